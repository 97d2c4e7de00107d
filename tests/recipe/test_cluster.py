"""More than one host: the network that they share, their Ray cluster, and the key of vLLM's servers."""

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from fastapi import FastAPI, WebSocket
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from empo2.recipe import network
from empo2.recipe.config import load_settings
from empo2.recipe.engine.model_key import KeyCheck
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.preflight import cluster
from empo2.recipe.preflight.checks import require
from empo2.recipe.preflight.estimate import CARDS
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.machine import Gpus
from empo2.recipe.preflight.machine_checks import nodes
from empo2.recipe.preflight.start import Start
from empo2.recipe.protocol import MODEL_KEY, model_key
from empo2.recipe.trainer import node_watch
from empo2.recipe.trainer.verl_config import build_verl_config

from .harness import KEY, ROOMS, running_gateway


def test_each_host_finds_its_own_address_or_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with two networks; the gateway listens where other hosts are."""
    given = {"lo": "127.0.0.1", "eth0": "192.168.7.4", "ib0.1": "10.0.3.9"}
    card = SimpleNamespace(family=socket.AF_PACKET, address="02:00")
    listed = {name: [card, SimpleNamespace(family=socket.AF_INET, address=a)] for name, a in given.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: listed)
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-3")
    assert network.address_in("10.0.0.0/16") == network.address_in("ib0.1") == ("10.0.3.9", "ib0.1")
    assert network.address_in("192.168.7.4") == ("192.168.7.4", "eth0")
    assert network.address_in("127.0.0.1") == ("127.0.0.1", "lo")
    for wrong in ("10.1.0.0/16", "eth1"):
        with pytest.raises(ConfigError, match=rf"hardware.network='{wrong}': worker-3 has no .* ib0.1 10.0.3.9"):
            network.address_in(wrong)
    for expected, settings in (
        ("127.0.0.1", []),
        ("10.0.3.9", ["hardware.network=10.0.0.0/16"]),
        ("0.0.0.0", ["hardware.network=10.0.0.0/16", "gateway.host=0.0.0.0"]),
    ):
        assert network.gateway_host(load_settings("cpu", settings)) == expected


def test_a_cluster_that_runs_is_joined_and_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(*settings: str) -> dict[str, Any]:
        loaded = load_settings("cpu", settings)
        config = build_verl_config(loaded, model_path="m", run_directory=Path(), gateway_url="", gateway_key="")
        return {name: value for name, value in config.ray_kwargs.ray_init.items() if value is not None}

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = {"address": "local", "num_cpus": 3, "num_gpus": 1, "_node_ip_address": "127.0.0.1"}
    assert options() == own | {"include_dashboard": False}
    # Of two cards verl takes three cores each, and would wait for ever where Ray counts fewer.
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert options("hardware.device=gpu", "hardware.gpus_per_node=2")["num_cpus"] == 6
    assert options("hardware.ray_address=auto", "hardware.nodes=2") == {"address": "auto"}
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert options("hardware.nodes=2") == {"address": "head:6379"}


def test_nodes_are_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node comes late, one has GPUs that others use, and one has gone without Ray's notice."""
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        answers = {"Alive": True, "Resources": {"GPU": 8.0}, "NodeManagerPort": raylet.getsockname()[1]}
        nodes = [answers | {"NodeID": str(each), "NodeManagerAddress": f"127.0.0.{each}"} for each in (1, 1, 1)]
        looks: list[int] = []
        monkeypatch.setattr(ray, "nodes", lambda: looks.append(1) or nodes[: 1 + len(looks) // 2])
        free = {"1": {"GPU": 8.0}}
        monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: free)
        monkeypatch.setattr(cluster, "_POLL_SECONDS", 0)
        said: list[str] = []
        found = cluster._wait(lambda: cluster._free_nodes(2, 8), said.append, sys.maxsize)
        assert not found.fix and "2 of 2 with 8 free GPUs" in found.said
        assert said == ["waiting for nodes: 1 of 2 with 8 free GPUs (free/all: 127.0.0.1 8/8)"]
        used = {**nodes[0], "NodeID": "2", "NodeManagerAddress": "127.0.0.1"}
        monkeypatch.setattr(ray, "nodes", lambda: [nodes[0], used])
        found = cluster._free_nodes(2, 8)
        assert "1 of 2 with 8 free GPUs (free/all: 127.0.0.1 8/8, 127.0.0.1 0/8)" in found.said and found.fix
    found = cluster._wait(lambda: cluster._free_nodes(1, 8), said.append, 0)  # at the deadline
    assert "0 of 1 with 8 free GPUs (free/all: 127.0.0.1 gone, 127.0.0.1 gone)" in found.said and found.fix


def test_what_differs_on_a_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")  # db2353cf: sha256 of "{}model.safetensors 3"
    (tmp_path / "model.safetensors").write_text("abc")
    file = tmp_path / "written"
    file.write_text(str(file))
    here, _ = cluster.facts_of(str(tmp_path), file, None)
    assert here["ray"] == ray.__version__
    assert cluster.differences(here, cluster.facts_of(str(tmp_path), file, "lo", "127.0.0.1")[0]) == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def cached(commit: str) -> cluster.Facts:
        folder = tmp_path / "models--org--m"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
        return cluster.facts_of("org/m", file, None)[0]

    absent, old, new = cluster.facts_of("org/m", file, None)[0], cached(40 * "a"), cached(40 * "b")
    assert cluster.differences(old, new) == ["model.path bbbbbbbb, not aaaaaaaa"]
    assert cluster.differences(old, absent) == cluster.differences(absent, old) == []  # it will be downloaded
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    file.write_text("of another disk")
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {})
    said = cluster.differences(here, cluster.facts_of(str(tmp_path), file, "10.0.0.0/8", "127.0.0.1")[0])
    assert f"ray 1.0, not {ray.__version__}" in said and "model.path unreadable, not db2353cf" in said
    assert [each for each in said if each.startswith("run.directory is not shared")]
    assert [each for each in said if each.startswith("hardware.network='10.0.0.0/8': ")]


