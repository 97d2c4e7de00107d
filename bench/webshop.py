"""Measure WebShop with a small catalogue and one of the original's size, of made-up products in its file formats.

files          size of the three data files, which are generated first
build          `python -m empo2.agents.webshop build`: time, peak memory (RSS), and the size of its catalogue
open           until the first search is answered: with nothing of the catalogue in RAM, and once more
search         1,000 queries: whole instructions, three words of one, and a single word that most products have
steps/s        random valid actions on one core, purchases and their rewards included (the smallest size only)
agents         agent processes that start at once, each with openai's client, and play an episode with a search, a
               product, its description and the purchase: time until all are done, then the memory of each: PSS, which
               divides shared pages among processes, and USS, the unshared pages (the largest size only)
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
from shared import Goal, empty_table, report, say

from empo2.agents.webshop.catalogue import Catalogue
from empo2.agents.webshop.environment import Environment
from empo2.agents.webshop.generated import write
from empo2.agents.webshop.reward import nouns

SIZES = (1_000, 1_180_000)
QUICK_SIZES = (300, 3_000)
AGENTS, QUICK_AGENTS = 50, 3
MAX_STEPS = 15
QUERIES = 1_000
COMMON_WORD = "made"
_MB = 1e6
_AGENT = """
import sys
from contextlib import closing
from pathlib import Path
from openai import OpenAI
from empo2.agents.webshop.agent import Environment
from empo2.agents.webshop.catalogue import Catalogue
client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")
with closing(Catalogue(Path(sys.argv[1]))) as catalogue:
    environment = Environment(catalogue)
    environment.reset(int(sys.argv[2]), 15)
    state = environment.step(f"search[{environment.task_description}]")
    product = next(action for action in state.valid_actions if action.startswith("click[b0"))
    for action in (product, "click[description]", "click[< prev]", "click[buy now]"):
        state = environment.step(action)
    assert state.done
    print("bought", flush=True)
    sys.stdin.read()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SIZES} products and 3 agents: a smoke run")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help=f"numbers of products (default: {SIZES})")
    parser.add_argument("--agents", type=int, metavar="N", help=f"agents at once (default: {AGENTS})")
    options = parser.parse_args()
    sizes = sorted(options.sizes or (QUICK_SIZES if options.quick else SIZES))
    agents = options.agents or (QUICK_AGENTS if options.quick else AGENTS)
    columns = ("files MB", "build s", "peak MB", "catalogue MB", "open cold s", "open s", "search p50 ms")
    columns += ("search p99 ms", "steps/s", "agents s", "PSS MB", "USS MB")
    title = f"WebShop; {agents} agents at once; load before: {os.getloadavg()[0]:.1f}"
    table = empty_table(title, ["products"], columns)
    found = {}
    for size in sizes:
        with _catalogue(size) as (folder, figures):
            figures |= measure_catalogue(folder)
            if size == sizes[0]:
                figures["steps/s"] = steps_per_second(folder)
            if size == sizes[-1]:
                figures |= measure_agents(folder, agents)
        found[size] = figures
        table.add_row(f"{size:,}", *(_cell(figures.get(column)) for column in columns))
    report(table, _goals(found, agents))


@contextmanager
def _catalogue(size: int) -> Iterator[tuple[Path, dict[str, float]]]:
    """Build a catalogue with the given number of products; return it and the cost of building it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "catalogue")
        say(f"{size:,} products: written")
        items, attributes, human = write(Path(scratch), size)
        figures = {"files MB": _megabytes((items, attributes, human))}
        say(f"{size:,} products: built into a catalogue")
        command = [sys.executable, "-m", "empo2.agents.webshop", "build", "--output", str(folder)]
        command += ["--items", str(items), "--attributes", str(attributes), "--human", str(human)]
        started = time.perf_counter()
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{command} ended with exit code {process.returncode}")
        figures |= {"build s": time.perf_counter() - started, "peak MB": usage.ru_maxrss * 1024 / _MB}
        figures["catalogue MB"] = _megabytes(_files(folder))
        yield folder, figures


def measure_catalogue(folder: Path) -> dict[str, float]:
    """Measure the seconds to open it and the milliseconds to search it."""
    say("opened and searched")
    os.sync()  # pages not yet written would stay in RAM
    for file in _files(folder):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    figures = {}
    for column in "open cold s", "open s":
        started = time.perf_counter()
        with closing(Catalogue(folder)) as catalogue:
            catalogue.search(COMMON_WORD)
            figures[column] = time.perf_counter() - started
    generator = random.Random(0)
    times = []
    with closing(Catalogue(folder)) as catalogue:
        for number in range(QUERIES):
            words = catalogue.goal(generator.randrange(catalogue.goals)).instruction
            if number % 3 == 1:
                words = " ".join(generator.sample(words.split(), 3))
            elif number % 3 == 2:
                words = COMMON_WORD
            started = time.perf_counter()
            catalogue.search(words)
            times.append(1000 * (time.perf_counter() - started))
    return figures | {f"search p{share} ms": float(np.percentile(times, share)) for share in (50, 99)}


def steps_per_second(folder: Path, seconds: float = 5.0) -> float:
    say("random actions")
    nouns("a name")  # loads spaCy
    generator = random.Random(0)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    with closing(Catalogue(folder)) as catalogue:
        environment = Environment(catalogue)
        steps, started = 0, time.perf_counter()
        while time.perf_counter() < started + seconds:
            state = environment.reset(generator.randrange(catalogue.goals), MAX_STEPS)
            while not state.done:
                state = environment.step(generator.choice(state.valid_actions))
                steps += 1
        elapsed = time.perf_counter() - started
    os.sched_setaffinity(0, cores)
    return steps / elapsed


def measure_agents(folder: Path, count: int) -> dict[str, float]:
    """Measure the seconds until all agents, started at once, have bought something, and the mean memory per agent."""
    say(f"{count} agents")
    started = time.perf_counter()
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", _AGENT, str(folder), str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for number in range(count)
    ]
    try:
        for agent in agents:
            assert agent.stdout
            if agent.stdout.readline() != b"bought\n":
                raise RuntimeError("an agent ended before its purchase: its error stands above")
        elapsed = time.perf_counter() - started
        memory = [psutil.Process(agent.pid).memory_full_info() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    pss, uss = (sum(getattr(each, kind) for each in memory) / count / _MB for kind in ("pss", "uss"))
    return {"agents s": elapsed, "PSS MB": pss, "USS MB": uss}


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _megabytes(files: Iterable[Path]) -> float:
    return sum(file.stat().st_size for file in files) / _MB


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _goals(found: dict[int, dict[str, float]], agents: int) -> list[Goal]:
    def goal(text: str, size: int, column: str, most: float) -> Goal:
        value = found.get(size, {}).get(column)
        return Goal(text, None if value is None else _cell(value), value is not None and value <= most)

    small, full = SIZES
    steps = found.get(small, {}).get("steps/s")
    return [
        goal(f"{full:,} products open in at most 5 s, cold", full, "open cold s", 5),
        goal(f"search p99 at most 100 ms, {full:,} products", full, "search p99 ms", 100),
        Goal(
            f"at least 1,000 steps/s on one core, {small:,} products",
            None if steps is None else _cell(steps),
            steps is not None and steps >= 1000,
        ),
        goal(f"at most 150 MB for each of {agents} agents, {full:,} products", full, "PSS MB", 150),
    ]


if __name__ == "__main__":
    main()
