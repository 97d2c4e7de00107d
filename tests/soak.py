"""Play thousands of episodes through `empo2 gateway` while things break, and count what is lost.

The gateway is the real one, a process started as `empo2 train` starts it, with traces, which the model server takes and
forgets; every second agent has a trace of its own. Stand-ins are the tests' model server in a process of its own,
agents as coroutines, and a trainer and controller that create, end, read and delete rollouts as the real ones do. Each
agent plays in a world that is a process. These break, each at a rate of its own (0 for never):

  of a model request  --errors (status 5xx), --resets, --halves (half of an answer's body), --hangs (no answer)
  of an episode       --agent-kills (the agent hangs up in mid call and is gone), --world-deaths (its world is killed)
                      --hostile (the agent also does what it may not, says what is no ordinary text, and floods)
  of a step           --gateway-kills (kill -9 in mid step; it is started again and the step is played anew),
                      --full-disks (for 3 seconds no file of the gateway can grow)

A step is one episode of each agent. Something is acknowledged once its sender has been told so: a call by its answer,
a reward by its response, tips and visits of a step by the answer to `drain`. What the gateway itself reports as failed
was never acknowledged. Worst stall: the longest wait for /healthz, asked for 20 times a second while the gateway is up.

Ctrl-C ends it after the current step. Exit code: 0 if all goals are met, 1 otherwise. The figures depend on what else
the machine does: `load` is its average.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import resource
import sqlite3
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.shared import Goal, observation, report
from empo2.recipe.launcher.processes import Processes, running
from empo2.recipe.network import bind
from empo2.recipe.protocol import Keys

from .processes import marked
from .recipe.model_server import MODEL, Body, ModelServer

AGENTS_KEY, ADMIN_KEY, MARK = "soak-agents", "soak-admin", "EMPO2_TEST_MARK"
TURNS, SCOPES, OBSERVATIONS = 3, 8, 200
MB = 2**20
_TRAINERS_SECONDS = 300  # as the trainer waits for the gateway; agents have --patience
_ATTEMPTS = 5
_START_UP_SECONDS = 5  # over which the agents of a step start; a controller starts processes, more slowly than that
_FULL_SECONDS = 3
_PROBE_SECONDS = 0.05
_START_SECONDS = 300
_SHORTEST_LIFE = 1000  # episodes after the warm-up; the growth over fewer is noise
_WARM_UP = 0.3  # of the samples of one life of the gateway; caches and connections fill first
_MODES = (("no-memory", "on-policy"), ("memory", "on-policy"), ("memory", "off-policy"))
_SETTINGS = (
    *("reflection.timeout=5", "memory.capacity=500", "algorithm.novelty_similarity=0.98"),
    "gateway.max_rollout=0.5",  # what a flood of a hostile agent meets
)
_ODD_TEXTS = (
    "9" * 4301,
    "[" * 3000,
    '{"a":' * 2000,
    '[{"type": "image_url", "image_url": {"url": 7}}]',
    "\x1b[2J\x9b\u202e",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=10_000, metavar="N", help="episodes in all (default: 10,000)")
    parser.add_argument("--agents", type=int, default=256, metavar="N", help="agents that play at once (default: 256)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what breaks when (default: 0)")
    parser.add_argument(
        "--patience", type=float, default=20, metavar="SECONDS", help="of an agent with a model call (default: 20)"
    )
    for name, default in _RATES.items():
        parser.add_argument(f"--{name}", type=float, default=default, metavar="RATE", help=f"default: {default:g}")
    options = parser.parse_args()
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    with tempfile.TemporaryDirectory() as folder:
        soak = asyncio.run(run(Path(folder), options))
    own = {os.getpid(), os.getppid()}
    left = [process for process in marked(mark) if process.pid not in own and not _is_tracker(process)]
    goals = soak.goals(len(left))
    report(soak.table(len(left)), goals)
    return 0 if all(goal.met or goal.found is None for goal in goals) else 1


_RATES = {
    "errors": 0.01,
    "resets": 0.005,
    "halves": 0.005,
    "hangs": 0.001,
    "agent-kills": 0.02,
    "world-deaths": 0.02,
    "hostile": 0.1,
    "gateway-kills": 0.1,
    "full-disks": 0.1,
}


def _is_tracker(process: psutil.Process) -> bool:
    """Return True for the helper that multiprocessing keeps until this process ends."""
    with suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return True


class WorldDied(Exception):
    pass


class Killed(Exception):
    pass


class Unanswered(Exception):
    pass


@dataclass
class Played:
    """One episode: what was acknowledged to its agent, and how it ended."""

    rollout: str
    calls: int = 0
    reward: float | None = None
    succeeded: bool = False


@dataclass
class Soak:
    """The gateway's process, its clients, and all counts."""

    options: argparse.Namespace
    folder: Path
    url: str
    model_url: str
    processes: Processes
    listener: int
    counts: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    memory: list[list[tuple[int, float]]] = field(default_factory=list)  # of each life: (episodes so far, MB)
    down: list[tuple[float, float]] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    probe_failures: int = 0
    seconds: float = 0.0
    load: float = 0.0
    tips: int = 0  # in the memory file after the last step
    visits: int = 0

    # The gateway

    def start_gateway(self) -> None:
        command = [sys.executable, "-m", "empo2.recipe.cli", "gateway", "--profile", "cpu", "--fd", str(self.listener)]
        traces = f"gateway.traces={self.model_url.removesuffix('/v1')}"
        command += ["--memory", str(self.memory_file), traces, *_SETTINGS]
        self.processes.start("gateway", command, inherit=(self.listener,))
        self.memory.append([])

    @property
    def memory_file(self) -> Path:
        return self.folder / "memory.sqlite"

    def gateway(self) -> psutil.Process:
        """Return the gateway's own process, not its guard's."""
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                command = process.cmdline()
                if "--fd" in command and not any("process_guard" in word for word in command):
                    return process
        raise RuntimeError("the gateway is gone:\n" + (self.folder / "gateway.log").read_text()[-2000:])

    async def wait_for_gateway(self, admin: httpx.AsyncClient) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self.processes.check()
            with suppress(httpx.HTTPError):
                if (await admin.get("/healthz", timeout=5)).status_code == 200:
                    break
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not answer after {_START_SECONDS} s")
            await asyncio.sleep(0.1)
        register = [{"model": MODEL, "endpoint": self.model_url}]
        (await admin.post("/api/models", json=register)).raise_for_status()

    async def kill_gateway(self, admin: httpx.AsyncClient) -> None:
        began = time.monotonic()
        self.gateway().kill()
        await asyncio.sleep(0.2)  # its guard reports and ends
        self.start_gateway()
        await self.wait_for_gateway(admin)
        self.down.append((began, time.monotonic()))
        self.counts["gateway kills"] += 1

    async def fill_disk(self) -> None:
        """Let no file of the gateway grow for a while."""
        pid = self.gateway().pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        self.counts["full disks"] += 1
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            await asyncio.sleep(_FULL_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    # One step

    async def step(self, number: int, admin: httpx.AsyncClient, agents: httpx.AsyncClient) -> None:
        """Play a step until it is read by the trainer; a killed gateway takes all of the step's rollouts with it."""
        plan = random.Random(f"{self.options.seed} {number}")
        kill = plan.random() < self.options.gateway_kills
        full = plan.random() < self.options.full_disks
        while True:
            created = await self.create(number, admin, agents)
            seed = f"{self.options.seed} {number} {kill}"  # a step that is played anew breaks in other places
            playing = [
                asyncio.create_task(self.play(played, index, agents, random.Random(f"{seed} {index}")))
                for index, played in enumerate(created)
            ]
            disk = asyncio.create_task(self.fill_disk()) if full else None
            if not kill:
                await asyncio.gather(*playing)
                await self.read(created, admin)
                if disk:
                    await disk
                return
            kill, full = False, False
            wanted = plan.uniform(0.1, 0.9) * len(playing)
            while sum(task.done() for task in playing) < wanted:
                await asyncio.sleep(0.02)
            for task in [*playing, *([disk] if disk else [])]:
                task.cancel()  # their calls are under way when the gateway is killed
            await self.kill_gateway(admin)
            await asyncio.gather(*playing, *([disk] if disk else []), return_exceptions=True)
            self.check_file(tips=0, visits=0, reported=False)
            self.counts["steps played anew"] += 1

    async def create(self, step: int, admin: httpx.AsyncClient, agents: httpx.AsyncClient) -> list[Played]:
        body = []
        for agent in range(self.options.agents):
            mode, update = _MODES[agent % 3]
            tag = {"rollout_mode": mode, "update_mode": update, "scope": f"scope {(step + agent // 3) % SCOPES}"}
            body.append({"input": {}, "metadata": {"empo2": tag}})
        created = (await admin.post("/api/rollouts", json=body)).raise_for_status().json()
        played = [Played(rollout["rollout_id"]) for rollout in created]
        for each in played:
            await self.patch(each, "running", agents)
        return played

    async def patch(self, played: Played, state: str, agents: httpx.AsyncClient) -> None:
        answer = await agents.patch(f"/api/rollouts/{played.rollout}", json={"status": {"state": state}})
        answer.raise_for_status()

    async def play(self, played: Played, index: int, agents: httpx.AsyncClient, plan: random.Random) -> None:
        """Play one episode as an agent, and end its rollout as the controller does."""
        dies_at = plan.randrange(TURNS) if plan.random() < self.options.world_deaths else None
        killed_at = plan.randrange(TURNS) if plan.random() < self.options.agent_kills else None
        is_hostile = plan.random() < self.options.hostile
        odd = plan.choice(_ODD_TEXTS) if is_hostile else ""
        await asyncio.sleep(plan.uniform(0, _START_UP_SECONDS))
        try:
            world = await asyncio.create_subprocess_exec(
                "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                messages: list[Body] = [{"role": "system", "content": "You act in a small text world."}]
                for turn in range(TURNS):
                    if turn == dies_at:
                        world.kill()
                        self.counts["worlds killed"] += 1
                    text = observation(random.Random((index + turn * 7) % OBSERVATIONS))
                    said = await _observe(world, text) + (odd if turn == 0 else "")
                    messages.append({"role": "user", "content": said})
                    if turn == 0 and is_hostile:
                        await self.misbehave(played, agents)
                    if turn == killed_at:
                        self.counts["agents killed"] += 1
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self.ask(played, messages, agents), 0.05)
                        raise Killed
                    messages.append(await self.ask(played, messages, agents))
                score = float(index % 11)
                event = {"event_type": "reward", "data": {"value": score}}
                await _until_answered(lambda: agents.post(_events_of(played), json=event))
                played.reward = score
                if is_hostile:
                    await self.flood(played, agents)
                played.succeeded = True
            finally:
                with suppress(ProcessLookupError):
                    world.kill()
                await world.communicate()
        except (WorldDied, Killed, Unanswered) as reason:
            self.counts[f"failed: {type(reason).__name__}"] += 1
        status = {"state": "succeeded" if played.succeeded else "failed"}
        status |= {"error_message": "\x1b]0;mine\x07\x9b2J"} if is_hostile else {}
        await _until_answered(lambda: agents.patch(f"/api/rollouts/{played.rollout}", json={"status": status}))
        if is_hostile and played.succeeded:
            late = {"event_type": "reward", "data": {"value": 99.0}}
            await self.refused(played, agents, [(_events_of(played), late)])

    async def misbehave(self, played: Played, agents: httpx.AsyncClient) -> None:
        """Post what only the gateway writes, and make calls that would hold the model server up."""
        forged: Body = {"response": {"prompt_token_ids": [1], "choices": [{"token_ids": [10**6]}]}}
        posts = [{"event_type": kind, "data": data} for kind, data in (("model_request", forged), ("empo2_call", {}))]
        messages = [{"role": "user", "content": "hello"}]
        asked = [{"n": 64}, {"structured_outputs": {"regex": "(a|b)" * 20_000}}, {"chat_template": "{{ 1 }}"}]
        image = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
        calls = [{"messages": messages} | more for more in asked]
        calls += [{"messages": [{"role": "user", "content": [image]}]}]
        chat = _chat_of(played)
        await self.refused(played, agents, [(_events_of(played), body) for body in posts] + [(chat, c) for c in calls])

    async def flood(self, played: Played, agents: httpx.AsyncClient) -> None:
        """Send events until they are too much."""
        event = {"event_type": "note", "data": {"text": "x" * 200_000}}
        for _ in range(4):
            with suppress(httpx.HTTPError):
                await agents.post(_events_of(played), json=event, headers=_own(played), timeout=self.options.patience)
        await self.refused(played, agents, [(_events_of(played), event)])

    async def refused(self, played: Played, agents: httpx.AsyncClient, requests: list[tuple[str, Body]]) -> None:
        """Send, with the key of the rollout, what the gateway must refuse."""
        for url, body in requests:
            with suppress(httpx.HTTPError):
                answer = await agents.post(url, json=body, headers=_own(played), timeout=self.options.patience)
                self.counts["hostile requests refused"] += answer.status_code in (400, 403, 410, 413)
                self.lost["hostile requests taken"] += answer.status_code == 200

    async def ask(self, played: Played, messages: list[Body], agents: httpx.AsyncClient) -> Body:
        body = {"model": "any", "messages": messages, "max_tokens": 8}
        own = {"traceparent": f"00-{played.rollout[::-1]}-{1:016x}-01"} if int(played.rollout, 16) % 2 else {}
        send = partial(agents.post, _chat_of(played), json=body, headers=own, timeout=self.options.patience)
        answer = await _until_answered(send)
        played.calls += 1
        self.counts["calls acknowledged"] += 1
        message = answer.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    async def read(self, created: list[Played], admin: httpx.AsyncClient) -> None:
        """Read, compare and delete the step's rollouts, then drain, as the trainer does."""
        visits = 0
        for played in created:
            (await admin.post(f"/empo2/rollouts/{played.rollout}/settle")).raise_for_status()
            events = (await admin.get(f"/api/rollouts/{played.rollout}/events")).raise_for_status().json()
            calls = [event["data"] for event in events if event["event_type"] == "empo2_call"]
            visits += sum(call.get("visits") is not None for call in calls)
            self.lost["calls"] += max(0, played.calls - len(calls))
            self.counts["calls recorded"] += len(calls)
            if played.reward is not None:
                rewards = [event["data"]["value"] for event in events if event["event_type"] == "reward"]
                self.counts["rewards acknowledged"] += 1
                self.lost["rewards"] += played.reward not in rewards
            (await admin.delete(f"/api/rollouts/{played.rollout}")).raise_for_status()
        drained = (await admin.post("/empo2/drain", json={"timeout": 30})).raise_for_status().json()
        written, failures = int(drained["empo2/tips_written"]), int(drained["empo2/memory_failures"])
        self.counts["tips acknowledged"] += written
        self.counts["tips refused or failed, reported"] += int(
            drained["empo2/tips_refused"] + drained["empo2/reflections_failed"]
        )
        self.counts["failures of the memory, reported"] += failures
        self.counts["spans lost, reported"] += int(drained["empo2/spans_lost"])
        self.counts["episodes"] += len(created)
        self.counts["episodes that succeeded"] += sum(played.succeeded for played in created)
        self.check_file(tips=written, visits=visits, reported=failures > 0)
        self.memory[-1].append((self.counts["episodes"], self.gateway().memory_info().rss / MB))

    def check_file(self, *, tips: int, visits: int, reported: bool) -> None:
        """Compare the memory file with what was there and what was acknowledged since; oldest tips may be dropped."""
        now_tips, now_visits = _in_file(self.memory_file)
        self.lost["tips"] += max(0, self.tips + tips - now_tips)
        missing = max(0, self.visits + visits - now_visits)
        self.lost["visits" if not reported else "visits, reported"] += missing
        self.counts["visits acknowledged"] += max(0, visits - (missing if reported else 0))
        self.tips, self.visits = now_tips, now_visits

    # The result

    def growth(self) -> float | None:
        """Return the growth of the gateway's resident memory in MB per 10,000 episodes, by all of its lives' slopes."""
        slopes, weights = [], []
        for life in self.memory:
            samples = np.array(life[int(len(life) * _WARM_UP) :])
            if len(samples) and np.ptp(samples[:, 0]) >= _SHORTEST_LIFE:
                slopes.append(np.polyfit(samples[:, 0], samples[:, 1], 1)[0] * 10_000)
                weights.append(np.ptp(samples[:, 0]) ** 2)
        return float(np.average(slopes, weights=weights)) if slopes else None

    def table(self, left: int) -> Table:
        counts, lost, growth = self.counts, self.lost, self.growth()
        table = Table(title=f"{counts['episodes']:,} episodes, {self.options.agents} agents, {self.seconds:.0f} s")
        for column in ("", "acknowledged", "lost"):
            table.add_column(column, justify="right" if column else "left")
        for name in ("calls", "rewards", "tips", "visits"):
            table.add_row(name, f"{counts[f'{name} acknowledged']:,}", f"{lost[name]:,}")
        table.add_section()
        for name in (
            *("episodes that succeeded", "failed: WorldDied", "failed: Killed", "failed: Unanswered"),
            *(
                "hostile requests refused",
                "agents killed",
                "worlds killed",
                "gateway kills",
                "steps played anew",
                "full disks",
            ),
            *("tips refused or failed, reported", "failures of the memory, reported", "spans lost, reported"),
        ):
            table.add_row(name, f"{counts[name]:,}", "")
        table.add_row("visits not stored, reported", f"{lost['visits, reported']:,}", "")
        table.add_section()
        table.add_row("growth of the gateway, MB / 10,000 episodes", "-" if growth is None else f"{growth:.1f}", "")
        table.add_row("gateway at the end, MB", f"{self.memory[-1][-1][1]:.0f}" if self.memory[-1] else "-", "")
        table.add_row("worst stall of /healthz, s", f"{max(self.stalls, default=0):.2f}", "")
        table.add_row("stalls above 1 s", f"{sum(seconds > 1 for seconds in self.stalls)}", "")
        table.add_row("/healthz not answered while up", f"{self.probe_failures}", "")
        table.add_row("processes left", f"{left}", "")
        table.add_row("load", f"{self.load:.1f}", "")
        return table

    def goals(self, left: int) -> list[Goal]:
        lost = {name: count for name, count in self.lost.items() if count and name != "visits, reported"}
        growth, stall = self.growth(), max(self.stalls, default=0)
        return [
            Goal("nothing acknowledged is lost", str(lost) if lost else "nothing", not lost),
            Goal("no stall above 1 s", f"{stall:.2f} s", stall <= 1 and not self.probe_failures),
            Goal(
                "at most 20 MB of growth per 10,000 episodes",
                None if growth is None else f"{growth:.1f} MB",
                growth is None or growth <= 20,
            ),
            Goal("no process is left", str(left), left == 0),
        ]


async def _observe(world: asyncio.subprocess.Process, text: str) -> str:
    """Let the world, which is `cat`, say a text.

    Raises:
        WorldDied: it has ended.
    """
    assert world.stdin and world.stdout
    with suppress(ConnectionError):
        world.stdin.write(f"{text}\n".encode())
        await world.stdin.drain()
        if line := await world.stdout.readline():
            return line.decode().rstrip("\n")
    raise WorldDied


def _events_of(played: Played) -> str:
    return f"/api/rollouts/{played.rollout}/attempt/0/events"


def _chat_of(played: Played) -> str:
    return f"/proxy/rollout/{played.rollout}/attempt/0/mode/train/openai/v1/chat/completions"


def _own(played: Played) -> dict[str, str]:
    """Return the header of an agent that has its rollout's key and no other."""
    return {"Authorization": f"Bearer {Keys(AGENTS_KEY, ADMIN_KEY).of_rollout(played.rollout)}"}


async def _until_answered(send: Any) -> httpx.Response:
    """Return the answer with status 200; try again after errors, as OpenAI's client does.

    Raises:
        Unanswered: after the last attempt.
    """
    for attempt in range(_ATTEMPTS):
        with suppress(httpx.HTTPError):
            answer = await send()
            if answer.status_code in (200, 201):
                return answer
        await asyncio.sleep(0.1 * 2**attempt)
    raise Unanswered


def _in_file(file: Path) -> tuple[int, int]:
    """Return the numbers of tips ever stored and of visits, as another process sees them; (0, 0) without a file."""
    if not file.exists():
        return 0, 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)) as db:
        tips = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'tips'").fetchone()  # ids are never reused
        visits = db.execute("SELECT sum(visits) FROM states").fetchone()
        return (tips[0] if tips else 0), (visits[0] or 0)


