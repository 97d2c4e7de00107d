"""The learning experiment: its plan is valid, and its statistics are those computed by hand."""

import itertools
import json
import os
import random
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

RUNS = Path("runs")
BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import houses as walked  # noqa: E402
import learning  # noqa: E402
import learning_notes as notes  # noqa: E402
import learning_plan as plans  # noqa: E402
import learning_report as report  # noqa: E402
import learning_statistics as statistics  # noqa: E402

from empo2.agents.houses.games import COIN_COLLECTOR  # noqa: E402
from empo2.agents.houses.house import House, disguise_of  # noqa: E402
from empo2.memory import MemoryStore  # noqa: E402
from empo2.memory.browse import stored_tips  # noqa: E402
from empo2.memory.file import reading  # noqa: E402
from empo2.recipe.config import load_settings  # noqa: E402
from empo2.recipe.evaluation.panels import load_panel  # noqa: E402
from empo2.recipe.launcher.plan import Trial  # noqa: E402
from empo2.recipe.launcher.tasks import check_rows  # noqa: E402
from empo2.recipe.rollout_log import CallRow, write_rollouts  # noqa: E402

from .memory.stores import add, play  # noqa: E402

HOUSE = House("hall", "den", {"hall": {"east": "study"}, "study": {"west": "hall", "north": "den"}, "den": {}})
TRUE = "Coin in the den: hall move east, study move north, den take coin."
FALSE = "Coin in the den: hall move west, study move north, den take coin."
PLAN = plans.read_plan()
CHOICE = {arm: (arm, 2e-5) for arm in PLAN["arms"]} | {"best": ("paired", 1e-5)}


# The plan


def names(jobs: list[Any]) -> list[str]:
    return [job.name for job in jobs]


def test_every_rate_of_every_arm_is_tried_on_the_block_that_nobody_else_plays():
    jobs = plans.development(PLAN, RUNS)
    assert names(jobs)[:2] == ["dev-grpo-2e-5-0", "dev-bonus-2e-5-0"] and len(set(names(jobs))) == 6 * 2
    settings = [phase.settings.to_dict() for job in jobs for phase in job.phases]
    assert {each["tasks"]["args"]["block"] for each in settings} == {0}
    assert len({yaml.safe_dump({**each, "run": None}) for each in settings}) == 6 * 2
    others = [phase.settings.tasks.args.get("block") for job in plans.later(PLAN, CHOICE, RUNS)
              if isinstance(job, plans.Training) for phase in job.phases]  # fmt: skip
    assert set(others) == {1, 2, 3, 4, 5, 6, None}


def test_the_claim_comes_first_seed_by_seed_and_a_model_is_evaluated_as_soon_as_it_is_trained():
    jobs = plans.later(PLAN, CHOICE, RUNS)
    found, trained = names(jobs), names([job for job in jobs if isinstance(job, plans.Training)])
    assert trained[:18] == [f"{arm}-{seed}" for seed in range(1, 7) for arm in ("grpo", "bonus", "empo2")]
    described = ["paper-1", "on-policy-1", "memory-only-1"]
    wide = ["grpo-64-1", "empo2-64-1", "grpo-16-1", "empo2-16-1", "shared-64-1"]
    seed = [*described, *wide, "map-grpo-1", "map-bonus-1", "map-empo2-1"]
    assert trained[18:][: len(seed) + 1] == [*seed, "paper-2"]
    of_grpo = ["grpo-1", *(f"grpo-1.{kind}" for kind in plans.ADAPTATIONS)]
    assert found[: len(of_grpo) + 1] == [*of_grpo, "bonus-1"]
    assert found[found.index("empo2-3.other") + 1] == "empo2-3.deleted"
    assert found[-3:] == [f"warm-start.{kind}" for kind in plans.ADAPTATIONS]
    assert len(set(found)) == len(found) == 18 + 9 + 15 + 6 + 3 * 10 + 12


