"""CoinCollector and MapReader: their houses beside the real TextWorld-Express; turns, levels, panels, agents."""

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.houses.agent import CoinCollectorAgent, MapReaderAgent
from empo2.agents.houses.deep import ROOMS
from empo2.agents.houses.environment import HouseEnvironment
from empo2.agents.houses.games import COIN_COLLECTOR, GAMES, MAP_READER, Game, Level
from empo2.agents.houses.house import DIRECTIONS, OPPOSITE, House, disguise_of
from empo2.agents.houses.tasks import CoinCollectorEpisode, MapReaderEpisode, coin_collector, coin_stream, map_reader
from empo2.agents.textworld_express.environment import Environment
from empo2.recipe.config import load_settings
from empo2.recipe.files.tasks import load_tasks
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.preflight.agent import check_agent
from empo2.recipe.protocol import scope_of
from empo2.small_model import deep
from empo2.small_model import houses as small_model
from empo2.small_model.levels import EARLIER, bring_back, collect, fits, learned, of_panel
from empo2.small_model.notes import Note, Turn, frontier_of, parse, render
from empo2.small_model.rows import play

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOADS = {COIN_COLLECTOR: coin_collector, MAP_READER: map_reader}
AGENTS = {COIN_COLLECTOR: CoinCollectorAgent, MAP_READER: MapReaderAgent}

in_java = pytest.mark.stack  # the real game

each_game = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
each_level = pytest.mark.parametrize(
    ("game", "level"),
    [
        pytest.param(game, level, id=f"{game.name}-{level}")
        for game in GAMES.values()
        for level, limits in game.levels.items()
        if not limits.deep
    ],
)
each_depth = pytest.mark.parametrize("depth", (6, 7, 8))


# Turns: hall - den - attic from west to east, a cellar south of the den, the coin in the attic

DOORS = {
    "hall": {"east": "den"},
    "den": {"south": "cellar", "east": "attic", "west": "hall"},
    "attic": {"west": "den"},
    "cellar": {"north": "den"},
}
HOUSE = House("hall", "attic", DOORS)
DEN = "You are in the den. East: attic. South: cellar. West: hall."


def test_a_turn_is_a_room_its_exits_and_the_coin():
    coin = HouseEnvironment(COIN_COLLECTOR, HOUSE, 20)
    hall = "You are in the hall. East: den."
    assert (coin.state.observation, coin.task_description) == (hall, "Find the coin and take it.")
    assert coin.state.valid_actions == ("move east",)
    told = [coin.step(action).observation for action in ("look around", "move south", "take coin", "Move east", "")]
    assert told == [hall, *[f"That does nothing. {hall}"] * 4]
    assert coin.step(" move east ").observation == DEN
    state = coin.step("move east")
    assert state.observation == "You are in the attic. You see a coin. West: den."
    assert (state.valid_actions, state.score, state.done) == (("move west", "take coin"), 0, False)
    state = coin.step("take coin")
    assert (state.score, state.done) == (100, True)
    short = HouseEnvironment(COIN_COLLECTOR, HOUSE, 2)
    assert [short.step("move east").done for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="no steps left"):
        short.step("move west")


def test_a_search_and_the_way_back():
    game = HouseEnvironment(MAP_READER, HOUSE, 20)
    assert game.task_description == "Find the coin, take it and bring it to the hall."
    assert "attic" not in game.state.observation  # its map and the coin's room are not shown
    actions = ["move east", "move east", "take coin", "move west", "move south", "take coin", "move north"]
    assert [game.step(action).observation for action in actions] == [
        DEN,
        "You are in the attic. You see a coin. West: den.",
        "Bring it to the hall. You are in the attic. West: den.",
        f"Bring it to the hall. {DEN}",
        "Bring it to the hall. You are in the cellar. North: den.",
        "That does nothing. Bring it to the hall. You are in the cellar. North: den.",
        f"Bring it to the hall. {DEN}",
    ]
    assert [(state.score, state.done) for state in [game.state, game.step("move west")]] == [(50, False), (100, True)]


# Houses


