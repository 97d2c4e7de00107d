"""Evaluations and adaptations: figures by hand, results that survive interruptions, and whole commands."""

import contextlib
import json
import math
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import panels as make
import pytest
import yaml
from rich.console import Console

from empo2.recipe.cli import main
from empo2.recipe.cli.options import PanelOptions
from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.evaluation import panels
from empo2.recipe.evaluation.adaptation import TASKS, UNSEEN, Plan, memory_of, play_trials, remaining
from empo2.recipe.evaluation.adaptation_report import (
    curves,
    figures,
    forgetting_line,
    read_adaptation,
    show_adaptations,
)
from empo2.recipe.evaluation.episode_results import Planned, Result, Results, read_results
from empo2.recipe.evaluation.evaluated import Evaluated
from empo2.recipe.evaluation.evaluation_report import show_evaluations
from empo2.recipe.evaluation.panels import Panel, load_panel
from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON, result_of
from empo2.recipe.evaluation.statistics import area, bootstrap, cumulative_success, forgetting, over_seeds
from empo2.recipe.evaluation.summary import ALL_TASKS, OVERALL, differences, failures_line, summarize

from ..memory.stores import rows
from .harness import ROOMS, is_reflection, running_gateway
from .model_server import MODEL, ModelServer


def result(index: int, return_: float | None, *, sample: int = 0, part: str = MEMORY_OFF, **more: Any) -> Result:
    return Result(part, index, sample, return_, **more)


# Statistics, by hand


@pytest.mark.parametrize(
    ("groups", "interval"),
    [
        # The mean of a resample is 0, 50 or 100, with probabilities 1/4, 1/2 and 1/4.
        ([[0, 100]], (50, 0, 100)),
        # P(mean >= 75) is 13/256 = 5.1 %, P(mean >= 100) 1/256 = 0.4 %; P(0) = 81/256.
        ([[0, 0, 0, 100]], (25, 0, 75)),
        # Stratified: a group of one task varies by nothing; groups count equally: means of (40 + {0, 50, 100}) / 2.
        ([[40], [0, 100]], (45, 20, 70)),
        ([[], []], (math.nan,) * 3),
    ],
)
def test_intervals_by_hand(groups: list[list[float]], interval: tuple[float, ...]) -> None:
    assert bootstrap(groups) == pytest.approx(interval, nan_ok=True)


def test_one_task_tells_no_interval() -> None:
    assert bootstrap([[0.0], [1.0]]) == pytest.approx((0.5, math.nan, math.nan), nan_ok=True)


def test_interval_over_three_seeds() -> None:
    """Mean 12, s = 2, t(0.975, 2) = 4.3027 of the tables: 12 ± 4.3027 * 2 / sqrt(3)."""
    assert over_seeds([10, 12, 14]) == pytest.approx((12, 12 - 4.9683, 12 + 4.9683), abs=1e-3)
    assert over_seeds([7]) == pytest.approx((7, math.nan, math.nan), nan_ok=True)


# Three tasks in four trials: the second is solved, lost, and solved again; the third is never solved.
SOLVED = np.array([[0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)


def test_cumulative_success_without_memory_is_pass_at_k() -> None:
    """Its mean over all orders of four attempts is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021), for each task."""
    n, solved = len(SOLVED), SOLVED.sum(axis=0).tolist()
    expected = [np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in solved]) for k in range(1, n + 1)]
    orders = [cumulative_success(SOLVED[list(order)]) for order in permutations(range(n))]
    assert np.mean(orders, axis=0) == pytest.approx(expected)


def test_forgetting_counts_what_was_solved_before() -> None:
    lost, failing = forgetting(SOLVED)
    assert lost.tolist() == [0, 1, 0, 2]
    assert failing.tolist() == [2, 2, 1, 3]


GROUPS = {"a": [0, 1], "b": [2]}
PLAYED = [
    result(0, 100, calls=4, metrics={"corrected_actions": 0.5}),
    result(0, -100, sample=1, calls=2, metrics={"corrected_actions": 0.0}),
    result(1, 71, calls=6, metrics={"corrected_actions": 0.25}),
    result(1, None, sample=1, calls=30, failed="failed_by_agent", error="lost"),
    result(2, 70, calls=8, metrics={"corrected_actions": 1.0}),
]