def test_settings_are_those_of_the_arm_with_its_rate():
    by_name = {job.name: job for job in plans.later(PLAN, CHOICE, RUNS) if isinstance(job, plans.Training)}
    first, last = (phase.settings for phase in by_name["empo2-2"].phases)
    assert (first.algorithm.baseline, first.algorithm.learning_rate, first.algorithm.seed) == ("paired", 1e-5, 2)
    assert first.to_dict() | {"run": None} == last.to_dict() | {"run": None}
    assert (first.run.steps, last.run.steps, last.run.validate_samples) == (36, 48, 8)
    assert (last.run.name, last.run.resume, last.run.validate_with_memory) == ("empo2-2", "auto", True)
    assert by_name["grpo-1"].phases[0].settings.algorithm.name == "grpo"
    bonus = by_name["bonus-1"].phases[0].settings
    assert (bonus.algorithm.name, bonus.algorithm.memory_probability) == ("empo2", 0)
    assert not bonus.run.validate_with_memory
    assert by_name["grpo-16-1"].phases[0].settings.tasks.args["train_houses"] == 16
    assert by_name["shared-64-1"].phases[0].settings.memory.scope == "all-tasks"
    assert by_name["map-grpo-1"].phases[0].settings.agent.name.endswith("MapReaderAgent")


def test_a_form_that_is_the_best_is_not_trained_twice():
    found = names(plans.later(PLAN, CHOICE | {"best": ("paper", 2e-5)}, RUNS))
    assert not {"paper-1", "paper-1.deleted"} & set(found) and {"empo2-1", "on-policy-1"} <= set(found)


