"""Measure the time that the gateway adds to an agent's model calls: agent-lightning's own server and `empo2 gateway`.

Concurrent agents play episodes of 20 turns with always new observations, through real processes, HTTP and the real
embedder, against a model server that answers after a fixed time, or after one drawn for each call, and needs almost no
CPU. One run measures these ways in turn for each number of agents, with their starts spread over one model call:

  no gateway       the agents call the model server: the overhead of this benchmark and of HTTP
  agl-server       agent-lightning's own server
  empo2, untagged  `empo2 gateway`, rollouts without a tag: memory off
  empo2            10,000 tips in memory; every fourth rollout sees tips, the others only count novelty
  empo2, known     the same episodes again: all states are still known, so nothing is embedded
  traced           another `empo2 gateway`, which sends spans (`gateway.traces`)
  traced, known    likewise
  before, ...      that of an older clone (--before)

  added            time of a call at the agent minus the model server's fixed time
  loop, CPU        CPU time of the gateway's event loop, and of the whole process, per call
  embedding        mean time that a search waited for its embedding, as the gateway reports it
  calls/s          from the first call to the last reward; beside it the share of a core that the event loop took:
                   above 90 % the gateway is saturated
  settled          seconds from then until all states were embedded
  lost, late       states whose visit was not counted; searches whose tips came too late
  of plain         calls per second, relative to agl-server
  others           cores used by other processes of this machine: above 0.1, the row is unreliable

At the speed of GPUs: --agents 128 512 --turns 30 --delay 0.3 1.0. With --embedder-ms 34 --cores 16 the embedder sleeps
34 ms for each text, in as many threads as 16 cores give, for machines whose cores are too few for the real one.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import numpy as np
import psutil
from rich.table import Table
from shared import (
    HEADERS,
    KEY,
    ROOT,
    SCOPE,
    Goal,
    empo2_gateway,
    filled_memory,
    free_port,
    report,
    say,
    server,
    turns,
    world_turns,
)

from empo2.recipe.gateway.server_client import Network

TIPS = 10_000
GOAL_AGENTS = 64
NO_GATEWAY, AGL_SERVER, UNTAGGED, TAGGED, KNOWN = "no gateway", "agl-server", "empo2, untagged", "empo2", "empo2, known"
TRACED, TRACED_KNOWN, BEFORE, BEFORE_KNOWN = "traced", "traced, known", "before", "before, known"
NAMES = (NO_GATEWAY, AGL_SERVER, UNTAGGED, TAGGED, KNOWN, TRACED, TRACED_KNOWN, BEFORE, BEFORE_KNOWN)
_CALL_SECONDS = 300
# A token is about 5 bytes of a chat as JSON. Every id has 6 characters, so a prompt's ids are a slice of this.
_PROMPT_IDS = b",".join(b"%d" % (10_000 + i % 30_000) for i in range(30_000))
_REPLY = "take the blue jug and go to the kitchen"


@dataclass(frozen=True)
class Way:
    """A way from the agents to the model server: its URL, its process (None for no gateway), and how to play."""

    name: str
    url: str
    model: str
    pid: int | None = None
    tagged: bool = False


@dataclass
class Played:
    """Milliseconds added to each call; CPU per call in milliseconds; calls per second; the rest as in the table."""

    without_tips: list[float] = field(default_factory=list)
    with_tips: list[float] = field(default_factory=list)
    loop_cpu: float = 0.0
    cpu: float = 0.0
    calls: float = 0.0
    loop_busy: float = 0.0
    settled: float = 0.0
    lost: int = 0
    others: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def all(self) -> list[float]:
        return self.without_tips + self.with_tips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 8 agents, 4 turns of 0.2 s, 500 tips")
    parser.add_argument(
        "--agents", type=int, nargs="+", default=[1, 16, 64, 128], metavar="N", help="concurrent agents"
    )
    parser.add_argument("--turns", type=int, default=20, metavar="N", help="model calls of an episode (default: 20)")
    parser.add_argument(
        "--delay",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="SECONDS",
        help="the model server's time: one (default:"
        " 1), or the least and the most, between which it is drawn for each call",
    )
    parser.add_argument(
        "--embedder-ms", type=float, metavar="MS", help="sleep so long for each text, in the place of the embedder"
    )
    parser.add_argument(
        "--cores", type=int, metavar="N", help="of the machine that --embedder-ms pretends (default: 16)"
    )
    parser.add_argument("--tips", type=int, default=TIPS, metavar="N", help=f"tips in memory (default: {TIPS:,})")
    parser.add_argument(
        "--ways", nargs="+", choices=NAMES, default=NAMES[:-2], metavar="NAME", help=f"of: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="play the ways in turn so often; what traces add is of all rounds but the first, all else is of the first"
        " one, in which states are new (default: 1)",
    )
    parser.add_argument("--before", type=Path, default=ROOT, metavar="FOLDER", help="another clone with its .venv")
    parser.add_argument(
        "--world", action="store_true", help="states of ALFWorld in groups of eight, not drawn ones that are all new"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="settings of `empo2 gateway`")
    options = parser.parse_args()
    if options.quick:
        options.agents, options.turns, options.delay, options.tips = [8], 4, [0.2], 500
    if len(options.delay) > 2 or options.delay != sorted(options.delay):
        parser.error(f"--delay {options.delay}: give one time, or the least and the most")
    if options.cores and not options.embedder_ms:
        parser.error(f"--cores {options.cores}: is for --embedder-ms; the real embedder has this machine's cores")
    with tempfile.TemporaryDirectory() as folder:
        table, goals = asyncio.run(compare(Path(folder), options))
    report(table, goals)


async def compare(folder: Path, options: argparse.Namespace) -> tuple[Table, list[Goal]]:
    delays = " to ".join(f"{delay:g}" for delay in options.delay)
    table = Table(title=f"episodes of {options.turns} calls of {delays} s; milliseconds, and settled in seconds")
    for column in (
        *("agents", "way", "calls", "added p50", "added p99", "loop", "CPU", "embedding"),
        *("calls/s", "loop busy", "settled", "lost", "late", "of plain", "others"),
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    goals = _goals([])
    with _ways(folder, options) as ways:
        async with httpx.AsyncClient(headers=HEADERS, timeout=_CALL_SECONDS, transport=Network()) as client:
            for way in ways:  # wait for the embedder, open connections and the memory
                await play(client, way, 1, argparse.Namespace(turns=2, delay=[0.0], world=False))
            for agents in options.agents:
                rounds: list[dict[str, Played]] = []
                for number in range(options.rounds):
                    rounds.append(rows := {})
                    for way in reversed(ways) if number % 2 else ways:  # so that no way always comes after another
                        say(f"{agents} agents: {way.name}")
                        rows[way.name] = await play(client, way, agents, options)
                        _add_rows(table, agents, way.name, rows)
                    table.add_section()
                if agents == GOAL_AGENTS:
                    goals = _goals(rounds)
    return table, goals


@contextmanager
def _ways(folder: Path, options: argparse.Namespace) -> Iterator[list[Way]]:
    """Start all processes; yield the ways in the order in which they are played."""
    memory = filled_memory(folder, options.tips)
    folders = agl_folder, empo2_folder, traced_folder, old = [
        folder / each for each in ("agl", "empo2", "traced", "old")
    ]
    for each in folders:
        each.mkdir()
    shutil.copy(memory, traced_folder)
    shutil.copy(memory, old)
    shutil.move(memory, empo2_folder)
    say("the processes start")
    model_url, agl_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    model = multiprocessing.get_context("spawn").Process(
        target=serve_model, args=(int(model_url.rpartition(":")[2]), options.delay), daemon=True
    )
    model.start()
    agl_command = [sys.executable, "-m", "agentlightning.server", "host=127.0.0.1", f"key={KEY}"]
    agl_command += [f"port={agl_url.rpartition(':')[2]}", "default_proxy.model_name=smollm2", "hydra.run.dir=."]
    settings = [f"memory.capacity={options.tips}", *options.set]
    told = f"import gateway; gateway.serve_told({options.embedder_ms}, {options.cores or 16})"
    module = ["-c", told] if options.embedder_ms else ["-m", "empo2.recipe.cli"]
    try:
        with (
            server(agl_command, f"{agl_url}/healthz", agl_folder / "log") as agl_pid,
            empo2_gateway(empo2_folder, empo2_folder / memory.name, *settings, module=module) as (url, pid),
            empo2_gateway(
                traced_folder, traced_folder / memory.name, f"gateway.traces={model_url}", *settings, module=module
            ) as (traced_url, traced_pid),
            empo2_gateway(old, old / memory.name, *settings, module=module, clone=options.before) as (old_url, old_pid),
        ):
            name = httpx.get(f"{url}/empo2/state", headers=HEADERS).json()["model"]
            for gateway, served in (agl_url, "smollm2"), (url, name), (traced_url, name), (old_url, name):
                register = [{"model": served, "endpoint": f"{model_url}/v1"}]
                httpx.post(f"{gateway}/api/models", json=register, headers=HEADERS).raise_for_status()
            ways = [
                Way(NO_GATEWAY, model_url, "smollm2"),
                Way(AGL_SERVER, agl_url, "smollm2", agl_pid),
                Way(UNTAGGED, url, name, pid),
                Way(TAGGED, url, name, pid, tagged=True),
                Way(KNOWN, url, name, pid, tagged=True),
                Way(TRACED, traced_url, name, traced_pid, tagged=True),
                Way(TRACED_KNOWN, traced_url, name, traced_pid, tagged=True),
                Way(BEFORE, old_url, name, old_pid, tagged=True),
                Way(BEFORE_KNOWN, old_url, name, old_pid, tagged=True),
            ]
            yield [way for way in ways if way.name in options.ways]
    finally:
        model.terminate()
        model.join()


async def play(client: httpx.AsyncClient, way: Way, agents: int, options: argparse.Namespace) -> Played:
    """Play one episode with each agent, started within a call's longest time; the same for every way."""
    count, delay = options.turns, options.delay[-1]
    rollouts = [await _create(client, way, agent) for agent in range(agents)]
    episodes = [
        world_turns(agent // 8, agent, count) if options.world else turns(random.Random(f"{agents} {agent}"), count)
        for agent in range(agents)
    ]
    played = Played()
    before, others = _cpu_seconds(way.pid), _others_cpu_seconds()
    started = time.perf_counter()
    await asyncio.gather(
        *(
            _episode(client, way, rollout, agent, texts, played, start=delay * agent / agents)
            for agent, (rollout, texts) in enumerate(zip(rollouts, episodes, strict=True))
        )
    )
    seconds = time.perf_counter() - started
    calls = agents * count
    played.calls, played.others = calls / seconds, (_others_cpu_seconds() - others) / seconds
    played.loop_busy = (_cpu_seconds(way.pid)[0] - before[0]) / seconds
    if way.tagged:
        ended = time.perf_counter()
        settle = f"{way.url}/empo2/settle"
        while (await client.post(settle)).raise_for_status().json()["late"]:
            pass  # it answers within 30 seconds
        played.settled = time.perf_counter() - ended
        drained = await client.post(f"{way.url}/empo2/drain", json={"timeout": _CALL_SECONDS})
        played.metrics = drained.raise_for_status().json()
        if played.metrics["empo2/reflections_failed"] or played.metrics.get("empo2/spans_lost"):
            raise RuntimeError(f"reflections failed or spans were lost, so this is no measurement: {played.metrics}")
        for rollout in rollouts:
            found = await client.get(f"{way.url}/api/rollouts/{rollout}/events", params={"event_type": "empo2_call"})
            counted = [event["data"].get("visits") for event in found.raise_for_status().json()]
            played.lost += count - sum(visits is not None for visits in counted)
    after = _cpu_seconds(way.pid)
    played.loop_cpu, played.cpu = (1000 * (end - begin) / calls for begin, end in zip(before, after, strict=True))
    if way.pid is not None:
        for rollout in rollouts:  # as the trainer does
            (await client.delete(f"{way.url}/api/rollouts/{rollout}")).raise_for_status()
    return played


async def _create(client: httpx.AsyncClient, way: Way, agent: int) -> str:
    if way.pid is None:
        return ""
    memory, update = agent % 4 == 0, "off-policy" if agent % 12 else "on-policy"
    tag = {
        "rollout_mode": "memory" if memory else "no-memory",
        "update_mode": update if memory else "on-policy",
        "scope": SCOPE,
    }
    body = [{"input": {}, "metadata": {"empo2": tag} if way.tagged else {}}]
    created = await client.post(f"{way.url}/api/rollouts", json=body)
    rollout = created.raise_for_status().json()[0]["rollout_id"]
    await _patch(client, way, rollout, "running")
    return rollout


async def _patch(client: httpx.AsyncClient, way: Way, rollout: str, state: str) -> None:
    patched = await client.patch(f"{way.url}/api/rollouts/{rollout}", json={"status": {"state": state}})
    patched.raise_for_status()


async def _episode(
    client: httpx.AsyncClient,
    way: Way,
    rollout: str,
    agent: int,
    texts: list[str],
    played: Played,
    start: float,
) -> None:
    base = f"{way.url}/v1" if way.pid is None else f"{way.url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1"
    added = played.with_tips if way.tagged and agent % 4 == 0 else played.without_tips
    messages = [{"role": "system", "content": "You act in a small text world. Reply with one action."}]
    await asyncio.sleep(start)
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": way.model, "messages": messages, "max_tokens": 32}
        sent = time.perf_counter()
        answer = await client.post(f"{base}/chat/completions", json=body)
        ended = time.perf_counter()
        reply = answer.raise_for_status().json()
        added.append(1000 * (ended - sent - float(reply["id"])))
        messages.append(reply["choices"][0]["message"])
    if way.pid is not None:
        event = {"event_type": "reward", "data": {"value": float(agent % 11) * 10}}
        posted = await client.post(f"{way.url}/api/rollouts/{rollout}/attempt/0/events", json=event)
        posted.raise_for_status()
        await _patch(client, way, rollout, "succeeded")


def _cpu_seconds(pid: int | None) -> tuple[float, float]:
    """Return the CPU time of a process so far: of its main thread, which runs the event loop, and of all threads."""
    if pid is None:
        return 0.0, 0.0
    threads = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}
    return threads[pid], sum(threads.values())