def read(observation: str) -> tuple[str, dict[str, str], bool]:
    """Room, exits and whether a coin lies there, of the real game's own text."""
    room = re.findall(r"^You are in the ([^.]+)\.", observation)[0]
    exits = re.findall(r"To the (North|East|South|West) you see the ([^.]+)\.", observation)
    return room, {direction.lower(): behind for direction, behind in exits}, "a coin" in observation


@in_java
@each_level
def test_an_episode_is_played_as_in_the_real_game(textworld: Environment, game: Game, level: str):
    """Random actions, some of which no house knows, in a house of each part, to the end of the real episode."""
    steps = 5000
    for part, number in (("train", 0), ("unseen", -1)):
        (seed, house), generator = list(game.houses(level)[part].items())[number], random.Random(level)
        real = textworld.reset(game.name, game.params_of(game.levels[level]), small_model.FOLD, seed, steps)
        ours, carried = HouseEnvironment(game, house, steps), False
        state, (room, exits, coin) = ours.state, read(real.observation)
        assert state.observation.startswith(f"You are in the {room}.")
        while not real.done:
            moves = [f"move {direction}" for direction in DIRECTIONS]
            takes = coin and generator.random() < 0.5
            action = "take coin" if takes else generator.choice([*moves, "take coin", "jump"])
            known, real = action in real.valid_actions, textworld.step(action)
            state = ours.step(action)
            if carried and real.observation.startswith("You are in") and read(real.observation)[0] == house.start:
                real = textworld.step("put coin in box")
            elif real.score == 50 and not carried:
                carried, real = True, textworld.step("look around")
            assert (state.score, state.done) == (real.score, real.done)
            assert state.observation.startswith("That does nothing. ") != known
            if real.observation.startswith("You are in") and not real.done:
                room, exits, coin = read(real.observation)
                shown = [f"{way.capitalize()}: {exits[way]}." for way in DIRECTIONS if way in exits]
                told = " ".join([f"You are in the {room}.", *["You see a coin."] * coin, *shown])
                assert state.observation.endswith(told)
                assert set(state.valid_actions) == {*moves, "take coin"} & set(real.valid_actions)
        assert (real.score, state.done) == (100, True)


@in_java
@each_game
def test_a_house_is_what_the_game_makes_of_its_seed(textworld: Environment, game: Game):
    for level, limits in of_the_game(game).items():
        for part in game.houses(level).values():
            for seed in [*part][:: len(part) - 1]:
                assert small_model.walk(textworld, game, limits, seed) == part[seed] == game.house(level, seed)
    with pytest.raises(ValueError, match=r"seed -1: level 'easy' of .* has no such house"):
        game.house("easy", -1)


def of_the_game(game: Game) -> dict[str, Level]:
    """The levels whose houses TextWorld-Express makes."""
    return {name: level for name, level in game.levels.items() if not level.deep}


def moves_to_the_coin(house: House) -> list[str]:
    """The directions of a shortest way, by trying all sequences of moves, the short ones first."""
    ways: list[tuple[str, list[str]]] = [(house.start, [])]
    for room, moves in ways:
        if room == house.coin:
            return moves
        ways += [(behind, [*moves, way]) for way, behind in house.doors[room].items()]
    raise AssertionError("no way")


def test_a_disguise_is_other_names_and_a_compass_in_which_doors_still_lead_back():
    plain = COIN_COLLECTOR.house("hard", 625)
    drawn = [disguise_of(plain, 7, number) for number in range(1, 41)]
    assert drawn == [disguise_of(plain, 7, number) for number in range(1, 41)]
    assert all(sorted(each.names) == sorted(each.names.values()) == sorted(plain.doors) for each in drawn)
    turns = {tuple(each.compass[direction] for direction in DIRECTIONS) for each in drawn}
    assert len(turns) == 8 and all(OPPOSITE[north] == south for north, _, south, _ in turns)
    for each in drawn:
        house = each.house(plain)
        assert house.distance == plain.distance and len(house.doors) == len(plain.doors)
        for room, exits in house.doors.items():
            assert all(house.doors[behind][OPPOSITE[direction]] == room for direction, behind in exits.items())


# The scripted player, by which levels are measured


