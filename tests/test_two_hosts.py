"""Three hosts, as network namespaces: two train, the third plays. Then one of the two dies, and the run is resumed."""

import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.launcher.commands import controller_command
from empo2.recipe.run_folder import checkpoint_folder

from .hosts import NETWORK, Host, hosts
from .processes import until
from .stack import CLI, environment, metrics_of

pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

RAY = str(Path(sys.executable).with_name("ray"))
AGENT = "stack_agent:GuessingAgent"
PORT, RAY_PORT = 8080, 6379
# SECURITY.md names them: gloo and torch's store of the trainer, which answer only their own form, and Ray's counters,
# at two ports of the head and one of each node's agent. Linux cuts a process's name at 15 characters.
SILENT, AGENT_OF_NODE = "ray::WorkerDict", "ray::DashboardA"
COUNTERS, COUNTERS_AT = "text/plain; version=0.0.4", ("44217", "44227")


@contextmanager
def ending(process: psutil.Popen) -> Iterator[psutil.Popen]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "tasks.jsonl").write_text("".join(f'{{"number": "{number}"}}\n' for number in range(1, 9)))
    key, token = secrets.token_hex(8), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    path = {"PYTHONPATH": environment()["PYTHONPATH"]}
    arguments = [
        "hardware.ray_address=auto",
        f"hardware.network={NETWORK}",
        "hardware.nodes=2",
        "hardware.kv_cache=1",
        f"run.directory={folder / 'runs'}",
        "run.name=test",
        "run.resume=auto",
        "run.validate_first=false",
        "run.save_every=1",
        f"gateway.port={PORT}",
        "agent.concurrency=0",
        f"agent.class={AGENT}",
        "agent.env={GAME_NUMBER: input.number, GAME_TROUBLE: never}",
        f"tasks.source={folder / 'tasks.jsonl'}",
        "memory.min_similarity=-1",
        "algorithm.memory_probability=1",
        "algorithm.off_policy_probability=0",  # so that each step can compare vLLM with the trainer
        "algorithm.success_return=40",
        "model.max_prompt_tokens=768",
        "model.max_episode_tokens=768",
    ]
    with hosts(folder, 3) as (a, b, c), ExitStack() as stack:
        seen = SimpleNamespace(run=folder / "runs" / "test", peers_of_c=set())

        def join(host: Host, *options: str) -> None:
            words = [RAY, "start", *options, f"--node-ip-address={host.address}", "--num-gpus=1", "--num-cpus=3"]
            assert host.start(folder / "ray.log", *words, **token, **path).wait() == 0, (folder / "ray.log").read_text()

        def train(steps: int) -> Any:
            command = [*CLI, "train", "--profile", "cpu", *arguments, f"run.steps={steps}"]
            return ending(a.start(folder / "train.log", *command, EMPO2_KEY=key, **token, **path))

        join(a, "--head", f"--port={RAY_PORT}", "--include-dashboard=false")
        settings = load_settings("cpu", [f"agent.class={AGENT}", "agent.concurrency=4"])
        url = f"http://{a.address}:{PORT}"
        command = controller_command(settings, url)
        playing = stack.enter_context(ending(c.start(folder / "controller.log", *command, EMPO2_KEY=key, **path)))
        with train(100) as launcher:  # it dies before, however long the questions below take
            said = "waiting for nodes: 1 of 2 with 1 free GPU"
            until(lambda: said in (folder / "train.log").read_text() or launcher.poll() is not None)
            join(b, f"--address={a.address}:{RAY_PORT}")
            c.route("add", b)
            _until_step(seen.run, 1, launcher, folder)
            for _ in range(20):
                seen.peers_of_c |= c.peers()
                time.sleep(0.5)
            _until_step(seen.run, 2, launcher, folder)
            until((seen.run / "checkpoints/global_step_2/complete").exists)
            c.route("del", b)
            seen.strangers = _ask_all(c, a, b)  # process and answer by address
            stranger = [RAY, "start", f"--address={a.address}:{RAY_PORT}", f"--node-ip-address={c.address}"]
            c.start(folder / "stranger", *stranger, RAY_AUTH_MODE="token", HOME=str(folder / "nowhere")).wait()
            seen.keyless_join = (folder / "stranger").read_text()
            seen.token_holders = {_title(each) for each in a.processes() if _holds_token(each)}
            _until_step(seen.run, len(metrics_of(seen.run)) + 1, launcher, folder)
            seen.steps_at_death = len(metrics_of(seen.run))
            b.die()  # in the midst of a step, far from its checkpoint
            died = time.monotonic()
            seen.code = launcher.wait(timeout=300)
            seen.seconds = time.monotonic() - died
        seen.output = (folder / "train.log").read_text()
        with suppress(AssertionError):  # a test says what is left
            until(lambda: not _of_a_run(map(_title, a.processes())), 60)
        seen.left_on_a = [_title(each) for each in a.processes()]
        until(lambda: not _agents(playing))
        b.come_back()
        join(b, f"--address={a.address}:{RAY_PORT}")
        seen.steps = seen.steps_at_death + 1
        with train(seen.steps) as launcher:
            assert launcher.wait() == 0, (folder / "train.log").read_text()[-3000:]
        yield seen


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _holds_token(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "RAY_AUTH_TOKEN" in process.environ()
    return False


def _of_a_run(titles: Iterable[str]) -> list[str]:
    return [title for title in titles if re.search(r"empo2\.recipe|WorkerDict|vLLM|VLLM", title)]


def _agents(controller: psutil.Process) -> list[psutil.Process]:
    """The processes that play; the controller's own children are what they are forked from."""
    return [agent for child in controller.children() for agent in child.children(recursive=True)]


def _until_step(run: Path, step: int, launcher: psutil.Popen, folder: Path) -> None:
    def there() -> bool:
        assert launcher.poll() is None, (folder / "train.log").read_text()[-3000:]
        return (run / "metrics.jsonl").exists() and len(metrics_of(run)) >= step

    until(there, 1500)


def _ask_all(stranger: Host, *others: Host) -> dict[str, tuple[str, str]]:
    """What each port of the others says to the stranger."""
    listening = {f"{at[0]}:{at[1]}": process for host in others for at, process in host.listening().items()}
    script = str(Path(__file__).with_name("stranger.py"))
    done = subprocess.run(stranger.command(sys.executable, script, *listening), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {at: (listening[at], answer) for at, answer in json.loads(done.stdout).items()}


def test_it_trains_on_both_hosts_and_shows_tips(seen: SimpleNamespace) -> None:
    steps = {line["step"]: line for line in metrics_of(seen.run)}
    assert list(steps) == list(range(1, seen.steps + 1))
    assert steps[2]["empo2/tips_injected_per_call"] > 0
    for step in steps.values():  # both servers sampled, with the weights that both ranks have trained
        assert step["rollout_corr/log_ppl_abs_diff"] < 0.05
    actor = checkpoint_folder(seen.run / "checkpoints", seen.steps) / "actor"
    assert {file.name for file in actor.glob("model_*.pt")} == {f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}


def test_agents_need_the_gateways_port_and_nothing_else(seen: SimpleNamespace) -> None:
    """The second host was out of their reach while two steps were trained."""
    assert seen.peers_of_c == {("10.77.0.1", PORT)}


def test_a_stranger_gets_nothing(seen: SimpleNamespace) -> None:
    assert seen.strangers[f"10.77.0.1:{PORT}"][1] == "401"
    agents: list[str] = []
    for at, (process, answer) in seen.strangers.items():
        host, _, port = at.partition(":")
        if COUNTERS in answer and AGENT_OF_NODE in process:
            agents.append(host)
        elif answer not in ("401", "refused"):
            known = SILENT in process and answer in ("silent", "closed")
            counters = COUNTERS in answer and port in COUNTERS_AT and host == "10.77.0.1"
            assert known or counters, f"{at} {process}: {answer}"
    assert len(agents) == len({*agents})
    for host in ("10.77.0.1", "10.77.0.2"):
        of_host = [said for at, said in seen.strangers.items() if at.startswith(f"{host}:")]
        for name in ("ray::vLLMHttp", "raylet"):
            assert "401" in [answer for who, answer in of_host if name in who], f"{name}: {of_host}"
    assert "token" in seen.keyless_join
    assert [name for name in seen.token_holders if "recipe.cli train" in name]
    assert not [name for name in seen.token_holders if "recipe.cli gateway" in name]


def test_the_run_ends_with_the_host_that_died_and_nothing_is_left(seen: SimpleNamespace) -> None:
    assert seen.code == 1 and seen.seconds < 180
    (line,) = [line for line in seen.output.splitlines() if line.startswith("empo2: error: ")]
    assert "host 10.77.0.2" in line and "has left the Ray cluster" in line
    # The cluster that was there before is still there, without a worker of the run.
    assert [name for name in seen.left_on_a if "gcs_server" in name] and [n for n in seen.left_on_a if "raylet" in n]
    assert not _of_a_run(seen.left_on_a)
