"""Rows of deep houses: what their notes say, where they are shown, and what the player does with them."""

import random

import pytest

from empo2.agents.houses.deep import deep_house
from empo2.agents.houses.environment import HouseEnvironment
from empo2.agents.houses.games import COIN_COLLECTOR, DEEP_HOUSES
from empo2.agents.houses.house import House
from empo2.small_model import failures
from empo2.small_model.failures import READING, WRITING, Earlier, known, misleading, played_with, rows, told
from empo2.small_model.houses import DEV_SEEDS, MAKE_SEEDS
from empo2.small_model.levels import first
from empo2.small_model.make import reflections
from empo2.small_model.notes import Note, frontier_of, parse, way_to
from empo2.small_model.rows import Row

pytestmark = pytest.mark.slow

HOUSE = deep_house(100_003, 5)
WAY = way_to(HOUSE.doors, HOUSE.start, HOUSE.coin)


@pytest.fixture(scope="module")
def made() -> list[Row]:
    return rows(400, READING, reflections(), random.Random(0))


def test_a_level_gives_as_many_houses_as_are_wanted_or_none() -> None:
    seeds = range(100_000, 100_003)
    assert len(first(seeds, "deep-7", 3)) == 3 and first(seeds, "deep-7", 1)[0].doors == deep_house(100_000, 7).doors
    for level in ("deep-7", "hard"):
        with pytest.raises(ValueError, match=rf"{level}: \d houses among range\(100000, 100003\), 4 are wanted"):
            first(seeds, level, 4)


def doors_to_nowhere(house: House, at: int) -> list[str]:
    """The two doors of the junction at this place of the way that lead nowhere."""
    room, right = WAY[at]
    return [way for way, behind in house.doors[room].items() if way != right and len(house.doors[behind]) == 1]


def test_every_kind_is_there_in_its_share_and_a_seed_gives_the_same_rows(made: list[Row]):
    for kind, percent in READING.kinds.items():
        assert 0.5 * percent < sum(row.kind == kind for row in made) / 4 < 1.7 * percent
    assert rows(20, READING, reflections(), random.Random(0)) == made[:20]
    assert all(any(message.learned for message in row.messages) for row in made)
    assert 0.1 < sum(row.success for row in made) / len(made) < 0.5


def test_the_second_stage_ends_every_row_with_a_note_and_sees_more_senseless_play():
    made = rows(200, WRITING, reflections(), random.Random(0))
    assert all(row.note and row.note.true_of(row.house) for row in made)
    moves = [message for row in made for message in row.messages if message.role == "assistant"]
    assert 0.03 < sum(not message.learned for message in moves) / len(moves) < 0.15


def test_notes_are_true_or_false_as_their_kind_says(made: list[Row]):
    told_false = [0, 0]
    for row in made:
        trues = [true for _, true in row.notes]
        if row.kind in ("success", "failure"):
            assert trues and all(trues)
        assert any(note.found for note, _ in row.notes) <= (row.kind in ("success", "mixed"))
        told_false[row.kind == "mixed"] += not all(trues)
    assert told_false[1] > 0.7 * sum(row.kind == "mixed" for row in made)  # some are never shown
    several = [row for row in made if row.kind == "failure" and len(row.notes) > 3]
    assert len(several) > 30


def test_what_a_row_teaches_to_write_is_true_of_its_own_episode(made: list[Row]):
    written = [row for row in made if row.note is not None]
    assert 0.5 < len(written) / len(made) < 0.7
    assert sum(bool(row.note.nowhere) for row in written if row.note) > 0.4 * len(written)
    for row in written:
        assert row.note is not None and parse(row.messages[-1].content) == row.note
        assert (row.note.true_of(row.house), row.note.found) == (True, row.success)
        shown = " ".join(message.content for message in row.messages[:-2] if message.role == "user")
        rooms = [row.note.end, *(room for room, _ in row.note.way)]
        rooms += [row.house.doors[row.note.end][row.note.nowhere]] if row.note.nowhere else []
        assert all(f"You are in the {room}." in shown for room in rooms)


