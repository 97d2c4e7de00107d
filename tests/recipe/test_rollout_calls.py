"""Which calls of a rollout are turns, joined with the gateway's events, and the rows that they make."""

from typing import Any

import numpy as np
import pytest

from empo2.recipe.protocol import Mode
from empo2.recipe.trainer.rollout_calls import PlayedCall, calls_of, rollout_times, rows_of, turns_of
from empo2.recipe.trainer.step_results import StepResults, Unusable

from .rollout_events import Event, recorded, refused, request, rollout_of

NO_MEMORY, ON_POLICY, OFF_POLICY = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)
HALL, ROOM = [1, 2, 3], [1, 4, 3]


def turns(*events: Event) -> list[PlayedCall]:
    return turns_of(calls_of(events))


def replies(*events: Event) -> list[int]:
    """The first tokens of the replies that are trained."""
    return [turn.reply[0] for turn in turns(*events)]


# Turns and repeated requests


def test_an_agent_that_comes_back_to_a_state_is_trained_on_every_turn() -> None:
    """Only the newest turn is sent: hall, room, room, hall, hall. All five visits earn their 1/n, and are rows.

    Also where an action changes nothing, so that the same prompt comes twice in turn.
    """
    earned = [1, 1, 1 / 2, 1 / 2, 1 / 3]
    events = []
    for number, (prompt, reward) in enumerate(zip([HALL, ROOM, ROOM, HALL, HALL], earned, strict=True)):
        events.append(request(prompt, [10 + number], ended=1.0 + number))
        events.append(recorded(prompt, tip_free_prompt_token_ids=prompt, visits=1, intrinsic_reward=reward))
    results = StepResults()
    trained = results.train(rollout_of("r", events, OFF_POLICY), None, 100)
    assert [triplet.response["token_ids"] for triplet in trained.triplets or []] == [[10], [11], [12], [13], [14]]
    assert results.kept["r"].intrinsic == pytest.approx(10 / 3)
    assert [call.intrinsic for call in calls_of(events)] == earned
    assert results.left_out["repeated_calls"] == 0
    assert [len(row) for row in rows_of(turns(*events))] == [1] * 5


def test_a_request_that_is_sent_again_before_its_answer_is_one_turn() -> None:
    """A client that gave up at 5 s and tried again: whichever answer came first, the second request's is the one."""
    patient = request(HALL, [10], ended=9, seconds=9)
    again = request(HALL, [11], ended=6, seconds=1)
    assert replies(again, patient, request(ROOM, [12], ended=10)) == [11, 12]
    results = StepResults()
    events = [again, recorded(HALL, intrinsic_reward=1.0), patient, recorded(HALL, intrinsic_reward=0.5)]
    results.train(rollout_of("r", events, ON_POLICY), None, 100)
    assert (results.left_out["repeated_calls"], results.kept["r"].intrinsic) == (1, 1.5)


def test_of_replies_asked_for_at_once_the_one_is_trained_that_the_chat_holds() -> None:
    three = [request(HALL, [10 + number], ended=2 + number / 10, seconds=1) for number in range(3)]
    assert replies(*three) == [12]
    goes_on = request([*HALL, 11, 5], [13], ended=4)
    assert replies(*three, goes_on) == [11, 13]


def test_a_chat_that_grows_shows_that_a_reply_was_not_used() -> None:
    """The reply 10 could not be read: the same request again, and the chat goes on from 11."""
    first, again = request(HALL, [10], ended=1), request(HALL, [11], ended=2)
    assert replies(first, again, request([*HALL, 11, 5], [12], ended=3)) == [11, 12]
    assert replies(first, again, request([*HALL, 10, 5], [12], ended=3)) == [10, 12]
    # The tokens of the reply came back as others: the last one was used.
    assert replies(first, again, request([*HALL, 77, 5], [12], ended=3)) == [11, 12]


def test_branches_of_a_chat_are_turns() -> None:
    """Back to the first prompt after another call: a new game, or another branch of a search."""
    played = [request(HALL, [10], ended=1), request([*HALL, 10, 5], [11], ended=2), request(HALL, [12], ended=3)]
    assert replies(*played) == [10, 11, 12]
    rows = rows_of(turns(*played))
    assert [[turn.number for turn in row] for row in rows] == [[0, 1], [2]]


