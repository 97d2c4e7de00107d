"""What the table counts, with a scripted policy in the model's place."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from empo2.agents.houses.house import House
from empo2.recipe.tip_block import render_tips
from empo2.small_model import episodes
from empo2.small_model.episodes import Episode, play
from empo2.small_model.evaluate import measured, share
from empo2.small_model.make import reflections
from empo2.small_model.notes import Turn

DOORS = {"hall": {"east": "den"}, "den": {"east": "cellar", "west": "hall"}, "cellar": {"west": "den"}}
HOUSE = House("hall", "cellar", DOORS)
NOTE = "Coin in the cellar: hall move east, den move east, cellar take coin."


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Episode]:
    """Play one episode whose replies are these, the last one the note; 4 steps at most."""

    def run(*replies: str, notes: tuple[str, ...] = ()) -> Episode:
        scripted = Mock()
        scripted.return_value.reply.side_effect = [{0: reply} for reply in replies]
        monkeypatch.setattr(episodes, "Chats", scripted)
        (episode,) = play(None, None, [HOUSE], [notes], 4, seed=0, reflection=reflections()[0])
        return episode

    return run


def test_a_found_coin_and_the_true_way_to_it(policy):
    episode = policy("move east", "move east", "take coin", NOTE)
    assert (episode.success, episode.valid, len(episode.turns), episode.tip) == (True, 3, 3, NOTE)
    assert episode.tip_true
    assert "was completed" in episode.chat[-1]["content"]
    assert episode.chat[-2] == {"role": "assistant", "content": "take coin"}
    assert not policy("move east", "move east", "take coin", NOTE.replace("den move east", "den move west")).tip_true


def test_doors_are_taken_as_true_notes_say():
    """Of the hall a note tells the way on, of the den that the north leads nowhere; a false one does not count."""
    doors = {"hall": {"east": "den", "south": "bar"}, "bar": {"north": "hall"}, "attic": {"south": "den"}}
    doors |= {"den": {"north": "attic", "east": "cellar", "west": "hall"}, "cellar": {"west": "den"}}
    house = House("hall", "cellar", doors)
    true = "No coin as far as the den: hall move east, den not north."
    false = "No coin as far as the hall: hall not east."

    def told(*actions: str, notes: tuple[str, ...]) -> str:
        turns = [Turn(room, doors[room], action) for room, action in zip(("hall", "den"), actions, strict=False)]
        return str(measured([Episode(house, [], "hall", notes, turns)])["as told"])

    assert told("move east", "move east", notes=(true, false)) == "1.00 (1.00-1.00), 2"
    assert told("move east", "move north", notes=(true, false)) == "0.50 (0.50-0.50), 2"
    assert told("move south", notes=(true,)) == "0.00 (0.00-0.00), 1"
    assert told("move south", notes=(false,)) == "None"


def test_a_failure_and_what_it_saw(policy):
    actions = ("move north", "take coin", "look", "move east")
    episode = policy(*actions, "No coin as far as the hall: hall no coin.", notes=("No coin as far as the attic.",))
    assert (episode.success, episode.valid, len(episode.turns)) == (False, 1, 4)
    assert episode.tip_true
    shown = render_tips(["No coin as far as the attic."])
    assert episode.chat[1]["content"] == f"{shown}\n\nFind the coin and take it.\n\nYou are in the hall. East: den."
    assert episode.chat[3]["content"] == "That does nothing. You are in the hall. East: den."
    assert episode.chat[-2]["content"] == "move east"  # its result was not shown
    # The den was not seen, so to call it empty is no honest note, though it is right; nor is a coin that was not found.
    assert not policy(*actions, "No coin as far as the den: hall move east, den no coin.").tip_true
    assert not policy(*actions, NOTE).tip_true
    # What the gateway keeps of it.
    assert policy(*actions, "Sure! No coin here. And so on.").tip == "No coin here."
    assert policy(*actions, "...").tip == ""


def test_the_interval_is_over_houses():
    """Against numpy's own bootstrap of equal groups: the mean of the houses' means."""
    hits = [4, 0, 0, 3, 1, 0]  # of four each
    cell = share([(f"house {house}", int(number < hit), 1) for house, hit in enumerate(hits) for number in range(4)])
    assert cell is not None and (cell.share, cell.count) == (pytest.approx(8 / 24, abs=1e-3), 24)
    drawn = np.random.default_rng(1).choice(np.array(hits) / 4, (20_000, 6)).mean(axis=1)
    assert (cell.low, cell.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=0.05)
    assert share([]) is None


def test_what_is_measured(policy):
    found = policy("move east", "move east", "take coin", NOTE)
    lost = policy("a", "move east", "move west", "d", "No coin as far as the den: hall move west, den no coin.")
    table = measured([found, lost])
    assert {name: cell.share for name, cell in table.items() if cell} == {
        "found": 0.5,
        "valid": pytest.approx(5 / 7, abs=1e-3),
        "true after success": 1,
        "true after failure": 0,
    }