def keep_run(results: Path, name: str, metrics: list[dict[str, float]], **facts: Any) -> None:
    rows = ({"step": step, "cpu_seconds": 60 * step} | row for step, row in enumerate(metrics))
    (results / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (results / f"{name}.json").write_text(json.dumps({"rate": 2e-5, "validations": {}} | facts))


def test_rates_and_form_are_chosen_by_the_scores_of_development(tmp_path: Path):
    with pytest.raises(SystemExit, match="development lacks dev-grpo-2e-5-0, dev-grpo-4e-5-0"):
        plans.chosen(PLAN, tmp_path)
    for arm, rate in itertools.product(PLAN["arms"], PLAN["rates"]):
        last = {("grpo", 4e-5): 0.3, ("paired", 2e-5): 0.6, ("paper", 4e-5): 0.5}.get((arm, rate), 0.2)
        ends = [{plans.SCORE: 0.9}, {plans.SCORE: 0.2}, {}, {plans.SCORE: last}]  # the first one does not count
        keep_run(tmp_path, f"{plans.development_name(arm, rate)}-0", ends)
    found = plans.chosen(PLAN, tmp_path)
    assert found["grpo"] == ("grpo", 4e-5) and found["best"] == found["paired"] == ("paired", 2e-5)
    assert found["bonus"] == ("bonus", 2e-5)  # of equal scores the smallest rate


# What is kept


def played(
    rollout: str, step: int, mode: str, task: dict[str, Any], return_: float | None, dropped: str | None = None
) -> list[CallRow]:
    """A validation rollout of two calls."""
    same = {"rollout": rollout, "step": step, "phase": "validation", "mode": mode, "task": task}
    return [same | {"return": return_, "dropped": dropped, "call": call} for call in range(2)]


def test_what_each_house_did_at_the_last_validations_is_kept_also_from_before_an_interruption(tmp_path: Path):
    def log(folder: Path, *rollouts: tuple[int, str, str, int, float | None]) -> None:
        folder.parent.mkdir(exist_ok=True)
        for number, (step, mode, panel, seed, return_) in enumerate(rollouts):
            dropped = "failed_by_agent" if return_ is None else None
            write_rollouts(
                folder, played(f"{number}", step, mode, {"seed": seed, "panel": panel}, return_, dropped), "all"
            )

    before = [(step, "no memory", "train", 7, 100.0) for step in (4, 8)]
    log(tmp_path / "set-aside-1/rollouts", *before)
    log(
        tmp_path / "rollouts",
        *[(8, "no memory", "train", seed, value) for seed, value in ((7, 0.0), (7, 100.0), (9, None), (9, 0.0))],
        (8, "memory, on-policy", "train", 7, 100.0),
        (8, "no memory", "unseen", 11, 50.0),
    )
    assert learning.validations(tmp_path) == {
        "4": {"train, no notes": {"7": [1, 1]}},
        "8": {
            "train, no notes": {"7": [1, 2], "9": [0, 2]},
            "train, notes": {"7": [1, 1]},
            "unseen, no notes": {"11": [0, 1]},
        },
    }


def test_episodes_are_counted_by_what_their_notes_said(tmp_path: Path):
    file, scope = tmp_path / "memory.sqlite", '{"level": "hard", "seed": 7}'
    store = MemoryStore(file, embedder="none", dimension=2)
    for number, text in enumerate((TRUE, FALSE, "No coin as far as the hall: hall no coin.", "Coin in the moon.")):
        add(store, f"writer {number}", np.array([1.0, 0.0]), scope=scope, tip=text)
    # Eight episodes: notes 1 (true), 1 and 2, 2, 3, 4 (false), none, 1 and 3, 1.
    for number, (shown, found) in enumerate(
        [((1,), 1), ((1, 2), 0), ((2,), 1), ((3,), 0), ((4,), 0), ((), 1), ((1, 3), 1), ((1,), 0)]
    ):
        play(store, f"player {number}", shown, scope=scope, score=100.0 * found, success=bool(found))
    store.close()
    assert notes.outcomes_by_notes(file, {7: HOUSE}) == {
        "the coin, true": [2, 3],
        "the coin, true and false": [0, 1],
        "the coin, false": [1, 2],
        "no coin": [1, 2],
    }


def test_the_control_shows_each_house_the_notes_of_the_one_before(tmp_path: Path):
    file, other = tmp_path / "memory.sqlite", tmp_path / "other.sqlite"
    store = MemoryStore(file, embedder="none", dimension=2)
    for scope in "abc":
        add(store, f"writer {scope}", np.array([1.0, 0.0]), scope=scope, tip=f"a note of {scope}")
    store.close()
    learning.refile(file, other, ["a", "b", "c"])
    with reading(other) as db:
        found = {tip.scope: tip.text for tip in stored_tips(db, order="newest")}
    assert found == {"a": "a note of c", "b": "a note of a", "c": "a note of b"}


def test_the_houses_of_a_run_are_those_that_its_player_sees():
    arguments = {"level": "hard", "train_houses": 1, "unseen_houses": 1, "block": 2}
    ((seed, house),) = notes.training_houses(arguments).items()
    panel = COIN_COLLECTOR.panel("hard")
    assert seed == panel["train"][20] and house.distance == 4 and len(house.doors) == 11
    plain = COIN_COLLECTOR.house("hard", seed)
    assert house == disguise_of(plain, seed, 3).house(plain) != plain


def test_a_run_is_trained_phase_by_phase_and_what_explains_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runs, results, done = tmp_path / "runs", tmp_path / "results", []

    def train(trial: Trial, folder: Path, show: Any, look: Any) -> None:
        done.append(trial.settings.run.steps)
        run = folder / trial.name
        (run / "checkpoints/global_step_12").mkdir(parents=True, exist_ok=True)
        with (run / "metrics.jsonl").open("a") as metrics, learning.cpu_file(trial, folder).open("a") as times:
            for step in range(trial.settings.run.steps - 11, trial.settings.run.steps + 1):
                metrics.write(json.dumps({"step": step, plans.SCORE: 0.5, "perf/mfu": 1.0}) + "\n")
                times.write(json.dumps({"step": step, "cpu_seconds": 10 * step}) + "\n")
        task = {"seed": 7, "panel": "train"}
        write_rollouts(
            run / "rollouts",
            played(f"{trial.settings.run.steps}", trial.settings.run.steps, "no memory", task, 100.0),
            "all",
        )
        show("step")

    commands = []
    monkeypatch.setattr(learning, "RESULTS", results)
    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "_command", lambda *words: commands.append(words[0]))
    monkeypatch.setattr(learning, "probed", lambda run, output: commands.append(output.name))
    monkeypatch.setattr(learning, "jobs", lambda plan, runs: plans.later(plan, CHOICE, runs)[:1])
    for _ in range(2):
        learning.make(PLAN, lambda job: True, runs, learning.Clock(None))
    assert done == [36, 48] and commands == ["grpo-1.probe.jsonl", "export"]
    kept = plans.read_rows(results / "grpo-1.jsonl")
    assert [row["step"] for row in kept] == [*range(25, 49)]
    assert kept[-1] == {"step": 48, plans.SCORE: 0.5, "cpu_seconds": 480}
    facts = json.loads((results / "grpo-1.json").read_text())
    solved = {"train, no notes": {"7": [1, 1]}}
    assert facts["validations"] == {"36": solved, "48": solved} and "notes" not in facts
    assert (facts["stage"], facts["rate"], len(facts["commit"])) == ("claim", 2e-5, 40)
    assert not (runs / "grpo-1/checkpoints").exists()