def test_the_scripted_player_needs_the_way_there_the_coin_and_the_way_back():
    told = Note("attic", (("hall", "east"), ("den", "east")), found=True)
    assert bring_back(HOUSE, [told], 5, random.Random(0)) == (True, told)
    assert bring_back(HOUSE, [told], 4, random.Random(0)) == (False, told)
    results = [bring_back(HOUSE, [], 5, random.Random(seed))[0] for seed in range(400)]
    assert 0.4 < sum(results) / 400 < 0.6  # in the den it goes on to the attic or to the cellar, from there too late
    assert all(bring_back(HOUSE, [], 7, random.Random(seed))[0] for seed in range(50))


# Levels, panels and rows


@each_level
def test_a_panels_houses_are_of_their_level_and_the_table_of_the_page_is_measured_in_them(game: Game, level: str):
    """| CoinCollector | hard | ... | 2.3 % | 6.4 % | 10.2 % | 18.1 % |"""
    limits, measured = game.levels[level], of_panel(game, level)
    houses = [house for part in game.houses(level).values() for house in part.values()]
    assert len({repr(house) for house in houses}) == len(houses) and len(measured) == 32
    assert all(len(house.doors) == limits.rooms and fits(game, house, limits) for house in houses)
    (line,) = re.findall(rf"^\| {game.title} \| {level} \|.*$", (ROOT / "docs/houses.md").read_text(), re.MULTILINE)
    written = [float(share) for share in re.findall(r"([\d.]+) %", line)]
    assert len(written) == len(EARLIER)
    assert written == [round(100 * share, 1) for share in learned(game, measured, limits.max_steps)]


@each_game
def test_no_house_is_used_for_two_purposes(game: Game):
    seeds = [seed for level in of_the_game(game) for part in game.panel(level).values() for seed in part]
    assert len(set(seeds)) == len(seeds) == 32 * len(of_the_game(game)) + 64 * (game is COIN_COLLECTOR)
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
    rest = {"max_steps": game.levels[level].max_steps, "actions": "free-text", "choices": 6}
    assert train[0] == {"seed": seeds["train"][0], "level": level, "disguise": 0, **rest}
    assert {row["max_steps"] for row in LOADS[game](level=level, max_steps=20)[0]} == {20}


def test_no_house_is_in_two_blocks_and_each_block_has_a_disguise():
    blocks = [coin_collector("hard", 8, 2, block=block) for block in range(9)]
    rows = [row for train, unseen in blocks for row in train + unseen]
    assert len({row["seed"] for row in rows}) == len(rows) == 90
    assert [{row["disguise"] for row in train + unseen} for train, unseen in blocks] == [{n} for n in range(1, 10)]


def test_a_stream_plays_houses_for_some_steps_and_never_again():
    streams = [coin_stream("deep-7", block, houses=4, at_once=2, steps=3)[0] for block in (1, 2)]
    first, second = ([row["seed"] for row in rows] for rows in streams)
    assert first == [156, 157] * 3 + [158, 159] * 3 and second == [152, 153] * 3 + [154, 155] * 3
    assert {row["disguise"] for row in streams[1]} == {3}
    for block in (0, 41):
        with pytest.raises(ValueError, match=f"block {block} of 4 houses: level 'deep-7' has blocks 1 to 40"):
            coin_stream("deep-7", block, houses=4)


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


# Deep houses


@each_depth
def test_a_deep_house_is_a_way_of_junctions_with_one_door_on_and_two_that_lead_nowhere(depth: int):
    level = COIN_COLLECTOR.levels[f"deep-{depth}"]
    houses = [house for part in COIN_COLLECTOR.houses(f"deep-{depth}").values() for house in part.values()]
    assert len({repr(house) for house in houses}) == len(houses) == 200
    ways: Counter[str] = Counter()
    for house in houses:
        moves = moves_to_the_coin(house)
        assert len(moves) == house.distance == depth == level.max_steps - 1
        assert len(house.doors) == level.rooms == 3 * depth + 1
        room, came = house.start, ""
        for move in moves:
            exits = house.doors[room]
            assert len(exits) == (4 if came else 3)
            others = [behind for way, behind in exits.items() if way not in (move, came)]
            assert len(others) == 2 and all(len(house.doors[behind]) == 1 for behind in others)
            assert all(house.doors[behind][OPPOSITE[way]] == room for way, behind in exits.items())
            room, came = exits[move], OPPOSITE[move]
        assert room == house.coin and len(house.doors[room]) == 1
        ways.update(moves)
    assert min(ways.values()) > 0.2 * sum(ways.values())  # no direction is the one to take


