"""Notes: what they say, whether it is true, and what a player who reads them does."""

import random

import pytest

from empo2.agents.houses.house import House
from empo2.small_model.notes import WORDINGS, Note, Turn, falsified, note_of, parse, render, way_to
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
TRUE = Note("cellar", (("hall", "east"), ("den", "east")), found=True)
FAILED = Note("den", (("hall", "east"),))
NOWHERE = Note("hall")


def turns(*actions: str) -> list[Turn]:
    """What a player sees that does this, until the coin is taken."""
    room, seen = HOUSE.start, []
    for action in actions:
        seen.append(Turn(room, HOUSE.doors[room], action))
        room = HOUSE.doors[room].get(action.removeprefix("move "), room)
    return seen


def test_wordings():
    assert render(TRUE) == "Coin in the cellar: hall move east, den move east, cellar take coin."
    assert render(FAILED) == "No coin as far as the den: hall move east, den no coin."
    assert render(NOWHERE) == "No coin as far as the hall: hall no coin."
    assert render(FAILED, 2) == "I came this far: in the hall move east, in the den no coin."
    every = {render(note, wording) for note in (TRUE, FAILED, NOWHERE) for wording in range(WORDINGS)}
    assert len(every) == 3 * WORDINGS


def test_what_is_written_is_read_back_and_other_text_is_no_note():
    for note in (TRUE, FAILED, NOWHERE, Note("hall", found=True)):
        assert parse(render(note)) == note
    for text in (
        "The coin is near.",
        "Coin in the den: hall move up, den take coin.",
        "Coin in the den: hall move east, attic take coin.",
        "No coin as far as the den: hall",
        "No coin as far as the den: hall move east, attic no coin.",
    ):
        assert parse(text) is None, text


@pytest.mark.parametrize(
    ("note", "true"),
    [
        *((note, True) for note in (TRUE, FAILED, NOWHERE)),
        (Note("barn", (("hall", "east"), ("den", "south")), True), False),  # the way is there, the coin is not
        (Note("cellar", (("hall", "east"), ("den", "north")), True), False),
        (Note("cellar", (("den", "east"),), True), False),  # does not begin at the start
        (Note("cellar", (), True), False),
        (Note("cellar", (("hall", "east"), ("den", "east"))), False),  # the coin is there
        (Note("den", (("hall", "north"),)), False),  # to the attic
        (Note("castle", (("hall", "east"),)), False),
    ],
)
def test_truth(note: Note, true: bool):
    assert note.true_of(HOUSE) is true


def test_a_note_is_the_way_to_the_coin_or_to_the_last_room_without_detours():
    detours = ["move north", "move south", "move up", "move east", "move south", "move north"]
    assert note_of(turns(*detours, "move east", "take coin"), True) == TRUE
    lost = turns("move south", "move north", "move east", "move south")  # the barn is not shown any more
    assert note_of(lost, False) == Note("den", (("hall", "east"),))
    assert note_of(turns("move south", "move north", "look"), False) == NOWHERE


def test_a_falsified_note_is_false():
    generator = random.Random(0)
    for note in (TRUE, FAILED, NOWHERE) * 100:
        assert not falsified(note, HOUSE, generator).true_of(HOUSE)


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
@pytest.mark.parametrize(
    ("notes", "begins", "finds"),
    [
        ([TRUE], ["hall", "den", "cellar"], True),
        ([FAILED], ["hall", "den"], False),
        ([Note("attic", (("hall", "north"),))], ["hall", "attic"], False),
        ([Note("attic", (("hall", "north"),)), TRUE], ["hall", "den", "cellar"], True),
        # false ones: of another house, a wrong place, and a turned step
        ([Note("barn", (("hall", "north"), ("kitchen", "east")), found=True)], ["hall"], True),
        ([Note("barn", (("hall", "east"), ("den", "south")), found=True)], ["hall", "den", "barn"], True),
        ([Note("den", (("hall", "south"),))], ["hall"], True),
    ],
)
def test_a_player_uses_notes_and_finds_the_coin_in_spite_of_false_ones(notes, begins, finds, seed):
    rooms = played(*notes, seed=seed)
    assert rooms[: len(begins)] == begins
    assert rooms[-1] == "cellar" or not finds


def test_a_player_follows_the_way_that_most_notes_name():
    ways = [
        played(*[Note("shed", (("hall", "south"),))] * 8, Note("attic", (("hall", "north"),)), seed=seed)[1]
        for seed in range(200)
    ]
    assert set(ways) == {"shed", "attic"}
    assert ways.count("shed") > 5 * ways.count("attic")


def test_a_player_without_notes_knows_nothing():
    assert {played(seed=seed)[1] for seed in range(50)} == {"attic", "den", "shed"}
