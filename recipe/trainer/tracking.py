"""The metrics of a step, and the file to which they are written."""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from verl.utils.tracking import Tracking

from empo2.recipe.config import Algorithm
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import METRICS_FILE
from empo2.recipe.trainer.results import RolloutResult, StepResults

_TOKEN_MEANS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")


class RunTracking(Tracking):
    """verl's loggers, and one line per step in the run's metrics.jsonl (verl's own file logger overwrites).

    The loggers get the configuration, and this process's command line, which wandb reads itself, without secrets.
    """

    def __init__(self, *args: Any, config: dict[str, Any], **kwargs: Any) -> None:
        shown = redacted({**config, "argv": sys.argv})
        sys.argv = shown.pop("argv")
        super().__init__(*args, config=shown, **kwargs)
        directory = config.get("empo2", {}).get("run_directory")
        self._file = Path(directory) / METRICS_FILE if directory else None

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        super().log(data=data, step=step, backend=backend)
        if self._file is not None:
            line = {"step": step} | {key: _json_number(value) for key, value in data.items()}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _json_number(value: Any) -> float | None:
    value = float(value)
    return value if math.isfinite(value) else None


def training_metrics(results: StepResults, success_return: float) -> dict[str, float]:
    """Return means over the trained rollouts, in the environment's units, and counts of the dropped ones."""
    kept = list(results.kept.values())
    metrics = {
        "training/return": np.mean([result.return_ for result in kept]),
        "training/return_std": np.std([result.return_ for result in kept]),
        "training/success_rate": np.mean([result.return_ >= success_return for result in kept]),
        "training/intrinsic_return": np.mean([result.intrinsic for result in kept]),
        "empo2/memory_fraction": np.mean([result.mode.memory for result in kept]),
        "empo2/off_policy_fraction": np.mean([result.mode.off_policy for result in kept]),
        "empo2/rollouts_dropped": results.dropped.total(),
        "empo2/turns_dropped": results.turns_dropped,
    }
    metrics |= {f"empo2/dropped/{reason}": count for reason, count in results.dropped.items()}
    metrics |= _agent_means("training", kept)
    return {key: float(value) for key, value in metrics.items()}


def _agent_means(phase: str, results: Iterable[RolloutResult]) -> dict[str, float]:
    """Return the mean of each number that agents reported, over the rollouts that reported it."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.agent_metrics.items():
            values[name].append(value)
    return {f"{phase}/agent/{name}": float(np.mean(reported)) for name, reported in values.items()}


def step_line(step: int, metrics: dict[str, Any], *, rollouts: int, rows: int) -> str:
    """Return the step's line of output: what is trained on, and a warning about everything that gets no gradient."""
    said = f"step {step}: training on {rollouts} rollouts in {rows} rows"
    dropped = {
        name.removeprefix("empo2/dropped/").replace("_", " "): count
        for name, count in metrics.items()
        if name.startswith("empo2/dropped/")
    }
    if dropped:
        said += f"; dropped {', '.join(f'{count:.0f} {reason}' for reason, count in dropped.items())}"
    if split := metrics["empo2/unmerged_rollouts"]:
        said += f"; {split} rollouts came in several rows (a prompt did not extend the one before)"
    losses = {
        "rows dropped, their prompt exceeds model.max_prompt_tokens": metrics["empo2/overlong_rows"],
        "rows cut at model.max_episode_tokens": metrics["empo2/cut_rows"],
        "turns dropped, their tip-free prompt is not known": metrics["empo2/turns_dropped"],
        "reply tokens without gradient": metrics["empo2/reply_tokens_lost"],
    }
    if lost := [f"{count:.0f} {what}" for what, count in losses.items() if count]:
        said += f"; WARNING: {', '.join(lost)}"
    return said


def validation_metrics(played: Iterable[StepResults], algorithm: Algorithm) -> dict[str, float]:
    """Return the mean return of all validation rollouts; a failed one counts as ``failure_return``.

    ``val/return_without_failures`` is the mean over the others. It is optimistic, since long or confused episodes
    fail more often.
    """
    played = list(played)
    dropped = sum((results.dropped for results in played), Counter[str]())
    kept = [result for results in played for result in results.kept.values()]
    returns = [result.return_ for result in kept]
    metrics = _agent_means("val", kept)
    metrics |= {f"val/dropped/{reason}": count for reason, count in dropped.items()}
    metrics |= {"val/rollouts_dropped": dropped.total(), "val/n_rollouts": len(returns) + dropped.total()}
    if with_failures := returns + [algorithm.failure_return] * dropped.total():
        metrics["val/return"] = float(np.mean(with_failures))
        successes = sum(value >= algorithm.success_return for value in returns)
        metrics["val/success_rate"] = successes / len(with_failures)
    if returns:
        metrics["val/return_without_failures"] = float(np.mean(returns))
    return metrics


def name_sums(metrics: dict[str, Any]) -> None:
    """Turn the loss's sums into fractions and means, in place.

    The loss reports sums, since a mean of means would weight a token by the size of its micro-batch. verl puts
    ``actor/`` before every name.
    """

    def total(name: str) -> float:
        return float(np.sum(metrics.pop(name)))

    tokens = max(total("actor/trained_tokens"), 1)
    for name in _TOKEN_MEANS:
        metrics[name] = [total(name) / tokens]
    metrics["empo2/masked_token_fraction"] = [total("actor/masked_tokens") / max(total("actor/off_policy_tokens"), 1)]
    # π_θ is what vLLM sampled from only before the first update.
    rows, gap = (float(np.atleast_1d(metrics.pop(f"actor/{name}"))[0]) for name in ("compared_rows", "log_ppl_gap"))
    if rows:
        metrics["rollout_corr/log_ppl_abs_diff"] = [gap / rows]
