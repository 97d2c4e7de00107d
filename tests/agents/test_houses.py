"""CoinCollector and MapReader in the real TextWorld-Express: turns, houses, levels, panels, agents."""

import random
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.houses import agent
from empo2.agents.houses.agent import CoinCollectorAgent, MapReaderAgent
from empo2.agents.houses.environment import HouseEnvironment, disguise_of, walk
from empo2.agents.houses.games import COIN_COLLECTOR, GAMES, MAP_READER, Game
from empo2.agents.houses.house import DIRECTIONS, OPPOSITE, House, room_text
from empo2.agents.houses.tasks import CoinCollectorEpisode, MapReaderEpisode, coin_collector, map_reader
from empo2.agents.textworld_express.environment import Environment
from empo2.recipe.config import load_settings
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.launcher.tasks import check_agent, load_tasks
from empo2.recipe.protocol import scope_of
from empo2.small_model import houses as small_model
from empo2.small_model.levels import EARLIER, bring_back, fits, learned, of_panel
from empo2.small_model.notes import Note, way_to
from empo2.small_model.player import Player

ROOT = Path(__file__).parents[2]
COIN, MAP = COIN_COLLECTOR.levels["hard"], MAP_READER.levels["medium"]  # 11 rooms both
STREET = 7  # of MapReader's level "easy": street - spare room - library, from north to south, the coin in the library
LOADS = {COIN_COLLECTOR: coin_collector, MAP_READER: map_reader}
AGENTS = {COIN_COLLECTOR: CoinCollectorAgent, MAP_READER: MapReaderAgent}

pytestmark = pytest.mark.stack

each_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
each_level = pytest.mark.parametrize(
    ("game", "level"),
    [pytest.param(game, level, id=f"{game.name}-{level}") for game in GAMES.values() for level in game.levels],
)


# Turns


def test_a_turn_is_a_room_its_exits_and_the_coin(textworld: Environment):
    coin = HouseEnvironment(textworld, COIN_COLLECTOR)
    kitchen = "You are in the kitchen. North: bathroom. East: corridor. West: pantry."
    state = coin.reset(COIN, 7, 20)
    assert (state.observation, coin.task_description) == (kitchen, "Find the coin and take it.")
    assert state.valid_actions == ("move east", "move north", "move west")
    told = [coin.step(action).observation for action in ("look around", "inventory", "move south")]
    assert told == [kitchen, *[f"That does nothing. {kitchen}"] * 2]
    for action in ("move east", "move east", "move south"):
        state = coin.step(action)
    assert state.observation == "You are in the driveway. You see a coin. North: backyard."
    state = coin.step("take coin")
    assert (state.score, state.done) == (100, True)


def test_a_search_and_the_way_back(textworld: Environment):
    game = HouseEnvironment(textworld, MAP_READER)
    assert game.reset(MAP_READER.levels["easy"], STREET, 20).observation == "You are in the street. South: spare room."
    assert game.task_description == "Find the coin, take it and bring it to the street."
    actions = ["move south", "move south", "take coin", "move south", "move west", "take coin"]
    assert [game.step(action).observation for action in actions] == [
        "You are in the spare room. North: street. South: library.",
        "You are in the library. You see a coin. North: spare room. South: parlor.",
        "Bring it to the street. You are in the library. North: spare room. South: parlor.",
        "Bring it to the street. You are in the parlor. North: library. South: lounge. West: cookery.",
        "Bring it to the street. You are in the cookery. East: parlor.",
        "That does nothing. Bring it to the street. You are in the cookery. East: parlor.",
    ]
    states = [game.step(action) for action in ("move east", "move north", "move north", "move north")]
    assert [(state.score, state.done) for state in states] == [(50, False)] * 3 + [(100, True)]


