"""Whose fault a failed rollout is, by what agent-lightning 1.0.2 leaves of it."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

FAILED_BY_AGENT, FAILED_BY_SYSTEM = "failed_by_agent", "failed_by_system"


def cause_of_failure(error_message: str | None, calls: Sequence[Mapping[str, Any]], *, answered: bool) -> str:
    """Return the cause of a rollout's failure, ``FAILED_BY_AGENT`` or ``FAILED_BY_SYSTEM``.

    It is the agent's failure, and so the policy's, if the agent's process ended with an error after the model had
    answered: an exception in the agent, or a chat that outgrew the model's context (HTTP 400). A time-out, a signal, a
    process that could not be started and a model server that did not answer are the system's failures.

    Args:
        error_message: of the rollout's status.
        calls: data of its ``model_request`` events, in order.
        answered: True if the model has answered at least once.
    """
    # agent-lightning 1.0.2, LocalReconciler._finish_proc; a negative code is a signal.
    exited = re.fullmatch(r"subprocess exited with code [1-9]\d*", error_message or "")
    unanswered = bool(calls) and calls[-1].get("status") == "error" and calls[-1].get("http_status") not in (400, 413)
    return FAILED_BY_AGENT if exited and answered and not unanswered else FAILED_BY_SYSTEM


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return the finite numbers among an agent's ``metrics``; ignore all else."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if type(value) in (int, float) and abs(value) <= sys.float_info.max
    }
