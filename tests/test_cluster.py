"""The files of examples/cluster, without a cluster: what the Slurm script and the manifests refer to is there."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.scripts.scripts import start as ray_start

from empo2.recipe.config import load_settings

pytestmark = pytest.mark.slow

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"


def test_what_the_slurm_script_says_to_ray_and_empo2_exists() -> None:
    """Without Slurm; tests/test_slurm.py runs it."""
    script = CLUSTER / "train.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    tasks = text[text.index("common=(") : text.index("ray=$!")].replace(text[text.index("scancel --") :], "")
    known = {option for each in ray_start.params for option in each.opts}
    assert {*re.findall(r"--[a-z-]+", tasks)} <= known
    given = re.findall(r'([a-z]+\.[a-z_]+)="?\'?[$a]', text[text.index("empo2 train") :])
    assert len(given) == 6
    example = {"hardware.nodes": "2", "gateway.port": "20003"}
    settings = load_settings("gpu", [f"{key}={example.get(key, 'auto')}" for key in given])
    assert settings.hardware.nodes == 2 and settings.run.resume == "auto"


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
