"""Rollouts made of the events that agent-lightning and the gateway record."""

from collections.abc import Sequence
from typing import Any

from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import CompletedRollout

from empo2.recipe.protocol import CALL_EVENT, Mode

Event = dict[str, Any]
TIP_FREE = [[1, 2], [1, 2, 10, 11, 3]]  # prompts of two turns
WITH_TIPS = [[1, 900, 2], [1, 900, 2, 10, 11, 901, 3]]
_SAMPLED: Any = object()


def request(
    prompt: Sequence[int],
    reply: Sequence[int],
    log_probs: Sequence[float] | None = _SAMPLED,
    *,
    ended: float = 1.0,
    seconds: float = 0.5,
    messages: Sequence[Event] = (),
    text: str = "go",
    version: int | None = None,
    **changes: Any,
) -> Event:
    """agent-lightning's event of a call (`agentlightning.server.proxy._capture_event`)."""
    if log_probs is _SAMPLED:
        log_probs = [-0.5] * len(reply)
    message = {"role": "assistant", "content": text}
    content = None if log_probs is None else [{"token": "x", "logprob": value} for value in log_probs]
    choice = {"message": message, "token_ids": [*reply], "logprobs": content and {"content": content}}
    data = {
        "request": {"messages": [*messages] or [{"role": "user", "content": "where?"}]},
        "response": {"prompt_token_ids": [*prompt], "choices": [choice]},
        "server": {"model": "m", "endpoint": "http://m/v1", "version": version},
        "latency_ms": 1000 * seconds,
        "http_status": 200,
        "status": "ok",
        "finish_reason": "stop",
    }
    return {"event_type": "model_request", "timestamp": ended, "data": data | changes}


def refused(status: int | None, error: str = "no", messages: Sequence[Event] = ()) -> Event:
    return request([], [], messages=messages, status="error", http_status=status, response={"error": error})


def recorded(prompt: Sequence[int], **data: Any) -> Event:
    """The gateway's event of a call."""
    return {"event_type": CALL_EVENT, "timestamp": 1.0, "data": {"prompt_token_ids": [*prompt], **data}}


def two_turns(**first: Any) -> list[Event]:
    """An episode whose tips are the tokens from 900 on."""
    known = {"tip_free_prompt_token_ids": TIP_FREE[0], "tip_ids": [7], "intrinsic_reward": 1.0} | first
    return [
        request(WITH_TIPS[0], [10, 11], [-0.1, -0.2]),
        recorded(WITH_TIPS[0], **known),
        request(WITH_TIPS[1], [12], [-0.3]),
        recorded(WITH_TIPS[1], tip_free_prompt_token_ids=TIP_FREE[1], tip_ids=[8, 7], intrinsic_reward=0.25),
    ]


def rollout_of(name: str, events: Sequence[Event], mode: Mode | None = None, **changes: Any) -> CompletedRollout:
    """A rollout that ended well with a reward of 50, untagged without a mode."""
    values: dict[str, Any] = {
        "data_id": "g",
        "step": 1,
        "sample_idx_in_step": 0,
        "enqueue_time": 0.0,
        "running_at": 10.0,
        "finished_at": 12.5,
        "final_reward": 50.0,
        "rollout_state": RolloutState.SUCCEEDED,
        "metadata": {} if mode is None else {"empo2": {**mode.model_dump(), "scope": "s"}},
    }
    return CompletedRollout(rollout_id=name, events=[*events], **values | changes)


def adapted(rollouts: Sequence[CompletedRollout], prompt: int, response: int) -> tuple[Any, dict[str, Any]]:
    """What agent-lightning's adapter makes of rollouts: rows of so many tokens of prompt and response, and metrics."""
    import torch
    from agentlightning.verl.rollout_adapter import RolloutAdapter

    adapter = RolloutAdapter(
        max_prompt_length=prompt,
        max_response_length=response,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    return adapter.get_train_data_batch([*rollouts])