def test_table_by_hand() -> None:
    lines = summarize(PLAYED, GROUPS, success_return=100)
    means = {name: {heading: value.mean for heading, value in line.values.items()} for name, line in lines.items()}
    # Task 0: (100, -100); task 1: 71, its other sample failed; task 2: 70, which is not above 70.
    names = ("raw", "clipped", "success %", "won %", "length", "invalid %")
    assert means["a"] == dict(zip(names, (35.5, 60.5, 25, 75, 4.5, 25), strict=True))
    assert means["b"] == dict(zip(names, (70, 70, 0, 0, 8, 100), strict=True))
    assert means[OVERALL]["raw"] == (35.5 + 70) / 2  # groups count equally
    assert means[ALL_TASKS]["raw"] == (0 + 71 + 70) / 3  # and here tasks
    assert (lines["a"].values["raw"].low, lines["a"].values["raw"].high) == (0, 71)
    assert [(line.episodes, line.failed) for line in lines.values()] == [
        (4, {"failed_by_agent": 1}),
        (1, {}),
        *[(5, {"failed_by_agent": 1})] * 2,
    ]
    assert "1 failed by agent; for example: lost" in failures_line(PLAYED)


def test_differences_are_paired_by_task() -> None:
    before = [result(0, 10), result(0, 30, sample=1), result(1, 50), result(2, 0)]
    after = [result(0, 40), result(1, 70), result(3, 9)]  # 2 and 3 have no partner
    lines = differences(before, after, {"a": [0, 1], "b": [2, 3]}, success_return=100)
    assert lines["a"]["raw"] == (20, 20, 20)  # 40 - 20 and 70 - 50
    assert math.isnan(lines["b"]["raw"].mean)
    assert lines[OVERALL]["raw"] == (20, 20, 20)
    assert list(lines) == ["a", "b", OVERALL, ALL_TASKS]


def test_groups_count_equally_in_cumulative_success_too_and_failures_of_the_system_are_none_of_the_agent() -> None:
    first = [result(0, 100), *(result(index, 0) for index in (1, 2, 3))]
    lost = [result(index, None, failed="failed_by_system") for index in range(3)]
    found = curves([[first, [*lost, result(3, 100)]]], {"a": [0], "b": [1, 2, 3]}, success_return=100)
    assert found["success %"].tolist() == [[50, 100]]
    assert found["cumulative success %"][0] == pytest.approx([50, (100 + 100 / 3) / 2])
    assert (found["lost"].tolist(), found["failing"].tolist()) == ([[0, 0]], [[3, 2]])


def test_an_episode_that_failed_by_its_agent_is_no_success_and_has_no_return() -> None:
    failed = result(0, None, sample=1, failed="failed_by_agent")
    found = curves([[[result(0, 100), failed]]], {"a": [0]}, success_return=100)
    assert [found[name].tolist() for name in ("raw", "success %", "cumulative success %")] == [[[100]], [[50]], [[50]]]


def test_curves_by_hand() -> None:
    trials = [[[result(0, 0), result(1, 100)], [result(0, 100), result(1, 50)]], [[result(0, 0), result(1, 0)]] * 2]
    found = curves(trials, {"a": [0], "b": [1]}, success_return=100)
    assert found["raw"].tolist() == [[50, 75], [0, 0]]
    assert found["cumulative success %"].tolist() == [[50, 100], [0, 0]]
    assert found["lost"].tolist() == [[0, 1], [0, 0]]
    assert found["failing"].tolist() == [[1, 1], [2, 2]]
    assert found["forgetting %"].tolist() == [[0, 100], [0, 0]]
    assert forgetting_line(found) == "forgetting 50.0 %, mean over trials and seeds: 1 lost of 3 failing"
    assert not forgetting_line(curves([[[result(0, 0)], [result(0, 100)]]], {"a": [0]}, success_return=100))
    assert area([10, 0, 0, 40]) == pytest.approx((5 + 0 + 20) / 3) and area([5]) == 5
    means = {name: value.mean for name, value in figures(np.array([[50.0, 75.0, 60.0], [0.0, 10.0, 20.0]])).items()}
    under = ((62.5 + 67.5) / 2 + (5 + 15) / 2) / 2
    assert means == {"first": 25, "last": 40, "best (oracle)": 47.5, "area": under}


