"""TextWorld-Express, the real one: its worlds, its rows, and its agent against a scripted model server."""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import textworld_express

from empo2.agents.textworld_express import agent, tasks
from empo2.agents.textworld_express.agent import TextWorldExpressAgent, begin
from empo2.agents.textworld_express.environment import Environment
from empo2.agents.textworld_express.tasks import GAMES, Episode, load
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.tasks import check_agent, load_tasks, scope_of

SETTINGS = Path(__file__).parents[2] / "agents/textworld_express/train.yaml"
SMALL_COIN = "numLocations=3,includeDoors=0"

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def world() -> Iterator[Environment]:
    with Environment() as shared:
        yield shared


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


@pytest.mark.parametrize("game", GAMES)
def test_a_world_follows_from_its_seed(world: Environment, game: str):
    first = wander(world, game, seed=3)
    assert len(first) > 2
    with Environment() as another:
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


def test_our_games_are_textworld_expresses():
    assert set(GAMES) < set(textworld_express.GAME_NAMES)


def test_exactly_max_steps_actions_go_through(world: Environment):
    state = world.reset("coin", SMALL_COIN, "train", 0, 2)
    assert [state.done, world.step("höre 数").done, world.step("look around").done] == [False, False, True]
    with pytest.raises(RuntimeError, match="no steps left"):
        world.step("look around")


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
def test_wrong_parameters_are_named_when_rows_are_made(game: str, params: str, says: str):
    with pytest.raises(ValueError, match=says) as error:
        load([game], params=params)
    assert "\n" not in str(error.value).strip()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"names": ["coins"]}, "game 'coins' is unknown; nearest: coin"),
        ({"names": "coin"}, "names 'coin': list some of coin, "),
        ({"names": []}, r"names \[\]: list some of"),
        ({"names": ["coin"], "actions": "chioce"}, "actions 'chioce' is unknown; nearest: choice"),
        ({"names": ["coin"], "max_steps": 0}, "max_steps 0 must be at least 1"),
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


def test_rows_are_the_first_seeds_of_disjoint_folds():
    train, test = load(["coin", "twc"], train_seeds=3, test_seeds=1000)
    assert [row["seed"] for row in train] == [0, 1, 2] * 2
    assert len(test) == 2000
    assert not {row["seed"] for row in test} & set(range(1000))
    assert train[0] == {
        "game": "coin",
        "params": "",
        "fold": "train",
        "seed": 0,
        "max_steps": 50,
        "actions": "free-text",
        "choices": 12,
    }
    assert {row["fold"] for row in test} == {"test"}
    assert json.loads(json.dumps(train)) == train


def test_the_settings_beside_the_agent_are_its_own():
    settings = load_settings("cpu", file=SETTINGS)
    assert check_agent(settings) is not None
    rows = load_tasks(settings)
    assert {variable: path for variable, path in settings.agent.env.items() if path.startswith("input.")} == (
        Episode.env_map()
    )
    assert len({scope_of(row, settings.memory.scope) for row in rows.train}) == 2
    assert (settings.algorithm.scale, settings.algorithm.new_state_reward) == (0.01, 1)


@pytest.fixture
def run(server, world, monkeypatch):
    """Run the agent as the controller does, in this process and in the shared world."""
    monkeypatch.setattr(agent, "Environment", lambda: nullcontext(world))

    def run_one(episode: Episode) -> dict:
        values = {name: str(getattr(episode, path.removeprefix("input."))) for name, path in Episode.env_map().items()}
        for name, value in {**values, **server.variables}.items():
            monkeypatch.setenv(name, value)
        TextWorldExpressAgent().run()
        return server.events[-1]["data"]

    return run_one


def test_a_found_coin_is_posted_as_100(run, server, world):
    script = iter(gold(world, "coin", seed=0))
    server.reply = lambda messages: next(script)
    reward = run(episode(params="", max_steps=100))
    assert (reward["value"], reward["success"]) == (100, True)
    assert reward["message"].startswith("coin seed 0: score 100 after ")
    system, first = server.chats[0]["messages"]
    assert "open door to DIRECTION" in system["content"]
    assert first["content"].startswith("Your task is to search the environment and find the coin.")


def test_choices_are_listed_and_equal_for_equal_replies(run, server):
    server.reply = lambda messages: "2" if len(messages) % 3 else "none of them"
    rewards = [run(episode(actions="choice", choices=3, max_steps=5, seed=7)) for _ in range(2)]
    assert rewards[0] == rewards[1]
    half = len(server.chats) // 2
    assert server.chats[:half] == server.chats[half:]
    turns = [message["content"] for message in server.chats[half - 1]["messages"] if message["role"] == "user"]
    assert all("\n1 " in turn and "\n3 " in turn and "\n4 " not in turn for turn in turns)


def test_a_chat_in_any_script_is_sent_as_it_is(run, server, world, monkeypatch):
    step = world._simulator.step

    def translated(action: str):
        _, reward, done, info = step(action)
        return f"Du hörst 数 🪙: {action}", reward, done, info

    monkeypatch.setattr(world._simulator, "step", translated)
    server.reply = lambda messages: "prüfe 金"
    run(episode(max_steps=2))
    assert server.chats[1]["messages"][-2:] == [
        {"role": "assistant", "content": "prüfe 金"},
        {"role": "user", "content": "Du hörst 数 🪙: prüfe 金"},
    ]
