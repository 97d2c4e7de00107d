"""Counts and times of the gateway during a training step."""

from collections import Counter
from dataclasses import dataclass, field

from empo2.recipe.gateway import upstream
from empo2.recipe.protocol import Controllers, StepProgress


@dataclass
class StepMetrics:
    """Counts and sums since the step began; `drain` returns them as metrics and starts the next step."""

    # By name, such as ``requests`` for the model calls of all rollouts; with a slash in it, such as
    # ``text_calls/REASON``, a count is a metric by itself.
    counts: Counter[str] = field(default_factory=Counter)
    memory_seconds: float = 0.0  # spent on calls before they were sent
    embedding_seconds: float = 0.0  # the part of it spent waiting for embeddings
    controllers: Controllers = "silent"  # what became of the last request for the list of rollouts
    ended_before: int = field(default_factory=upstream.rollouts_ended)  # rollouts that had ended when the step began

    def progress(self) -> StepProgress:
        """Return how far the step has come."""
        ended, open_ = upstream.rollouts_ended() - self.ended_before, upstream.open_rollouts()
        return StepProgress(
            rollouts=ended + len(open_),
            ended=ended,
            queued=sum(each.status.state is upstream.RolloutState.QUEUING for each in open_),
            controllers=self.controllers,
            problem=next((each.status.error_message for each in open_ if each.status.error_message), ""),
            validation=any(not each.is_train for each in open_),
            calls=self.counts["requests"],
            tips=self.counts["tips_written"],
        )

    def drain(self) -> dict[str, float]:
        """Return the step's metrics and reset the counts; ratios are 0 if nothing was counted."""
        counts = self.counts
        calls, searches = max(counts["calls"], 1), max(counts["searches"], 1)
        continuing = max(counts["continuing_calls"], 1)
        episodes, memory_episodes = max(counts["episodes"], 1), max(counts["memory_episodes"], 1)
        totals = (
            "calls",
            "tips_written",
            "tips_refused",
            "reflections_failed",
            "memory_failures",
            "memory_late",
            "rollouts_expired",
            "tokenize_failures",
            "answers_refused",
            "sampling_overridden",
            "constrained_calls",
            "untrained_calls",
            "side_calls",
            "compaction_calls",
            "continued_calls",
            "text_calls",
            "reply_limits_lifted",
            "tips_withdrawn",
        )
        metrics: dict[str, float] = {name: counts[name] for name in totals}
        metrics |= {name: count for name, count in counts.items() if "/" in name}
        metrics |= {
            "tips_injected_per_call": counts["tips_injected"] / searches,
            "hit_rate": counts["hits"] / searches,
            "tips_per_episode": counts["distinct_tips"] / memory_episodes,
            "tip_tokens_per_episode": counts["tip_tokens"] / memory_episodes,
            "token_drift": counts["drifted_calls"] / continuing,
            "context_ended": counts["context_ended"] / episodes,
            "memory_ms_per_call": 1000 * self.memory_seconds / calls,
            "embedding_ms_per_search": 1000 * self.embedding_seconds / searches,
        }
        counts.clear()
        self.ended_before = upstream.rollouts_ended()
        self.memory_seconds = self.embedding_seconds = 0.0
        return {f"empo2/{name}": value for name, value in metrics.items()}
