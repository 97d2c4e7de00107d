"""agent-lightning's controller (1.0.2) with warm agents: ``python -m empo2.recipe.controller MODULE:CLASS OPTION...``.

The options are agent-lightning's own. A rollout of another class gets a Python of its own, as upstream's do.
"""

import asyncio
import sys
from types import SimpleNamespace

from agentlightning.controller import local_reconciler
from agentlightning.controller.__main__ import main as run_controller

from empo2.recipe.controller.warm_agents import start_agent, start_fork_server


def start_agents_with(start: object) -> None:
    """Make ``LocalReconciler._spawn_for`` call ``start`` in the place of ``asyncio.create_subprocess_exec``."""
    names = {**vars(asyncio), "create_subprocess_exec": start}
    local_reconciler.asyncio = SimpleNamespace(**names)  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    """Run the controller; the first argument is the agent's class."""
    start_fork_server(sys.argv.pop(1))
    start_agents_with(start_agent)
    run_controller()


if __name__ == "__main__":
    main()
