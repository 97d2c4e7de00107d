"""What was played in a step's rollouts and what became of them, for the run's `rollout_log`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentlightning.verl.agl_rollout_manager import CompletedRollout

from empo2.recipe.failures import reported_error
from empo2.recipe.messages import Message, reply_of
from empo2.recipe.rollout_log import LoggedRollout, Phase
from empo2.recipe.trainer.rollout_calls import PlayedCall, calls_of
from empo2.recipe.trainer.step_results import StepResults, mode_of

_TEXT_CHARACTERS = 20_000  # of one text, such as an image in a message
_ROLLOUT_CHARACTERS = 400_000  # of all new messages of a rollout; a chat that is written anew each turn may reach it


def logged_rollouts(
    played: Sequence[CompletedRollout], results: StepResults, step: int, phase: Phase, advantages: Mapping[str, float]
) -> Iterator[LoggedRollout]:
    """Yield each rollout of a step, used or not.

    Args:
        advantages: by rollout id, of those that are trained on.
    """
    for rollout in played:
        error, calls = reported_error(rollout.events), list(_shown_calls(calls_of(rollout.events)))
        dropped = results.dropped.get(rollout.rollout_id)
        example = dropped.error if dropped else ""
        yield LoggedRollout(
            id=rollout.rollout_id,
            step=step,
            phase=phase,
            mode=mode_of(rollout).name,
            return_=rollout.final_reward,
            intrinsic=sum(call["intrinsic"] for call in calls),
            advantage=advantages.get(rollout.rollout_id),
            turns=len(calls),
            tips=len({tip for call in calls for tip in call["tips"]}),
            dropped=dropped.reason if dropped else None,
            cause=error.cause if error and dropped else example,
            example=example,
            played={
                "task": rollout.input,
                "seconds": (rollout.finished_at or 0.0) - (rollout.running_at or rollout.finished_at or 0.0),
                "error": error.model_dump() if error else rollout.error_message,
                "calls": calls,
            },
        )


def _shown_calls(calls: Sequence[PlayedCall]) -> Iterator[dict[str, Any]]:
    """Yield each call: the messages that the one before it did not have, the reply, and the gateway's event."""
    before: list[Message] = []
    room = _ROLLOUT_CHARACTERS
    for call in calls:
        request, response = call.data["request"], call.data["response"]
        messages = request.get("messages") or [{"role": "user", "content": str(request.get("prompt", ""))}]
        extends = messages[: len(before)] == before
        new = _short(messages[len(before) :] if extends else messages)
        size = len(str(new))
        before, room = messages, room - size
        refused = call.data.get("status") != "ok"
        yield {
            "messages": new if room > 0 else [{"role": "", "content": f"({size} characters are not kept)"}],
            "anew": not extends,
            "reply": _short(reply_of(response)),
            "problem": f"HTTP {call.data.get('http_status')}: {_short(response)}" if refused else None,
            "finish_reason": call.data.get("finish_reason"),
            "prompt_length": len(call.prompt),
            "reply_length": len(call.reply),
            "seconds": call.seconds,
            "tips": call.event.tip_ids if call.event else [],
            "visits": call.event.visits if call.event else None,
            "intrinsic": call.intrinsic,
        }


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
