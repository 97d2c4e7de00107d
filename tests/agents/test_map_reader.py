"""MapReader in the real TextWorld-Express: a search and a way back in short turns, and the scripted player in it."""

import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from empo2.agents.houses import agent
from empo2.agents.houses.house import House
from empo2.agents.map_reader.agent import MapReaderAgent
from empo2.agents.map_reader.environment import MapReaderEnvironment, walk
from empo2.agents.map_reader.tasks import Episode, load
from empo2.agents.textworld_express.environment import Environment
from empo2.recipe.config import load_settings
from empo2.recipe.gateway.tips.state import StateReader
from empo2.small_model.levels import bring_back
from empo2.small_model.notes import Note, way_to
from empo2.small_model.player import Player

ROOMS = 11
SETTINGS = Path(__file__).parents[2] / "agents/map_reader/train.yaml"
STREET = 7  # street - spare room - library, from north to south, the coin in the library

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def world() -> Iterator[Environment]:
    with Environment() as shared:
        yield shared


def observations(game: MapReaderEnvironment, actions: list[str]) -> list[str]:
    return [game.step(action).observation for action in actions]


def test_a_search_and_the_way_back(world: Environment):
    game = MapReaderEnvironment(world)
    assert game.reset(ROOMS, 2, STREET, 20).observation == "You are in the street. South: spare room."
    assert game.task_description == "Find the coin, take it and bring it to the street."
    assert observations(game, ["move south", "move south", "take coin", "move south", "move west", "take coin"]) == [
        "You are in the spare room. North: street. South: library.",
        "You are in the library. You see a coin. North: spare room. South: parlor.",
        "Bring it to the street. You are in the library. North: spare room. South: parlor.",
        "Bring it to the street. You are in the parlor. North: library. South: lounge. West: cookery.",
        "Bring it to the street. You are in the cookery. East: parlor.",
        "That does nothing. Bring it to the street. You are in the cookery. East: parlor.",
    ]
    states = [game.step(action) for action in ("move east", "move north", "move north", "move north")]
    assert [(state.score, state.done) for state in states] == [(50, False)] * 3 + [(100, True)]


def test_neither_the_map_nor_the_coins_room_is_shown(world: Environment):
    game = MapReaderEnvironment(world)
    state = game.reset(ROOMS, 2, STREET, 20)
    assert "library" in world.task_description
    assert state.valid_actions == ("move south",)
    for action in ("read map", "task", "inventory", "put map in box", "take map", "move north"):
        assert game.step(action).observation == "That does nothing. You are in the street. South: spare room."


@pytest.mark.parametrize("seed", range(5))
def test_the_shortest_way_there_and_back_is_just_long_enough(world: Environment, seed: int):
    house, game = walk(world, ROOMS, 3, seed), MapReaderEnvironment(world)
    ways: list[tuple[str, list[str]]] = [(house.start, [])]
    for room, moves in ways:  # all sequences of moves, the short ones first
        if any(end == house.coin for end, _ in ways):
            break
        ways += [(behind, [*moves, way]) for way, behind in house.doors[room].items()]
    moves = next(moves for room, moves in ways if room == house.coin)
    opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
    back = [opposite[way] for way in reversed(moves)]
    actions = [*(f"move {way}" for way in moves), "take coin", *(f"move {way}" for way in back)]
    assert len(actions) == 2 * house.distance + 1
    game.reset(ROOMS, 3, seed, len(actions))
    states = [game.step(action) for action in actions]
    assert [state.score for state in states] == [0] * house.distance + [50] * house.distance + [100]


def test_a_house_without_rooms_so_far_apart_is_named(world: Environment):
    with pytest.raises(ValueError, match="No locations could be found that distance apart"):
        walk(world, 3, 8, 0)


