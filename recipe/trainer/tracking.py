"""The metrics of a step, and the file to which they are written."""

import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.utils.tracking import Tracking

from empo2.recipe.config import Algorithm
from empo2.recipe.marked_lines import say_note
from empo2.recipe.protocol import TRAIN_PANEL, is_success
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import METRICS_FILE, losses
from empo2.recipe.trainer.advantages import range_warning, tip_gain, tolerance_warning
from empo2.recipe.trainer.objective import by_kind
from empo2.recipe.trainer.rows import groups_without_gradient
from empo2.recipe.trainer.step_results import Results, RolloutResult, StepResults
from empo2.recipe.trainer.symptoms import Symptoms

_TOKEN_MEANS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")


class RunTracking(Tracking):
    """verl's loggers, and one line per step in the run's metrics.jsonl (verl's own file logger overwrites).

    What tensorboard and wandb write lies in the run's folder, unless their own variables say otherwise. The loggers get
    the configuration, and this process's command line, which wandb reads itself, without secrets.
    """

    def __init__(self, *args: Any, config: dict[str, Any], **kwargs: Any) -> None:
        shown = redacted({**config, "argv": sys.argv})
        sys.argv = shown.pop("argv")
        if directory := config.get("empo2", {}).get("run_directory"):
            os.environ.setdefault("TENSORBOARD_DIR", str(Path(directory, "tensorboard")))
            os.environ.setdefault("WANDB_DIR", str(directory))
        super().__init__(*args, config=shown, **kwargs)
        self._file = Path(directory) / METRICS_FILE if directory else None
        self._symptoms = Symptoms()

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        super().log(data=data, step=step, backend=backend)
        for warning in self._symptoms.seen(data):
            say_note(f"step {step}: {warning}")
        if self._file is not None:
            line = {"step": step} | {key: float(each) if math.isfinite(each) else None for key, each in data.items()}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def training_metrics(results: StepResults, success_return: float) -> dict[str, float]:
    """Return means over the trained rollouts, in the environment's units, and counts of the dropped ones."""
    kept = list(results.kept.values())
    metrics = {
        "training/return": np.mean([result.return_ for result in kept]),
        "training/return_std": np.std([result.return_ for result in kept]),
        "training/success_rate": np.mean([is_success(result.return_, success_return) for result in kept]),
        "training/intrinsic_return": np.mean([result.intrinsic for result in kept]),
        "empo2/memory_fraction": np.mean([result.mode.memory for result in kept]),
        "empo2/off_policy_fraction": np.mean([result.mode.off_policy for result in kept]),
        "empo2/rollouts_dropped": len(results.dropped),
    }
    for name, memory in (("memory_success_rate", True), ("success_rate_without_memory", False)):
        if half := [is_success(result.return_, success_return) for result in kept if result.mode.memory == memory]:
            metrics[f"training/{name}"] = np.mean(half)
    metrics |= {f"empo2/{name}": count for name, count in results.left_out.items()}
    metrics |= {f"empo2/dropped/{reason}": count for reason, count in results.reasons.items()}
    metrics |= _agent_means("training", kept)
    return {key: float(value) for key, value in metrics.items()}


def _agent_means(phase: str, results: Iterable[RolloutResult]) -> dict[str, float]:
    """Return the mean of each number that agents reported, over the rollouts that reported it."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.agent_metrics.items():
            values[name].append(value)
    return {f"{phase}/agent/{name}": float(np.mean(reported)) for name, reported in values.items()}


def row_metrics(
    batch: DataProto, of_rows: Mapping[str, Any], results: Results, algorithm: Algorithm
) -> dict[str, float]:
    """Return what the rows hold of what was sampled, and what tips were worth.

    Args:
        of_rows: agent-lightning's metrics of them.
    """
    sampled = sum(result.reply_tokens for result in results.values())
    metrics = {
        "empo2/unmerged_rollouts": of_rows["training/n_unmerged_rollouts"],
        "empo2/groups_without_gradient": groups_without_gradient(batch),
        "empo2/cut_rows": of_rows["training/n_truncated_sample"],
        "empo2/off_policy_rows": int(batch.batch["off_policy"].sum()),
        "empo2/reply_tokens_lost": sampled - int(batch.batch["response_mask"].sum()),
        "training/n_sample_trained": len(batch),
    }
    gain = tip_gain(results, algorithm)
    return metrics if gain is None else metrics | {"empo2/tip_gain": gain}


def entropies(batch: DataProto) -> dict[str, float]:
    """Return the mean surprise of the sampled tokens, of all and of each kind of rows.

    It estimates the entropy without a pass over the vocabulary.
    """
    mask, surprise = batch.batch["response_mask"], -batch.batch["rollout_log_probs"]
    kinds = by_kind(batch.batch["off_policy"], batch.batch["memory"])
    named = {"actor/entropy": torch.ones(len(batch), dtype=torch.bool)}
    named |= {f"empo2/{kind}/entropy": rows for kind, rows in kinds.items() if rows.any()}
    return {name: float((surprise * mask)[rows].sum() / mask[rows].sum()) for name, rows in named.items()}


def say_step(
    step: int, metrics: Mapping[str, Any], results: Results, algorithm: Algorithm, paper: ModuleType | None
) -> None:
    """Print the step's line, and after the first step what its numbers warn of."""
    rows = metrics["training/n_sample_trained"]
    print(step_line(step, metrics, rollouts=len(results), rows=rows), flush=True)
    if step == 1:
        warnings = [range_warning(results, algorithm), paper.warning(metrics) if paper else ""]
        if metrics["empo2/groups_without_gradient"] == 1:
            warnings.append(tolerance_warning(results, algorithm))
        for warning in filter(None, warnings):
            print(f"step 1: {warning}", flush=True)