def test_sizes_and_groups_of_the_panels() -> None:
    """As the papers and ScienceWorld's split have them: 265 and 89 rows of 18 tasks, 1,684 of 29."""
    found = {name: load_panel(name) for name in panels.names()}
    assert set(found) == set(make.PANELS)
    expected = {"scienceworld-paper": (265, 18), "scienceworld-paper-seen": (89, 18), "scienceworld-l1": (1684, 29)}
    expected |= {"textworld-express": (80, 4), "webshop-verl-agent": (500, 1), "webshop-500": (500, 1)}
    assert expected.items() <= {name: (len(panel.rows), len(panel.groups())) for name, panel in found.items()}.items()
    for panel in found.values():
        assert len({json.dumps(row) for row in panel.rows}) == len(panel.rows)
        load_settings(world=panel.config)
    # Made anew, but for those of ScienceWorld and WebShop, which take long to start.
    for name in ("textworld-express", *(name for name in make.PANELS if name.startswith(("coin-", "mapreader-")))):
        assert make.text_of(name) == (panels.FOLDER / f"{name}.json").read_text()


def test_limits_changes_and_groups() -> None:
    panel = load_panel("scienceworld-paper", ["actions=choice", "max_steps=6"], limit=2)
    assert len(panel.rows) == 36
    assert {(row["actions"], row["max_steps"]) for row in panel.rows} == {("choice", 6)}
    assert panel.checksum != load_panel("scienceworld-paper", limit=2).checksum
    one = load_panel("scienceworld-paper-seen", limit=4, only=["use-thermometer"])
    assert [(row["task"], row["variation"]) for row in one.rows] == [("use-thermometer", n) for n in range(4)]


def toy_panel(folder: Path, *rows: dict[str, Any]) -> Path:
    agent = {"class": "toy_agent:ToyAgent", "env": {"TOY_DOOR": "input.door", "TOY_TROUBLE": "input.trouble"}}
    algorithm = {"success_return": 1.0, "return_tolerance": 0.01}
    content = {
        "description": "Ten doors.",
        "group": ["trouble"],
        "config": {"agent": agent, "memory": {"scope": ["door"]}, "algorithm": algorithm},
        "common": {"trouble": "none"},
        "rows": rows,
    }
    file = folder / "toy.json"
    file.write_text(json.dumps(content))
    return file