def test_no_cluster_no_node_and_an_old_driver_on_a_node_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cluster Ray itself would wait for minutes, or abort with a stack trace."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = load_settings("cpu", [f"hardware.ray_address={address}"])
        with pytest.raises(ConfigError, match=rf"ray_address='{address}': no Ray cluster answers .*cluster.md"):
            cluster.look_at_cluster(settings, "m")
    processes: list[dict[str, Any]] = [{"name": "python", "cmdline": ["--gcs-address=127.0.0.1:1"]}]
    monkeypatch.setattr(psutil, "process_iter", lambda _: [SimpleNamespace(info=each) for each in processes])
    with pytest.raises(ConfigError, match=r"hardware.ray_address='auto': this host is no node of it"):
        cluster.look_at_cluster(load_settings("cpu", ["hardware.ray_address=auto"]), "m")
    processes.append({"name": "raylet", "cmdline": ["raylet", "--gcs-address=10.0.0.1:6379"]})
    assert not cluster._answer("auto", "it").fix
    with socket.create_server(("127.0.0.1", 0)) as server:  # of which the raylet here is no node
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "this host is no node of it" in cluster._answer(address, "it").said
        said: list[str] = []

        def join(text: str) -> None:
            said.append(text)
            processes.append({"name": "raylet", "cmdline": [f"--gcs-address={address}"]})

        assert not cluster._wait(lambda: cluster._answer(address, "it"), join, time.monotonic() + 60).fix
    assert said == ["waiting for it: this host is no node of it"]
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"the variable RAY_ADDRESS='http://127.0.0.1:1': no Ray cluster answers"):
        cluster.look_at_cluster(load_settings("cpu"), "m")
    settings = load_settings("gpu", ["hardware.ray_address=auto", "hardware.nodes=2", f"run.directory={tmp_path}"])
    drivers = {"10.0.0.1": "580.65.06", "10.0.0.2": "550.54.15"}
    answers = {address: ({}, Gpus([CARDS["h100-80"]] * 8, driver)) for address, driver in drivers.items()}
    monkeypatch.setattr(cluster, "_joined", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "_free_nodes", lambda *_: Finding("nodes", "2 of 2"))
    monkeypatch.setattr(cluster, "_ask_nodes", lambda *_: answers)
    start = Start(settings, served=str(tmp_path))
    assert len(start.gpus.cards) == 16
    with pytest.raises(ConfigError, match=r"^node 10.0.0.2: driver 550.54.15; CUDA 13.0 needs 580; install 580"):
        require(start, {"nodes": nodes})


def test_a_host_or_worker_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeID": "n", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerHostname": "b"}
        node["NodeManagerPort"] = server.getsockname()[1]
        actors = {
            name: {"ActorClassName": name, "Address": {"NodeID": "n"}, "State": "ALIVE"}
            for name in ("WorkerDict", "vLLMHttpServer", "Other")
        }
        monkeypatch.setattr(ray, "nodes", lambda: [node])
        monkeypatch.setattr(node_watch, "_actors", lambda: actors)
        watch = node_watch.NodeWatch()
        watch.check()
        actors["Other"]["State"] = "DEAD"
        watch.check()
        actors["vLLMHttpServer"]["State"] = "DEAD"
        with pytest.raises(Empo2Error, match=r"vLLMHttpServer on host 127.0.0.1 \(b\) has ended"):
            watch.check()
    monkeypatch.setattr(node_watch, "_SILENT_SECONDS", 0)  # the port is closed, and Ray has not noticed
    with pytest.raises(Empo2Error, match=r"host 127.0.0.1 \(b\) has left the Ray cluster"):
        watch.check()
    done, ended = threading.Event(), list[int]()

    def leave() -> None:  # the trainer is done, and leaves the cluster while the watch looks at it
        done.set()
        raise ConnectionError

    monkeypatch.setattr(watch, "check", leave)
    monkeypatch.setattr(node_watch, "_POLL_SECONDS", 0)
    monkeypatch.setattr("os._exit", ended.append)
    watch.end_process_with_them(done).join(60)
    assert not ended


def test_vllms_key_opens_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_KEY, "secret")
    app = FastAPI()
    app.add_api_route("/tokenize", lambda: "ids")

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    app.add_middleware(KeyCheck)
    with TestClient(app) as client:
        for key in ("", "Bearer ", "Bearer wrong", "secret"):
            for path in ("/tokenize", "/nowhere"):
                assert client.get(path, headers={"Authorization": key}).status_code == 401
        assert client.get("/tokenize", headers={"Authorization": "Bearer secret"}).json() == "ids"
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime"):
            pass


async def test_the_gateway_presents_the_key_in_agents_calls_its_own_and_streams(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "gateway.cumulative_tokens=true") as gateway:
        await gateway.store_tips(ROOMS, "Take the lamp first.")
        await gateway.episode()
        await gateway.drain()
        asked = {seen.path for seen in gateway.model.seen}
        assert asked >= {"/v1/chat/completions", "/tokenize"} and gateway.reflections()
        assert {seen.key for seen in gateway.model.seen} == {f"Bearer {model_key(KEY)}"}
    assert model_key("") == "" and model_key("a") != model_key("b")