def step_line(step: int, metrics: Mapping[str, Any], *, rollouts: int, rows: int) -> str:
    """Return the step's line of output: what is trained on, and a warning about everything that gets no gradient."""
    said = f"step {step}: training on {rollouts} rollouts in {rows} rows"
    mark = "empo2/dropped/"
    reasons = {name.removeprefix(mark).replace("_", " "): metrics[name] for name in metrics if name.startswith(mark)}
    if dropped := [f"{count:.0f} {reason}" for reason, count in reasons.items()]:
        said += f"; dropped {', '.join(dropped)}"
    if split := metrics["empo2/unmerged_rollouts"]:
        said += f"; {split} rollouts came in several rows (a prompt did not extend the one before)"
    beside = {
        "calls beside the main chat": sum(metrics.get(f"empo2/side_calls{name}", 0) for name in ("", "_dropped")),
        "calls to compact a chat": metrics.get("empo2/compaction_calls", 0),
        "episodes ended at agent.most_calls": metrics.get("empo2/episodes_ended/most_calls", 0),
        "episodes ended as too long twice": metrics.get("empo2/episodes_ended/too_long", 0),
    }
    if seen := [f"{count:.0f} {what}" for what, count in beside.items() if count]:
        said += f"; {', '.join(seen)}"
    if lost := losses(metrics):
        said += f"; WARNING: {', '.join(lost)}"
    return said


def validation_metrics(played: Sequence[StepResults], algorithm: Algorithm) -> dict[str, float]:
    """Return mean return and success rate of the validation rollouts; a failed one counts as ``failure_return``.

    docs/algorithm.md, "Validation", has their names. ``val/return_without_failures`` is optimistic, since long or
    confused episodes fail more often; ``val/n_rollouts``, ``val/rollouts_dropped``, ``val/dropped/REASON`` count all.
    """
    kept = [result for results in played for result in results.kept.values()]
    dropped = [each for results in played for each in results.dropped.values()]
    alone = [result for result in kept if not result.mode.memory and result.panel != TRAIN_PANEL]
    metrics = _agent_means("val", alone)
    metrics |= {f"val/dropped/{reason}": count for reason, count in Counter(each.reason for each in dropped).items()}
    metrics |= {"val/rollouts_dropped": len(dropped), "val/n_rollouts": len(kept) + len(dropped)}
    if alone:
        metrics["val/return_without_failures"] = float(np.mean([result.return_ for result in alone]))

    returns: dict[str, list[float]] = defaultdict(list)
    for each in (*kept, *dropped):
        value = each.return_ if isinstance(each, RolloutResult) else algorithm.failure_return
        kind = "memory_" if each.mode.memory else ""
        if each.panel:
            returns[f"val/{each.panel}/{kind}"].append(value)
        if each.panel != TRAIN_PANEL:
            returns[f"val/{kind}"].append(value)
    for name, values in returns.items():
        solved = [is_success(value, algorithm.success_return) for value in values]
        metrics |= {f"{name}return": float(np.mean(values)), f"{name}success_rate": float(np.mean(solved))}
    for name in (name for name in returns if f"{name}memory_" in returns):
        for gap, mean in (("memory_gap", "return"), ("memory_success_gap", "success_rate")):
            metrics[f"{name}{gap}"] = metrics[f"{name}memory_{mean}"] - metrics[f"{name}{mean}"]
    return metrics


def name_sums(metrics: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Turn the loss's sums into fractions and means, in place; return them. docs/algorithm.md has ``empo2/KIND/...``.

    The loss reports sums, since a mean of means would weight a token by the size of its micro-batch. verl puts
    ``actor/`` before every name. A row that disagrees in each of the ``epochs`` counts as one.
    """

    def total(name: str) -> float:
        return float(np.sum(metrics.pop(name)))

    metrics["empo2/disagreeing_rows"] = [total("actor/disagreeing_rows") / epochs]
    if "actor/distilled_tokens" in metrics:
        metrics["empo2/distillation_kl"] = [total("actor/distillation_kl") / max(total("actor/distilled_tokens"), 1)]
    begin = "actor/tokens/"
    counts = {name.removeprefix(begin): total(name) for name in [*metrics] if name.startswith(begin)}
    for name in _TOKEN_MEANS:
        metrics[name] = [total(name) / max(sum(counts.values()), 1)]
    for kind, count in counts.items():
        for name in [name for name in metrics if name.endswith(f"/{kind}")]:
            mean = total(name) / max(count, 1)
            if name == "actor/masked/off_policy":
                metrics["empo2/masked_token_fraction"] = [mean]
            if count:
                metrics[f"empo2/{kind}/{name.split('/')[1]}"] = [mean]
    # π_θ is what vLLM sampled from only before the first update.
    rows, gap = (float(np.atleast_1d(metrics.pop(f"actor/{name}"))[0]) for name in ("compared_rows", "log_ppl_gap"))
    if rows:
        metrics["rollout_corr/log_ppl_abs_diff"] = [gap / rows]
    return metrics