async def run(folder: Path, options: argparse.Namespace) -> Soak:
    """Play all episodes; return the counts. Nothing that was started runs any more then."""
    started = time.monotonic()
    environment = {**os.environ, "EMPO2_KEY": AGENTS_KEY, "EMPO2_ADMIN_KEY": ADMIN_KEY}
    with (
        model_server(options) as model_url,
        bind("127.0.0.1", 0) as listener,
        running(folder, environment) as processes,
    ):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        soak = Soak(options, folder, url, model_url, processes, listener.fileno())
        async with _client(url, ADMIN_KEY) as admin, _client(url, AGENTS_KEY) as agents:
            soak.start_gateway()
            await soak.wait_for_gateway(admin)
            with probing(soak), _progress() as bar:
                task = bar.add_task("", total=options.episodes)
                for number in range(-(-options.episodes // options.agents)):
                    try:
                        processes.check()
                    except KeyboardInterrupt:
                        break
                    await soak.step(number, admin, agents)
                    lost = sum(soak.lost.values()) - soak.lost["visits, reported"]
                    said = f"{lost} lost, {soak.counts['gateway kills']} gateways killed"
                    bar.update(task, completed=soak.counts["episodes"], description=said)
        soak.seconds, soak.load = time.monotonic() - started, os.getloadavg()[1]
    with closing(sqlite3.connect(soak.memory_file)) as db:
        soak.lost["damaged pages"] += db.execute("PRAGMA integrity_check").fetchone() != ("ok",)
    return soak


def _client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_TRAINERS_SECONDS, limits=limits)


def _progress() -> Progress:
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("episodes"), *columns, TextColumn("{task.description}"))


