"""Which calls of a rollout are turns, joined with the gateway's events, and the rows that they make."""

from typing import Any

import numpy as np
import pytest

from empo2.recipe.protocol import Mode
from empo2.recipe.trainer.rollout_calls import calls_of, rollout_times, rows_of, turns_of
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import TIP_FREE, WITH_TIPS, Event, recorded, refused, request, rollout_of, two_turns

ON_POLICY, OFF_POLICY = Mode.of(memory=True), Mode.of(memory=True, off_policy=True)
HALL, ROOM = [1, 2, 3], [1, 4, 3]


def test_an_agent_that_comes_back_to_a_state_is_trained_on_every_turn() -> None:
    """Only the newest turn is sent: hall, room, room, hall, hall. All five visits earn their 1/n, and are rows."""
    earned = [1, 1, 1 / 2, 1 / 2, 1 / 3]
    events = []
    for number, (prompt, reward) in enumerate(zip([HALL, ROOM, ROOM, HALL, HALL], earned, strict=True)):
        events.append(request(prompt, [10 + number], ended=1.0 + number))
        events.append(recorded(prompt, tip_free_prompt_token_ids=prompt, visits=1, intrinsic_reward=reward))
    results = StepResults()
    trained = results.train(rollout_of("r", events, OFF_POLICY))
    assert [triplet.response["token_ids"] for triplet in trained.triplets or []] == [[10], [11], [12], [13], [14]]
    assert results.kept["r"].intrinsic == pytest.approx(10 / 3)
    assert [call.intrinsic for call in calls_of(events)] == earned
    assert results.left_out["repeated_calls"] == 0
    assert [len(row) for row in rows_of(turns_of(calls_of(events)))] == [1] * 5


_PATIENT = request(HALL, [10], ended=9, seconds=9)
_AGAIN = request(HALL, [11], ended=6, seconds=1)
_AT_ONCE = [request(HALL, [10 + number], ended=2 + number / 10, seconds=1) for number in range(3)]
_IN_TURN = [request(HALL, [10], ended=1), request(HALL, [11], ended=2)]


@pytest.mark.parametrize(
    ("events", "trained"),
    [
        # A client gave up at 5 s and tried again: whichever answer came first, the second request's is the one.
        ([_AGAIN, _PATIENT, request(ROOM, [12], ended=10)], [11, 12]),
        # Of replies that were asked for at once the last, or that which the chat holds.
        (_AT_ONCE, [12]),
        ([*_AT_ONCE, request([*HALL, 11, 5], [13], ended=4)], [11, 13]),
        # A reply could not be read, the request came again, and the chat shows from which of them it goes on.
        ([*_IN_TURN, request([*HALL, 11, 5], [12], ended=3)], [11, 12]),
        ([*_IN_TURN, request([*HALL, 10, 5], [12], ended=3)], [10, 12]),
        # The tokens of the reply came back as others: the last one was used.
        ([*_IN_TURN, request([*HALL, 77, 5], [12], ended=3)], [11, 12]),
        # Back to the first prompt after another call: a new game, or another branch of a search.
        ([_IN_TURN[0], request([*HALL, 10, 5], [11], ended=2), request(HALL, [12], ended=3)], [10, 11, 12]),
    ],
)
def test_of_a_request_that_is_sent_again_one_reply_is_trained(events: list[Event], trained: list[int]) -> None:
    turns = turns_of(calls_of(events))
    assert [turn.reply[0] for turn in turns] == trained
    results = StepResults()
    results.train(rollout_of("r", [*events, *(recorded(HALL, intrinsic_reward=0.5) for _ in range(2))], ON_POLICY))
    assert results.left_out["repeated_calls"] == len(events) - len(trained)
    assert results.kept["r"].intrinsic == 0.5 * sum(turn.prompt == HALL for turn in turns)  # a request visits once


def test_refused_calls_are_no_turns() -> None:
    calls = calls_of([refused(503), request(HALL, [10], ended=1), request(ROOM, [], ended=2), refused(400)])
    assert [(call.prompt, call.reply, call.number) for call in calls][:3] == [
        ([], [], 0),
        (HALL, [10], 0),
        (ROOM, [], 1),
    ]
    assert [call.reply for call in turns_of(calls)] == [[10]]


def test_each_call_has_its_own_event() -> None:
    """Of equal prompts by their order, whatever stands between; none for a prompt that the gateway did not record."""
    events = [
        *(request(HALL, [10], ended=1), request(ROOM, [11], ended=2), request(HALL, [12], ended=3)),
        *(recorded(HALL, visits=1), recorded(HALL, visits=2), recorded([9], visits=7)),
    ]
    assert [call.event and call.event.visits for call in calls_of(events)] == [1, None, 2]


@pytest.mark.parametrize(
    ("mode", "first", "prompts"),
    [
        (OFF_POLICY, {}, TIP_FREE),
        (OFF_POLICY, {"tip_free_prompt_token_ids": None}, TIP_FREE[1:]),  # never trained with its tips
        (ON_POLICY, {}, WITH_TIPS),
        (None, {}, WITH_TIPS),
    ],
)
def test_the_prompt_that_a_turn_is_trained_with(
    mode: Mode | None, first: dict[str, Any], prompts: list[list[int]]
) -> None:
    """vLLM's log-probs stay; the visit of a turn that is left out counts all the same."""
    results = StepResults()
    triplets = results.train(rollout_of("r", two_turns(**first), mode)).triplets or []
    assert [triplet.prompt["token_ids"] for triplet in triplets] == prompts
    replies = [{"token_ids": [10, 11], "log_probs": [-0.1, -0.2]}, {"token_ids": [12], "log_probs": [-0.3]}]
    assert [triplet.response for triplet in triplets] == replies[-len(prompts) :]
    assert results.left_out["turns_dropped"] == 2 - len(prompts)
    assert (results.kept["r"].intrinsic, results.kept["r"].tips) == (1.25, [7, 8])


def test_parts_of_a_rollout() -> None:
    rollouts = []
    for calls, running_at, finished_at in (  # calls by their ends and seconds
        ([(106, 2), (110, 1)], 101, 112),  # first call from 104, 3 s of 8 in the model
        ([(104, 1)], 103, 104),  # its first call began as it started
        ([(104, 1)], 104, 104),  # it was seen only at its end
        ([], 101, 150),
        ([(104, 1)], None, 104),
    ):
        events = [request([1], [2], ended=ended, seconds=seconds) for ended, seconds in calls]
        times = {"enqueue_time": 100.0, "running_at": running_at, "finished_at": finished_at}
        rollouts.append(rollout_of(str(len(rollouts)), events, **times))
    calls = {rollout.rollout_id: calls_of(rollout.events) for rollout in rollouts}
    assert rollout_times(rollouts, calls) == {
        "timing_s/rollout_queue": np.mean([1, 3, 3]),
        "timing_s/rollout_start": np.mean([3, 0, 0]),
        "timing_s/rollout_model": np.mean([3, 1, 1]),
        "timing_s/rollout_agent": np.mean([5, 0, 0]),
    }
    assert rollout_times(rollouts[3:], calls) == {}