def test_wrong_panels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text('{"rows": []}')
    refused: Any = (
        ("scienceworld", {}, r"--panel scienceworld: there is no such panel; nearest: scienceworld-"),
        ("textworld-express", {"changes": ["steps=3"]}, r"--row steps=3: give FIELD=VALUE; the fields are .*max_steps"),
        ("absent", {"option": "--unseen"}, r"--unseen absent: there is no such panel"),
        ("x.json", {}, r"x\.json: not a panel .*it has description, group, config, common and rows"),
        ("scienceworld-paper-seen", {"only": ["thermometer"]}, r"--only thermometer: panel .* has no .* use-therm"),
    )
    for name, given, message in refused:
        with pytest.raises(ConfigError, match=message):
            load_panel(name, **given)


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(model: str, panel: Path | str, **options: Any) -> Evaluated:
        return PanelOptions(model=model, panel=str(panel), profile="cpu", **options).read("eval", remembers=False)

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    server = "http://127.0.0.1:9/v1"
    panel = json.loads((panels.FOLDER / "scienceworld-paper.json").read_text())
    panel["rows"][3]["task"] = "find-unicorn"
    (tmp_path / "mine.json").write_text(json.dumps(panel))
    with pytest.raises(ConfigError, match=r"--panel mine, row 3: task 'find-unicorn' is unknown; nearest: find-"):
        request("any", tmp_path / "mine.json", server=server)
    with pytest.raises(ConfigError, match=r"--panel toy, row 0: has no field 'door', which agent\.env names"):
        request("any", toy_panel(tmp_path, {"doors": 1}), server=server)
    code, said = run(["adapt", "any", "--server", server, "--profile", "cpu", "--panel", "coin-medium",
                      "--unseen", str(tmp_path / "toy.json")])  # fmt: skip
    assert code == 2 and "--unseen toy, row 0: " in said
    with pytest.raises(ConfigError, match=r"MODEL \./nothing: no such directory"):
        request("./nothing", "scienceworld-paper")
    (tmp_path / "config.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigError, match=r"the run has no checkpoint; run\.save_every makes them"):
        request(str(tmp_path), "scienceworld-paper")
    with pytest.raises(ConfigError, match=r"--memory-from .*nothing: no memory"):
        request("any", "scienceworld-paper", server=server, memory_from=tmp_path / "nothing")


@pytest.mark.parametrize(("run", "panel"), [("coin", "mapreader-easy"), ("mapreader", "coin-medium")])
def test_a_run_in_one_game_is_not_played_in_another_under_its_name(tmp_path: Path, run: str, panel: str) -> None:
    world = Path(panels.__file__).parents[3] / "agents" / "houses" / f"{run}.yaml"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(load_settings("cpu", file=world).to_dict()))
    server = "http://127.0.0.1:9/v1"
    options = PanelOptions(model="any", server=server, panel=panel, config=tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=f"--panel {panel}: its tasks are of .*, the model plays .*"):
        options.read("eval", remembers=False)


@pytest.mark.parametrize("trained", ["off_policy_loss=distillation", "form=internalise"])
def test_a_distilled_model_is_evaluated_without_memory(tmp_path: Path, trained: str) -> None:
    trained_with = load_settings("cpu", [f"algorithm.{trained}"]).to_dict()  # as a run keeps it, all values
    (tmp_path / "distilled.yaml").write_text(yaml.safe_dump(trained_with))
    options = PanelOptions(model="any", server="http://127.0.0.1:9/v1", panel="scienceworld-paper", profile="cpu",
                           config=tmp_path / "distilled.yaml")  # fmt: skip
    assert options.read("eval", remembers=False).settings.algorithm.name == "grpo"


EPISODES = [Planned(MEMORY_OFF, index, sample, {"door": 3}) for index in range(2) for sample in range(2)]


