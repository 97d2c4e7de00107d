"""A step's rollouts as they are logged: what each call added to the chat, and what became of the rollout."""

import json
from typing import Any

from agentlightning.schemas import RolloutState

from empo2.recipe.protocol import ERROR_EVENT, Mode
from empo2.recipe.rollout_log import LoggedRollout
from empo2.recipe.trainer.shown_rollouts import logged_rollouts
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import recorded, refused, request, rollout_of

OFF_POLICY = Mode.of(memory=True, off_policy=True)


SYSTEM, FIRST = {"role": "system", "content": "Play."}, {"role": "user", "content": "A room."}
REPLY, SECOND = {"role": "assistant", "content": "look"}, {"role": "user", "content": "A lamp."}


def test_each_call_has_what_it_added_to_the_chat() -> None:
    events = [
        request([1, 2], [7, 8], messages=[SYSTEM, FIRST], text="look"),
        recorded([1, 2], tip_ids=[4], visits=2, intrinsic_reward=0.5),
        request([1, 2, 7, 8, 3], [7, 8], messages=[SYSTEM, FIRST, REPLY, SECOND], text="take"),
        recorded([1, 2, 7, 8, 3], tip_ids=[4, 6], visits=4, intrinsic_reward=0.25),
        refused(400, "too long", messages=[SYSTEM, SECOND]),
    ]
    played = [rollout_of("r", events, OFF_POLICY, step=3, input={"room": 9})]
    (logged,) = logged_rollouts(played, StepResults(), 3, "training", {"r": -0.4})
    assert (logged.id, logged.step, logged.phase, logged.mode) == ("r", 3, "training", "memory, off-policy")
    assert (logged.return_, logged.intrinsic, logged.advantage, logged.dropped) == (50.0, 0.75, -0.4, None)
    assert (logged.turns, logged.tips, logged.cause) == (3, 2, "")
    first, second, failed = logged.played["calls"]
    assert (first["messages"], first["anew"]) == ([SYSTEM, FIRST], False)
    assert (second["messages"], second["anew"], second["reply"]["content"]) == ([REPLY, SECOND], False, "take")
    assert (second["tips"], second["visits"], second["seconds"]) == ([4, 6], 4, 0.5)
    assert (second["prompt_length"], second["reply_length"], second["problem"]) == (5, 2, None)
    assert (failed["messages"], failed["anew"], failed["reply"]) == ([SYSTEM, SECOND], True, None)
    assert failed["problem"] == "HTTP 400: {'error': 'too long'}"
    assert (logged.played["task"], logged.played["seconds"], logged.played["error"]) == ({"room": 9}, 2.5, None)
    json.dumps(logged.played)


def test_why_rollouts_were_dropped() -> None:
    error = {"type": "KeyError", "message": "'x'", "where": "quiz.py:3 in run", "output": "Traceback"}
    failed: dict[str, Any] = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    message = "subprocess exited with code 1"
    played = [
        rollout_of("agent", [{"event_type": ERROR_EVENT, "data": error}], error_message=message, **failed),
        rollout_of("late", [], error_message="local subprocess timed out", **failed),
        rollout_of("alone", []),
        rollout_of("trained", []),
    ]
    results = StepResults()
    for each, reason in zip(played, ("failed_by_agent", "failed_by_system", "alone_in_group"), strict=False):
        results.drop(each, reason)
    assert "for example: KeyError: 'x' (quiz.py:3 in run)" in results.why_none()
    logged = {each.id: each for each in logged_rollouts(played, results, 3, "training", {"trained": 1.0})}
    assert {name: (each.dropped, each.cause, each.example) for name, each in logged.items()} == {
        "agent": ("failed_by_agent", "KeyError at quiz.py:3 in run", "KeyError: 'x' (quiz.py:3 in run)"),
        "late": ("failed_by_system", "local subprocess timed out", "local subprocess timed out"),
        "alone": ("alone_in_group", "", ""),
        "trained": (None, "", ""),
    }
    assert logged["agent"].played["error"] == error


def test_what_is_kept_of_a_rollout_is_bounded() -> None:
    """An image of 5 MB; and a chat that is written anew at every turn."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 5_000_000}}]}

    def shown(events: list[Any]) -> LoggedRollout:
        (logged,) = logged_rollouts([rollout_of("r", events)], StepResults(), 1, "validation", {})
        return logged

    assert len(json.dumps(shown([request([1], [7], messages=[image])]).played)) < 25_000
    anew = [request([n], [7], messages=[{"role": "user", "content": f"{n} " + "y" * 15_000}]) for n in range(200)]
    logged = shown(anew)
    assert logged.turns == 200 and len(json.dumps(logged.played)) < 500_000
    assert logged.played["calls"][-1]["messages"] == [{"role": "", "content": "(15037 characters are not kept)"}]
