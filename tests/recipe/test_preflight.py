"""Every setting that is wrong before a start: `empo2 check` names it, and the other commands refuse it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from empo2.memory.store import MemoryStore
from empo2.recipe import network
from empo2.recipe.cli import main
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher import commands
from empo2.recipe.preflight import settings_checks
from empo2.recipe.preflight.checks import PLAYED, SERVED, SETTINGS, look, require
from empo2.recipe.preflight.start import Start

from .model_server import serving

AGENT = """
class Agent:
    def run(self): pass

class Broken(Agent):
    @staticmethod
    def check(): raise FileNotFoundError("no world is installed")

class Sees(Agent):
    def run(self):
        import os, httpx
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"messages": [{"role": "user", "content": [image]}]}
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        httpx.post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers, timeout=60)

class NoRun: pass

def two(rows=2, **fields): return [fields] * rows, [fields]

def none(): return [], []

def one_list(): return [{}] * 3

def without_a_field(): return [{"door": 1}] * 2, [{}]
"""
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 128}
ACTOR, ROLLOUT = "verl.actor_rollout_ref.actor", "verl.actor_rollout_ref.rollout"

Case = tuple[list[str], str]  # settings, or VARIABLE=value of the environment, and a part of what is said
# By check, so that one of each can be wrong at once.
WRONG: Mapping[str, list[Case]] = {
    "agent": [
        (["agent.class=no_such:Agent"], "agent.class='no_such:Agent': cannot be imported: No module named 'no_such'"),
        (["agent.class=mine:NoRun"], "agent.class='mine:NoRun': has no run() method"),
        (["agent.class=leaves:Agent"], "agent.class='leaves:Agent': cannot be imported: it ends with sys.exit(3)"),
        (["agent.class=mine:Broken"], "agent.class='mine:Broken': no world is installed"),
        (["agent.class=null"], "agent.class=None: give the agent"),
    ],
    "state": [(["memory.state=no_such:state"], "memory.state='no_such:state': cannot be imported")],
    "calls": [(["gateway.trained_calls=no_such:choice"], "gateway.trained_calls='no_such:choice': cannot be imported")],
    "traces": [
        (
            ["gateway.traces=http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"],
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: must be http/protobuf",
        )
    ],
    "environment": [
        (["EMPO2_KEY=same", "EMPO2_ADMIN_KEY=same"], "EMPO2_ADMIN_KEY equals EMPO2_KEY"),
        (["hardware.device=gpu", "CUDA_VISIBLE_DEVICES=GPU-8a,1"], "CUDA_VISIBLE_DEVICES=GPU-8a,1: vLLM 0.20 reads"),
        (["hardware.device=gpu", "CUDA_VISIBLE_DEVICES=MIG-8a"], "CUDA_VISIBLE_DEVICES=MIG-8a: vLLM 0.20 reads"),
    ],
    "model": [
        (["model.path=./none"], "model.path: no such directory: './none'"),
        (["model.path=empty"], "model.path: 'empty' has no config.json"),
        (["model.path=mixture"], "model.path='mixture': is a mixture of experts (num_experts in its config.json)"),
        (["model.server=http://127.0.0.1:1/v1"], "model.server='http://127.0.0.1:1/v1': training starts its own vLLM"),
    ],
    "tasks": [
        (["tasks.source=null"], "tasks.source=None: give the tasks"),
        (["tasks.source=mine:nothing"], "tasks.source='mine:nothing': cannot be imported"),
        (
            ["tasks.source=mine:one_list"],
            "tasks.source='mine:one_list': must return two lists, training and validation",
        ),
        (
            ["tasks.source=mine:without_a_field", "agent.env.DOOR=input.door", "memory.scope=all-tasks"],
            "tasks.source='mine:without_a_field', validation, row 0: has no field 'door', which agent.env names",
        ),
        (["tasks.source=mine:none"], "tasks.source='mine:none': gave 0 training and 0 validation tasks"),
        (["tasks.source=mine:none", "tasks.args.seed=1"], "tasks.args={'seed': 1}: none() got an unexpected keyword"),
        (["tasks.source=absent.jsonl"], "tasks.source='absent.jsonl': No such file or directory"),
        (["tasks.source=one.jsonl"], "tasks.source='one.jsonl': has 1 rows; give two or more"),
        (
            ["tasks.source=tasks.jsonl", "memory.scope=[planet]"],
            "memory.scope=['planet']: tasks have no field 'planet'",
        ),
        (
            ["tasks.source=tasks.jsonl", "agent.env.DOOR=input.door.handle"],
            "tasks.source='tasks.jsonl', training, row 0: has no field 'door.handle', which agent.env names",
        ),
    ],
    "verl": [
        (["verl.trainer.foo=1"], "verl.trainer.foo=1: not an option of verl or agent-lightning"),
        ([f"{ACTOR}.shuffle=true"], "actor.shuffle=True: must be False: "),
        ([f"{ROLLOUT}.logprobs_mode=raw_logprobs"], "logprobs_mode='raw_logprobs': must be 'processed_logprobs': "),
        (["verl.agentlightning.max_ppo_update_times=3"], "max_ppo_update_times=3: must be None: it drops rows"),
        (["verl.agentlightning.trace_aggregator.level=transition"], "level='transition': must be 'trajectory'"),
        (["verl.algorithm.adv_estimator=gae"], "algorithm.adv_estimator='gae': must be 'grpo'"),
        ([f"{ACTOR}.policy_loss.loss_mode=vanilla"], "loss_mode='vanilla': must be 'per_rollout_mean'"),
        ([f"{ROLLOUT}.engine_kwargs.vllm.middleware=m.M"], "vllm.middleware='m.M': the place is taken"),
    ],
    "run": [
        (["run.name=null", "run.resume=auto"], "run.resume='auto': give run.name"),
        (["run.name=taken"], "taken exists; give another run.name"),
        (["run.name=taken", "run.resume=auto", "algorithm.name=grpo"], "algorithm.name='grpo': the run 'taken' began"),
        (["run.name=taken", "run.resume=auto", "run.steps=2"], "run.steps=2: the run 'taken' has done 2 already"),
        (["run.name=mixture", "run.directory=."], "mixture exists; give another run.name"),
        (["run.directory=mine.py/runs"], "run.directory='mine.py/runs': "),
        (["memory.from=nowhere"], "memory.from='nowhere': no memory at nowhere"),
        (["memory.from=other.sqlite"], "other.sqlite was written with embedder 'other'"),
    ],
    # Not beside the first of the environment, which has a key.
    "concurrency": [([], ""), (["agent.concurrency=0"], "agent.concurrency=0: controllers of other hosts need a key")],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an agent, tasks, models, a run and a memory of another embedder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    for name, count in (("tasks", 20), ("one", 1)):
        lines = [json.dumps({"question": str(number)}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(MIXTURE))
    (tmp_path / "mixture" / "chat_template.jinja").write_text("{{ tools }} <tool_call>")
    MemoryStore(tmp_path / "other.sqlite", embedder="other", dimension=8).close()
    run = tmp_path / "runs" / "taken"
    (run / "checkpoints" / "global_step_2").mkdir(parents=True)
    (run / "checkpoints" / "global_step_2" / "complete").touch()
    (run / "config.yaml").write_text(json.dumps(load_settings("cpu", OWN).to_dict()))
    (run / "metrics.jsonl").write_text('{"step": 2}\n')
    return tmp_path


OWN = ["agent.class=mine:Agent", "tasks.source=tasks.jsonl", "run.name=new", "run.steps=9"]


def split(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Settings, after the environment has its variables, and what must be said."""
    given = [each for settings, _ in cases for each in settings]
    for each in given:
        if each.split("=")[0].isupper():
            monkeypatch.setenv(*each.split("=", 1))
    return [each for each in given if not each.split("=")[0].isupper()], [said for _, said in cases]