def test_results_go_on_after_a_line_that_was_cut(tmp_path: Path) -> None:
    """Those of something else, or in use, are refused."""
    results = Results(tmp_path, {"model": "m"})
    results.add(result(0, 1.0))
    results.add(result(0, None, sample=1, failed="failed_by_system", error="no answer"))
    results.add(result(1, None, failed="failed_by_agent", error="exited"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"part": "memory off", "index": 1, "sam')
    results.close()
    again = Results(tmp_path, {"model": "m"})
    # The system's failure is played again, the policy's is a result.
    assert [episode.key for episode in again.missing(EPISODES)] == [(MEMORY_OFF, 0, 1), (MEMORY_OFF, 1, 1)]
    with pytest.raises(ConfigError, match="another process is writing"):
        Results(tmp_path, {"model": "m"})
    again.add(result(0, 0.5, sample=1))
    again.close()
    with pytest.raises(ConfigError, match=r'its results have model="m", this command model="n"'):
        Results(tmp_path, {"model": "n"})
    for facts, key in (({"model": "m", "critic": {"path": "c"}}, "critic.path=null"), ({}, 'model="m"')):
        with pytest.raises(ConfigError, match=f"its results have {key}, this command"):
            Results(tmp_path, facts)
    Results(tmp_path, {"model": "m", "agent": {"concurrency": 2}, "sampling": {"server": "http://b/v1"}}).close()
    (tmp_path / "failed").mkdir()
    for model in ("m", "n"):  # a start that failed leaves no result
        Results(tmp_path / "failed", {"model": model}).close()
    for name in ("config.yaml", "memory.sqlite", "checkpoints"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(ConfigError, match="has a run or a memory; give the results a folder of their own"):
            Results(tmp_path / name, {"model": "m"})
        assert [file.name for file in (tmp_path / name).iterdir()] == [name]
    played = {each.key[1:]: each.return_ for each in read_results(tmp_path)}
    assert played == {(0, 0): 1.0, (0, 1): 0.5, (1, 0): None}


def test_a_full_disk_leaves_no_half_of_what_decides_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(file: Path, text: str) -> None:
        file.write_bytes(text[: len(text) // 2].encode())
        raise OSError("No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(Path, "write_text", half)
        Results(tmp_path, {"model": "m"})
    Results(tmp_path, {"model": "m"}).close()


def call(http_status: int = 200, text: str = "") -> dict[str, Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": 2} if http_status == 200 else None
    data = {"status": "ok" if http_status < 400 else "error", "http_status": http_status, "usage": usage}
    return {"event_type": "model_request", "data": data | {"request": {"messages": [{"content": text}]}}}


def reward(value: Any, **data: Any) -> dict[str, Any]:
    return {"event_type": "reward", "data": {"value": value, **data}}


@pytest.mark.parametrize(
    ("state", "error", "events", "expected"),
    [
        ("succeeded", None, [call(), call(), reward(3)], (3.0, None)),
        ("succeeded", None, [call(), reward(1), reward(2)], (2.0, None)),
        ("succeeded", None, [call()], (None, "failed_by_agent")),
        ("succeeded", None, [], (None, "failed_by_system")),
        ("succeeded", None, [call(), reward(float("nan"))], (None, "failed_by_agent")),
        ("failed", "subprocess exited with code 1", [call(), reward(9)], (None, "failed_by_agent")),
        ("failed", "subprocess exited with code 1", [call(), call(502)], (None, "failed_by_system")),
    ],
)
def test_result_of_a_rollout(state: str, error: str | None, events: list[Any], expected: Any) -> None:
    found = result_of(EPISODES[0], {"state": state, "error_message": error}, events)
    assert (found.return_, found.failed) == expected
    assert bool(found.error) == bool(found.failed)


def test_costs_and_metrics_of_a_rollout() -> None:
    tips = "Notes from earlier episodes of this task (each may be wrong):\n- Go."
    events = [call(text=tips), call(), call(500), reward(1, metrics={"corrected_actions": 0.5, "name": "x"})]
    found = result_of(EPISODES[0], {"state": "succeeded", "error_message": None}, events)
    assert (found.calls, found.calls_with_tips, found.prompt_tokens, found.reply_tokens) == (2, 1, 20, 4)
    assert found.metrics == {"corrected_actions": 0.5}


# Adaptation


class Memory:
    """Gateway and player in one: an episode returns the number of tips that it sees, and leaves one if it writes."""

    def __init__(self, stop_after: int | None = None, lost: str = "") -> None:
        self.tips = 0
        self.left = stop_after
        self.lost = lost  # the part whose episodes fail by the system when they are first played
        self.seen: list[Planned] = []

    def play(self, episodes: Sequence[Planned]) -> Any:
        shown = self.tips
        for episode in episodes:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            is_lost = episode.part == self.lost and episode not in self.seen
            self.seen.append(episode)
            if is_lost:
                yield Result(episode.part, episode.index, episode.sample, None, failed="failed_by_system")
                continue
            self.tips += "write" in episode.memory
            value = float(shown if "read" in episode.memory else 0)
            yield Result(episode.part, episode.index, episode.sample, value, calls=1, calls_with_tips=int(value > 5))

    def restore(self, file: Path) -> None:
        self.tips = int(file.read_text())

    def snapshot(self, file: Path) -> None:
        file.write_text(str(self.tips))

    def drain(self, seconds: float) -> dict[str, float]:
        return {}


def adaptation(folder: Path, memory: Any = "write", **changes: Any) -> tuple[Memory, Results, Plan]:
    """Two tasks and one unseen task, three trials after the first, two seeds."""
    tasks = Panel("tasks", "", (), {}, ({"a": 1}, {"a": 2}))
    unseen = Panel("unseen", "", (), {}, ({"a": 3},))
    plan = Plan(tasks, unseen, trials=3, rollouts=2, samples=1, seeds=2, memory=memory)
    folder.mkdir(exist_ok=True)
    (folder / "start").write_text("5")
    assert (plan.sizes(), plan.total()) == ({TASKS: 4, UNSEEN: 1}, 40)
    groups = {TASKS: tasks.groups(), UNSEEN: unseen.groups()}
    facts = {"kind": "adapt", "groups": groups, "episodes": plan.sizes(), "algorithm": {"success_return": 15}}
    facts |= {"memory_use": memory, "rows": "r", "unseen": ["unseen", "u"]}
    results, played = Results(folder / "out", facts), Memory(**changes)
    room: Any = played
    with contextlib.suppress(KeyboardInterrupt):
        play_trials(plan, room, results, room, folder / "start", 1.0)
    results.close()
    return played, results, plan


def test_trials_write_and_read_and_each_seed_begins_with_the_same_memory(tmp_path: Path) -> None:
    played, results, plan = adaptation(tmp_path)
    assert not remaining(plan, results)
    assert {each.memory for each in played.seen if "trial 0" in each.part} == {"write", "off"}
    assert {(each.memory, each.explore) for each in played.seen if "trial 0" not in each.part} == {
        ("read and write", True),
        ("read", False),
    }
    assert memory_of(tmp_path / "out", 1)[0] == 3


@pytest.mark.parametrize(("panel", "episodes"), [(TASKS, 4), (UNSEEN, 1)])
def test_what_the_system_has_lost_is_played_once_more_before_a_trial_is_done(
    tmp_path: Path, panel: str, episodes: int
) -> None:
    played, results, plan = adaptation(tmp_path, lost=f"seed 0, trial 1, {panel}")
    assert len(played.seen) == 40 + episodes and not remaining(plan, results)
    raw = {panel: found["raw"].tolist() for panel, found in read_adaptation(tmp_path / "out").panels.items()}
    assert raw == {TASKS: [[0, 9, 13, 17]] * 2, UNSEEN: [[0, 9, 13, 17]] * 2}


@pytest.mark.parametrize("stop", [1, 8, 39])
def test_an_interrupted_adaptation_ends_as_if_it_had_not_been(tmp_path: Path, stop: int) -> None:
    first, _, _ = adaptation(tmp_path, stop_after=stop)
    assert len(first.seen) == stop
    second, results, plan = adaptation(tmp_path)
    assert not remaining(plan, results)
    raw = {panel: found["raw"].tolist() for panel, found in read_adaptation(tmp_path / "out").panels.items()}
    # 5 tips at first, four more after each trial: both panels see what the trials before have left.
    assert raw == {TASKS: [[0, 9, 13, 17]] * 2, UNSEEN: [[0, 9, 13, 17]] * 2}
    # Of 40 episodes at most the four of the trial that was interrupted are played twice.
    assert 40 <= stop + len(second.seen) < 44


def test_controls_never_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, _, _ = adaptation(tmp_path / "off", "off")
    assert {each.memory for each in off.seen} == {"off"}
    assert {each.explore for each in off.seen if TASKS in each.part} == {True}  # the temperature of the others
    read, _, _ = adaptation(tmp_path / "read", "read", stop_after=7)
    frozen, _, _ = adaptation(tmp_path / "read", "read")
    assert {each.memory for each in frozen.seen} == {"read", "off"}
    assert len(read.seen) + len(frozen.seen) == 40  # nothing is played twice
    assert read_adaptation(tmp_path / "read" / "out").panels[TASKS]["raw"].tolist() == [[0, 5, 5, 5]] * 2
    adaptation(tmp_path)
    assert main(["report", *(str(folder / "out") for folder in (tmp_path, tmp_path / "off", tmp_path / "read"))]) == 0
    assert capsys.readouterr().out.count("warning  no call was shown a tip") == 1  # "read": five tips count as none


def test_an_adaptation_goes_on_with_the_settings_that_values_are_learned_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    panel, out = toy_panel(tmp_path, {"door": 3}), tmp_path / "out"
    command = ["adapt", "any", "--server", "http://127.0.0.1:9/v1", "--profile", "cpu", "--panel", str(panel)]
    command += ["--output", str(out)]
    run(command)  # plays nothing, since no server answers
    (out / "results.jsonl").write_text('{"part": "seed 0, trial 0, tasks", "index": 0, "sample": 0, "return": 1}\n')
    for name, had, has in (("failure_return", "-100.0", "-1.0"), ("return_scale", "0.01", "2.0")):
        code, said = run([*command, f"algorithm.{name}={has}"])
        assert code == 2 and f"its results have algorithm.{name}={had}, this command algorithm.{name}={has}" in said


@pytest.mark.parametrize("fact", ["rows", "unseen"])
def test_adaptations_of_other_tasks_are_not_compared(tmp_path: Path, fact: str) -> None:
    folders = []
    for name in ("first", "other"):
        adaptation(tmp_path / name)
        folders.append(tmp_path / name / "out")
    assert show_adaptations(folders, Console(), tmp_path).is_file()
    file = folders[1] / "evaluation.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {fact: ["unseen", "v"]}))
    with pytest.raises(Empo2Error, match="out: was played on other tasks than out; compare results of one panel"):
        show_adaptations(folders, Console(), tmp_path)


def evaluated(folder: Path, rows: str, *returns: float, **facts: Any) -> Path:
    facts = {"kind": "eval", "rows": rows, "groups": {"all": [0, 1]}, "algorithm": {"success_return": 100}} | facts
    results = Results(folder, facts)
    for index, value in enumerate(returns):
        results.add(result(index, value))
    results.close()
    return folder


def test_report_of_two_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = evaluated(tmp_path / "before", "r", 10, 20), evaluated(tmp_path / "after", "r", 40, 60)
    assert main(["report", str(before), str(after)]) == 0
    said = capsys.readouterr().out
    assert "after  minus  before, task by task" in said
    assert "+35.0" in said  # (40 - 10 + 60 - 20) / 2
    assert "+30.0…+40.0" in said
    assert (tmp_path / "evaluation.png").stat().st_size > 10_000
    other = evaluated(tmp_path / "other", "s", 1, 2)
    with pytest.raises(Empo2Error, match=r"other: was played on other tasks than before"):
        show_evaluations([before, other], Console())
    for facts, said in (
        ({"groups": {"a": [0], "b": [1]}}, "has other groups of tasks than before"),
        ({"algorithm": {"success_return": 50}}, r"has another algorithm\.success_return than before"),
    ):
        other = evaluated(tmp_path / said, "r", 1, 2, **facts)
        with pytest.raises(Empo2Error, match=said):
            show_evaluations([before, other], Console())


def test_groups_may_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, names = tmp_path / "a", ["a [/b] c", "[easy] rooms", r"Solve $\foo{x}$"]
    evaluated(folder, "r", 1, 2, 3, groups={name: [number] for number, name in enumerate(names)})
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)


async def test_rag_stores_transcripts_without_asking_and_without_tips(tmp_path: Path, empty_stores: None) -> None:
    """The second episode is shown the first one's transcript, and its own has only its own observations."""
    changes = ["reflection.form=transcript", "reflection.max_words=60", "memory.searched=first-turn"]
    async with running_gateway(tmp_path, *changes, "memory.min_similarity=-1") as gateway:
        for score in (100.0, 7.5):
            rollout = await gateway.create("memory")
            await gateway.play(rollout, ROOMS[:2])
            assert (await gateway.ended(rollout, score))["empo2/tips_written"] == 1
        tips, _ = await gateway.snapshot()
        prompts = [seen.prompt for seen in gateway.model.requests()]
    steps = "Observation: a dark room with a lamp Action: go 0 Observation: the lamp is lit Action: go 1"
    won, lost = f"The task was completed, score 100. {steps}", f"The task was not completed, score 7.5. {steps}"
    assert [text for _, text, _ in tips] == [won, lost]
    assert [f"- {won}\n" in prompt for prompt in prompts] == [False, False, True, True]  # the agents' calls alone


# Whole commands: controller, gateway, agents and a scripted model server


@pytest.mark.slow
def test_evaluation_goes_on_where_it_stopped(tmp_path: Path, empo2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six episodes, of which three are played at first; the model says 3, and the door 3 is a success.

    The agents look for the keys of server and operator in the environment of their processes.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "key-of-the-server")
    monkeypatch.setenv("EMPO2_ADMIN_KEY", "key-of-the-operator")
    panel = toy_panel(tmp_path, {"door": 2}, {"door": 3}, {"door": 5, "trouble": "raise"})
    model = ModelServer(reply=lambda body: "3")
    out = tmp_path / "out"
    with model.serve():
        command = ["eval", MODEL, "--server", model.url, "--panel", str(panel), "--output", str(out)]
        empo2(*command, "--samples", "1")
        seen = len(model.seen)
        lines = (out / "results.jsonl").read_text()
        again, _ = empo2(*command, "--samples", "2")
    assert seen == 3 + 3 + 1
    assert len(model.seen) == 2 * seen
    assert "3 of 6 episodes to play" in again
    assert (out / "results.jsonl").read_text().startswith(lines)
    assert {each.key: each.return_ for each in read_results(out)} == {
        (MEMORY_OFF, index, sample): value for index, value in enumerate((0.9, 1.0, None)) for sample in range(2)
    }
    assert all("return_token_ids" not in seen.body for seen in model.seen)
    assert all(seen.body["temperature"] == 0.4 for seen in model.seen)
    assert {seen.key for seen in model.seen} == {"Bearer key-of-the-server"}
    assert not any(b"key-of-the-" in file.read_bytes() for file in out.iterdir())
    summary = json.loads((out / "summary.json").read_text())[MEMORY_OFF]
    assert summary["none"]["values"]["raw"][0] == pytest.approx(0.95)
    assert summary["raise"]["failed"] == {"failed_by_agent": 2}


@pytest.mark.slow
def test_adaptation_writes_tips_and_reads_them(tmp_path: Path, empo2: Any) -> None:
    panel = toy_panel(tmp_path, {"door": 3})
    tip = "The lamp is behind door 3."

    def reply(body: dict[str, Any]) -> str:
        if is_reflection(body):
            return tip
        return "3" if tip in str(body["messages"]) else "7"

    model = ModelServer(reply=reply)
    out = tmp_path / "out"
    with model.serve():
        command = ["adapt", MODEL, "--server", model.url, "--panel", str(panel), "--unseen", str(panel)]
        command += ["--trials", "1", "--seeds", "1", "--rollouts", "2", "--samples", "1", "--output", str(out)]
        empo2(*command, "memory.min_similarity=-1")
        # The memory that came out, read by an evaluation with memory and without.
        command = ["eval", MODEL, "--server", model.url, "--panel", str(panel), "--samples", "1", "--memory", "both"]
        both, _ = empo2(*command, "--memory-from", str(memory_of(out, 0)[1]), "memory.min_similarity=-1")
    found = read_adaptation(out).panels
    assert found[TASKS]["raw"].tolist() == found[UNSEEN]["raw"].tolist() == [[pytest.approx(0.6), 1.0]]
    assert "tips in 100% of the calls" in both
    evaluation = next((tmp_path / "runs").glob("eval-*"))
    assert {each.part: each.return_ for each in read_results(evaluation)} == {
        MEMORY_OFF: pytest.approx(0.6),
        MEMORY_ON: 1.0,
    }
    assert rows(evaluation / "memory.sqlite", "SELECT count(*) FROM plays") == [(2,)]  # read only: nothing is left