def test_neither_the_map_nor_the_coins_room_is_shown(textworld: Environment):
    game = HouseEnvironment(textworld, MAP_READER)
    state = game.reset(MAP_READER.levels["easy"], STREET, 20)
    assert "library" in textworld.task_description
    assert state.valid_actions == ("move south",)
    for action in ("read map", "task", "take map", "move north"):
        assert game.step(action).observation == "That does nothing. You are in the street. South: spare room."


# Houses


def moves_to_the_coin(house: House) -> list[str]:
    """The directions of a shortest way, by trying all sequences of moves, the short ones first."""
    ways: list[tuple[str, list[str]]] = [(house.start, [])]
    for room, moves in ways:
        if room == house.coin:
            return moves
        ways += [(behind, [*moves, way]) for way, behind in house.doors[room].items()]
    raise AssertionError("no way")


def test_a_house_is_what_its_seed_says_and_nothing_else(textworld: Environment):
    first, second = (walk(textworld, COIN_COLLECTOR, COIN, seed) for seed in (7, 8))
    assert len(first.doors) == COIN.rooms
    assert first != second
    assert walk(textworld, COIN_COLLECTOR, COIN, 7) == first


def test_a_walked_house_reads_as_the_game_does(textworld: Environment):
    """The small model's data and evaluation play `House`, not the game. The first one is not in disguise."""
    for seed in range(5):
        house, coin = walk(textworld, COIN_COLLECTOR, COIN, seed, seed), HouseEnvironment(textworld, COIN_COLLECTOR)
        generator, state, room = random.Random(seed), coin.reset(COIN, seed, 60, seed), house.start
        for _ in range(50):
            text = room_text(room, house.doors[room], room == house.coin)
            assert state.observation.removeprefix("That does nothing. ") == text
            moves = [f"move {direction}" for direction in house.doors[room]]
            assert state.valid_actions == tuple(sorted(moves + ["take coin"] * (room == house.coin)))
            direction = generator.choice(DIRECTIONS)
            state = coin.step(f"move {direction}")
            assert state.observation.startswith("That does nothing.") == (direction not in house.doors[room])
            room = house.doors[room].get(direction, room)