@pytest.mark.parametrize("cases", [[each for each in row if each and each[1]] for row in zip_longest(*WRONG.values())])
def test_check_names_each_wrong_setting_and_train_refuses_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], cases: list[Case]
) -> None:
    """One of each check is wrong at once."""
    settings, said = split(cases, monkeypatch)
    assert main(["check", "--profile", "cpu", *OWN, *settings]) == 2
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  WRONG")]
    for each in said:
        assert sum(each in line for line in lines) == 1, (each, lines)
    before = sorted(here.rglob("*"))
    assert main(["train", "--profile", "cpu", *OWN, *settings]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("empo2: error: ") and [each for each in said if each not in line] == []
    assert [path for path in sorted(here.rglob("*")) if "__pycache__" not in str(path)] == [
        path for path in before if "__pycache__" not in str(path)
    ]


def test_the_machine_is_looked_at_by_both(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"gateway.port={taken.getsockname()[1]}"
        for setting, said in ((port, port), ("hardware.network=10.255.0.0/30", "hardware.network='10.255.0.0/30': ")):
            assert main(["check", "--profile", "cpu", *OWN, setting]) == 1
            assert f"  WRONG  port           {said}" in capfd.readouterr().out
            assert main(["train", "--profile", "cpu", *OWN, setting]) == 2
            assert said in capfd.readouterr().err


def test_a_good_start_is_not_refused_and_each_check_looks_once(here: Path) -> None:
    start = Start(load_settings("cpu", OWN))
    found = look(start, SETTINGS)
    assert [each.name for each in found if each.refuses] == []
    assert {each.name: each.said for each in found}["tasks"] == "18 for training, 2 for validation"
    settings = load_settings("cpu", [*OWN, "agent.class=mine:Broken", "tasks.source=mine:nothing"])
    assert [each.name for each in look(Start(settings), SETTINGS) if each.refuses] == [
        "agent",
        "tasks",
    ]  # tools need tasks


@pytest.mark.parametrize("checks", [PLAYED, SERVED])
def test_what_eval_adapt_and_serve_refuse(here: Path, monkeypatch: pytest.MonkeyPatch, checks: Any) -> None:
    names = {"calls", "traces", "environment"} | ({"agent", "state"} if checks is PLAYED else set())
    cases = [case for name in names for case in WRONG[name][:1]] + WRONG["environment"][1:2]
    settings, said = split([case for case in cases if "EMPO2_KEY=same" not in case[0]], monkeypatch)
    server = ["model.server=http://127.0.0.1:1/v1"]  # nobody listens there
    with pytest.raises(ConfigError) as refused:
        require(Start(load_settings("cpu", [*OWN, *settings, *server, "agent.concurrency=0"]), served="m"), checks)
    said += ["model.server='http://127.0.0.1:1/v1': no server answers"]
    said += ["agent.concurrency=0: is for empo2 train"] if checks is PLAYED else []
    assert [each for each in said if each not in str(refused.value)] == []


def test_a_sweep_is_refused_before_its_first_run(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arms = {"good": {}, "bad": {"settings": {"memory": {"state": "no_such:state"}}}}
    (here / "arms.yaml").write_text(json.dumps({"seeds": 2, "arms": arms}))
    assert main(["sweep", "arms.yaml", "--profile", "cpu", *OWN[:2]]) == 2
    printed = capfd.readouterr()
    assert printed.err.startswith("empo2: error: bad-1: memory.state='no_such:state': cannot be imported")
    assert not (here / "runs" / "arms").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            "model.max_context_tokens=9000",
            "model.max_context_tokens=9000: smollm2-135m-instruct reads 8192 at most; lower",
        ),
        (
            "hardware.tensor_parallel=2",
            "tensor_parallel=2: must divide the 9 attention heads of .*; take one of 1, 3, 9",
        ),
    ],
)
def test_what_vllm_refuses_of_a_model_is_refused_at_once(here: Path, changed: str, says: str) -> None:
    gpus = ["hardware.device=gpu", "hardware.gpus_per_node=2"]
    with pytest.raises(ConfigError, match=says):
        settings_checks.model(Start(load_settings("cpu", [*gpus, changed])))
    settings_checks.model(Start(load_settings("cpu", gpus)))


