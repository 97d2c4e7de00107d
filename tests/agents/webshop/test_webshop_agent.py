"""WebShop's rows, its settings, and its agent against a scripted model server."""

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from empo2.agents.webshop import agent, environment, tasks
from empo2.agents.webshop.agent import WebShopAgent
from empo2.agents.webshop.tasks import Episode, load, open_catalogue
from empo2.recipe.config import load_settings
from empo2.recipe.files.tasks import load_tasks, scope_of
from empo2.recipe.preflight.agent import check_agent

FOLDER = Path(agent.__file__).parent
MUG = "B0BLUEMUG1"
BUY_THE_MUG = ("search[blue stoneware]", "click[b0bluemug1]", "click[blue]", "click[large]", "click[buy now]")


@pytest.fixture
def episode(shop_folder: Path, goal_of: Callable[[str], int]) -> Callable[..., Episode]:
    def make(**changes: object) -> Episode:
        defaults = {"catalogue": str(shop_folder), "goal": goal_of(MUG), "max_steps": 15, "seed": 0, "hits": 10}
        defaults |= {"actions": "free-text", "choices": 40, "option_matching": "original"}
        return Episode(**{**defaults, **changes})

    return make


@pytest.fixture
def run(play_agent) -> Callable[..., dict]:
    return partial(play_agent, WebShopAgent)


def test_the_right_purchase_is_posted_as_100(run, server, episode, goal_of):
    reward = run(episode(), [*BUY_THE_MUG])
    assert (reward["value"], reward["success"]) == (100, True)
    assert reward["message"] == f"goal {goal_of(MUG)}: score 100 after 5 of 15 steps"
    system, first = server.chats[0]["messages"]
    assert "search[WORDS]" in system["content"]
    assert first["content"].startswith("I want a blue mug that is dishwasher safe, and price lower than ")


def test_a_visit_starts_after_its_prefix(run, server, episode):
    reward = run(episode(), [*BUY_THE_MUG[2:]], EPISODE_PREFIX=json.dumps(BUY_THE_MUG[:2]))
    assert (reward["value"], reward["actions"], len(server.chats)) == (100, [*BUY_THE_MUG], 3)
    first = server.chats[0]["messages"][-1]["content"]
    assert first.startswith("I want a blue mug") and "buy now" in first.lower()


def test_a_shopper_by_numbers_can_buy_the_right_thing(run, server, episode):
    wanted = iter(["search[i want a blue mug that is dishwasher safe]", *BUY_THE_MUG[1:]])

    def number_of_the_action(messages: list[dict]) -> str:
        lines = (line.partition(" ") for line in messages[-1]["content"].splitlines())
        return {action: number for number, _, action in lines}[next(wanted)]

    server.reply = number_of_the_action
    assert run(episode(actions="choice"))["value"] == 100
    system, first = server.chats[0]["messages"]
    assert "search[" not in system["content"]
    assert [line.partition(" ")[0] for line in first["content"].splitlines()[-4:]] == ["1", "2", "3", "4"]


def test_who_buys_nothing_gets_nothing_and_fewer_hits_make_a_shorter_page(run, server, episode):
    reward = run(episode(max_steps=2, hits=3), ["search[mug]"] * 2)
    assert (reward["value"], reward["success"], len(server.chats)) == (0, False, 2)
    assert server.chats[1]["messages"][-1]["content"].count("$") == 3


@pytest.mark.parametrize("option_matching", ["original", "values"])
def test_options_are_matched_as_the_episode_says(run, episode, monkeypatch, option_matching):
    monkeypatch.setattr(environment, "reward", matched := Mock(wraps=environment.reward))
    run(episode(option_matching=option_matching), [*BUY_THE_MUG])
    assert matched.call_args.args[-1] == option_matching


def test_rows_are_the_first_goals_of_disjoint_splits(shop_folder, monkeypatch):
    # 24 goals: a sixth, a third and a half.
    monkeypatch.chdir(shop_folder.parent)
    train, test = load("catalogue", seed=7)
    assert [row["goal"] for row in test] == [0, 1, 2, 3]
    assert [row["goal"] for row in train] == list(range(12, 24))
    rest = {"max_steps": 15, "actions": "free-text", "choices": 12, "hits": 10, "option_matching": "original"}
    assert train[0] == {"catalogue": str(shop_folder), "goal": 12, "seed": 7, **rest}
    assert json.loads(json.dumps(train)) == train
    train, test = load(str(shop_folder), train_goals=[20, 13], test_goals=3, test_split="validation")
    assert [row["goal"] for row in train] == [20, 13]
    assert [row["goal"] for row in test] == [4, 5, 6]
    train, _ = load(str(shop_folder), split="verl-agent", option_matching="values")
    assert [(row["goal"], row["option_matching"]) for row in train] == [(goal, "values") for goal in range(4, 24)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"catalogue": "own", "actions": "chioce"}, "actions 'chioce' is unknown; nearest: choice"),
        ({"catalogue": "own", "choices": 0}, "choices 0 must be at least 1"),
        ({"test_split": "tests"}, "test_split 'tests' is unknown; nearest: test"),
        ({"split": "verl_agent"}, "split 'verl_agent' is unknown; nearest: verl-agent"),
        ({"split": "verl-agent", "test_split": "validation"}, "test_split 'validation' is not in split 'verl-agent'"),
        ({"option_matching": "value"}, "option_matching 'value' is unknown; nearest: values"),
        ({"train_goals": 0}, "train_goals 0 must be at least 1"),
        ({"train_goals": [12, 3]}, "train_goals 3 is not in its split, 12 to 23"),
        ({"test_goals": [24]}, "test_goals 24 is not in its split, 0 to 3"),
        ({"catalogue": "nowhere"}, "nowhere is no WebShop catalogue"),
    ],
)
def test_a_wrong_argument_gets_one_line(wrong, says, shop_folder, monkeypatch):
    monkeypatch.setattr(tasks, "own_catalogue", lambda: pytest.fail("a catalogue was built"))
    monkeypatch.chdir(shop_folder.parent)
    with pytest.raises(ValueError, match=says) as error:
        load(**{"catalogue": "catalogue", **wrong})
    assert "\n" not in str(error.value)


def test_the_settings_beside_the_agent_play_the_projects_own_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = load_settings("cpu", file=FOLDER / "train.yaml")
    check_agent(settings)
    rows = load_tasks(settings)
    assert {variable: path for variable, path in settings.agent.env.items() if path.startswith("input.")} == (
        Episode.env_map()
    )
    assert {row["catalogue"] for row in rows.train} == {"own"}  # as rows of a panel say, and the same on any machine
    with closing(open_catalogue("own")) as shop:
        assert shop.products == 1000
    assert next((tmp_path / "empo2").glob("webshop-1000-*/catalogue.sqlite"))
    assert len({row["goal"] for row in rows.train}) == 2
    assert len({scope_of(row, settings.memory.scope) for row in rows.train}) == 1


def test_the_papers_settings(shop_folder):
    layer = {"tasks": {"args": {"catalogue": str(shop_folder), "test_goals": 4}}}
    settings = load_settings("gpu", file=FOLDER / "paper.yaml", layer=layer)
    check_agent(settings)
    rows = load_tasks(settings)
    assert {(row["max_steps"], row["actions"]) for row in rows.train + rows.val} == {(15, "free-text")}
    assert settings.agent.env == {**Episode.env_map(), "WEBSHOP_MAX_TOKENS": "512"}
