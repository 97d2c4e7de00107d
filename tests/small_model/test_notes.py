"""Notes: what they say, whether it is true, and what a player who reads them does."""

import random

import pytest

from empo2.agents.coin_collector.house import House
from empo2.small_model.notes import WORDINGS, Note, Turn, falsified, note_of, parse, render, shortened, way_to
from empo2.small_model.player import Player

#   attic
#     |
#   hall - den - cellar (the coin)
#     |     |
#   shed   barn
HOUSE = House(
    "hall",
    "cellar",
    {
        "hall": {"north": "attic", "east": "den", "south": "shed"},
        "attic": {"south": "hall"},
        "shed": {"north": "hall"},
        "den": {"east": "cellar", "south": "barn", "west": "hall"},
        "barn": {"north": "den"},
        "cellar": {"west": "den"},
    },
)
TRUE = Note("cellar", (("hall", "east"), ("den", "east")))
FAILED = Note(empty=("hall", "den"))
DEAD_END = Note(empty=("hall", "attic", "den"), dead_ends=("attic",))


def turns(*actions: str) -> list[Turn]:
    """What a player sees that does this, until the coin is taken."""
    room, seen = HOUSE.start, []
    for action in actions:
        seen.append(Turn(room, HOUSE.doors[room], action))
        room = HOUSE.doors[room].get(action.removeprefix("move "), room)
    return seen


def test_wordings():
    assert render(TRUE) == "Coin in the cellar: hall move east, den move east, cellar take coin."
    assert render(FAILED) == "Empty: hall, den."
    assert render(DEAD_END) == "Empty: hall, attic (dead end), den."
    assert render(FAILED, 2) == "There was no coin in the hall or the den."
    assert len({render(note, wording) for note in (TRUE, FAILED) for wording in range(WORDINGS)}) == 2 * WORDINGS


@pytest.mark.parametrize("note", [TRUE, FAILED, DEAD_END, Note("hall")])
def test_what_is_written_is_read_back(note: Note):
    assert parse(render(note)) == note


@pytest.mark.parametrize("text", ["", "The coin is near.", "Coin in the den: hall move up, den take coin.", "Empty: "])
def test_other_text_is_no_note(text: str):
    assert parse(text) is None


@pytest.mark.parametrize(
    ("note", "true"),
    [
        (TRUE, True),
        (Note("barn", (("hall", "east"), ("den", "south"))), False),  # the way is there, the coin is not
        (Note("cellar", (("hall", "east"), ("den", "north"))), False),
        (Note("cellar", (("den", "east"),)), False),  # does not begin at the start
        (Note("cellar", ()), False),
        (FAILED, True),
        (DEAD_END, True),
        (Note(empty=("hall", "den"), dead_ends=("den",)), False),  # three doors
        (Note(empty=("hall", "cellar")), False),
        (Note(empty=("hall", "castle")), False),
    ],
)
def test_truth(note: Note, true: bool):
    assert note.true_of(HOUSE) is true


def test_the_note_of_a_success_is_its_way_without_detours():
    found = turns(
        "move north", "move south", "move up", "move east", "move south", "move north", "move east", "take coin"
    )
    assert note_of(found, True) == TRUE


def test_the_note_of_a_failure_is_the_rooms_that_were_seen_and_which_are_dead_ends():
    lost = turns("move south", "move north", "move east", "move south")  # the barn is not shown any more
    assert note_of(lost, False) == Note(empty=("hall", "shed", "den"), dead_ends=("shed",))


def test_loops_are_left_out():
    assert shortened([("a", "north"), ("b", "east"), ("c", "west"), ("b", "south"), ("d", "east")], "e") == (
        ("a", "north"),
        ("b", "south"),
        ("d", "east"),
    )
    assert shortened([("a", "north"), ("b", "south"), ("a", "east")], "a") == ()


def test_a_falsified_note_is_false():
    generator = random.Random(0)
    for _ in range(100):
        assert not falsified(TRUE, HOUSE, generator).true_of(HOUSE)
        assert not falsified(FAILED, HOUSE, generator).true_of(HOUSE)
        assert not falsified(DEAD_END, HOUSE, generator).true_of(HOUSE)


def test_a_shortest_way():
    assert way_to(HOUSE.doors, "shed", "cellar") == (("shed", "north"), ("hall", "east"), ("den", "east"))
    assert way_to(HOUSE.doors, "den", "den") == ()
    with pytest.raises(ValueError, match="no way from shed to castle"):
        way_to(HOUSE.doors, "shed", "castle")


def played(*notes: Note, limit: int = 30, seed: int = 0) -> list[str]:
    """The rooms that the scripted player comes through, the coin's last."""
    player, room, rooms = Player(notes, random.Random(seed)), HOUSE.start, [HOUSE.start]
    for _ in range(limit):
        action = player.act(room, HOUSE.doors[room], room == HOUSE.coin)
        if action == "take coin":
            return rooms
        room = HOUSE.doors[room][action.removeprefix("move ")]
        rooms.append(room)
    return rooms


@pytest.mark.parametrize("seed", range(10))
def test_a_player_uses_what_notes_say(seed: int):
    assert played(TRUE, seed=seed) == ["hall", "den", "cellar"]
    ruled_out = Note(empty=("hall", "attic", "shed", "barn"))
    assert played(ruled_out, seed=seed) == ["hall", "den", "cellar"]
    dead_ends = Note(empty=("attic", "hall", "shed", "barn", "den"), dead_ends=("attic", "shed", "barn"))
    assert played(dead_ends, seed=seed) == ["hall", "den", "cellar"]


@pytest.mark.parametrize("seed", range(10))
def test_a_player_finds_the_coin_in_spite_of_false_notes(seed: int):
    strange = Note("barn", (("hall", "north"), ("kitchen", "east")))  # north of the hall is the attic
    assert played(strange, seed=seed)[-1] == "cellar"
    wrong = Note("barn", (("hall", "east"), ("den", "south")))
    assert played(wrong, seed=seed)[:3] == ["hall", "den", "barn"]
    assert played(wrong, seed=seed)[-1] == "cellar"
    ruled_out = Note(empty=("cellar", "den"))
    assert played(ruled_out, seed=seed)[-1] == "cellar"


def test_a_player_without_notes_knows_nothing():
    ways = {tuple(played(seed=seed)) for seed in range(50)}
    assert {way[1] for way in ways} == {"attic", "den", "shed"}
    assert all(len(set(way)) == len(way) or way.count("hall") > 1 or way.count("den") > 1 for way in ways)