def test_the_clock_goes_on_where_an_interrupted_training_left_it(tmp_path: Path):
    file, own = tmp_path / "a-1.cpu.jsonl", os.getpid()
    for step in (1, 2):
        counter = learning.CpuSeconds(file)
        counter.look(own, None)
        counter.look(own, step)
    first, second = map(json.loads, file.read_text().splitlines())
    assert [first["step"], second["step"]] == [1, 2]
    assert second["cpu_seconds"] == pytest.approx(2 * first["cpu_seconds"], abs=3) and first["cpu_seconds"] > 0


def test_houses_of_evaluations_are_tasks_that_the_agent_plays(tmp_path: Path):
    settings = load_settings("cpu", file=BENCH.parent / "agents/houses/coin.yaml")
    new = plans.Evaluation("adaptation", "write", "empo2-2", 2)
    trained = plans.Evaluation("deleted", "deleted", "empo2-2", 2)
    for job, count, disguise in ((new, 16, 1), (trained, 8, 3)):
        learning.write_panel(tmp_path / "panel.json", learning.rows_of(job, PLAN["stages"][job.stage]))
        panel = load_panel(str(tmp_path / "panel.json"))
        check_rows(settings, panel.name, panel.rows)
        assert [row["disguise"] for row in panel.rows] == [disguise] * count


def test_work_ends_before_its_time(monkeypatch: pytest.MonkeyPatch):
    begun = datetime(2026, 1, 1, 12)

    class Now(datetime):
        minutes = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return begun + timedelta(minutes=cls.minutes)

    monkeypatch.setattr(learning, "datetime", Now)
    monkeypatch.setattr(learning.signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(learning.signal, "signal", lambda *_: None)
    assert learning.time_of("12:30") == begun + timedelta(minutes=30)
    assert learning.time_of("11:30") == begun + timedelta(hours=23, minutes=30)
    clock = learning.Clock(begun + timedelta(minutes=30))
    for Now.minutes in (10, 19):
        clock.checkpoint()  # 10 and 9 minutes after the one before; 20 and 11 are left
    Now.minutes = 26  # 7 minutes, and 4 are left
    with pytest.raises(learning.OutOfTimeError):
        clock.checkpoint()


# Statistics


def test_the_exact_test_counts_all_signs():
    assert statistics.p_of_pairs([1, 2, 3, 4, 5, 6]) == 2 / 64
    assert statistics.p_of_pairs([1, 2, 3, 4, 5]) == 2 / 32
    differences = [12.5, -3.0, 8.0, 1.5, 20.0, -6.0]
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=6)]  # fmt: skip
    by_hand = sum(each >= abs(sum(differences)) - 1e-9 for each in sums) / 64
    assert statistics.p_of_pairs(differences) == pytest.approx(by_hand)


def test_an_interval_is_over_seeds_and_houses_and_within_the_range():
    # One house: of three seeds 0, 0, 1 all draws are 0 with (2/3)^3 = 0.30 and 1 with 1/27 = 0.037.
    assert statistics.over_seeds_and_houses(np.array([[0.0], [0.0], [1.0]])) == (pytest.approx(1 / 3), 0, 1)
    # Against plain loops with other random numbers.
    values = np.array([[0, 0, 1, 0.5], [1, 1, 1, 0], [0, 0.25, 0, 0]])
    generator = np.random.default_rng(7)

    def drawn(same: bool) -> np.ndarray:
        means = []
        for _ in range(4000):
            houses = generator.integers(4, size=4)
            seeds = generator.integers(3, size=3)
            means.append(np.mean([values[s, houses if same else generator.integers(4, size=4)] for s in seeds]))
        return np.quantile(means, (0.025, 0.975))

    for same in (False, True):
        mean, low, high = statistics.over_seeds_and_houses(values, same_houses=same)
        assert mean == values.mean()
        assert (low, high) == pytest.approx(tuple(drawn(same)), abs=0.04)


