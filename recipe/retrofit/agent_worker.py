"""Start an agent as agent-lightning's local controller (1.0.2) does; uses private names of it.

Replaces ``LocalReconciler._spawn_for``, which needs a rollout in a gateway and a configuration of its own.
"""

import sys
from collections.abc import Mapping
from typing import Any

from agentlightning.controller.local_reconciler import _build_env_from_map

from empo2.recipe.errors import ConfigError

_WORKER = (
    "import sys; from agentlightning.controller.local_reconciler import _run_local_reconciler_worker; "
    "sys.exit(_run_local_reconciler_worker(sys.argv[1]))"
)


def worker_command(agent_class: str) -> list[str]:
    """Return the command line that runs an agent class, ``module:Class``, once."""
    return [sys.executable, "-c", _WORKER, agent_class]


def agent_variables(task: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``agent.env`` for a task.

    Raises:
        ConfigError: ``agent.env`` names a field that the task does not have.
    """
    try:
        return _build_env_from_map(task, dict(env))
    except ValueError as error:
        path = str(error).rpartition(" ")[2]
        raise ConfigError(f"agent.env: the tasks have no {path!r}; they have {sorted(task)}") from None