def test_a_cluster_that_is_not_there_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def look(*_: Any, seconds: float, **__: Any) -> Any:
        looks.append(seconds)
        raise ConfigError("hardware.ray_address='auto': no Ray cluster runs there")

    monkeypatch.setattr("empo2.recipe.preflight.start.cluster.look_at_cluster", look)
    start = Start(load_settings("gpu", ["hardware.ray_address=auto"]), seconds=600, served="m")
    for _ in range(3):
        with pytest.raises(ConfigError, match="no Ray cluster"):
            assert start.gpus
    assert looks == [600]


def test_a_training_without_a_dense_model_is_refused_and_serving_it_is_not(here: Path) -> None:
    for name, config in (
        ("num_local_experts", {"num_local_experts": 8}),
        ("n_routed_experts", {"n_routed_experts": 64}),
        ("num_experts", {"text_config": {"num_experts": 128}}),
        ("num_experts", {"text_config": {"num_experts": [8, 8]}}),
    ):
        (here / "mixture" / "config.json").write_text(json.dumps(config))
        start = Start(load_settings("cpu", [*OWN, "model.path=mixture"]))
        assert f"({name} in its config.json)" in str([str(each) for each in look(start, SETTINGS)])
        require(start, SERVED)
    for config in ({"num_experts": None}, {"num_local_experts": 0, "num_experts_per_tok": 2}):
        (here / "mixture" / "config.json").write_text(json.dumps(config))
        start = Start(load_settings("cpu", [*OWN, "model.path=mixture"]))
        assert "experts" not in str([str(each) for each in look(start, SETTINGS)])