def test_curves():
    rows = [{"step": 0, "x": 0.0}, {"step": 3}, {"step": 6, "x": 0.5}, {"step": 12, "x": 1.0}]
    steps, values = statistics.curve(rows, "x")
    assert steps.tolist() == [0, 6, 12] and values.tolist() == [0, 0.5, 1]
    assert statistics.first_reach((steps, values), 0.4) == 6
    assert np.isnan(statistics.first_reach((steps, values), 1.1))
    blocks, means = statistics.over_blocks((np.arange(1, 18), np.arange(17.0)), 8)
    assert blocks.tolist() == [8, 16] and means.tolist() == [3.5, 11.5]  # (0 + ... + 7) / 8
    steps, mean = statistics.mean_curve([(steps, values), (np.array([0, 6, 14]), np.array([0.2, 0.5, 0.6]))])
    assert steps.tolist() == [0, 6, 13] and mean.tolist() == [0.1, 0.5, 0.8]


def test_an_order_of_names_leads_on_to_rooms_that_were_not_seen():
    #  hall - den - attic (the coin), and a cellar beside the den
    doors = {"hall": {"east": "den"}, "den": {"west": "hall", "east": "attic", "south": "cellar"}}
    doors |= {"attic": {"west": "den"}, "cellar": {"north": "den"}}
    house, key = House("hall", "attic", doors), walked.KEYS["names"]
    assert walked.finds(["hall", "attic", "cellar", "den"], key, house)
    assert walked.finds(["cellar", "attic", "hall", "den"], key, house)  # from the dead end back, and on
    far = House("hall", "attic", doors | {"hall": {"east": "den", "west": "shed"}, "shed": {"east": "hall"}})
    assert walked.finds(["shed", "attic", "hall", "cellar", "den"], key, far)  # shed, hall, den, attic, and take
    assert not walked.finds(["shed", "cellar", "hall", "attic", "den"], key, far)


def test_what_houses_have_in_common_does_not_help_in_disguise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(walked, "RESTARTS", 3)
    monkeypatch.setattr(walked, "SWAPS", 200)
    key, panel = walked.KEYS["names"], COIN_COLLECTOR.houses("hard").values()
    fit, test = (dict(list(houses.items())[:size]) for houses, size in zip(panel, (16, 32), strict=True))
    plain = walked.generalises(key, [list(fit.values())], list(test.values()), random.Random(0))
    disguised = [house for number in range(1, 11) for house in walked.all_in_disguise(test, number)]
    fits = [walked.all_in_disguise(fit, number) for number in (11, 12)]
    assert plain > 0.2
    assert walked.generalises(key, fits, disguised, random.Random(0)) < 0.08


# The report


