"""The rollouts that a run has kept, those before an interruption included."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset

from empo2.recipe.rollout_log import SCHEMA, Phase, rollout_files
from empo2.recipe.run_folder import ROLLOUTS


def played(run: Path, phase: Phase, columns: Sequence[str]) -> dict[int, list[list[dict[str, Any]]]]:
    """Return by step the calls of each rollout of a phase.

    What was played before an interruption stands in a folder of its own; a step counts as it was played last.
    """
    found: dict[int, list[list[dict[str, Any]]]] = {}
    aside = sorted(run.glob("set-aside-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    for folder in (*aside, run):
        steps: dict[int, list[list[dict[str, Any]]]] = {}
        kept = dataset.dataset([str(file) for file in rollout_files(folder / ROLLOUTS)], SCHEMA, format="parquet")
        rows = kept.to_table(columns=["rollout", "step", *columns], filter=dataset.field("phase") == phase).to_pylist()
        for _, calls in groupby(rows, key=lambda row: row["rollout"]):
            of_rollout = [*calls]
            steps.setdefault(of_rollout[0]["step"], []).append(of_rollout)
        found |= steps
    return found


def succeeded(call: Mapping[str, Any], success_return: float) -> bool:
    """Return whether the rollout of a call was used and reached a return; of columns `return` and `dropped`."""
    return call["dropped"] is None and call["return"] is not None and call["return"] >= success_return