def _others_cpu_seconds() -> float:
    """Return the CPU time so far of all processes except this one and its children, plus time stolen by the host."""
    times = psutil.cpu_times()
    busy = times.user + times.system + times.irq + times.softirq + times.steal
    own = psutil.Process()
    return busy - sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def serve_told(milliseconds: float, cores: int) -> None:
    """Run ``empo2 gateway`` with an embedder that sleeps for each text, as on a machine of so many cores."""
    from empo2.memory import batching
    from empo2.recipe.cli import main
    from empo2.recipe.gateway import memory

    class Told:
        name, dimension = "all-MiniLM-L6-v2", 384

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def embed(self, texts: Sequence[str]) -> np.ndarray:
            time.sleep(len(texts) * milliseconds / 1000)
            vectors = np.array([np.random.default_rng(crc32(text.encode())).normal(size=384) for text in texts])
            return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    os.sched_getaffinity = lambda _: set(range(cores))
    assert batching.cpu_threads() == min(8, max(1, cores // 4))
    memory.SentenceEmbedder = Told
    main()


def serve_model(port: int, delays: list[float]) -> None:
    """Run a cheap model server: `/tokenize` answers at once, a chat completion after a time, which is its id.

    It takes spans, too, and forgets them.
    """
    import uvicorn

    generator = random.Random(0)

    tokens = _REPLY.split()
    ids = b",".join(b"%d" % i for i in range(10_000, 10_000 + len(tokens)))
    log_probs = ",".join(f'{{"token": "{token}", "logprob": -0.5, "top_logprobs": []}}' for token in tokens).encode()
    completion = (
        b'{"id": "%%b", "object": "chat.completion", "created": 0, "model": "smollm2", "choices": [{"index": 0,'
        b' "finish_reason": "stop", "message": {"role": "assistant", "content": "%b"}, "token_ids": [%b],'
        b' "logprobs": {"content": [%b]}}], "prompt_token_ids": [%%b]}' % (_REPLY.encode(), ids, log_probs)
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        prompt_ids = _PROMPT_IDS[: 6 * (size // 5) - 1]
        if scope["path"] == "/v1/traces":
            body = b""
        elif scope["path"] == "/tokenize":
            body = b'{"tokens": [%b]}' % prompt_ids
        else:
            delay = generator.uniform(delays[0], delays[-1])
            await asyncio.sleep(delay)
            body = completion % (b"%.6f" % delay, prompt_ids)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="off", timeout_keep_alive=300)


def _add_rows(table: Table, agents: int, name: str, rows: dict[str, Played]) -> None:
    played = rows[name]
    plain = rows[AGL_SERVER].calls if AGL_SERVER in rows else None
    kinds = [("", played.without_tips), (": calls with tips", played.with_tips)]
    for number, (kind, added) in enumerate((kind, added) for kind, added in kinds if added):
        cells = [""] * 10
        if number == 0:
            embedding = played.metrics.get("empo2/embedding_ms_per_search")
            cells = [
                f"{played.loop_cpu:.2f}" if played.cpu else "-",
                f"{played.cpu:.2f}" if played.cpu else "-",
                "-" if embedding is None else f"{embedding:.1f}",
                f"{played.calls:.1f}",
                f"{played.loop_busy:.0%}" if played.cpu else "-",
                *(
                    (f"{played.settled:.1f}", f"{played.lost}", f"{played.metrics['empo2/memory_late']:.0f}")
                    if played.metrics
                    else "---"
                ),
                "-" if plain is None else f"{played.calls / plain:.3f}",
                f"{played.others:.2f}",
            ]
        p50, p99 = np.percentile(added, (50, 99))
        table.add_row(str(agents), name + kind, str(len(added)), f"{p50:.1f}", f"{p99:.1f}", *cells)


def _goals(rounds: Sequence[dict[str, Played]]) -> list[Goal]:
    """Return the goals of the rounds with GOAL_AGENTS agents; each is measured if its ways were played."""
    beside = f"added over agl-server beside the embedding (known, with tips), {GOAL_AGENTS} agents"

    def of(measure: Callable[[dict[str, Played]], np.ndarray], *ways: str) -> np.ndarray | None:
        """Return a measure of the first round, or None if one of the ways was not played."""
        return measure(rounds[0]) if rounds and set(ways) <= set(rounds[0]) else None

    plain = of(
        lambda rows: _p50_p99(rows[KNOWN].with_tips) - _p50_p99(rows[AGL_SERVER].without_tips), KNOWN, AGL_SERVER
    )
    new = of(lambda rows: _p50_p99(rows[TAGGED].with_tips) - _p50_p99(rows[KNOWN].with_tips), TAGGED, KNOWN)
    rate = of(lambda rows: np.array([rows[TAGGED].calls / rows[AGL_SERVER].calls]), TAGGED, AGL_SERVER)
    traces = of(lambda _: _added_by_traces(rounds[1:] or rounds), KNOWN, TRACED_KNOWN)
    return [
        _most(f"{beside}: p50", plain, 0, 5),
        _most(f"{beside}: p99", plain, 1, 20),
        _most(f"embedding (with tips, new less known), {GOAL_AGENTS} agents: p50", new, 0, 15),
        Goal(
            f"calls per second at least 0.98 of agl-server's, {GOAL_AGENTS} agents",
            None if rate is None else f"{rate[0]:.3f}",
            rate is not None and bool(rate[0] >= 0.98),
        ),
        _most(f"added by traces (known, all calls), {GOAL_AGENTS} agents: p50", traces, 0, 1),
        _most(f"added by traces (known, all calls), {GOAL_AGENTS} agents: p99", traces, 1, 1),
    ]


def _added_by_traces(rounds: Sequence[dict[str, Played]]) -> np.ndarray:
    """Return what traces add to the p50 and p99 of the calls of all rounds, and say its interval over the rounds."""

    def added(chosen: Sequence[dict[str, Played]]) -> np.ndarray:
        off, on = (_p50_p99([call for rows in chosen for call in rows[way].all]) for way in (KNOWN, TRACED_KNOWN))
        return on - off

    generator = random.Random(0)
    drawn = [added(generator.choices(rounds, k=len(rounds))) for _ in range(1000)]
    for name, low, high in zip(("p50", "p99"), *np.percentile(drawn, (2.5, 97.5), axis=0), strict=True):
        say(f"added by traces, {name}, 95 % of {len(rounds)} rounds drawn again: {low:.2f} to {high:.2f} ms")
    return added(rounds)


def _p50_p99(milliseconds: Sequence[float]) -> np.ndarray:
    return np.percentile(milliseconds, (50, 99))


def _most(text: str, found: np.ndarray | None, place: int, limit: float) -> Goal:
    return Goal(
        f"{text} at most {limit:g} ms",
        None if found is None else f"{found[place]:.2f} ms",
        found is not None and bool(found[place] <= limit),
    )


if __name__ == "__main__":
    main()
