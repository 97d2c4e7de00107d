"""What was played in a step's rollouts and what became of them, for the run's `rollout_log`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentlightning.verl.agl_rollout_manager import CompletedRollout

from empo2.recipe.failures import reported_error
from empo2.recipe.messages import Message, reply_of
from empo2.recipe.protocol import CALL_EVENT, CallEvent
from empo2.recipe.rollout_log import LoggedRollout, Phase
from empo2.recipe.trainer.step_results import StepResults, mode_of, tips_of

_TEXT_CHARACTERS = 20_000  # of one text, such as an image in a message
_ROLLOUT_CHARACTERS = 400_000  # of all new messages of a rollout; a chat that is written anew each turn may reach it


def logged_rollouts(
    played: Sequence[CompletedRollout], results: StepResults, step: int, phase: Phase, advantages: Mapping[str, float]
) -> Iterator[LoggedRollout]:
    """Yield each rollout of a step, used or not.

    Args:
        advantages: by rollout id, of those that are trained on. In training the others have been dropped.
    """
    for rollout in played:
        rollout_id = rollout.rollout_id
        error, calls = reported_error(rollout.events), list(_calls(rollout.events))
        dropped = results.reasons.get(rollout_id)
        if dropped is None and phase == "training" and rollout_id not in advantages:
            dropped = "overlong"
        example = str(error or rollout.error_message or "")
        yield LoggedRollout(
            id=rollout_id,
            step=step,
            phase=phase,
            mode=mode_of(rollout).name,
            return_=rollout.final_reward,
            intrinsic=sum(call["intrinsic"] for call in calls),
            advantage=advantages.get(rollout_id),
            turns=len(calls),
            tips=len(tips_of(rollout)),
            dropped=dropped,
            cause=error.cause if error else example,
            example=example,
            played={
                "task": rollout.input,
                "seconds": (rollout.finished_at or 0.0) - (rollout.running_at or rollout.finished_at or 0.0),
                "error": error.model_dump() if error else rollout.error_message,
                "calls": calls,
            },
        )


def _calls(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each model call: the messages that the one before it did not have, the reply, and the gateway's event."""
    ours = [CallEvent.model_validate(event["data"]) for event in events if event["event_type"] == CALL_EVENT]
    by_prompt = {tuple(event.prompt_token_ids): event for event in ours}
    before: list[Message] = []
    room = _ROLLOUT_CHARACTERS
    for event in events:
        if event["event_type"] != "model_request":
            continue
        data = event["data"]
        request, response = data["request"], data["response"]
        messages = request.get("messages") or [{"role": "user", "content": str(request.get("prompt", ""))}]
        extends = messages[: len(before)] == before
        new = _short(messages[len(before) :] if extends else messages)
        size = len(str(new))
        before, room = messages, room - size
        prompt_ids, reply_ids = _token_ids(response)
        call = by_prompt.get(tuple(prompt_ids))
        yield {
            "messages": new if room > 0 else [{"role": "", "content": f"({size} characters are not kept)"}],
            "anew": not extends,
            "reply": _short(reply_of(response)),
            "problem": None if data.get("status") == "ok" else f"HTTP {data.get('http_status')}: {_short(response)}",
            "finish_reason": data.get("finish_reason"),
            "prompt_length": len(prompt_ids),
            "reply_length": len(reply_ids),
            "seconds": (data.get("latency_ms") or 0.0) / 1000,
            "tips": call.tip_ids if call else [],
            "visits": call.visits if call else None,
            "intrinsic": call.intrinsic_reward if call else 0.0,
        }


def _token_ids(response: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    choice = (response.get("choices") or [{}])[0]
    return response.get("prompt_token_ids") or choice.get("prompt_token_ids") or [], choice.get("token_ids") or []


def _short(value: Any) -> Any:
    """Return a JSON-like value with the middle of long texts left out."""
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    if isinstance(value, str) and len(value) > _TEXT_CHARACTERS:
        half = _TEXT_CHARACTERS // 2
        return f"{value[:half]}\n... {len(value) - 2 * half} characters are not kept ...\n{value[-half:]}"
    return value
