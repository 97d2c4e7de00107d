"""Forked agents: each is a process of its own, whatever it does; what cannot be forked gets a Python of its own."""

import asyncio
import contextlib
import gc
import hmac
import multiprocessing
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agentlightning.controller import k8s_reconciler, local_reconciler
from agentlightning.schemas import Rollout
from omegaconf import OmegaConf

from empo2.agents.process_guard import guarded
from empo2.recipe.config import TRACES_VARIABLES
from empo2.recipe.controller.kubernetes import TellingReconciler
from empo2.recipe.controller.run import OwnKeys, start_agents_with, with_own_key
from empo2.recipe.controller.warm_agents import WarmAgent, start_agent, start_fork_server
from empo2.recipe.failures import cause_of_failure
from empo2.recipe.protocol import traceparent

from ..processes import mark, until
from .harness import worker_command

__all__ = ["mark"]

AGENTS = "warm_agents_of_tests:Agent"
SERVER = {"url": "http://gateway", "key": "k"}
STATUS = {"state": "queuing", "created_at": 0, "updated_at": 0}


class Warm:
    """Warm agents of a class, and the lines that they have written, to stdout and to stderr."""

    def __init__(self, agent_class: str, capfd: pytest.CaptureFixture[str]) -> None:
        self.agent_class, self.capfd, self.said = agent_class, capfd, ""
        start_fork_server(agent_class)

    async def start(self, act: str, **variables: str) -> WarmAgent:
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True}
        environment = {**os.environ, "ACT": act, **variables}
        return await start_agent(*worker_command(self.agent_class), env=environment, **options)

    async def play(self, act: str, **variables: str) -> int:
        """The exit code of an agent."""
        return await (await self.start(act, **variables)).wait()

    def lines(self) -> list[str]:
        self.said += "".join(self.capfd.readouterr())
        return self.said.splitlines()


@pytest.fixture
def warm(tmp_path: Path, mark: str, no_fork_server: None, monkeypatch: Any, capfd: Any) -> Callable[..., Warm]:
    """Makes warm agents of a class; modules are also found in tmp_path."""
    folders = [str(Path(__file__).parent), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    monkeypatch.setenv("EMPO2_TEST_MARK", mark)
    return lambda agent_class=AGENTS: Warm(agent_class, capfd)


async def test_an_agent_is_a_process_of_its_own_with_its_variables_and_its_output(warm) -> None:
    """Nothing passes from one agent to the next."""
    agents = warm()
    assert await agents.play("write", MY_OLD="1") == 0
    agent = await agents.start("tell", MY_DOOR="3", MY_TEXT="ä\n{}")
    assert await agent.wait() == 0 == agent.returncode
    (line,) = (line for line in agents.lines() if "|" in line)
    pid, parent, session, imported_by, variables, arguments, stdin = line.split("|")
    assert int(pid) == agent.pid == int(session) != int(parent) == int(imported_by)
    assert (variables, arguments, stdin) == (str({"MY_DOOR": "3", "MY_TEXT": "ä\n{}"}), str(["-c", AGENTS]), "")
    assert {"on stderr", "tell leaves"} < {*agents.lines()}
    for _ in range(2):
        assert await agents.play("draw") == 0
    first, second = (line.split("|") for line in agents.lines() if line.startswith("0."))
    assert first[0] != second[0] and first[1] != second[1]  # of random, of numpy


@pytest.mark.parametrize(
    ("act", "code", "said"),
    [("raise", 1, "ValueError: no such door"), ("exit", 7, "exit leaves"), ("crash", -signal.SIGSEGV, None)],
)
async def test_an_agents_end_is_its_own(warm, act: str, code: int, said: str | None) -> None:
    agents = warm()
    running = await agents.start("hang")
    failing = await agents.start(act)
    until(lambda: not psutil.pid_exists(failing.pid))
    multiprocessing.active_children()  # looks at all children, as each start of a Process does, in a thread
    assert await failing.wait() == code == failing.returncode
    assert said is None or said in agents.lines()
    assert running.returncode is None
    assert await agents.play("tell") == 0
    os.killpg(running.pid, signal.SIGKILL)
    assert await running.wait() == -signal.SIGKILL


async def test_what_an_agent_leaves_ends_with_it_and_a_guard_ends_what_it_guards(warm) -> None:
    """In its session, and in one of its own, as browsers are started."""
    agents, address = warm(), {"AGL_OPENAI_BASE_URL": "http://gateway/proxy/rollout/r-1/attempt/0/mode/train/openai/v1"}
    guarding = subprocess.Popen(
        guarded(["sleep", "1000"]), stdin=subprocess.PIPE, env={**os.environ, **address}, start_new_session=True
    )
    until(lambda: psutil.Process(guarding.pid).children())
    assert await agents.play("leave", **address) == 0
    left = [int(pid) for pid in agents.lines()[0].split()[1:]]
    assert len(left) == 2
    until(lambda: not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in left))
    assert guarding.poll() is None and psutil.Process(guarding.pid).children()
    with guarding:  # its owner's end
        pass


