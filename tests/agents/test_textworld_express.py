"""TextWorld-Express, the real one: its worlds, its rows, and its agent against a scripted model server."""

import json
import random
from contextlib import nullcontext

import pytest

from empo2.agents.textworld_express import agent, tasks
from empo2.agents.textworld_express.agent import TextWorldExpressAgent, begin
from empo2.agents.textworld_express.environment import Environment
from empo2.agents.textworld_express.tasks import GAMES, Episode, load

SMALL_COIN = "numLocations=3,includeDoors=0"

pytestmark = pytest.mark.stack


@pytest.fixture
def world(textworld: Environment, monkeypatch: pytest.MonkeyPatch) -> Environment:
    for module in (agent, tasks):
        monkeypatch.setattr(module, "Environment", lambda: nullcontext(textworld))
    return textworld


def episode(**changes: object) -> Episode:
    defaults = {"game": "coin", "params": SMALL_COIN, "fold": "train", "seed": 0, "max_steps": 10}
    return Episode(**{**defaults, "actions": "free-text", "choices": 12, **changes})


def wander(environment: Environment, game: str, seed: int, fold: str = "train", max_steps: int = 30) -> list:
    """The states of a random walk, always the same one in the same world."""
    generator = random.Random(0)
    states = [environment.reset(game, "", fold, seed, max_steps)]
    while not states[-1].done:
        states.append(environment.step(generator.choice(states[-1].valid_actions)))
    return states


def gold(environment: Environment, game: str, seed: int) -> list[str]:
    """Actions that TextWorld-Express itself solves the world with."""
    environment.reset(game, "", "train", seed, 100)
    environment._simulator.reset(seed=seed, gameFold="train", generateGoldPath=True)
    return environment._simulator.getGoldActionSequence()


def test_a_world_follows_from_its_seed(world: Environment):
    with Environment() as another:
        for game in GAMES:
            first = wander(world, game, seed=3)
            assert len(first) > 2
            assert wander(another, game, seed=3) == first
            assert wander(world, game, seed=4)[0] != first[0]


@pytest.mark.parametrize("game", GAMES)
def test_a_solved_world_scores_100_and_its_actions_have_the_forms_that_we_name(world: Environment, game: str):
    actions = gold(world, game, seed=1)
    state = world.reset(game, "", "train", 1, 100)
    verbs = {form.split()[0] for form in GAMES[game]}
    for action in actions:
        assert {action.split()[0] for action in state.valid_actions} <= verbs
        state = world.step(action)
        if state.done:
            break
    assert (state.score, state.done) == (100, True)


def test_a_reply_after_the_end_changes_nothing(world: Environment):
    game = begin(world, episode(max_steps=1))
    game.act("look around")
    ended = game.outcome()
    game.act("take coin")  # as a framework's second tool call in one reply
    assert game.outcome() == ended


@pytest.mark.parametrize(
    ("game", "params", "says"),
    [
        ("coin", "numLocation=3", r"params 'numLocation=3' of coin: .*numLocations"),
        ("coin", "numLocations=99", "less than or equal to 11"),
        ("coin", "numLocations=many", "'numLocations=many' must be NAME=NUMBER"),
        ("coin", "junk", "'junk' must be NAME=NUMBER"),
        ("mapreader", "numLocations=3,maxDistanceApart=8", "No locations could be found that distance apart"),
    ],
)
def test_wrong_parameters_are_named_when_rows_are_made(world, game: str, params: str, says: str):
    with pytest.raises(ValueError, match=says) as error:
        load([game], params=params)
    assert "\n" not in str(error.value).strip()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"names": ["coins"]}, "game 'coins' is unknown; nearest: coin"),
        ({"names": []}, r"names \[\]: list some of"),
        ({"names": ["coin"], "train_seeds": 0}, "train_seeds 0 must be at least 1"),
        ({"names": ["coin"], "test_seeds": -1}, "test_seeds -1 must be at least 1"),
    ],
)
def test_a_wrong_argument_gets_one_line_before_java_starts(wrong: dict, says: str, monkeypatch):
    monkeypatch.setattr(tasks, "Environment", lambda: pytest.fail("Java was started"))
    with pytest.raises(ValueError, match=says):
        load(**wrong)


def test_a_wrong_fold_is_named():  # upstream would play the train fold
    with pytest.raises(ValueError, match="fold 'tets' is unknown; nearest: test"):
        episode(fold="tets")


def test_rows_are_the_first_seeds_of_disjoint_folds(world):
    train, test = load(["coin", "twc"], train_seeds=3, test_seeds=1000)
    assert [row["seed"] for row in train] == [0, 1, 2] * 2
    assert len(test) == 2000
    assert not {row["seed"] for row in test} & set(range(1000))
    rest = {"params": "", "fold": "train", "max_steps": 50, "actions": "free-text", "choices": 12}
    assert train[0] == {"game": "coin", "seed": 0, **rest}
    assert {row["fold"] for row in test} == {"test"}
    assert json.loads(json.dumps(train)) == train


def test_a_found_coin_is_posted_as_100(play_agent, server, world):
    reward = play_agent(TextWorldExpressAgent, episode(params="", max_steps=100), gold(world, "coin", seed=0))
    assert (reward["value"], reward["success"]) == (100, True)
    assert reward["message"].startswith("coin seed 0: score 100 after ")
    system, first = server.chats[0]["messages"]
    assert "open door to DIRECTION" in system["content"]
    assert first["content"].startswith("Your task is to search the environment and find the coin.")
    way = gold(world, "coin", seed=0)
    rest = play_agent(
        TextWorldExpressAgent, episode(params="", max_steps=100), way[2:], EPISODE_PREFIX=json.dumps(way[:2])
    )
    assert (rest["value"], rest["actions"]) == (100, way)
