"""Spans of the real gateway in the tools of docs/traces.md: through a collector into Phoenix, and into MLflow."""

import asyncio
import os
import socket
import subprocess
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from .harness import ROOMS, running_gateway

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build/trace-tools"
SECONDS = 600  # until a tool answers, or shows what it got: each reads thousands of modules first

pytestmark = [
    pytest.mark.stack,
    pytest.mark.rare,
    pytest.mark.timeout(3 * SECONDS),
    pytest.mark.usefixtures("quiet", "empty_stores"),
    pytest.mark.skipif(not TOOLS.exists(), reason="needs Phoenix, MLflow and a collector: make trace-tools"),
]


class Span(NamedTuple):
    trace: str
    id: str
    parent: str
    name: str


# Where a tool takes spans, and what finds those of the traces that its filter lets through.
Tool = tuple[str, Callable[[str], Awaitable[list[Span]]]]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def process(folder: Path, *command: object, **variables: object) -> Iterator[None]:
    words = [str(word) for word in command]
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    with (folder / f"{Path(words[0]).name}.log").open("wb") as log:
        started = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            started.terminate()
            started.wait(60)


async def spans_of(found: Callable[[str], Awaitable[list[Span]]], counts: dict[str, int]) -> list[Span]:
    """Return all spans once the tool answers and each of these traces has as many as are awaited."""
    async with asyncio.timeout(SECONDS):
        while True:
            with suppress(httpx.HTTPError):
                spans = await found("")
                traces = Counter(span.trace for span in spans)
                if all(traces[trace] >= count for trace, count in counts.items()):
                    return spans
            await asyncio.sleep(0.5)


@asynccontextmanager
async def phoenix(folder: Path) -> AsyncIterator[Tool]:
    port, taken = free_port(), free_port()
    settings = {"PHOENIX_WORKING_DIR": folder, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_TELEMETRY_ENABLED": "false"}
    settings |= {"PHOENIX_PORT": port, "PHOENIX_GRPC_PORT": free_port()}
    (collector,) = TOOLS.glob("lib/*/site-packages/rotel/rotel-agent")
    receives = ("--otlp-http-endpoint", f"127.0.0.1:{taken}", "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}")
    sends = ("--exporter", "otlp", "--otlp-exporter-protocol", "http")
    sends += ("--otlp-exporter-endpoint", f"http://127.0.0.1:{port}")
    fields = "name parentId spanId trace { traceId }"
    query = (
        "query ($filter: String) { projects { edges { node { spans(first: 1000, filterCondition: $filter) "
        f"{{ edges {{ node {{ {fields} }} }} }} }} }} }} }}"
    )

    async def found(condition: str) -> list[Span]:
        body = {"query": query, "variables": {"filter": condition}}
        projects = (await client.post("/graphql", json=body)).raise_for_status().json()["data"]["projects"]["edges"]
        nodes = [span["node"] for project in projects for span in project["node"]["spans"]["edges"]]
        return [Span(node["trace"]["traceId"], node["spanId"], node["parentId"] or "", node["name"]) for node in nodes]

    with (
        process(folder, TOOLS / "bin/python", "-m", "phoenix.server.main", "serve", **settings),
        process(folder, collector, "start", *receives, *sends),
    ):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
            yield f"http://127.0.0.1:{taken}", found


@asynccontextmanager
async def mlflow(folder: Path) -> AsyncIterator[Tool]:
    port = free_port()
    files = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", folder / "artifacts")
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "0"}}

    async def found(condition: str) -> list[Span]:
        body = {"locations": [place], "filter": condition, "max_results": 100}
        traces = (await client.post("/api/3.0/mlflow/traces/search", json=body)).raise_for_status().json()
        spans = []
        for trace in traces.get("traces", []):
            answer = await client.get("/api/3.0/mlflow/traces/get", params={"trace_id": trace["trace_id"]})
            spans += answer.raise_for_status().json()["trace"].get("spans", [])

        ids = ("trace_id", "span_id", "parent_span_id")
        return [Span._make([*(b64decode(span.get(key, "")).hex() for key in ids), span["name"]]) for span in spans]

    command = (TOOLS / "bin/mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", 1)
    with process(folder, *command, *files, PATH=f"{TOOLS / 'bin'}:{os.environ['PATH']}"):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
            yield f"http://127.0.0.1:{port}", found


@pytest.mark.parametrize(
    ("tool", "condition", "headers"),
    [
        (phoenix, "attributes['empo2']['rollout_mode'] == 'memory'", ""),
        (mlflow, "span.attributes.empo2.rollout_mode ILIKE '%\"memory%'", "x-mlflow-experiment-id=0"),
    ],
)
async def test_a_trace_arrives_whole_and_is_found_by_its_mode(
    tool: Any, condition: str, headers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/traces.md").read_text()
    assert condition in page and headers in page
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with tool(tmp_path) as (address, found):
        await spans_of(found, {})
        async with running_gateway(tmp_path, f"gateway.traces={address}") as gateway:
            await gateway.store_tips(ROOMS[:1], "Take the lamp.")
            memory, plain = await gateway.create("memory"), await gateway.create("no-memory")
            for rollout in (memory, plain):
                await gateway.play(rollout, ROOMS[:2])
                await gateway.finish(rollout)
            await gateway.drain()
        spans = await spans_of(found, {memory: 6, plain: 4})
        names = {span.id: span.name for span in spans}
        tree = sorted((span.name, names.get(span.parent)) for span in spans if span.trace == memory)
        assert tree == [
            ("chat any", "invoke_agent"), ("chat any", "invoke_agent"), ("create_memory a", "invoke_agent"),
            ("invoke_agent", None), ("search_memory a", "chat any"), ("search_memory a", "chat any"),
        ]  # fmt: skip
        assert {span.trace for span in await found(condition)} == {memory}
