"""Run one agent in this process, as agent-lightning's local controller (1.0.2) does, and report its exception."""

import asyncio
import contextlib
import importlib
import inspect
import os
import traceback
from collections.abc import Mapping

import httpx

from empo2.agents.command.agent import CommandFailed
from empo2.agents.rollout import Rollout
from empo2.recipe.failures import error_of
from empo2.recipe.protocol import ERROR_EVENT
from empo2.recipe.redaction import redacted

# What `python -c` runs, followed by the class: an agent that is not forked.
ALONE = "import sys; from empo2.recipe.controller.agent_process import play; sys.exit(play(sys.argv[1]))"


def play(agent_class: str) -> int:
    """Run ``module:Class().run()``, and await what it returns if it can be; return the process's exit code.

    An exception is printed, as upstream does, and posted as an event of the rollout (`AgentError`).
    """
    environment = dict(os.environ)  # the agent may change it
    try:
        module, _, name = agent_class.rpartition(":" if ":" in agent_class else ".")
        result = getattr(importlib.import_module(module), name)().run()
        if inspect.isawaitable(result):
            asyncio.run(asyncio.wait_for(result, None))  # which takes any awaitable
    except Exception as error:
        traceback.print_exc()
        _report(error, environment)
        return error.code if isinstance(error, CommandFailed) else 1
    except SystemExit as error:
        if error.code:
            _report(error, environment)
        raise
    return 0


def _report(error: BaseException, environment: Mapping[str, str]) -> None:
    data = redacted(error_of(error, own=__file__).model_dump())
    with contextlib.suppress(httpx.HTTPError, ValueError):  # without a gateway there is nobody to tell
        Rollout.from_env(environment).post(ERROR_EVENT, data)