async def test_a_command_that_a_signal_ended_ends_its_agent_with_the_signals_code(warm) -> None:
    """By which the failure is the system's (`cause_of_failure`)."""
    url = "http://127.0.0.1:9"  # where nobody is told of it
    variables = {"AGL_OPENAI_BASE_URL": f"{url}/v1", "AGL_EVENT_URL": f"{url}/events", "AGL_KEY": "k"}
    agents = warm("empo2.agents.command:CommandAgent")
    for line, code in (("sh -c 'kill -9 $$'", 137), ("sh -c 'exit 7'", 7), ("true", 1)):
        assert await agents.play("", AGENT_COMMAND=line, **variables) == code


async def test_a_fork_is_a_main_process_with_the_path_of_its_module(warm, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/beside_it.py").write_text("")
    (tmp_path / "path_agent.py").write_text(
        f"import sys\nfrom warm_agents_of_tests import Agent as Base\n"
        f"sys.path.insert(0, {str(tmp_path / 'library')!r})\n"
        "class Agent(Base):\n    def run(self):\n        import beside_it\n        super().run()\n"
    )
    agents = warm("path_agent:Agent")
    assert await agents.play("alone") == 0
    assert agents.lines()[0] == "MainProcess None"


async def test_agents_that_have_ended_hold_no_descriptors(warm) -> None:
    """`LocalReconciler` keeps every agent that it has started."""
    agents = warm()
    await agents.play("write")
    gc.collect()  # it would close those of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    kept = [await agents.start("write") for _ in range(4)]
    assert [await agent.wait() for agent in kept] == [0] * 4
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_killed_agent_takes_its_children_along_as_agent_lightning_kills(warm) -> None:
    """`LocalReconciler._kill_process_group` kills the group of `pid` and waits for 5 s."""
    agents = warm()
    agent = await agents.start("hang")
    while not agents.lines():
        await asyncio.sleep(0.02)
    item = local_reconciler.Proc(attempt_id="0", proc=agent, spawned_at=0)
    assert await local_reconciler.LocalReconciler._kill_process_group(None, "id", item)  # type: ignore[arg-type]
    assert agent.returncode == -signal.SIGKILL
    until(lambda: not _alive(agent.pid))


def _alive(session: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


@pytest.mark.parametrize("agent_class", [AGENTS, "late_agent:Agent"])  # the session of the latter comes late
async def test_agents_end_with_a_killed_fork_server_and_later_ones_are_forked(
    warm, tmp_path: Path, agent_class: str
) -> None:
    (tmp_path / "late_agent.py").write_text(
        "import os, time\nfrom warm_agents_of_tests import Agent\nsetsid = os.setsid\n"
        "os.setsid = lambda: (time.sleep(1), setsid())\n"
    )
    agents = warm(agent_class)
    running = await agents.start("hang")
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    server.kill()
    until(lambda: server.status() == psutil.STATUS_ZOMBIE)
    assert await running.wait() == -signal.SIGKILL
    until(lambda: not _alive(running.pid))
    # It may have no session of its own, and may wait for its new parent to ask for its end.
    with contextlib.suppress(psutil.NoSuchProcess):
        until(lambda: psutil.Process(running.pid).status() == psutil.STATUS_ZOMBIE)
    assert await agents.play("exit") == 7


@pytest.mark.parametrize(
    ("module", "code", "error"),
    [("no_such_module", 1, "ModuleNotFoundError: No module named"), ("exiting_agent", 2, "SystemExit: 2")],
)
async def test_a_class_that_cannot_be_imported_says_so_in_one_line(
    warm, tmp_path: Path, module: str, code: int, error: str
) -> None:
    (tmp_path / "exiting_agent.py").write_text("import sys\nsys.exit(2)\n")
    agents = warm(f"{module}:Agent")
    agent = await agents.start("tell")
    assert await agent.wait() == code  # as without warm agents: with a traceback, of this rollout alone
    said = [line for line in agents.lines() if line.startswith("empo2:")]
    assert len(said) == 1
    assert f"agent.class='{module}:Agent' cannot be imported: {error}" in said[0]


ODD = {
    "reads MY_DOOR while": "import os\nDOOR = os.environ.get('MY_DOOR')",
    "reads the whole environment": "import os\nALL = dict(os.environ)",
    "starts threads": "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "leaves 1 sockets open": "import socket\nSOCKET = socket.socket()",
    "the run's agent is warm_agents_of_tests:Agent": "",
}


@pytest.mark.parametrize("why", ODD)
async def test_what_a_fork_would_break_starts_alone(warm, tmp_path: Path, why: str) -> None:
    (tmp_path / "odd_agent.py").write_text(
        f"{ODD[why]}\nimport os\nclass Agent:\n    def run(self):\n        print('door', os.environ['MY_DOOR'])\n"
    )
    agents = warm("odd_agent:Agent" if ODD[why] else AGENTS)
    agents.agent_class = "odd_agent:Agent"
    played = ["3", "4"] if why.startswith("leaves") else ["3"]  # it is said once
    for door in played:
        assert await agents.play("", MY_DOOR=door) == 0
    *doors, said = agents.lines()
    assert doors == [f"door {door}" for door in played]
    assert said.startswith("empo2: every agent starts a Python of its own") and why in said


async def test_what_a_module_sets_while_it_is_imported_is_set_in_each_agent(
    warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each agent starts alone."""
    (tmp_path / "setting_agent.py").write_text(
        "import os\nos.environ.setdefault('MY_CACHE', 'off')\nos.environ['OMP_NUM_THREADS'] = '7'\n"
        "del os.environ['GONE']\nclass Agent:\n    def run(self):\n"
        "        names = 'MY_CACHE', 'OMP_NUM_THREADS', 'GONE', 'MKL_NUM_THREADS', 'DOOR'\n"
        "        print('set', *map(os.environ.get, names))\n"
    )
    monkeypatch.setenv("GONE", "1")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    agents = warm("setting_agent:Agent")
    for door in "34":
        assert await agents.play("", DOOR=door) == 0
    assert agents.lines() == ["set off 7 None None 3", "set off 7 None None 4"]


async def test_agent_lightning_starts_agents_as_warm_agents_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its rollout's key. Fails when ``LocalReconciler._spawn_for`` changes how it starts a process."""
    started, failed = [], []

    async def start(*command: str, **options: object) -> None:
        started.append((command, options))
        raise OSError("not started")

    async def patch_status(rollout_id: str, json: dict) -> None:
        failed.append(json["status"]["error_message"])

    monkeypatch.setattr(local_reconciler, "asyncio", asyncio)
    start_agents_with(start)
    config = {"runner_type": "local", "agl_server": SERVER, "local_runner": {"maximum_size": 1, "poll_interval": 1}}
    api = SimpleNamespace(patch=patch_status)
    reconciler = OwnKeys(api, OmegaConf.create(config))  # pyright: ignore[reportArgumentType]
    local = {"agent_class": AGENTS, "env_map": {"MY_DOOR": "input.door"}}
    rollout = {"rollout_id": "r", "input": {"door": 3}, "config": {"local": local}}
    assert not await reconciler._spawn_for(Rollout.model_validate({**rollout, "status": STATUS}))
    assert reconciler._config.agl_server.key == "k"
    assert failed == ["local subprocess spawn failed: not started"]
    ((command, options),) = started
    assert list(command) == worker_command(AGENTS)
    environment = options.pop("env")
    assert (environment["AGL_KEY"], environment["MY_DOOR"]) == (hmac.new(b"k", b"r", "sha256").hexdigest(), "3")
    assert options == {"stdin": subprocess.DEVNULL, "stdout": None, "stderr": None, "start_new_session": True}


def test_a_kubernetes_job_has_the_key_of_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function with which agent-lightning's reconciler makes a Job, of the template of examples/cluster."""
    template = (Path(__file__).parents[2] / "examples/cluster/agent-job.yaml").read_text()
    config = {"agl_server": SERVER, "k8s_runner": {"namespace": "agents", "ttl_after_finished": 60}}
    monkeypatch.setenv(TRACES_VARIABLES[0], "http://collector:4318/v1/traces")
    for id in ("r", "s"):
        rollout: dict[str, Any] = {"rollout_id": id, "input": {"question": "2 + 2", "answer": "4"}, "status": STATUS}
        rollout["config"] = {"k8s": {"job_template": template}}
        job = with_own_key(k8s_reconciler.build_job_spec)(Rollout.model_validate(rollout), OmegaConf.create(config))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["AGL_KEY"] == hmac.new(b"k", id.encode(), "sha256").hexdigest()
        assert f"/rollout/{id}/attempt/" in variables["AGL_OPENAI_BASE_URL"]
        assert variables["TRACEPARENT"] == traceparent(id)


async def test_why_a_rollout_has_no_pod_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing image, no node with room, a Job that Kubernetes refuses; by agent-lightning's reconciler."""
    pulling = {"reason": "ImagePullBackOff", "message": "not found"}
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    pods = {
        "job-a": {"containerStatuses": [{"state": {"waiting": pulling}}]},
        "job-b": {"conditions": [full]},
        "job-c": {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
        "of-others": {"conditions": [full]},
    }
    said: dict[str, str | None] = dict.fromkeys("abc")
    told: list[str] = []
    answers = [Exception("exceeded quota: agents")] * 2 + [None]  # of Kubernetes, to three attempts

    def rollout(name: str) -> Rollout:
        status = {**STATUS, "k8s_job_name": f"job-{name}", "error_message": said[name]}
        return Rollout.model_validate({"rollout_id": name, "input": {}, "config": {}, "status": status})

    class Reconciler(TellingReconciler):
        async def _query_rollouts(self, **_: object) -> list[Rollout]:
            return [*map(rollout, said)]

        async def _patch_status(self, rollout_id: str, *, error_message: str | None) -> None:  # pyright: ignore
            said[rollout_id] = error_message
            told.append(rollout_id)

        async def _get_k8s_api(self) -> None: ...

    async def listed(**asked: object) -> AsyncIterator[object]:
        assert asked["namespace"] == "ours"
        for job, status in pods.items():
            yield SimpleNamespace(raw={"metadata": {"labels": {"batch.kubernetes.io/job-name": job}}, "status": status})

    async def nothing(*_: object) -> None: ...

    async def create(job: object) -> None:
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(k8s_reconciler.K8sReconciler, "_reconcile_once", nothing)
    monkeypatch.setattr("empo2.recipe.controller.kubernetes.Pod", SimpleNamespace(async_list=listed))
    config = OmegaConf.create({"k8s_runner": {"namespace": "ours", "max_jobs_per_minute": 9}})
    reconciler = Reconciler(None, config)  # pyright: ignore
    for _ in range(2):
        await reconciler._reconcile_once()
    assert said == {"a": "ImagePullBackOff: not found", "b": "Unschedulable: 0/3 nodes are available", "c": None}
    assert told == ["a", "b"]
    job = {"metadata": {"labels": {"agentlightning/attempt-id": "0"}}, "kind": "Job"}
    monkeypatch.setattr(k8s_reconciler, "build_job_spec", lambda *_: job)
    monkeypatch.setattr("kr8s.asyncio.objects.Job.async_create", create)
    for wanted in ("Kubernetes refuses the Job: exceeded quota: agents",) * 2 + (None,):
        await reconciler._create_job(rollout("c"))
        assert said["c"] == wanted
    assert told == [*"abcc"] and not answers


@pytest.mark.parametrize(
    ("why", "status", "said"),
    [
        ("BackoffLimitExceeded", {"containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}, "by agent"),
        ("BackoffLimitExceeded", {"containerStatuses": [{"state": {"terminated": {"exitCode": 137}}}]}, "by system"),
        (
            "BackoffLimitExceeded",
            {
                "conditions": [{"type": "DisruptionTarget", "status": "True"}],
                "containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}],
            },
            "by system",
        ),
        ("DeadlineExceeded", {"containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}, "by system"),
        ("BackoffLimitExceeded", None, "by system"),
        (None, {"containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}, "by agent"),
    ],
    ids=["exits with 1", "out of memory", "evicted", "out of time", "no right to list pods", "no condition yet"],
)
async def test_whose_fault_a_failed_job_is(
    why: str | None, status: dict[str, Any] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Jobs that agent-lightning's reconciler lists, and the words that the trainer reads."""
    told: list[dict[str, Any]] = []

    class Api:
        async def get(self, path: str, *, params: object) -> SimpleNamespace:
            rollout = {"rollout_id": "r", "input": {}, "config": {}, "status": {**STATUS, "state": "running"}}
            listed = [rollout] if path == "/api/rollouts" else []
            return SimpleNamespace(raise_for_status=lambda: None, json=lambda: listed)

        async def patch(self, path: str, *, json: dict[str, Any]) -> SimpleNamespace:
            assert path == "/api/rollouts/r"
            told.append(json["status"])
            return SimpleNamespace(raise_for_status=lambda: None)

    async def jobs(**_: object) -> AsyncIterator[object]:
        ended = [{"type": "Failed", "status": "True", "reason": why, "message": "it says more"}]
        name = {"name": k8s_reconciler.build_job_name("r")}
        yield SimpleNamespace(raw={"metadata": name, "status": {"failed": 1, "conditions": ended if why else []}})

    async def listed(**asked: object) -> AsyncIterator[object]:
        if asked["label_selector"] != "batch.kubernetes.io/job-name=agl-rollout-r":
            return  # those that wait
        if status is None:
            raise PermissionError("pods is forbidden")
        yield SimpleNamespace(raw={"status": status})

    async def no_cluster(_: object) -> None: ...

    monkeypatch.setattr("empo2.recipe.controller.kubernetes.Pod", SimpleNamespace(async_list=listed))
    monkeypatch.setattr(k8s_reconciler.k8s_objects.Job, "async_list", jobs)
    monkeypatch.setattr(TellingReconciler, "_get_k8s_api", no_cluster)
    config = OmegaConf.create({"k8s_runner": {"namespace": "ours"}})
    reconciler = TellingReconciler(Api(), config)  # pyright: ignore[reportArgumentType]
    await reconciler._reconcile_once()
    (failed,) = told
    assert failed["state"] == "failed"
    cause = cause_of_failure(failed["error_message"], [{"status": "success"}], answered=True)
    assert cause == f"failed_{said.replace(' ', '_')}"
