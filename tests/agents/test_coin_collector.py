"""CoinCollector in the real TextWorld-Express: short turns, houses by seed, levels and panels, the agent."""

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from empo2.agents.coin_collector.agent import CoinCollectorAgent
from empo2.agents.coin_collector.environment import CoinEnvironment, walk
from empo2.agents.coin_collector.levels import LEVELS, panel
from empo2.agents.coin_collector.tasks import Episode, load
from empo2.agents.houses import agent
from empo2.agents.houses.house import DIRECTIONS, House, room_text
from empo2.agents.textworld_express.environment import Environment
from empo2.small_model import houses as small_model

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


def test_no_house_of_a_panel_made_or_measured_the_small_model():
    made = {*small_model.MAKE_SEEDS, *small_model.DEV_SEEDS, *small_model.LEVEL_SEEDS, *small_model.TEST_SEEDS}
    for level in LEVELS:
        for seeds in panel(level).values():
            assert made.isdisjoint(seeds)


def test_the_small_models_seeds_have_one_purpose_each():
    made = set(small_model.MAKE_SEEDS) | set(small_model.DEV_SEEDS)
    assert made.isdisjoint({*small_model.LEVEL_SEEDS, *small_model.TEST_SEEDS})


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