@contextmanager
def model_server(options: argparse.Namespace) -> Iterator[str]:
    """Run the tests' model server in a process of its own; yield its URL."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_model, args=(there, options), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(10)
        process.kill()
        process.join()


def serve_model(pipe: Connection, options: argparse.Namespace) -> None:
    """Answer with a few words, each reflection with a sentence of its own, and break at the given rates."""
    generator = random.Random(options.seed + 1)
    faults = {500: options.errors, "reset": options.resets, "half": options.halves, "hang": options.hangs}
    said = iter(range(sys.maxsize))

    def fault(path: str, body: Body) -> Any:
        drawn = generator.choices([*faults, None], [*faults.values(), max(0, 1 - sum(faults.values()))])[0]
        return None if drawn == "hang" and path == "/tokenize" else drawn  # the gateway waits a minute for it

    def reply(body: Body) -> str:
        if "The episode is over" in str(body["messages"][-1].get("content")):
            return f"Episode {next(said)} looked into the kitchen first and found the lamp there."
        return generator.choice(("go north", "take the lamp", "open the door", "wait"))

    server = ModelServer(reply=reply, fault=fault, seen=deque(maxlen=1))
    with server.serve(), suppress(EOFError):
        pipe.send(server.url)
        pipe.recv()


@contextmanager
def probing(soak: Soak) -> Iterator[None]:
    """Ask for /healthz from a process of its own; at the end add the waits while the gateway was up."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=probe, args=(there, f"{soak.url}/healthz"), daemon=True)
    process.start()
    there.close()
    try:
        yield
    finally:
        here.send(None)
        probes: list[tuple[float, float, bool]] = here.recv() if here.poll(30) else []
        process.join(10)
        process.kill()
        process.join()
        up = [
            (began, seconds, answered)
            for began, seconds, answered in probes
            if not any(began < end and began + seconds > start for start, end in soak.down)
        ]
        soak.stalls += [seconds for _, seconds, _ in up]
        soak.probe_failures += sum(not answered for _, _, answered in up)


def probe(pipe: Connection, url: str) -> None:
    """Until told to stop, note start, duration and success of each request that took long or failed."""
    noted: list[tuple[float, float, bool]] = []
    with httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while not pipe.poll(_PROBE_SECONDS):
            began = time.monotonic()
            try:
                answered = client.get(url).status_code == 200
            except httpx.HTTPError:
                answered = False
            seconds = time.monotonic() - began
            if not answered or seconds > 0.05:
                noted.append((began, seconds, answered))
    pipe.send(noted)


if __name__ == "__main__":
    sys.exit(main())
