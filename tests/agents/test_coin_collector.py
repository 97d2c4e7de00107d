"""CoinCollector in the real TextWorld-Express: short turns, houses by seed, levels and panels, the agent."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from empo2.agents.coin_collector import agent
from empo2.agents.coin_collector.agent import CoinCollectorAgent
from empo2.agents.coin_collector.environment import CoinEnvironment, walk
from empo2.agents.coin_collector.house import DIRECTIONS, House, room_text
from empo2.agents.coin_collector.levels import LEVELS, panel
from empo2.agents.coin_collector.tasks import Episode, load
from empo2.agents.textworld_express.environment import Environment
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.tasks import check_agent, load_tasks
from empo2.recipe.protocol import scope_of
from empo2.small_model import houses as small_model
from empo2.small_model.levels import chance

SETTINGS = Path(__file__).parents[2] / "agents/coin_collector/train.yaml"
ROOMS = 11

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def world() -> Iterator[Environment]:
    with Environment() as shared:
        yield shared


def solution(house: House) -> list[str]:
    """Shortest actions to the coin, by trying all sequences of moves, the short ones first."""
    ways: list[tuple[str, list[str]]] = [(house.start, [])]
    for room, actions in ways:
        if room == house.coin:
            return [*actions, "take coin"]
        ways += [(behind, [*actions, f"move {way}"]) for way, behind in house.doors[room].items()]
    raise AssertionError("no way")


def test_a_turn_is_a_room_its_exits_and_the_coin(world: Environment):
    coin = CoinEnvironment(world)
    assert (
        coin.reset(ROOMS, 7, 20).observation == "You are in the kitchen. North: bathroom. East: corridor. West: pantry."
    )
    assert coin.step("look around").observation.startswith("You are in the kitchen. North:")
    assert coin.step("move south").observation.startswith("That does nothing. You are in the kitchen. North:")
    for action in ("move east", "move east", "move south"):
        state = coin.step(action)
    assert state.observation == "You are in the driveway. You see a coin. North: backyard."
    state = coin.step("take coin")
    assert (state.score, state.done) == (100, True)


def test_a_house_is_what_its_seed_says_and_nothing_else(world: Environment):
    first = walk(world, ROOMS, 7)
    assert len(first.doors) == ROOMS
    with Environment() as another:
        assert walk(another, ROOMS, 7) == first
    assert walk(world, ROOMS, 8) != first


@pytest.mark.parametrize("seed", range(5))
def test_a_walked_house_reads_as_the_game_does(world: Environment, seed: int):
    """The small model's data and evaluation play `House`, not the game."""
    house, coin, generator = walk(world, ROOMS, seed), CoinEnvironment(world), random.Random(seed)
    state, room = coin.reset(ROOMS, seed, 60), house.start
    for _ in range(50):
        text = room_text(room, house.doors[room], room == house.coin)
        assert state.observation.removeprefix("That does nothing. ") == text
        direction = generator.choice(DIRECTIONS)
        state = coin.step(f"move {direction}")
        assert state.observation.startswith("That does nothing.") == (direction not in house.doors[room])
        room = house.doors[room].get(direction, room)


@pytest.mark.parametrize("seed", range(5))
def test_the_distance_is_that_of_the_shortest_solution(world: Environment, seed: int):
    house, coin = walk(world, ROOMS, seed), CoinEnvironment(world)
    actions = solution(house)
    assert len(actions) == house.distance + 1
    coin.reset(ROOMS, seed, len(actions))
    states = [coin.step(action) for action in actions]
    assert [state.score for state in states] == [0] * house.distance + [100]


def test_no_house_is_in_two_panels_or_made_the_small_model():
    panels = [set(panel(level)[part]) for level in LEVELS for part in ("train", "unseen")]
    made = set(small_model.MAKE_SEEDS) | set(small_model.DEV_SEEDS)
    measured = set(small_model.LEVEL_SEEDS) | set(small_model.TEST_SEEDS)
    assert made.isdisjoint(measured)
    for level in LEVELS:
        train, unseen = panel(level)["train"], panel(level)["unseen"]
        assert len({*train, *unseen}) == len(train) + len(unseen) >= 32
    for seeds in panels:
        assert seeds.isdisjoint(made | measured)


@pytest.mark.parametrize("level", LEVELS)
def test_a_panels_houses_are_of_their_level_and_all_different(world: Environment, level: str):
    seeds = [seed for part in panel(level).values() for seed in part]
    walked = [walk(world, LEVELS[level].rooms, seed) for seed in seeds]
    assert len({repr(house) for house in walked}) == len(seeds)
    low, high = LEVELS[level].chance
    for house in walked:
        assert house.distance in LEVELS[level].distances
        assert house.distance < LEVELS[level].max_steps
        assert low <= chance(house, LEVELS[level].max_steps) <= high


def test_rows_are_the_first_houses_of_a_panel():
    train, unseen = load("hard", train_houses=2, unseen_houses=3)
    assert [row["seed"] for row in train + unseen] == panel("hard")["train"][:2] + panel("hard")["unseen"][:3]
    steps = LEVELS["hard"].max_steps
    assert train[0] == {
        "level": "hard",
        "seed": train[0]["seed"],
        "max_steps": steps,
        "actions": "free-text",
        "choices": 6,
    }
    assert {row["max_steps"] for row in load("hard", max_steps=20)[0]} == {20}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"level": "hrad"}, "level 'hrad' is unknown; nearest: hard"),
        ({"level": "hard", "train_houses": 0}, "train_houses 0 must be at least 1"),
        ({"level": "hard", "unseen_houses": 10_000}, "unseen_houses 10000: level 'hard' has "),
        ({"level": "hard", "max_steps": 0}, "max_steps 0 must be at least 1"),
    ],
)
def test_a_wrong_argument_gets_one_line(wrong: dict, says: str):
    with pytest.raises(ValueError, match=says):
        load(**wrong)


def test_the_settings_beside_the_agent_are_its_own():
    settings = load_settings("cpu", file=SETTINGS)
    assert check_agent(settings) is not None
    rows = load_tasks(settings)
    assert {variable: path for variable, path in settings.agent.env.items() if path.startswith("input.")} == (
        Episode.env_map()
    )
    assert len({scope_of(row, settings.memory.scope) for row in rows.train}) == len(rows.train)


def test_a_found_coin_is_posted_as_100(server, world: Environment, monkeypatch: pytest.MonkeyPatch):
    episode = Episode(**load("easy", train_houses=1)[0][0])
    script = iter(solution(walk(world, ROOMS, episode.seed)))
    monkeypatch.setattr(agent, "Environment", lambda: nullcontext(world))
    values = {name: str(getattr(episode, path.removeprefix("input."))) for name, path in Episode.env_map().items()}
    for name, value in {**values, **server.variables}.items():
        monkeypatch.setenv(name, value)
    server.reply = lambda messages: next(script)
    CoinCollectorAgent().run()
    reward = server.events[-1]["data"]
    assert (reward["value"], reward["success"]) == (100, True)
    system, first = server.chats[0]["messages"]
    assert system["content"] == "Reply with one action: move north, move east, move south, move west or take coin."
    assert first["content"].startswith("Find the coin and take it.\n\nYou are in the kitchen. ")
