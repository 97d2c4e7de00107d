"""Where the time of a step's rollouts goes, as metrics."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from agentlightning.verl.agl_rollout_manager import CompletedRollout


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Write the seconds that the block took to ``metrics``, as ``timing_s/name``."""
    begin = perf_counter()
    try:
        yield
    finally:
        metrics[f"timing_s/{name}"] = perf_counter() - begin


def rollout_times(rollouts: Iterable[CompletedRollout]) -> dict[str, float]:
    """Return the mean seconds of a rollout's parts, over the rollouts that called the model.

    ``queue``: until its agent was started, ``start``: until its first call, ``model``: all of its calls, as the gateway
    saw them, ``agent``: the rest, until its end was noticed, also while its calls waited for an update. Parallel calls
    of one agent each count in full.
    """
    sums: dict[str, float] = dict.fromkeys(("queue", "start", "model", "agent"), 0.0)
    count = 0
    for rollout in rollouts:
        calls = [
            (event["timestamp"], event["data"].get("latency_ms", 0.0) / 1000)
            for event in rollout.events
            if event["event_type"] == "model_request"
        ]
        if not calls or rollout.running_at is None or rollout.finished_at is None:
            continue
        count += 1
        first = min(end - seconds for end, seconds in calls)
        model = sum(seconds for _, seconds in calls)
        sums["queue"] += rollout.running_at - rollout.enqueue_time
        sums["start"] += first - rollout.running_at
        sums["model"] += model
        sums["agent"] += rollout.finished_at - first - model
    return {f"timing_s/rollout_{name}": total / count for name, total in sums.items() if count}
