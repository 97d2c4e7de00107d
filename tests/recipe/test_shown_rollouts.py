"""A step's rollouts as they are logged: what each call added to the chat, and what became of the rollout."""

import json
from typing import Any

from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import CompletedRollout

from empo2.recipe.protocol import CALL_EVENT, ERROR_EVENT, Mode
from empo2.recipe.trainer.shown_rollouts import logged_rollouts
from empo2.recipe.trainer.step_results import StepResults

OFF_POLICY = Mode.of(memory=True, off_policy=True)


def request(messages: list[dict[str, Any]], prompt: list[int], reply: str, **changes: Any) -> dict[str, Any]:
    """agent-lightning's event of a call."""
    message = {"role": "assistant", "content": reply}
    data = {
        "request": {"messages": messages},
        "response": {"prompt_token_ids": prompt, "choices": [{"message": message, "token_ids": [7, 8]}]},
        "latency_ms": 500.0,
        "http_status": 200,
        "status": "ok",
        "finish_reason": "stop",
    }
    return {"event_type": "model_request", "timestamp": 1.0, "data": data | changes}


def ours(prompt: list[int], **data: Any) -> dict[str, Any]:
    return {"event_type": CALL_EVENT, "data": {"prompt_token_ids": prompt, **data}}


def rollout(name: str, events: list[dict[str, Any]], **changes: Any) -> CompletedRollout:
    values: dict[str, Any] = {
        "data_id": "g",
        "step": 3,
        "sample_idx_in_step": 0,
        "enqueue_time": 0.0,
        "running_at": 10.0,
        "finished_at": 12.5,
        "input": {"room": 9},
        "final_reward": 50.0,
        "rollout_state": RolloutState.SUCCEEDED,
        "metadata": {"empo2": {**OFF_POLICY.model_dump(), "scope": "s"}},
    }
    return CompletedRollout(rollout_id=name, events=events, **values | changes)


SYSTEM, FIRST = {"role": "system", "content": "Play."}, {"role": "user", "content": "A room."}
REPLY, SECOND = {"role": "assistant", "content": "look"}, {"role": "user", "content": "A lamp."}


def test_each_call_has_what_it_added_to_the_chat() -> None:
    events = [
        request([SYSTEM, FIRST], [1, 2], "look"),
        ours([1, 2], tip_ids=[4], visits=2, intrinsic_reward=0.5),
        request([SYSTEM, FIRST, REPLY, SECOND], [1, 2, 7, 8, 3], "take"),
        ours([1, 2, 7, 8, 3], tip_ids=[4, 6], visits=4, intrinsic_reward=0.25),
        request([SYSTEM, SECOND], [1, 3], "", status="error", http_status=400, response={"error": "too long"}),
    ]
    played = [rollout("r", events)]
    (logged,) = logged_rollouts(played, StepResults(), 3, "training", {"r": -0.4})
    assert (logged.id, logged.step, logged.phase, logged.mode) == ("r", 3, "training", "memory, off-policy")
    assert (logged.return_, logged.intrinsic, logged.advantage, logged.dropped) == (50.0, 0.75, -0.4, None)
    assert (logged.turns, logged.tips, logged.cause) == (3, 2, "")
    first, second, refused = logged.played["calls"]
    assert (first["messages"], first["anew"]) == ([SYSTEM, FIRST], False)
    assert (second["messages"], second["anew"], second["reply"]["content"]) == ([REPLY, SECOND], False, "take")
    assert (second["tips"], second["visits"], second["seconds"]) == ([4, 6], 4, 0.5)
    assert (second["prompt_length"], second["reply_length"], second["problem"]) == (5, 2, None)
    assert (refused["messages"], refused["anew"], refused["reply"]) == ([SYSTEM, SECOND], True, None)
    assert refused["problem"] == "HTTP 400: {'error': 'too long'}"
    assert (logged.played["task"], logged.played["seconds"], logged.played["error"]) == ({"room": 9}, 2.5, None)
    json.dumps(logged.played)


def test_why_rollouts_were_dropped() -> None:
    error = {"type": "KeyError", "message": "'x'", "where": "quiz.py:3 in run", "output": "Traceback"}
    failed = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    message = "subprocess exited with code 1"
    played = [
        rollout("agent", [{"event_type": ERROR_EVENT, "data": error}], error_message=message, **failed),
        rollout("late", [], error_message="local subprocess timed out", **failed),
        rollout("alone", []),
        rollout("long", []),
        rollout("trained", []),
    ]
    results = StepResults()
    for each, reason in zip(played, ("failed_by_agent", "failed_by_system", "alone_in_group"), strict=False):
        results.drop(each, reason)
    assert results.errors == ["KeyError: 'x' (quiz.py:3 in run)", "local subprocess timed out", "alone in group"]
    assert "for example: KeyError: 'x' (quiz.py:3 in run)" in results.why_none()
    logged = {each.id: each for each in logged_rollouts(played, results, 3, "training", {"trained": 1.0})}
    assert [each.dropped for each in logged.values()] == [
        "failed_by_agent",
        "failed_by_system",
        "alone_in_group",
        "overlong",
        None,
    ]
    assert (logged["agent"].cause, logged["agent"].example) == ("KeyError at quiz.py:3 in run", results.errors[0])
    assert (logged["late"].cause, logged["alone"].cause) == ("local subprocess timed out", "")
    assert logged["agent"].played["error"] == error
    # Nothing is trained on in a validation, so nothing is overlong there.
    assert [each.dropped for each in logged_rollouts(played[3:], results, 3, "validation", {})] == [None, None]


def test_what_is_kept_of_a_rollout_is_bounded() -> None:
    """An image of 5 MB; and a chat that is written anew at every turn."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 5_000_000}}]}
    (logged,) = logged_rollouts([rollout("r", [request([image], [1], "a")])], StepResults(), 1, "validation", {})
    assert len(json.dumps(logged.played)) < 25_000
    anew = [request([{"role": "user", "content": f"{n} " + "y" * 15_000}], [n], "a") for n in range(200)]
    (logged,) = logged_rollouts([rollout("r", anew)], StepResults(), 1, "validation", {})
    assert logged.turns == 200 and len(json.dumps(logged.played)) < 500_000
    assert logged.played["calls"][-1]["messages"] == [{"role": "", "content": "(15037 characters are not kept)"}]