@pytest.mark.parametrize("disguise", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_shortest_way_is_just_long_enough(textworld: Environment, seed: int, disguise: int):
    house, coin = walk(textworld, COIN_COLLECTOR, COIN, seed, disguise), HouseEnvironment(textworld, COIN_COLLECTOR)
    moves = moves_to_the_coin(house)
    assert len(moves) == house.distance
    coin.reset(COIN, seed, house.distance + 1, disguise)
    there = [*(f"move {way}" for way in moves), "take coin"]
    assert [coin.step(action).score for action in there] == [0] * house.distance + [100]

    house, game = walk(textworld, MAP_READER, MAP, seed, disguise), HouseEnvironment(textworld, MAP_READER)
    moves = moves_to_the_coin(house)
    game.reset(MAP, seed, 2 * house.distance + 1, disguise)
    assert game.task_description.endswith(f" to the {house.start}.")
    back = [f"move {OPPOSITE[way]}" for way in reversed(moves)]
    actions = [*(f"move {way}" for way in moves), "take coin", *back]
    scores = [0] * house.distance + [50] * house.distance + [100]
    assert [game.step(action).score for action in actions] == scores


def test_a_disguise_is_other_names_and_a_compass_in_which_doors_still_lead_back(textworld: Environment):
    plain = walk(textworld, COIN_COLLECTOR, COIN, 7)
    drawn = [disguise_of(plain, 7, number) for number in range(1, 41)]
    assert drawn == [disguise_of(plain, 7, number) for number in range(1, 41)]
    assert all(sorted(each.names) == sorted(each.names.values()) == sorted(plain.doors) for each in drawn)
    assert len({str(each.names) for each in drawn}) == 40
    turns = {tuple(each.compass[direction] for direction in DIRECTIONS) for each in drawn}
    assert len(turns) == 8 and all(OPPOSITE[north] == south for north, _, south, _ in turns)
    assert {each.names[plain.start] for each in drawn} == set(plain.doors)
    for each in drawn:
        house = each.house(plain)
        assert house.distance == plain.distance and len(house.doors) == len(plain.doors)
        for room, exits in house.doors.items():
            assert all(house.doors[behind][OPPOSITE[direction]] == room for direction, behind in exits.items())
    assert drawn[0] != disguise_of(plain, 8, 1)


def test_a_house_without_rooms_so_far_apart_is_named(textworld: Environment):
    with pytest.raises(ValueError, match="No locations could be found that distance apart"):
        walk(textworld, MAP_READER, replace(MAP, rooms=3, distances=(8,)), 0)


# The scripted player, by which levels are measured


def played_by_text(game: HouseEnvironment, seed: int, max_steps: int, generator: random.Random) -> bool:
    """Play as `bring_back` does, but in the game and by what its text says."""
    player = Player([], generator)
    state = game.reset(MAP, seed, max_steps)
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


def test_what_the_scripted_player_does_in_a_walked_house_it_does_in_the_game(textworld: Environment):
    found = set()
    for seed in range(4):
        house, game = walk(textworld, MAP_READER, MAP, seed), HouseEnvironment(textworld, MAP_READER)
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


# Levels, panels and rows


@each_level
def test_a_panels_houses_are_of_their_level_and_the_table_of_the_page_is_measured_in_them(
    textworld: Environment, game: Game, level: str
):
    """| CoinCollector | hard | ... | 2.3 % | 6.4 % | 10.2 % | 18.1 % |"""
    limits, walked = game.levels[level], of_panel(textworld, game, level)
    seeds = [seed for part in game.panel(level).values() for seed in part]
    houses = [walk(textworld, game, limits, seed) for seed in seeds]
    assert len({repr(house) for house in houses}) == len(seeds) and len(walked) == 32
    assert all(len(house.doors) == limits.rooms and fits(game, house, limits) for house in houses)
    (line,) = re.findall(rf"^\| {game.title} \| {level} \|.*$", (ROOT / "docs/houses.md").read_text(), re.MULTILINE)
    written = [float(share) for share in re.findall(r"([\d.]+) %", line)]
    assert len(written) == len(EARLIER)
    assert written == [round(100 * share, 1) for share in learned(game, walked, limits.max_steps)]


@each_game
def test_no_house_is_used_for_two_purposes(game: Game):
    seeds = [seed for level in game.levels for part in game.panel(level).values() for seed in part]
    assert len(set(seeds)) == len(seeds) == 32 * len(game.levels) + 64 * (game is COIN_COLLECTOR)
    made = {*small_model.MAKE_SEEDS, *small_model.DEV_SEEDS}
    measured = {*small_model.LEVEL_SEEDS, *small_model.TEST_SEEDS}
    assert made.isdisjoint(measured)
    if game is COIN_COLLECTOR:
        assert (made | measured).isdisjoint(seeds)


@each_level
def test_rows_are_the_first_houses_of_a_panel(game: Game, level: str):
    train, unseen = LOADS[game](level=level, train_houses=2, unseen_houses=3)
    seeds = game.panel(level)
    assert [row["seed"] for row in train + unseen] == seeds["train"][:2] + seeds["unseen"][:3]
    rest = {"level": level, "disguise": 0, "actions": "free-text", "choices": 6}
    rest["max_steps"] = game.levels[level].max_steps
    assert train[0] == {"seed": seeds["train"][0], **rest}
    assert {row["max_steps"] for row in LOADS[game](level=level, max_steps=20)[0]} == {20}


def test_no_house_is_in_two_blocks_and_each_block_has_a_disguise():
    blocks = [coin_collector("hard", 8, 2, block=block) for block in range(9)]
    rows = [row for train, unseen in blocks for row in train + unseen]
    assert len({row["seed"] for row in rows}) == len(rows) == 90
    assert [{row["disguise"] for row in train + unseen} for train, unseen in blocks] == [{n} for n in range(1, 10)]
    assert [len(rows) for rows in coin_collector("hard", 64, 32)] == [64, 32]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"level": "easy", "block": 3}, "block 3: level 'easy' has blocks 0 to 2"),
        ({"level": "easy", "block": 0}, "train_houses 16: a block of level 'easy' has 8"),
        ({"level": "hrad"}, "level 'hrad' is unknown; nearest: hard"),
        ({"level": "hard", "unseen_houses": 10_000}, "unseen_houses 10000: level 'hard' has "),
    ],
)
def test_a_wrong_argument_gets_one_line(wrong: dict, says: str):
    with pytest.raises(ValueError, match=says):
        map_reader(**wrong)


