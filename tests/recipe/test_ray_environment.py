"""Ray's start, which may run out of time on a busy machine."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray._private.ray_constants
import ray._raylet  # noqa: F401  which the Ray below has not
from omegaconf import OmegaConf

from empo2.recipe.errors import Empo2Error
from empo2.recipe.trainer.ray_environment import start_ray

LATE = Exception("The current node timed out during startup.\nThis could happen because the raylet failed.")


@pytest.mark.parametrize(
    ("failures", "said", "wanted"),
    [
        ([LATE], None, ["init", "shutdown", "init"]),
        (
            [LATE, ConnectionError("gone")],
            "tried twice: ConnectionError: gone; look into /scratch/session_latest/logs",
            ["init", "shutdown", "init"],
        ),
        ([ValueError("no such option")], "no such option", ["init"]),
    ],
)
def test_rays_start_is_tried_twice(
    failures: list[Exception],
    said: str | None,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[str] = []

    def init(**options: Any) -> None:
        assert options["num_cpus"] == 3
        asked.append("init")
        if asked.count("init") <= len(failures):
            raise failures[asked.count("init") - 1]

    ray = SimpleNamespace(init=init, shutdown=lambda: asked.append("shutdown"), is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    with pytest.raises((Empo2Error, ValueError), match=said) if said else nullcontext():
        start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 3}}}))
    assert asked == wanted
    second = "Ray was started at the second attempt; the first one failed: Exception: The current node timed out"
    assert (f"{second} during startup. This could happen" in capsys.readouterr().out) == (said is None)


@pytest.mark.parametrize(("address", "told"), [("10.0.0.1:6379", "10.0.0.0/16"), ("", None)])
def test_a_cluster_is_joined_that_rays_own_variable_names(
    address: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script's configuration need not repeat it; its workers are told the network, too."""
    given: list[dict[str, Any]] = []
    ray = SimpleNamespace(init=lambda **options: given.append(options), is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", address)
    hardware = {"network": "10.0.0.0/16"}
    start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": {}}, "empo2": {"hardware": hardware}}))
    (options,) = given
    assert options["runtime_env"]["env_vars"].get("EMPO2_NETWORK") == told
    assert ("_temp_dir" in options) is (told is None)  # of a Ray that is started


RAY = """
import contextlib, json, os, psutil, ray, sys
from empo2.recipe.config import load_settings
from empo2.recipe.trainer.ray_environment import start_ray
from empo2.recipe.trainer.verl_config import build_verl_config
from pathlib import Path

settings = load_settings("cpu")
start_ray(build_verl_config(settings, model_path="m", run_directory=Path(), gateway_url="", gateway_key=""))

@ray.remote(num_gpus=1)
class Worker:
    def names(self):
        from empo2.recipe.trainer.ray_environment import use_network
        use_network()
        return [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")]

worker = Worker.remote()
names = ray.get(worker.names.remote())
tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
sockets = []
for process in tree:
    with contextlib.suppress(psutil.NoSuchProcess):  # Ray ends some that it does not need
        sockets += [each for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
addresses = [[each.laddr.ip, each.laddr.port] for each in sockets]
sys.path.insert(0, sys.argv[1])
from stranger import answer
answers = {port: answer(f"127.0.0.1:{port}") for _, port in addresses}
print(json.dumps([names, addresses, answers]))
"""


@pytest.mark.stack
def test_a_ray_of_ones_own_listens_on_loopback_and_asks_for_its_token() -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", RAY, str(Path(__file__).parents[1])]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, addresses, answers = json.loads(done.stdout.splitlines()[-1])
    assert names == ["lo", "lo", "127.0.0.1"]
    assert len(addresses) > 5 and {host.removeprefix("::ffff:") for host, _ in addresses} <= {"127.0.0.1", "::1"}
    assert [answer for answer in answers.values() if answer == "401"]
    assert not [
        answer
        for answer in answers.values()
        if answer not in ("401", "refused") and "text/plain; version=0.0.4" not in answer
    ]