def test_the_rooms_of_deep_houses_are_called_as_the_games_rooms_are():
    of_levels = [game.houses(level) for game in GAMES.values() for level in of_the_game(game)]
    assert {
        room for parts in of_levels for part in parts.values() for house in part.values() for room in house.doors
    } == (set(ROOMS))


def test_one_wrong_door_is_one_too_many(play_agent, server):
    row: dict[str, Any] = coin_collector("deep-7", train_houses=1)[0][0]
    house = COIN_COLLECTOR.house("deep-7", row["seed"])
    right = [f"move {way}" for way in moves_to_the_coin(house)]
    (wrong, *_) = (way for way in house.doors[house.start] if f"move {way}" != right[0])
    late = [f"move {wrong}", f"move {OPPOSITE[wrong]}", *right][:8]
    assert play_agent(CoinCollectorAgent, CoinCollectorEpisode(**row), late)["value"] == 0
    assert play_agent(CoinCollectorAgent, CoinCollectorEpisode(**row), [*right, "take coin"])["value"] == 100


def abstract_stream(depth: int, ignores: float, generator: random.Random) -> list[bool]:
    """A house without rooms or texts: what is known of each junction, and whether an episode finds the coin."""
    right, dead, sure, won = [generator.randrange(3) for _ in range(depth)], set(), set(), []
    for _ in range(deep.EPISODES):
        steps, at, tried, wrong = depth + 1, 0, set(), []
        while steps > 0 and at < depth:
            free = {0, 1, 2} - tried
            if generator.random() >= ignores:
                free = {right[at]} if at in sure else {door for door in free if (at, door) not in dead} or free
            door = generator.choice(sorted(free))
            steps -= 1
            if door == right[at]:
                at, tried = at + 1, set()
            elif steps:  # else nobody sees what was behind the door
                steps -= 1
                tried.add(door)
                wrong.append((at, door))
        won.append(at == depth)
        if wrong and not won[-1]:
            dead.add(wrong[-1])
        sure |= set(range(depth if won[-1] else wrong[-1][0] if wrong else at))
    return won


@pytest.mark.parametrize(("depth", "ignores"), ((6, 0.0), (7, 0.2), (8, 0.3)))
def test_scripted_readers_find_what_a_game_without_rooms_says(depth: int, ignores: float):
    """Two programs that share nothing: players in rooms with notes as text says, and sets of doors."""
    level, generator = COIN_COLLECTOR.levels[f"deep-{depth}"], random.Random(1)
    houses = [level.made(seed) for seed in range(80)]
    played = deep.streams(houses, level.max_steps, frontier_of, ignores, seed=3)
    sets = [abstract_stream(depth, ignores, generator) for _ in range(2000)]
    for by in (4, 12, 20):
        share = deep.found_by(sets, by)
        assert deep.found_by(played, by) == pytest.approx(
            share, abs=3.5 * (max(share * (1 - share), 0.01) / 100) ** 0.5
        )
    assert deep.at_the_end(played) == pytest.approx(deep.at_the_end(sets), abs=0.06)


def test_chance_finds_one_coin_in_3_to_the_power_of_the_junctions():
    houses = [Level.of_junctions(3).made(seed) for seed in range(4000)]
    found = sum(bring_back(house, [], 4, random.Random(seed))[0] for seed, house in enumerate(houses))
    assert found == 0  # MapReader's player, who has to come back, has no time for it
    found = sum(collect(house, [], 4, random.Random(seed))[0] for seed, house in enumerate(houses))
    assert found / 4000 == pytest.approx(1 / 27, abs=0.012)  # four standard errors


