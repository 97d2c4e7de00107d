"""The learning experiment: its plan is valid, and its statistics are those computed by hand."""

import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import yaml

RUNS = Path("runs")
BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))

import learning  # noqa: E402
import learning_notes as notes  # noqa: E402
import learning_report as report  # noqa: E402

from empo2.agents.houses.games import COIN_COLLECTOR  # noqa: E402
from empo2.agents.houses.house import House  # noqa: E402
from empo2.memory import MemoryStore  # noqa: E402

from .memory.stores import add, play  # noqa: E402

HOUSE = House("hall", "den", {"hall": {"east": "study"}, "study": {"west": "hall", "north": "den"}, "den": {}})
TRUE = "Coin in the den: hall move east, study move north, den take coin."
FALSE = "Coin in the den: hall move west, study move north, den take coin."


def test_the_plan_begins_with_the_first_seed_of_every_arm():
    trials = learning.trials_in(RUNS)
    names = [trial.name for trial in trials]
    assert names[:3] == ["grpo-1", "empo2-1", "paired-1"]
    assert [trial.seed for trial in trials] == sorted(trial.seed for trial in trials)
    assert {"grpo-3", "empo2-3", "paired-3"} <= set(names) and len(set(names)) == len(names)


def test_every_arm_has_valid_settings_that_differ():
    loaded = {trial.name: trial.settings.to_dict() for trial in learning.trials_in(RUNS)}
    assert len({str(settings | {"run": None}) for settings in loaded.values()}) == len(loaded)
    assert loaded["empo2-2"]["run"]["name"] == "empo2-2" and loaded["empo2-2"]["run"]["resume"] == "auto"
    assert loaded["grpo-1"]["algorithm"]["name"] == "grpo"
    assert {settings["tasks"]["args"]["level"] for settings in loaded.values()} == {"hard"}
    assert loaded["empo2-2"]["algorithm"]["seed"] == 2


def test_a_mean_over_seeds_has_its_interval():
    # t of 2 degrees of freedom at 97.5 % is 4.303; the values' standard deviation is 0.1: 4.303 * 0.1 / sqrt(3) = 0.25
    assert report.percent([0.2, 0.3, 0.4]) == "30 % ± 25"
    assert report.percent([0.5]) == "50 %"


def test_curves():
    rows = [{"step": 0, "x": 0.0}, {"step": 3}, {"step": 6, "x": 0.5}, {"step": 12, "x": 1.0}]
    steps, values = report.curve(rows, "x")
    assert steps.tolist() == [0, 6, 12] and values.tolist() == [0, 0.5, 1]
    assert report.first_reach((steps, values), 0.4) == 6
    assert math.isnan(report.first_reach((steps, values), 1.1))
    steps_of_blocks, means = report.over_blocks((np.arange(1, 18), np.arange(17.0)), 8)
    assert steps_of_blocks.tolist() == [8, 16] and means.tolist() == [3.5, 11.5]  # (0 + ... + 7) / 8
    steps, mean = report.mean_curve([(steps, values), (np.array([0, 12]), np.array([0.2, 0.6]))])
    assert steps.tolist() == [0, 12] and mean.tolist() == [0.1, 0.8]


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


def test_the_houses_of_the_experiment_have_their_coins_where_the_agent_finds_them():
    (seed, house), *_ = notes.training_houses("hard", 2).items()
    assert house.distance == 4 and len(house.doors) == 11 and seed == COIN_COLLECTOR.panel("hard")["train"][0]


def test_the_report_is_made_from_results(tmp_path: Path):
    docs, results = tmp_path / "docs", tmp_path / "results"
    docs.mkdir()
    results.mkdir()
    (docs / "learning.md").write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, ends in (("grpo", (0.1, 0.3)), ("empo2", (0.6, 0.8))):
        for seed, end in enumerate(ends, 1):
            lines = [
                {"step": step, report.ALONE: alone, report.UNSEEN: 0.0, "cpu_seconds": 60 * step}
                | ({report.WITH_MEMORY: noted, "empo2/memory_fraction": noted} if name == "empo2" else {})
                | ({report.FLAT: alone, "empo2/tips_written": step} if step else {})
                for step, alone, noted in ((0, 0.0, 0.0), (6, end / 2, 0.9), (12, end, 0.9))
            ]
            (results / f"{name}-{seed}.jsonl").write_text("".join(f"{report.json.dumps(line)}\n" for line in lines))
            if name == "empo2":  # of a kind 4 of 16, 8 of 16 ...; of the last kind no episode
                counts = {kind: [4 * number, 16 if number else 0] for number, kind in enumerate(notes.KINDS[::-1])}
                (results / f"{name}-{seed}{report.NOTES}").write_text(report.json.dumps(counts))
    report.write_report(learning.PLAN, results, docs)
    text = (docs / "learning.md").read_text()
    assert text.startswith("before\n") and text.endswith(f"{report.END}\nafter\n") and "old" not in text
    table = [line.split(" | ") for line in text.splitlines() if line.startswith(("| GRPO", "| EMPO²"))]
    assert table[0][:5] == ["| GRPO", "2", "20 % ± 127", "10 % ± 64", "12"]  # t of 1 degree of freedom is 12.7
    assert table[0][8] == "12 |"
    # EMPO² is at 0.35 after 6 steps, above GRPO's 0.2; the distance is 0.55 at most and 0.2 at the end.
    assert table[1][4] == "6" and table[1][7].startswith("55 %") and ", 20 %" in table[1][7]
    # Steps 6 and 12 of two seeds: for GRPO flat groups (0.05 + 0.1 + 0.15 + 0.3) / 4, 9 notes a step.
    assert table[2][1:4] == ["15 %", "0 %", "0 %"] and table[2][5] == "9.0"
    assert table[3][2] == "90 %"
    assert table[4] == ["| EMPO²", "75 % of 32", "50 % of 32", "25 % of 32", "- |"]
    for picture in report.PICTURES.values():
        assert f"({picture})" in text and (docs / picture).read_bytes().startswith(b"\x89PNG")


def test_cpu_minutes_are_those_of_repeated_arms():
    """An arm with one seed may have been trained on a slower machine."""
    arms = yaml.safe_load(learning.PLAN.read_text())["arms"]
    rows = [{report.ALONE: 0.5, report.UNSEEN: 0.0, "step": step, "cpu_seconds": 60 * step} for step in (0, 8)]
    lines = report.table(arms, {"grpo": [rows] * 3, "no-mask": [rows]}).splitlines()
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["8 |", "- |"]


def test_the_legend_of_all_arms_lies_within_the_picture(tmp_path: Path):
    arms = yaml.safe_load(learning.PLAN.read_text())["arms"]
    rows = [{report.ALONE: 0.5, "step": step, "cpu_seconds": step} for step in (0, 8)]
    picture = tmp_path / "arms.png"
    report.draw_arms(arms, {name: [rows] * arm["seeds"] for name, arm in arms.items()}, picture)
    assert (plt.imread(picture)[:, [0, -1], :3] == 1).all()  # white: what is cut off reaches the edge