# The agents


@each_game
def test_the_settings_beside_the_agent_are_its_own(game: Game):
    settings = load_settings("cpu", file=ROOT / f"agents/houses/{game.name}.yaml")
    assert game.title in str(check_agent(settings))
    rows = load_tasks(settings)
    assert {variable: path for variable, path in settings.agent.env.items() if path.startswith("input.")} == (
        AGENTS[game].episode.env_map()
    )
    assert len({scope_of(row, settings.memory.scope) for row in rows.train}) == len(rows.train)


def test_the_state_is_the_room_and_whether_the_coin_is_in_hand():
    """The gateway counts visits to it: a move against a wall is no new state, the coin in hand is one."""
    state = StateReader(load_settings("cpu", file=ROOT / "agents/houses/mapreader.yaml").memory)

    def of(text: str) -> str:
        return state.of_chat([{"role": "user", "content": text}])

    here = "You are in the den. South: attic."
    carried = f"Bring it to the hall. {here}"
    assert of(f"Find the coin, take it and bring it to the hall.\n\n{here}") == here
    assert (of(here), of(f"That does nothing. {here}")) == (here, here)
    assert (of(carried), of(f"That does nothing. {carried}")) == (carried, carried)


@pytest.fixture
def run(play_agent, textworld, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "Environment", lambda: nullcontext(textworld))
    return play_agent


def test_a_found_coin_is_posted_as_100(run, server, textworld: Environment):
    row: dict[str, Any] = coin_collector("easy", train_houses=1)[0][0] | {"disguise": 2}
    house = walk(textworld, COIN_COLLECTOR, COIN_COLLECTOR.levels["easy"], row["seed"], row["disguise"])
    moves = moves_to_the_coin(house)
    replies = [*(f"move {way}" for way in moves), "take coin"]
    reward = run(CoinCollectorAgent, CoinCollectorEpisode(**row), replies)
    assert (reward["value"], reward["success"]) == (100, True)
    system, first = server.chats[0]["messages"]
    assert system["content"] == "Reply with one action: move north, move east, move south, move west or take coin."
    assert first["content"].startswith(f"Find the coin and take it.\n\nYou are in the {house.start}. ")
    assert house.start != "kitchen"


THERE_AND_BACK = ["move south", "move south", "take coin", "move north", "move north"]


@pytest.mark.parametrize(("steps", "value", "success"), [(5, 100, True), (4, 50, False), (2, 0, False)])
def test_a_coin_is_worth_50_and_100_once_it_is_back(run, server, steps: int, value: int, success: bool):
    row: dict[str, Any] = map_reader("easy", train_houses=1)[0][0] | {"seed": STREET, "max_steps": steps}
    reward = run(MapReaderAgent, MapReaderEpisode(**row), THERE_AND_BACK)
    assert (reward["value"], reward["success"]) == (value, success)
    _, first = server.chats[0]["messages"]
    assert first["content"] == (
        "Find the coin, take it and bring it to the street.\n\nYou are in the street. South: spare room."
    )
    assert len(server.chats) == steps