def test_a_note_of_a_failure_tells_the_last_door_that_led_nowhere_if_it_was_seen():
    house = Level.of_junctions(6).made(0)
    right = moves_to_the_coin(house)
    second = house.doors[house.start][right[0]]
    wrong = next(way for way in house.doors[second] if way not in (right[1], OPPOSITE[right[0]]))
    behind = house.doors[second][wrong]
    turns = [
        Turn(house.start, house.doors[house.start], f"move {right[0]}"),
        Turn(second, house.doors[second], f"move {wrong}"),
        Turn(behind, house.doors[behind], f"move {OPPOSITE[wrong]}"),
    ]
    note = frontier_of(turns, success=False)
    assert note == Note(second, ((house.start, right[0]),), nowhere=wrong) and note.true_of(house)
    assert parse(render(note)) == note
    assert render(note) == f"No coin as far as the {second}: {house.start} move {right[0]}, {second} not {wrong}."
    assert all(f"not {wrong}" in render(note, wording) for wording in range(3))
    assert not Note(second, note.way, nowhere=right[1]).true_of(house)  # it leads on
    unseen = frontier_of(turns[:2], success=False)
    assert unseen == Note(second, note.way)  # nobody saw what was behind the door
    reader = [play(house, [note], 7, 0.0, random.Random(seed)).turns[1].action for seed in range(60)]
    assert f"move {wrong}" not in reader and len(set(reader)) == 2


def test_the_table_of_the_page_is_what_scripted_players_find():
    written = (ROOT / "docs/houses.md").read_text()
    for line in deep.lines(COIN_COLLECTOR.levels["deep-6"]):
        assert line in written


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


def test_a_found_coin_is_posted_as_100(play_agent, server):
    row: dict[str, Any] = coin_collector("easy", train_houses=1)[0][0] | {"disguise": 2}
    house = COIN_COLLECTOR.house("easy", row["seed"], row["disguise"])
    moves = moves_to_the_coin(house)
    assert len(moves) == house.distance
    replies = [*(f"move {way}" for way in moves), "take coin"]
    reward = play_agent(CoinCollectorAgent, CoinCollectorEpisode(**row), replies)
    assert (reward["value"], reward["success"]) == (100, True)
    system, first = server.chats[0]["messages"]
    assert system["content"] == "Reply with one action: move north, move east, move south, move west or take coin."
    assert first["content"].startswith(f"Find the coin and take it.\n\nYou are in the {house.start}. ")
    assert house.start != "kitchen"


@pytest.mark.parametrize(("short", "value", "success"), [(0, 100, True), (1, 50, False), (4, 0, False)])
def test_a_coin_is_worth_50_and_100_once_it_is_back(play_agent, server, short: int, value: int, success: bool):
    row: dict[str, Any] = map_reader("medium", train_houses=1)[0][0]
    moves = moves_to_the_coin(MAP_READER.house("medium", row["seed"]))
    replies = [*(f"move {way}" for way in moves), "take coin", *(f"move {OPPOSITE[way]}" for way in reversed(moves))]
    row["max_steps"] = steps = len(replies) - short
    reward = play_agent(MapReaderAgent, MapReaderEpisode(**row), replies)
    assert (reward["value"], reward["success"], len(server.chats)) == (value, success, steps)


def test_an_episode_starts_after_its_prefix(play_agent, server):
    """The walk of one episode in two: the second starts where half of the first has led, and is shown the same."""
    row: dict[str, Any] = coin_collector("easy", train_houses=1)[0][0]
    house, episode = COIN_COLLECTOR.house("easy", row["seed"], 0), AGENTS[COIN_COLLECTOR].episode(**row)
    walk = ["look around", "fly", *(f"move {way}" for way in moves_to_the_coin(house)), "take coin"]
    whole = play_agent(AGENTS[COIN_COLLECTOR], episode, walk)
    shown = [chat["messages"][-1]["content"] for chat in server.chats]
    server.chats.clear()
    rest = play_agent(AGENTS[COIN_COLLECTOR], episode, walk[2:], EPISODE_PREFIX='["look around", "fly"]')
    again = [chat["messages"][-1]["content"] for chat in server.chats]
    assert again[0].endswith(f"\n\n{shown[2]}") and again[1:] == shown[3:]
    assert whole["actions"] == rest["actions"] == walk and whole["value"] == rest["value"] == 100
    assert whole["message"] == rest["message"]  # the prefix counts as steps
