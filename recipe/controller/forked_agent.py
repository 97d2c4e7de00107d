"""Import an agent's class in the fork server, once, and run the agent in each process that is forked from it.

An agent's imports take seconds, a fork takes milliseconds. All else is as if the agent had been started alone: its
process, session and environment are its own, its random numbers too, and ``atexit`` functions run at its end.

What is made while the module is imported is the same in all: a generator of random numbers, or a folder, belongs into
``run()``. What cannot be shared is refused, and the forked process then becomes a new Python: for another class, and
for one whose module reads a variable that differs between rollouts while it is imported, or leaves a thread or an open
socket behind.
"""

import atexit
import contextlib
import gc
import importlib
import mmap
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from empo2.agents.process_guard import end_with_parent
from empo2.recipe.controller.agent_process import ALONE, play
from empo2.recipe.controller.warm_agents import AGENT_CLASS

# Most agents are clients of openai's; some import it only when they play, and it imports parts of itself later still.
_USED_BY_MOST = ("openai", "openai.resources.chat.completions")
# Set while the class is imported only: their threads, which a fork would lose, start at the import of numpy.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def import_class(agent_class: str) -> tuple[Callable[[str, Mapping[str, str]], str | None], dict[str, str | None]]:
    """Import the module of an agent's class, and what most agents use.

    Return a function of an agent's class and variables: why it cannot be forked, or None if it can; and the variables
    that the import has set, None for one that it has removed.
    """
    environment = dict(os.environ)
    module, name = agent_class.split(":")
    one_thread = {variable: "1" for variable in _ONE_THREAD if variable not in environment}
    os.environ.update(one_thread)
    refused = None
    with _recorded_reads() as (read, iterated):
        for used in _USED_BY_MOST:
            with contextlib.suppress(ImportError):
                importlib.import_module(used)
        try:
            getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:
            refused = f"agent.class={agent_class!r} cannot be imported: {type(error).__name__}: {error}"
    left = {variable: value for variable, value in os.environ.items() if one_thread.get(variable) != value}
    changed = {variable: left.get(variable) for variable, _ in environment.items() ^ left.items()}
    if iterated:
        refused = refused or "its module reads the whole environment while it is imported; read it in run()"
    sys.stdout.flush()  # what the import has printed would be printed by each fork
    gc.freeze()  # the collector would write into every shared page
    refused = refused or _cannot_fork()
    read -= one_thread.keys()

    def refuses(asked: str, variables: Mapping[str, str]) -> str | None:
        if asked != agent_class:
            return f"the run's agent is {agent_class}"
        differ = {name for name in read if variables.get(name) != environment.get(name)}
        return refused or (
            f"its module reads {', '.join(sorted(differ))} while it is imported; read it in run()" if differ else None
        )

    return refuses, changed


@contextlib.contextmanager
def _recorded_reads() -> Any:
    """Yield two sets, filled with names of variables: asked for in ``os.environ``, and met in a walk over it.

    Python (3.12) tells no audit hook of it, and an object in the place of ``os.environ`` would miss those who have it.
    """
    asked: set[str] = set()
    met: set[str] = set()
    environ: Any = os.environ
    encode, decode = environ.encodekey, environ.decodekey
    environ.encodekey = lambda name: encode(asked.add(name) or name)
    environ.decodekey = lambda name: met.add(decode(name)) or decode(name)
    try:
        yield asked, met
    finally:
        environ.encodekey, environ.decodekey = encode, decode


def _cannot_fork() -> str | None:
    """Return what the import has left in this process that a fork would break; None if nothing."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"its module starts threads while it is imported ({threads - 1} are running); start them in run()"
    sockets = sum(each.is_socket() for each in Path("/proc/self/fd").iterdir() if int(each.name) > 2)
    if sockets > 1:  # the fork server's own
        return f"its module leaves {sockets - 1} sockets open while it is imported; open them in run()"
    return None


end_with_parent()  # the controller
_refuses, _changed = import_class(os.environ[AGENT_CLASS])
_path = [*sys.path]  # multiprocessing gives each fork the controller's
_SAID = mmap.mmap(-1, 1)  # shared by all forks: not 0 once one has said why it is refused


def run_agent(agent_class: str, environment: dict[str, str]) -> None:
    """Run an agent in this forked process; exit with its code."""
    end_with_parent()
    os.setsid()
    if reason := _refuses(agent_class, environment):
        if not _SAID[0]:
            _SAID[0] = 1
            print(f"empo2: every agent starts a Python of its own, which takes seconds: {reason}", file=sys.stderr)
            sys.stderr.flush()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.execve(sys.executable, [sys.executable, "-c", ALONE, agent_class], environment)
    os.environ.clear()
    os.environ.update({name: value for name, value in {**environment, **_changed}.items() if value is not None})
    sys.argv, sys.path[:] = ["-c", agent_class], _path  # as upstream starts it
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by a fork
        sys.modules["numpy.random"].seed()
    try:
        sys.exit(play(agent_class))
    finally:  # as Python ends; multiprocessing only forgets these functions
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
