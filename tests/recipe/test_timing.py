"""The parts of a rollout's time, against sums by hand."""

import pytest
from agentlightning.verl.agl_rollout_manager import CompletedRollout

from empo2.recipe.trainer.timing import rollout_times, timed


def rollout(calls: list[tuple[float, float]], *, running_at: float | None, finished_at: float) -> CompletedRollout:
    """Enqueued at 100; ``calls`` by their ends and seconds."""
    events = [
        {"event_type": "model_request", "timestamp": end, "data": {"latency_ms": 1000 * seconds}}
        for end, seconds in calls
    ]
    return CompletedRollout(
        rollout_id="r",
        data_id="d",
        step=1,
        sample_idx_in_step=0,
        enqueue_time=100,
        running_at=running_at,
        finished_at=finished_at,
        events=[*events, {"event_type": "reward", "timestamp": finished_at, "data": {"value": 1}}],
    )


def test_parts_of_a_rollout() -> None:
    one = rollout([(106, 2), (110, 1)], running_at=101, finished_at=112)  # first call from 104, 3 s of 8 in the model
    two = rollout([(104, 1)], running_at=103, finished_at=104)  # its first call began as it started
    silent = rollout([], running_at=101, finished_at=150)
    never_started = rollout([(104, 1)], running_at=None, finished_at=104)
    times = rollout_times([one, two, silent, never_started])
    assert times == pytest.approx(
        {
            "timing_s/rollout_queue": (1 + 3) / 2,
            "timing_s/rollout_start": (3 + 0) / 2,
            "timing_s/rollout_model": (3 + 1) / 2,
            "timing_s/rollout_agent": (5 + 0) / 2,
        }
    )
    assert rollout_times([silent]) == {}


def test_timed_counts_a_block_that_raises() -> None:
    metrics: dict[str, float] = {}
    with pytest.raises(ValueError), timed(metrics, "drain"):
        raise ValueError
    assert metrics["timing_s/drain"] >= 0