def test_a_chat_is_an_episode_of_the_world(made: list[Row]):
    for row in made:
        world = HouseEnvironment(COIN_COLLECTOR, row.house, row.house.distance + 1)
        state = world.state
        for asked, reply in zip(row.messages[1::2], row.messages[2::2], strict=True):
            if asked.content.startswith("The episode is over"):
                break
            assert asked.content.endswith(state.observation) and not state.done
            state = world.step(reply.content)
        assert state.done and (state.score == 100) == row.success


def test_a_note_is_shown_once_in_a_room_that_its_episode_was_in():
    generator, later = random.Random(0), 0
    for _ in range(200):
        earlier = known("failure", HOUSE, HOUSE, generator)
        played, heard = played_with(HOUSE, earlier, 6, 0.0, generator)
        shown = [each for new in heard.values() for each in new]
        assert len(shown) == len(set(shown)) and set(shown) <= set(earlier)
        for turn, new in heard.items():
            assert len(new) <= failures.TOP and all(played.turns[turn].room in each.rooms for each in new)
        later += any(turn > 0 for turn in heard)
    assert later > 20


def test_the_player_does_what_it_was_told_at_every_junction():
    generator, count = random.Random(0), 0
    for _ in range(300):
        earlier = known("failure", HOUSE, HOUSE, generator)
        played, heard = played_with(HOUSE, earlier, 6, 0.0, generator)
        followed = told(played.turns, heard)
        assert all(did for _, did in followed)
        count += len(followed)
        deaf = played_with(HOUSE, [], 6, 0.0, generator)[0]
        assert told(deaf.turns, {}) == []
    assert count > 500


def test_both_doors_that_lead_nowhere_leave_the_third():
    rooms = frozenset(room for room, _ in WAY)
    notes = [Earlier(Note(WAY[2][0], WAY[:2], nowhere=door), rooms) for door in doors_to_nowhere(HOUSE, 2)]
    for seed in range(20):
        played, heard = played_with(HOUSE, notes, 6, 0.0, random.Random(seed))
        assert [turn.move for turn in played.turns[:3]] == [direction for _, direction in WAY[:3]]
        assert told(played.turns, heard)[:3] == [(0, True), (1, True), (2, True)]
    one = [played_with(HOUSE, notes[:1], 6, 0.0, random.Random(seed))[0].turns[2].move for seed in range(60)]
    assert set(one) == {WAY[2][1], doors_to_nowhere(HOUSE, 2)[1]}
    # Chance does as one note says in two of three.
    blind = [played_with(HOUSE, [], 6, 0.0, random.Random(seed))[0] for seed in range(900)]
    kept = [
        told(each.turns, {0: [Earlier(Note(WAY[0][0], nowhere=doors_to_nowhere(HOUSE, 0)[0]), rooms)]})
        for each in blind
    ]
    assert sum(did for each in kept for _, did in each) / 900 == pytest.approx(2 / 3, abs=0.05)


def test_a_misleading_note_says_that_the_right_door_leads_nowhere_and_the_player_comes_back():
    note = Note(WAY[0][0], nowhere=doors_to_nowhere(HOUSE, 0)[0])
    wrong = [misleading(note, HOUSE, random.Random(seed)) for seed in range(40)]
    assert not any(each.true_of(HOUSE) for each in wrong)
    right = [each for each in wrong if each.nowhere == WAY[0][1]]
    assert len(right) > 20
    shown = [Earlier(right[0], frozenset({HOUSE.start}))]
    turns = played_with(HOUSE, shown, 9, 0.0, random.Random(0))[0].turns
    assert [turn.move for turn in turns if turn.room == HOUSE.start][-1] == WAY[0][1]
    assert sum(turn.room == HOUSE.start for turn in turns) == 3


def test_no_house_that_is_played_was_trained_on():
    assert not {*MAKE_SEEDS} & {*DEV_SEEDS} and not {*MAKE_SEEDS} & {
        seed for part in DEEP_HOUSES.values() for seed in part
    }


def test_how_far_it_came_where_no_door_led_nowhere():
    played = played_with(
        HOUSE, [Earlier(Note(HOUSE.coin, WAY, found=True), frozenset({HOUSE.start}))], 3, 0.0, random.Random(0)
    )
    assert frontier_of(played[0].turns, success=False) == Note(WAY[2][0], WAY[:2])