@pytest.mark.slow
def test_images_are_refused_where_the_model_would_take_them(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model's server that sees none refuses them itself, and no agent is started."""
    template = (here / "mixture" / "chat_template.jinja").read_text()
    for name, config in (("sees", {"vision_config": {}}), ("blind", {})):
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(config))
        (here / name / "chat_template.jinja").write_text(template)
    for kind, model, refused in (("Sees", "sees", True), ("Sees", "blind", False), ("Agent", "sees", False)):
        main(["check", "--profile", "cpu", *OWN, f"agent.class=mine:{kind}", f"model.path={model}"])
        printed = capfd.readouterr().out
        said = "agent.class='mine:Sees': 1 call with images, which are not trained: send text, or leave these calls to"
        assert (said in printed) == refused, printed
        told = "the model sees them; calls with any are left out, and counted in empo2/image_calls"
        assert (told in printed) == (model == "sees" and not refused)


ASKS = """
import httpx, sys, urllib.request
for url in sys.argv[1:]:
    assert httpx.get(url).text == urllib.request.urlopen(url).read().decode() == "ours", url
"""


def test_no_proxy_hears_of_our_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx and urllib in a process of a run, and the launcher's own client; what the user excepts stays so."""
    with serving(PlainTextResponse("ours")) as ours, serving(PlainTextResponse("the proxy")) as proxy:
        _ask(ours, proxy, monkeypatch)


def _ask(ours: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("NO_PROXY", "intranet, 10.0.0.0/8")
    monkeypatch.delenv("no_proxy", raising=False)
    environment = commands.environment_without(url="http://10.0.0.7:8080")
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intranet,10.0.0.0/8,127.0.0.1,localhost,10.0.0.7"
    command = [sys.executable, "-c", ASKS, ours, ours.replace("127.0.0.1", "localhost")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(command, env={**os.environ, "NO_PROXY": ""}, capture_output=True).returncode == 1
    commands.wait_for(ours, lambda: None)
    monkeypatch.setenv("no_proxy", "*")
    assert network.direct()["NO_PROXY"] == "*"  # which urllib reads alone only
    done = subprocess.run(command, env={**os.environ, **network.direct()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
