"""The story of a run: sentences that are true of its numbers, whatever these are."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from empo2.memory import MemoryStore
from empo2.recipe.errors import Empo2Error
from empo2.small_model.demo import Point, read_points, sentences, tell

from ..memory.stores import add


def test_a_run_that_learns():
    before, noted, after = sentences([Point(0, 0.125, 0.125), Point(5, 0.25, 0.75), Point(10, 0.625, 0.875)])
    assert before == "Before training, without notes, the task succeeds in 12 % of the episodes."
    assert noted == (
        "With the notes that it has written by step 5, it succeeds in 75 %; without them, at the same step, in 25 %."
    )
    assert after == (
        "After 10 steps it succeeds without notes in 62 %: 50 points more than before. Notes add +50 points at step 5 "
        "and +25 points at the end, so part of what the notes say is in the weights now."
    )


def test_a_run_that_does_not():
    *_, after = sentences([Point(0, 0.25, 0.25), Point(5, 0.25, 0.5), Point(10, 0.125, 0.375)])
    assert "12 points less than before" in after and after.endswith("so it has not closed yet.")
    *_, after = sentences([Point(0, 0.25, 0.25), Point(4, 0.25, 1.0), Point(12, 1.0, 0.5)])
    assert after.endswith("and -50 points at the end, so the weights do without notes now, and read them worse.")
    *_, after = sentences([Point(0, 0.25, 0.25), Point(5, 0.25, 0.125)])
    assert "in 25 %: no change. Notes add -12 points at step 5 and -12 points at the end." in after


def test_steps_without_validation_are_no_points_and_the_first_one_was_measured_twice():
    rows = [
        {"step": 0, "val/train/success_rate": 0.0, "val/train/memory_success_rate": 0.5},
        {"step": 1, "training/return": 3.0},
        {"step": 2, "val/train/success_rate": 0.5, "val/train/memory_success_rate": 0.6},
    ]
    assert read_points(rows) == [Point(0, 0.25, 0.25), Point(2, 0.5, 0.6)]
    with pytest.raises(Empo2Error, match="validate_with_memory=true"):
        read_points(rows[:2])


def test_the_whole_story(tmp_path: Path):
    rows = [
        {"step": step, "val/train/success_rate": alone, "val/train/memory_success_rate": noted}
        for step, alone, noted in ((0, 0.0, 0.0), (5, 0.25, 0.75))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key = np.array([1.0, 0.0])
    way = [("You are in the hall.", key, "move east"), ("You are in the den.\nYou see a coin.", key, "take coin")]
    slip = "You are in the hall.", key, "move eastern shade"  # all that is new in an episode with the same tip
    with closing(MemoryStore(tmp_path / "memory.sqlite", embedder="none", dimension=2, capacity=10)) as store:
        add(store, "one", *way[:1], tip="No coin as far as the hall.", score=0.0, success=False)
        add(store, "two", *way, tip="Coin in the den.", score=100.0, success=True)
        add(store, "three", slip, *way, tip="Coin in the den.", score=100.0, success=True)
    told = tell(tmp_path).splitlines()
    assert told[:2] == ["tip (after a success)  Coin in the den.", "tip (after a failure)  No coin as far as the hall."]
    assert told[3:8] == [
        "the episode of the first tip, each move once",
        "  You are in the hall.",
        "    > move east",
        "  You are in the den. You see a coin.",
        "    > take coin",
    ]
    assert told[-1] == f"picture  {tmp_path / 'story.png'}"
    assert (tmp_path / "story.png").read_bytes().startswith(b"\x89PNG")
