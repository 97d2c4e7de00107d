"""What training and evaluation start alike: gateway and controller, with their settings and keys."""

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx
import yaml

from empo2.recipe.config import TRACES_VARIABLES, Settings, traces_endpoint
from empo2.recipe.launcher.processes import Processes
from empo2.recipe.network import direct
from empo2.recipe.protocol import ADMIN_KEY, KEY, Keys, given_keys
from empo2.recipe.run_folder import MEMORY_FILE
from empo2.recipe.waiting import first_answer

_ANSWER_SECONDS = 1  # of one request; a server that starts may take connections before it answers


def given_or_random_keys() -> Keys:
    """Return the gateway's keys, random where the environment gives none."""
    given = given_keys()
    return Keys(given.agent or secrets.token_urlsafe(24), given.admin or secrets.token_urlsafe(24))


def environment_without(*names: str, url: str = "") -> dict[str, str]:
    """Return the environment for all processes: this one's without the gateway's keys and the variables named.

    No proxy stands before the gateway at ``url`` and this machine.
    """
    left_out = {KEY, ADMIN_KEY, *names}
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, **direct(url), "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def settings_descriptor(settings: Settings) -> Iterator[int]:
    """Yield the descriptor of a file in RAM with all settings; the one in the run's folder has no secrets."""
    with os.fdopen(os.memfd_create("settings"), "w") as file:
        yaml.safe_dump(settings.to_dict(), file)
        file.flush()
        yield file.fileno()


def empo2_command(verb: str, descriptor: int) -> list[str]:
    """Return the command line of a verb that reads its settings from a file's descriptor."""
    return [sys.executable, "-P", "-m", "empo2.recipe.cli", verb, "--config", f"/dev/fd/{descriptor}"]


def controller_command(settings: Settings, url: str) -> list[str]:
    """Return the command line of the controller of the gateway at ``url``."""
    agent = [f"agent.class={settings.agent.name}", f"agent.concurrency={settings.agent.concurrency}"]
    return [sys.executable, "-P", "-m", "empo2.recipe.cli", "controller", "--gateway", url, *agent]


def start_gateway(
    processes: Processes,
    descriptor: int,
    listener: socket.socket,
    keys: Keys,
    *,
    options: Sequence[str] = (),
    secrets: Mapping[str, str] | None = None,
    restartable: bool = False,
) -> None:
    """Start the gateway, whose memory is beside its log; its environment has the keys and other ``secrets``.

    Args:
        descriptor: of the file with its settings.
        options: of its command line.
        restartable: it is started again if it ends; its rollouts are gone then, and a trainer plays its step anew.
    """
    memory = str(processes.directory / MEMORY_FILE)
    processes.start(
        "gateway",
        [*empo2_command("gateway", descriptor), "--fd", str(listener.fileno()), "--memory", memory, *options],
        secrets={KEY: keys.agent, ADMIN_KEY: keys.admin, **(secrets or {})},
        inherit=(descriptor, listener.fileno()),
        restartable=restartable,
    )


def start_controller(processes: Processes, settings: Settings, url: str, keys: Keys) -> None:
    """Start the controller of the gateway at ``url``, which keeps its rollouts: if it ends, those under way fail alone.

    Its environment, without the key, becomes that of the agents; it has the address of the collector of traces, and
    the current folder among those of Python's modules, which may hold the user's agents. In the other processes that
    folder comes last: there a vllm.py of the user's would run in the place of vLLM.
    """
    path = os.pathsep.join(filter(None, [os.getcwd(), processes.environment.get("PYTHONPATH")]))
    environment = {KEY: keys.agent, "PYTHONPATH": path}
    if endpoint := traces_endpoint(settings):
        environment[TRACES_VARIABLES[0]] = endpoint
    processes.start("controller", controller_command(settings, url), secrets=environment, restartable=True)


def wait_for(url: str, check: Callable[[], object]) -> None:
    """Return once a server answers; until then, ``check`` raises if its process has ended. As `first_answer`."""
    with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        first_answer(lambda: client.get(url), lambda _: check())


def url_of(listener: socket.socket) -> str:
    """Return the address at which processes of this machine reach a listener."""
    host, port = listener.getsockname()[:2]
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