def test_refused_calls_are_no_turns() -> None:
    events = [refused(503), request(HALL, [10], ended=1), request(ROOM, [], ended=2), refused(400)]
    calls = calls_of(events)
    assert [(call.prompt, call.reply, call.number) for call in calls] == [
        ([], [], 0),
        (HALL, [10], 0),
        (ROOM, [], 1),
        ([], [], 1),
    ]
    assert [call.reply for call in turns_of(calls)] == [[10]]


def test_each_call_has_its_own_event() -> None:
    """Of equal prompts by their order, whatever stands between; none for a prompt that the gateway did not record."""
    events = [
        *(request(HALL, [10], ended=1), request(ROOM, [11], ended=2), request(HALL, [12], ended=3)),
        *(recorded(HALL, visits=1), recorded(HALL, visits=2), recorded([9], visits=7)),
    ]
    assert [call.event and call.event.visits for call in calls_of(events)] == [1, None, 2]


# Prompts


def two_turns(**data: Any) -> list[Event]:
    """An episode whose tips are the tokens from 900 on."""
    return [
        request([1, 900, 2], [10, 11], [-0.1, -0.2]),
        recorded([1, 900, 2], **{"tip_free_prompt_token_ids": [1, 2], "tip_ids": [7], "intrinsic_reward": 1.0} | data),
        request([1, 900, 2, 10, 11, 901, 3], [12], [-0.3]),
        recorded(
            [1, 900, 2, 10, 11, 901, 3],
            tip_free_prompt_token_ids=[1, 2, 10, 11, 3],
            tip_ids=[8, 7],
            intrinsic_reward=0.25,
        ),
    ]


def prompts_of(mode: Mode | None, events: list[Event], **changes: Any) -> tuple[list[list[int]], StepResults]:
    results = StepResults()
    trained = results.train(rollout_of("r", events, mode, **changes), None, 100)
    for triplet in trained.triplets or []:  # vLLM's log-probs above all
        assert triplet.response in (
            {"token_ids": [10, 11], "log_probs": [-0.1, -0.2]},
            {"token_ids": [12], "log_probs": [-0.3]},
        )
    return [triplet.prompt["token_ids"] for triplet in trained.triplets or []], results


def test_off_policy_rollout_gets_its_tip_free_prompts_and_nothing_else() -> None:
    prompts, results = prompts_of(OFF_POLICY, two_turns())
    assert prompts == [[1, 2], [1, 2, 10, 11, 3]]
    assert (results.kept["r"].intrinsic, results.kept["r"].tips, results.left_out["turns_dropped"]) == (1.25, [7, 8], 0)


@pytest.mark.parametrize("mode", [ON_POLICY, None])
def test_on_policy_rollout_keeps_its_prompts(mode: Mode | None) -> None:
    assert prompts_of(mode, two_turns())[0] == [[1, 900, 2], [1, 900, 2, 10, 11, 901, 3]]


def test_turn_without_tip_free_prompt_is_left_out() -> None:
    """Never trained with its tips; its visit counts all the same."""
    prompts, results = prompts_of(OFF_POLICY, two_turns(tip_free_prompt_token_ids=None))
    assert prompts == [[1, 2, 10, 11, 3]]
    assert (results.kept["r"].intrinsic, results.left_out["turns_dropped"]) == (1.25, 1)


def test_rollout_without_events_of_its_prompts_is_not_trained_off_policy() -> None:
    other = recorded([1, 900, 3], tip_free_prompt_token_ids=[7], intrinsic_reward=1.0)
    with pytest.raises(Unusable, match="no_tip_free_prompt"):
        prompts_of(OFF_POLICY, [*two_turns()[::2], other])


# Times


def test_parts_of_a_rollout() -> None:
    def played(calls: list[tuple[float, float]], running_at: float | None, finished_at: float) -> Any:
        """Enqueued at 100; ``calls`` by their ends and seconds."""
        events = [request([1], [2], ended=ended, seconds=seconds) for ended, seconds in calls]
        return rollout_of("r", events, enqueue_time=100.0, running_at=running_at, finished_at=finished_at)

    one = played([(106, 2), (110, 1)], 101, 112)  # first call from 104, 3 s of 8 in the model
    two = played([(104, 1)], 103, 104)  # its first call began as it started
    silent, never_started = played([], 101, 150), played([(104, 1)], None, 104)
    assert rollout_times([one, two, silent, never_started]) == pytest.approx(
        {
            "timing_s/rollout_queue": np.mean([1, 3]),
            "timing_s/rollout_start": np.mean([3, 0]),
            "timing_s/rollout_model": np.mean([3, 1]),
            "timing_s/rollout_agent": np.mean([5, 0]),
        }
    )
    assert rollout_times([silent]) == {}