def played_by_text(game: MapReaderEnvironment, seed: int, max_steps: int, generator: random.Random) -> bool:
    """Play as `bring_back` does, but in the game and by what its text says."""
    player = Player([], generator)
    state = game.reset(ROOMS, 3, seed, max_steps)
    (box,) = re.findall(r"bring it to the ([^.]+)\.", game.task_description)
    for _ in range(max_steps):
        text = state.observation
        room = re.findall(r"You are in the ([^.]+)\.", text)[0]
        exits = {way.lower(): behind for way, behind in re.findall(r"(North|East|South|West): ([^.]+)\.", text)}
        if text.startswith("Bring it to the "):
            action = f"move {way_to(player.exits, room, box)[0][1]}"
        else:
            action = player.act(room, exits, "You see a coin." in text)
        state = game.step(action)
        if state.done:
            break
    return state.score == 100


def test_what_the_scripted_player_does_in_a_walked_house_it_does_in_the_game(world: Environment):
    """Levels are measured in walked houses."""
    found = set()
    for seed in range(4):
        house, game = walk(world, ROOMS, 3, seed), MapReaderEnvironment(world)
        walked = [bring_back(house, [], 9, random.Random(number))[0] for number in range(10)]
        assert walked == [played_by_text(game, seed, 9, random.Random(number)) for number in range(10)]
        found |= set(walked)
    assert found == {True, False}


# a - b - c, and d beside b: the coin is in c.
DOORS = {"a": {"east": "b"}, "b": {"west": "a", "east": "c", "south": "d"}, "c": {"west": "b"}, "d": {"north": "b"}}


def test_the_scripted_player_needs_the_way_there_the_coin_and_the_way_back():
    house, way = House("a", "c", DOORS), (("a", "east"), ("b", "east"))
    told = Note("c", way, found=True)
    assert bring_back(house, [told], 5, random.Random(0)) == (True, told)
    assert bring_back(house, [told], 4, random.Random(0)) == (False, told)
    results = [bring_back(house, [], 5, random.Random(seed))[0] for seed in range(400)]
    assert 0.4 < sum(results) / 400 < 0.6  # in b it goes on to c or to d; from d it comes too late
    assert all(bring_back(house, [], 7, random.Random(seed))[0] for seed in range(50))


def test_the_state_is_the_room_and_whether_the_coin_is_in_hand():
    """The gateway counts visits to it: a move against a wall is no new state, the coin in hand is one."""
    state = StateReader(load_settings("cpu", file=SETTINGS).memory)

    def of(text: str) -> str:
        return state.of_chat([{"role": "user", "content": text}])

    here = "You are in the den. South: attic."
    carried = f"Bring it to the hall. {here}"
    assert of(f"Find the coin, take it and bring it to the hall.\n\n{here}") == here
    assert (of(here), of(f"That does nothing. {here}")) == (here, here)
    assert (of(carried), of(f"That does nothing. {carried}")) == (carried, carried)


@pytest.fixture
def run(server, world, monkeypatch: pytest.MonkeyPatch):
    """Run the agent as the controller does, in this process and in the shared world, with these actions."""
    monkeypatch.setattr(agent, "Environment", lambda: nullcontext(world))

    def run_one(actions: list[str], **changes: object) -> dict:
        (row,), _ = load("easy", train_houses=1, unseen_houses=1)
        episode = Episode(**{**row, **changes})
        script = iter(actions)
        values = {name: str(getattr(episode, path.removeprefix("input."))) for name, path in Episode.env_map().items()}
        for name, value in {**values, **server.variables}.items():
            monkeypatch.setenv(name, value)
        server.reply = lambda messages: next(script)
        MapReaderAgent().run()
        return server.events[-1]["data"]

    return run_one


THERE_AND_BACK = ["move south", "move south", "take coin", "move north", "move north"]


@pytest.mark.parametrize(("steps", "value", "success"), [(5, 100, True), (4, 50, False), (2, 0, False)])
def test_a_coin_is_worth_50_and_100_once_it_is_back(run, server, steps: int, value: int, success: bool):
    reward = run(THERE_AND_BACK, seed=STREET, max_steps=steps)
    assert (reward["value"], reward["success"]) == (value, success)
    system, first = server.chats[0]["messages"]
    assert system["content"] == "Reply with one action: move north, move east, move south, move west or take coin."
    assert first["content"] == (
        "Find the coin, take it and bring it to the street.\n\nYou are in the street. South: spare room."
    )
    assert len(server.chats) == steps