def test_the_report_is_made_from_what_there_is(tmp_path: Path):
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    page = docs / "learning.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_report(PLAN, results, docs)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{report.END}\nafter\n") and "old" not in text
    assert "- claim: 0 of 18" in text and text.count("*Not measured yet.*") == 6 and "| arm |" not in text

    # Two seeds, two houses of 8 episodes each at the last validations.
    whole = {"7": [8, 8], "12": [8, 8]}
    told = {"the coin, true": [6, 8], "the coin, true and false": [0, 0], "the coin, false": [1, 4], "no coin": [0, 4]}
    for arm, hits in (("empo2", [(8, 4), (6, 2)]), ("bonus", [(2, 2), (2, 0)])):
        for seed, (one, two) in enumerate(hits, 1):
            part = {"7": [one, 8], "12": [two, 8]}
            at = {str(step): {"train, no notes": part, "train, notes": whole} for step in (4, 5, 6)}
            step = {report.FLAT: 0.5, "empo2/memory_fraction": 0.25}
            rows = [{plans.SCORE: (one + two) / 16 * number / 6} | step for number in range(7)]
            facts = {"validations": {"0": {}} | at} | ({"notes": told} if arm == "empo2" else {})
            keep_run(results, f"{arm}-{seed}", rows, **facts)
    probes = [{"step": step, "with_note": dict.fromkeys(("action", "way", "entropy", "start_kl"), value),
               "without_note": {"action": 0.25}} for step, value in ((0, 0.9), (36, 0.5), (48, 0.8))]  # fmt: skip
    (results / "empo2-1.probe.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in probes))
    for arm, hits in (("empo2", 6), ("on-policy", 2)):
        parts = {"memory off": {"7": [hits, 8], "12": [hits, 8]}}
        (results / f"{arm}-1.deleted.json").write_text(json.dumps({"parts": parts}))
    adapted = {"warm-start.write": (0, 2, 2, 3), "empo2-1.write": (0, 4, 6, 8), "empo2-1.off": (1, 1, 1, 2)}
    for name, ends in adapted.items():
        parts = {f"seed 0, trial {n}, tasks": {"7": [end, 8], "12": [end, 8]} for n, end in enumerate(ends)}
        (results / f"{name}.json").write_text(json.dumps({"parts": parts}))
    unseen = {"1": {"unseen, no notes": {"3": [1, 2], "4": [1, 2]}}}
    keep_run(results, "grpo-64-1", [{report.UNSEEN_CURVE: 0.0}, {report.UNSEEN_CURVE: 0.5}], validations=unseen)
    report.write_report(PLAN, results, docs)
    text = page.read_text()
    assert "- claim: 4 of 18" in text
    assert "*GRPO, 64 houses: 50 % (50 to 50), from 0 % at the start.*" in text
    # (8 + 4 + 6 + 2) / 32 = 62 %. A draw of a seed and of two of its houses has 16, 12, 8 or 4 of 16 with 1/8, 3/8, 3/8
    # and 1/8; so two seeds have 32 of 32 with 1/64, less than 0.025, and 28 or more with 7/64.
    (arm,) = [line for line in text.splitlines() if line.startswith("| EMPO² (best form) | 2 | 2e-05 |")]
    assert arm == "| EMPO² (best form) | 2 | 2e-05 | 100 % (100 to 100) | 62 % (38 to 88) | 75 % (75 to 75) | 6 |"
    # By house 6/8 and 2/8 more, 4/8 and 2/8; a seed 50 and 37.5 points. Twice 6/8 in both seeds has 1/64 again, 2.5 of
    # 4 or more 7/64. Two pairs cannot reach less than 0.5.
    assert "Difference +44 points (+25 to +62); seed by seed +50, +38; p = 0.5000, at best 0.5000" in text
    assert "Difference +50 points (+50 to +50), 1 seeds" in text
    gain = "gain +100 points (+100 to +100); more than without memory by +88 points (+88 to +88)"
    assert f"EMPO²: {gain}; in the fourth trial +62 points (+62 to +62) against the warm start" in text
    # Bonus ends at (2 + 2 + 2 + 0) / 32 = 18.75 %, in step 6; EMPO²'s mean is 10.4 * step: above it from step 2 on.
    assert "19 %: EMPO² at step 2, 2 CPU minutes; GRPO + 1/n at step 6, 6 CPU minutes" in text
    assert "*EMPO² (best form) -10 points (-10 to -10).*" in text
    assert "| EMPO² (best form) | 1 | 0.90, 0.80 | 0.25, 0.25 | 0.90, 0.80 | 0.90, 0.80 | 0.90, 0.80 |" in text
    assert "| EMPO² (best form) | 75 % of 16 | - | 25 % of 8 | 0 % of 8 |" in text
    cells = " | ".join(f"{share} % ({share} to {share})" for share in (0, 50, 75, 100))
    assert f"| EMPO² (best form): own notes | 1 | {cells} |" in text
    assert [line for line in text.splitlines() if line.startswith("| EMPO² (best form) | 50% | 25% | - |")]
    for picture in report.PICTURES.values():
        assert f"({picture})" in text and (docs / picture).read_bytes().startswith(b"\x89PNG")
