"""The files of examples/cluster: the Slurm script among stand-ins of Slurm, Ray and empo2; what manifests refer to."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from empo2.recipe.config import load_settings

from .processes import mark, marked, until

pytestmark = pytest.mark.slow

__all__ = ["mark"]

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
# Each writes down how it was called. `srun` starts two tasks; if one ends, it ends the other and itself.
STAND_INS = {
    "scontrol": '[[ $1 == show ]] && printf "node1\\nnode2\\n"; true',
    "getent": 'printf "127.0.1.1 STREAM node1\\n10.0.0.7 STREAM node1\\n"',  # as on Debian
    "srun": 'while [[ $1 == --* ]]; do shift; done\ntrap "kill \\$(jobs -p); exit 1" TERM\n'
    'for rank in 0 1; do SLURM_PROCID=$rank "$@" & done; wait -n; kill $(jobs -p); exit 1',
    "ray": "exec sleep 1000",
    "empo2": 'trap "exit 143" USR1\ntrap "echo told >> $CALLS; exit 143" TERM\nwhile true; do sleep 0.1; done',
}


class Job:
    """The script under way, as Slurm starts it."""

    def __init__(self, folder: Path, mark: str) -> None:
        self.calls, self.errors, tools = folder / "calls", folder / "errors", folder / "bin"
        tools.mkdir()
        for name, body in STAND_INS.items():
            (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >> "$CALLS"\n{body}\n')
            (tools / name).chmod(0o755)
        slurm = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2"}
        slurm |= {"SLURM_CPUS_PER_TASK": "64", "CALLS": str(self.calls), "EMPO2_TEST_MARK": mark}
        environment = {**os.environ, **slurm, "PATH": f"{tools}:{os.environ['PATH']}"}
        command = ["bash", str(CLUSTER / "train.sbatch"), "my.yaml", "mine", "run.steps=3"]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=errors)
        until(lambda: self.process.poll() is not None or (len(self.of("ray")), len(self.of("empo2"))) == (2, 1))
        assert self.process.returncode is None, self.errors.read_text()

    def of(self, tool: str) -> list[list[str]]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [shlex.split(line)[1:] for line in lines if line.split()[0] == tool]


def test_a_slurm_job_that_is_warned_saves_and_is_requeued(tmp_path: Path, mark: str) -> None:
    job = Job(tmp_path, mark)
    first = 20_000 + 6 * (4242 % 2000)
    assert job.of("srun")[0][0] == "--cpus-per-task=64"  # which srun does not take from the job
    head, worker = sorted(job.of("ray"), key=lambda given: "--head" not in given)
    assert {f"--port={first}", "--node-ip-address=10.0.0.7", "--head", "--block"} <= {*head}
    assert f"--address=10.0.0.7:{first}" in worker and "--head" not in worker
    ports = {word.partition("=")[2] for word in head if "port=" in word} - {"0"}
    (given,) = job.of("empo2")
    assert given[:3] == ["train", "--config", "my.yaml"] and "run.resume=auto" in given and given[-1] == "run.steps=3"
    assert f"hardware.ray_address=10.0.0.7:{first}" in given and f"gateway.port={first + 3}" in given
    assert {*map(int, ports)} == {first, first + 1, first + 2}  # with the gateway's and two of the environment below
    assert load_settings("gpu", [word for word in given if "=" in word]).hardware.nodes == 2
    environments = [process.environ() for process in marked(mark) if process.name() == "sleep"]
    tokens = {each.get("RAY_AUTH_TOKEN", "") for each in environments if each.get("SLURM_PROCID")}
    assert len(tokens) == 1 and len(tokens.pop()) == 64
    assert {each["AUTOSCALER_METRIC_PORT"] for each in environments if each.get("SLURM_PROCID")} == {str(first + 4)}
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(60) == 143
    assert job.of("scontrol")[-1] == ["requeue", "4242"]
    until(lambda: not marked(mark), 10)


def test_a_slurm_job_whose_ray_node_ends_releases_its_allocation(tmp_path: Path, mark: str) -> None:
    job = Job(tmp_path, mark)
    node = next(each for each in marked(mark) if each.name() == "sleep" and each.environ().get("SLURM_PROCID") == "1")
    node.kill()
    assert job.process.wait(60) == 1
    assert "Ray has ended on a node" in job.errors.read_text()
    assert job.of("told") and job.of("scontrol")[-1][0] != "requeue"
    until(lambda: not marked(mark), 10)


def found(value: Any, key: str) -> Iterator[Any]:
    """What stands under a key, at any depth."""
    if isinstance(value, dict):
        yield from ([value[key]] if key in value else [])
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from found(each, key)


def test_what_the_manifests_refer_to_is_there() -> None:
    files = (CLUSTER / f"{name}.yaml" for name in ("gateway", "controller", "agents", "trainer", "ray-job"))
    every: list[Any] = [each for file in files for each in yaml.safe_load_all(file.read_text())]
    objects = {(each["kind"], each["metadata"]["name"]): each for each in every}
    made = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
    (settings,) = made["configMapGenerator"]
    assert all((CLUSTER / file).is_file() for file in settings["files"] + made["resources"])
    assert {claim["claimName"] for claim in found(every, "persistentVolumeClaim")} == {"runs"}
    assert {of["name"] for of in found(every, "configMap")} == {settings["name"]}
    assert {of["name"] for kind in ("secretKeyRef", "secretRef") for of in found(every, kind)} == {"empo2-keys"}
    (port,) = objects["Service", "gateway"]["spec"]["ports"]
    pods = objects["Deployment", "gateway"]["spec"]["template"]
    assert objects["Service", "gateway"]["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    (gateway,) = pods["spec"]["containers"]
    assert [{"containerPort": port["port"]}] == gateway["ports"] and f"gateway.port={port['port']}" in gateway["args"]
    binding = objects["RoleBinding", "controller"]
    assert ("ClusterRole", binding["roleRef"]["name"]) in objects
    assert {("ServiceAccount", each["name"]) for each in binding["subjects"]} <= objects.keys()
    commands = [*found(every, "args"), objects["RayJob", "trainer"]["spec"]["entrypoint"].split()[1:]]
    assert sorted(command[0] for command in commands) == ["controller", "gateway", "train", "train"]
    each_job = load_settings("gpu", file=CLUSTER / "empo2.yaml").verl["agentlightning"]["k8s"]["job_template_path"]
    mounted = [word for command in commands for word in command if word.startswith("/etc/empo2/")]
    assert {Path(file).name for file in (*mounted, each_job)} <= {Path(file).name for file in settings["files"]}
    # The controller has the agents' key alone; the trainer the admin key alone.
    assert [*found(objects["Deployment", "controller"], "key")] == ["EMPO2_KEY"]
    for kind in ("Job", "RayJob"):
        assert {*found(objects[kind, "trainer"], "key")} == {"EMPO2_ADMIN_KEY"}
