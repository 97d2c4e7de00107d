"""The rows: ScienceWorld's own split, the paper's limits, and one clear line for whatever is wrong."""

import dataclasses
import json
from contextlib import nullcontext
from typing import Literal

import pytest

from empo2.agents.scienceworld import tasks
from empo2.agents.scienceworld.environment import Environment
from empo2.agents.scienceworld.tasks import ENV_MAP, PAPER_TASKS, TASKS, Episode, load
from empo2.recipe.evaluation.panels import load_panel


@pytest.fixture
def no_other_java(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "Environment", lambda: nullcontext(environment))


@pytest.mark.stack
def test_rows_are_the_first_variations_of_scienceworlds_own_split():
    train, test = load(["find-animal", "identify-life-stages-2", "chemistry-mix"], seed=7)

    def variations(rows: list[dict], task: str) -> list[int]:
        return [row["variation"] for row in rows if row["task"] == task]

    # find-animal: 300 variations, 150 train, 75 dev, 75 test; identify-life-stages-2: 10, 4, 2, 4;
    # chemistry-mix: 32, 16, 8, 8.
    assert variations(train, "find-animal") == [0, 1, 2, 3, 4]
    assert variations(test, "find-animal") == list(range(225, 245))
    assert variations(train, "identify-life-stages-2") == [0, 1, 2, 3]
    assert variations(test, "identify-life-stages-2") == [6, 7, 8, 9]
    assert variations(test, "chemistry-mix") == list(range(24, 32))
    _, dev = load(["find-animal", "chemistry-mix"], test_split="dev")
    assert variations(dev, "find-animal") == list(range(150, 170))
    assert variations(dev, "chemistry-mix") == list(range(16, 24))
    rest = {"simplification": "easy", "max_steps": 30, "actions": "free-text", "choices": 12, "seed": 7}
    assert train[0] == {"task": "find-animal", "variation": 0, **rest}
    assert json.loads(json.dumps(train)) == train


@pytest.mark.stack
def test_the_papers_tasks_can_be_named_at_once(no_other_java):
    train, test = load("paper")
    assert (len(train), len(test)) == (89, 265)
    assert list(dict.fromkeys(row["task"] for row in train)) == list(PAPER_TASKS)
    assert len(PAPER_TASKS) == 18
    assert {row["max_steps"] for row in train if row["task"] == "chemistry-mix"} == {60}
    train, _ = load("boil", train_variations=2)
    assert [row["task"] for row in train] == ["boil"] * 2


@pytest.mark.stack
@pytest.mark.parametrize(
    ("level", "split", "size", "number"),
    [("l0", "dev", 1661, 29), ("l1", "test", 1684, 29), ("l2", "test", 549, 10)],
)
def test_panels_are_rlvmrs_lists(no_other_java, level: str, split: Literal["dev", "test"], size: int, number: int):
    panel = load_panel(f"scienceworld-{level}")
    names = list(panel.groups())
    _, rows = load(names, actions="paper", test_split=split, test_variations=1000, max_steps=30)
    assert [*panel.rows] == rows and (len(rows), len(names)) == (size, number)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("task", "simplification", "played"),
    [
        *(("find-animal", each, {each}) for each in tasks.SIMPLIFICATIONS[1:]),
        ("find-animal", "openDoors,teleportAction", {"openDoors", "teleportAction"}),
        ("find-animal", "easy", {*tasks.SIMPLIFICATIONS[1:]} - {"openContainers"}),
        ("power-component", "easy", {"openDoors", "selfWateringFlowerPots", "teleportAction"}),
    ],
)
def test_every_simplification_is_played(environment: Environment, task: str, simplification: str, played: set[str]):
    environment.reset(task, 0, simplification, 30)
    assert set(environment._simulator.get_simplifications_used().split(", ")) == played


@pytest.mark.stack
def test_what_we_list_is_what_scienceworld_knows(environment: Environment, no_other_java):
    simulator = environment._simulator
    assert {name.replace("(", "").replace(")", "") for name in simulator.get_task_names()} >= set(TASKS)
    assert set(tasks.SIMPLIFICATIONS) == {"easy", *simulator.get_possible_simplifications()}
    train, test = load("all", train_variations=10_000, test_variations=10_000)
    assert list(dict.fromkeys(row["task"] for row in train)) == list(TASKS)
    assert list(dict.fromkeys(row["task"] for row in test)) == list(TASKS)
    worlds = [(row["task"], row["variation"]) for row in train + test]
    assert len(set(worlds)) == len(worlds)


def test_step_limits_are_the_papers():
    limits = {task: tasks.paper_max_steps(task) for task in TASKS}
    assert limits.pop("chemistry-mix") == 60
    assert limits.pop("measure-melting-point-known-substance") == 120
    assert set(limits.values()) == {30}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"names": ["find-aminal"]}, r"task 'find-aminal' is unknown; nearest: find-animal"),
        ({"names": ["boil"], "simplification": "easy,opendoors"}, r"simplification 'opendoors' .* openDoors"),
        ({"names": ["power-component"], "simplification": "noElectricalAction"}, "needs electrical actions; use"),
        ({"names": ["boil"], "choices": 0}, "choices 0 must be at least 1"),
        ({"names": ["boil"], "test_variations": -1}, "test_variations -1 must be at least 1"),
        ({"names": ["boil"], "test_split": "train"}, "test_split 'train' is unknown; nearest: "),
        ({"names": []}, "no task is named"),
        ({"names": "find-aminal"}, r"names 'find-aminal' is unknown; nearest: find-animal"),
    ],
)
def test_a_wrong_argument_gets_one_line_before_java_starts(wrong, says, monkeypatch):
    monkeypatch.setattr(tasks, "Environment", lambda: pytest.fail("Java was started"))
    with pytest.raises(ValueError, match=says) as error:
        load(**wrong)
    assert "\n" not in str(error.value)


def test_an_episode_comes_back_from_its_variables(episode, variables):
    original = episode(task="boil", variation=3, simplification="", actions="choice", seed=5)
    assert Episode.from_env(variables(original)) == original
    assert list(ENV_MAP.values()) == [f"input.{key}" for key in dataclasses.asdict(original)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SCIENCEWORLD_MAX_STEPS": "3.5"}, "SCIENCEWORLD_MAX_STEPS='3.5' is not an integer"),
        ({"SCIENCEWORLD_SEED": "null"}, "SCIENCEWORLD_SEED='null' is not an integer"),
        ({"SCIENCEWORLD_TASK": None}, "SCIENCEWORLD_TASK is not set: .*input.task"),
        ({"SCIENCEWORLD_ACTIONS": "typed"}, "actions 'typed' is unknown"),
    ],
)
def test_a_wrong_variable_is_named(change, says, episode, variables):
    environ = {name: value for name, value in {**variables(episode()), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=says):
        Episode.from_env(environ)
