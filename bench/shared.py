"""Shared by the benchmarks: their report, their processes, and episodes of seeded texts."""

import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from empo2.agents.alfworld.environment import Environment
from empo2.agents.alfworld.tasks import Episode, game_of, load
from empo2.memory import MemoryStore, SentenceEmbedder, Step
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.serving import vllm_command

ROOT = Path(__file__).parents[1]
KEY = "bench"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SCOPE = "bench"
_START_SECONDS = 900
_STOP_SECONDS = 20
_EMBEDDED_STATES = 500
_ROOMS = ("kitchen", "hallway", "greenhouse", "workshop", "foundry", "bathroom", "living room", "art studio", "bedroom")
_KINDS = ("glass", "metal", "wooden", "ceramic", "red", "blue", "empty", "open", "small", "orange", "heavy", "broken")
_THINGS = (
    *("cup", "table", "battery", "thermometer", "wire", "light bulb", "switch", "chair", "pot", "stove", "sink"),
    *("apple tree", "dove egg", "flower pot", "shovel", "jug", "picture", "freezer", "cupboard", "bee hive", "turtle"),
)


@dataclass(frozen=True)
class Goal:
    """A target and its outcome; `found` is None if a run of this size does not measure it."""

    text: str
    found: str | None
    met: bool


def report(table: Table, goals: Sequence[Goal]) -> None:
    """Print the table and the outcome of the goals. A missed goal is not an error."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for goal in goals:
        outcome = "not in this run" if goal.found is None else f"{goal.found}: {'met' if goal.met else 'missed'}"
        console.print(f"goal  {goal.text}: {outcome}", soft_wrap=True, highlight=False, markup=False)


def empty_table(title: str, text: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table, whose columns of text come first."""
    table = Table(*text, title=title)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def server(command: Sequence[str], url: str, log: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """Start a server and wait until `url` answers; yield its process id, and stop it at the end.

    Raises:
        RuntimeError: it ended or did not answer; the message holds the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, cwd=log.parent, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                httpx.get(url, headers=HEADERS).raise_for_status()
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() > deadline:
                    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise RuntimeError(f"no answer from {url}; the end of the log of {command}:\n{end}") from None
                time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        # vLLM's engine is a separate process, which survives a killed server.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def vllm(folder: Path, model: str, *settings: str, **variables: str) -> Iterator[str]:
    """Start vLLM on the CPU with a model's folder on a free port; yield its URL."""
    from empo2.recipe.trainer.ray_environment import VARIABLES  # sets them for this process, too

    say("vLLM starts")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = vllm_command(load_settings("cpu", settings), model, port)
    with server(command, f"{url}/health", folder / "vllm.log", {**os.environ, **VARIABLES, **variables}):
        yield url


@contextmanager
def empo2_gateway(
    folder: Path, memory: Path, *settings: str, module: Sequence[str] = ("-m", "empo2.recipe.cli"), clone: Path = ROOT
) -> Iterator[tuple[str, int]]:
    """Start a clone's `empo2 gateway` with SmolLM2's tokenizer on a free port; yield its URL and its process id."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    python = sys.executable if clone == ROOT else str(clone / ".venv/bin/python")
    command = [python, *module, "gateway", "--memory", str(memory), f"gateway.port={port}"]
    command += ["model.path=smollm2-135m-instruct", *settings]
    path = os.pathsep.join(filter(None, [str(clone / "bench"), os.environ.get("PYTHONPATH")]))
    variables = {"EMPO2_KEY": f"{KEY}-agent", "EMPO2_ADMIN_KEY": KEY, "PYTHONPATH": path}
    with server(command, f"{url}/healthz", folder / "gateway.log", {**os.environ, **variables}) as pid:
        yield url, pid


def observation(generator: random.Random) -> str:
    """Return a text like an agent's observation: 60 to 120 tokens, almost never the same twice."""
    rooms = generator.sample(_ROOMS, 3)
    things = [f"a {generator.choice(_KINDS)} {thing}" for thing in generator.sample(_THINGS, generator.randint(7, 13))]
    return (
        f"This room is called the {rooms[0]}. In it, you see: the agent, a substance called air, {', '.join(things)}. "
        f"You also see: a door to the {rooms[1]} (that is open), a door to the {rooms[2]} (that is closed)."
    )


def turns(generator: random.Random, count: int) -> list[str]:
    """Return the user messages of an episode of `count` turns: the task and first observation, then observations."""
    task = f"Your task is to find the {generator.choice(_THINGS)} and to move it to the {generator.choice(_ROOMS)}."
    first, *others = (observation(generator) for _ in range(count))
    return [f"{task}\n\n{first}", *others]


def world_turns(group: int, agent: int, count: int) -> list[str]:
    """Return the user messages of an episode of ALFWorld by a player that acts at random; a group shares its task."""
    tasks, _ = load()
    episode, generator = Episode(**tasks[group * 37 % len(tasks)]), random.Random(f"{group} {agent}")
    environment = Environment(game_of(episode), episode.wording, episode.reward)
    state, texts = environment.state, []
    for _ in range(count):
        texts.append("\n".join((state.observation, "Possible commands:", *state.valid_actions)))
        state = environment.step(generator.choice(state.valid_actions))
    return texts


def filled_memory(folder: Path, tips: int) -> Path:
    """Write a memory file with tips, each under one state like those of `turns`, which takes 20 s; return it.

    500 states are embedded; a tip's key is one of these keys with a little noise, at a cosine of about 0.95.
    """
    say("the memory is filled")
    file = folder / "memory.sqlite"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # keeps torch out of this process
        pool.submit(_fill_memory, file, tips).result()
    return file


def _fill_memory(file: Path, tips: int) -> None:
    generator, noise = random.Random(0), np.random.default_rng(0)
    embedder = SentenceEmbedder("all-MiniLM-L6-v2")
    states = [observation(generator) for _ in range(min(tips, _EMBEDDED_STATES))]
    keys = embedder.embed(states)
    store = MemoryStore(file, embedder=embedder.name, dimension=embedder.dimension, capacity=tips)
    for number in range(tips):
        row = number % len(states)
        key = keys[row] + noise.normal(scale=0.3 / np.sqrt(embedder.dimension), size=embedder.dimension)
        room, thing = generator.choice(_ROOMS), generator.choice(_THINGS)
        tip = (
            f"Episode {number} went to the {room} and took the {generator.choice(_KINDS)} {thing}, which left the task"
            f" {generator.randint(1, 9)} steps from its end; look into the {generator.choice(_ROOMS)} first."
        )
        step = Step(states[row], key, f"take {thing}")
        score = float(generator.randint(0, 10) * 10)
        store.add_episode(SCOPE, f"filled-{number}", tip=tip, score=score, success=score == 100, steps=[step])
    store.close()
