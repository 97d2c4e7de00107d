"""The gateway as the tests use it: agent-lightning's real app with the memory in it, before a scripted model server."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from agentlightning.schemas import Rollout
from agentlightning.server.store import _events, _models, _rollouts, _terminal_order

from empo2.memory import Embedder, MemoryStore, Step
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.gateway import app as gateway_app
from empo2.recipe.gateway.memory import open_memory
from empo2.recipe.launcher.commands import controller_command
from empo2.recipe.protocol import KEY as KEY_VARIABLE
from empo2.recipe.protocol import Keys, Serving

from .model_server import MODEL, Body, ModelServer, Seen, serving, tokenizer

gateway_app.tokenizer_of = cache(gateway_app.tokenizer_of)  # to read it takes longer than most tests

KEY = "the-key"  # of trainer and operator
AGENT_KEY = "the-agents-key"
key_of = Keys(AGENT_KEY).of_rollout  # what the controller gives to a rollout's agent
STORES: tuple[Any, ...] = (_rollouts, _events, _models, _terminal_order)
SECONDS = 120  # that a busy machine may take for what takes milliseconds
PATIENT = [f"reflection.timeout={SECONDS}", f"memory.deadline={1000 * SECONDS}"]
BLOCK = "Notes from earlier episodes"
CHAT = "/v1/chat/completions"
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODES = [("no-memory", "on-policy"), ("memory", "on-policy"), ("memory", "off-policy")]


class Words:
    """Embeds a text as the hashes of its words: equal texts have cosine 1, texts with no word in common about 0."""

    name, dimension = "words", 64

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def embed(self, texts: Any) -> np.ndarray:
        self.gate.wait(SECONDS)
        if self.failure:
            raise self.failure
        self.texts += texts
        return np.array([self._key(text) for text in texts], np.float32)

    def _key(self, text: str) -> np.ndarray:
        key = np.zeros(self.dimension)
        for word in [*text.split(), "."]:
            key += np.random.default_rng(zlib.crc32(word.encode())).normal(size=self.dimension)
        return key / np.linalg.norm(key)


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


def fill_memory(file: Path, tips: Sequence[str], *, state: str = "a room", embedder: str = Words.name) -> None:
    """Write a memory with these tips of one state, the later ones with the higher scores."""
    step = Step(state, Words().embed([state])[0], "look")
    with closing(MemoryStore(file, embedder=embedder, dimension=Words.dimension)) as store:
        for number, text in enumerate(tips):
            store.add_episode("a", f"episode {number}", tip=text, score=number, success=None, steps=[step])


def is_reflection(body: Body) -> bool:
    return "The episode is over" in str(body.get("messages", [{}])[-1].get("content"))


def in_reflection(fault: Any) -> Callable[[str, Body], Any]:
    return lambda path, body: fault if path == CHAT and is_reflection(body) else None


@dataclass
class GatewayUnderTest:
    """The gateway, what it stands before, and how a trainer, a controller and agents would use it."""

    client: httpx.AsyncClient
    model: ModelServer
    words: Words
    folder: Path
    tip: str = "Take the lamp first."
    rollouts: list[str] = field(default_factory=list)

    def reply(self, body: Body) -> str | Body:
        if is_reflection(body):
            return self.tip
        replies = [message for message in body.get("messages", []) if message["role"] == "assistant"]
        return f"go {len(replies)}"

    async def create(self, mode: str | None = "memory", update: str = "on-policy", scope: str = "a", **tag: Any) -> str:
        """A running rollout; untagged for mode None."""
        tag = {"rollout_mode": mode, "update_mode": update, "scope": scope, **tag}
        return await self.create_as({"empo2": tag} if mode else {})

    async def create_as(self, metadata: Any, **task: Any) -> str:
        created = await self.client.post("/api/rollouts", json=[{"input": task, "metadata": metadata}])
        rollout = created.json()[0]["rollout_id"]
        self.rollouts.append(rollout)
        await self.patch(rollout, "running")
        return rollout

    async def patch(self, rollout: str, state: str, **options: Any) -> httpx.Response:
        return await self.client.patch(f"/api/rollouts/{rollout}", json={"status": {"state": state}}, **options)

    async def call(self, rollout: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = "completions" if b'"prompt"' in content and b'"messages"' not in content else "chat/completions"
        return await self.client.post(f"{self.address(rollout)}/{path}", content=content, **options)

    def address(self, rollout: str, mode: str = "train") -> str:
        root = str(self.client.base_url).rstrip("/")
        return f"{root}/proxy/rollout/{rollout}/attempt/0/mode/{mode}/openai/v1"

    def variables(self, rollout: str) -> dict[str, str]:
        events = f"{self.client.base_url}/api/rollouts/{rollout}/attempt/0/events"
        return {"AGL_OPENAI_BASE_URL": self.address(rollout), "AGL_EVENT_URL": events, "AGL_KEY": key_of(rollout)}

    def as_agent(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {AGENT_KEY}"}
        return httpx.AsyncClient(base_url=self.client.base_url, headers=headers, timeout=SECONDS, verify=False)

    async def play(self, rollout: str, bodies: list[Body]) -> list[list[int]]:
        """All calls of an episode; the prompt ids that the model server saw."""
        for body in bodies:
            answer = await self.call(rollout, {"model": "any", "max_tokens": 8, **body})
            assert answer.status_code == 200, answer.text
        await self.client.post(f"/empo2/rollouts/{rollout}/settle")
        return [prompt_ids(call) for call in await self.events(rollout, "model_request") if call["status"] == "ok"]

    async def episode(self, mode: str | None = "memory", bodies: list[Body] | None = None, score: Any = 1.0) -> str:
        rollout = await self.create(mode)
        await self.play(rollout, ROOMS if bodies is None else bodies)
        await self.finish(rollout, score)
        return rollout

    async def calls(self, rollout: str) -> list[Body]:
        """The memory's events of a rollout, when all are recorded."""
        await self.client.post(f"/empo2/rollouts/{rollout}/settle")
        return await self.events(rollout, "empo2_call")

    async def events(self, rollout: str, event_type: str) -> list[Body]:
        found = await self.client.get(f"/api/rollouts/{rollout}/events", params={"event_type": event_type})
        return [event["data"] for event in found.json()]

    async def reward(self, rollout: str, value: Any) -> None:
        event = {"event_type": "reward", "data": {"value": value}}
        (await self.client.post(f"/api/rollouts/{rollout}/attempt/0/events", json=event)).raise_for_status()

    async def finish(self, rollout: str, score: Any = 1.0) -> None:
        await self.reward(rollout, score)
        (await self.patch(rollout, "succeeded")).raise_for_status()

    async def ended(self, rollout: str, score: Any = 1.0) -> dict[str, float]:
        await self.finish(rollout, score)
        return await self.drain()

    async def store_tips(self, bodies: list[Body], *tips: str, scope: str = "a") -> None:
        """Episodes that leave these tips, each with a higher score than the one before."""
        for number, self.tip in enumerate(tips):
            rollout = await self.create("no-memory", scope=scope)
            await self.play(rollout, bodies)
            metrics = await self.ended(rollout, 10.0 * number)
            assert metrics["empo2/tips_written"] == 1, metrics

    async def drain(self, timeout: float = SECONDS) -> dict[str, float]:
        return (await self.client.post("/empo2/drain", json={"timeout": timeout})).raise_for_status().json()

    async def state(self) -> Body:
        return (await self.client.get("/empo2/state")).json()

    async def snapshot(self) -> tuple[list[tuple], list[tuple]]:
        """The memory as it is written: (scope, text, score) of each tip, (state, action) of each entry."""
        tips = await self.query("SELECT scope, text, score FROM tips ORDER BY id")
        return tips, await self.query("SELECT state, action FROM entries ORDER BY id")

    async def query(self, query: str) -> list[tuple]:
        """Rows of a snapshot that is taken now, ``snapshot.sqlite``."""
        path = self.folder / "snapshot.sqlite"
        (await self.client.post("/empo2/snapshot", json={"path": str(path)})).raise_for_status()
        with closing(sqlite3.connect(path)) as database:
            return database.execute(query).fetchall()

    def last(self) -> Seen:
        return self.model.requests()[-1]

    def reflections(self) -> list[Seen]:
        return [seen for seen in self.model.requests() if is_reflection(seen.body)]


def worker_command(agent_class: str) -> list[str]:
    """The command by which agent-lightning's controller (1.0.2, `LocalReconciler._spawn_for`) starts an agent."""
    worker = (
        "import sys; from agentlightning.controller.local_reconciler import _run_local_reconciler_worker; "
        "sys.exit(_run_local_reconciler_worker(sys.argv[1]))"
    )
    return [sys.executable, "-c", worker, agent_class]


@dataclass
class Played:
    sent: list[list[int]]
    replies: list[list[int]]
    calls: list[Body]

    @property
    def tips_shown(self) -> list[int]:
        return [tokenizer().decode(ids).count(BLOCK) for ids in self.sent]

    @property
    def tip_free(self) -> list[list[int]]:
        return [call["tip_free_prompt_token_ids"] for call in self.calls]


async def recorded(gateway: GatewayUnderTest, rollout: str) -> Played:
    calls = await gateway.calls(rollout)
    events = [event for event in await gateway.events(rollout, "model_request") if "choices" in event["response"]]
    replies = [event["response"]["choices"][0]["token_ids"] for event in events]
    return Played([prompt_ids(event) for event in events], replies, calls)


def calling(name: str, arguments: Body, number: int = 0, form: str = "<call>{}") -> Body:
    """A reply that calls a tool, written as TOOL_TEMPLATE does, or in another form."""
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call-{number}", "type": "function", "function": {**function, "arguments": json.dumps(arguments)}}
    return {"content": None, "tool_calls": [call], "written": form.format(json.dumps(function, ensure_ascii=False))}


def prompt_ids(event: Body) -> list[int]:
    response = event["response"]
    return response.get("prompt_token_ids") or response["choices"][0]["prompt_token_ids"]


def turns(*observations: Any, system: str | None = None, **more: Any) -> list[Body]:
    """The requests of an agent that sends its whole chat, where the model answers as `GatewayUnderTest.reply` does."""
    messages, bodies = [{"role": "system", "content": system}] if system else [], []
    for number, observation in enumerate(observations):
        messages = [*messages, {"role": "user", "content": observation}]
        bodies.append({"messages": messages, **more})
        messages = [*messages, {"role": "assistant", "content": f"go {number}"}]
    return bodies


ROOMS = turns("a dark room with a lamp", "the lamp is lit", "a door opens", system="You play a game.")


def as_trainer(url: str) -> httpx.AsyncClient:
    # verify=False: certificates are not needed here, and take longer to read than most tests take.
    # No keep-alive: uvicorn closes a connection after a request that failed in agent-lightning's app, and the next
    # request may go out on it before that is seen.
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=SECONDS, verify=False, limits=limits)


@asynccontextmanager
async def running_gateway(
    folder: Path,
    *settings: str,
    words: Words | None = None,
    embedder: Embedder | None = None,
    model: ModelServer | None = None,
    serving_agents: Serving | None = None,
) -> AsyncIterator[GatewayUnderTest]:
    words, model = words or Words(), model or ModelServer()
    checked = load_settings("cpu", [*PATIENT, "memory.top_k=10", *settings])
    file = folder / "memory.sqlite"
    app = gateway_app.make_gateway(
        checked,
        model_path=MODEL,
        keys=Keys(AGENT_KEY, KEY),
        folder=folder,
        memory=open_memory(checked, file, embedder or words),
        serving=serving_agents,
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(model.serve())
        url = stack.enter_context(serving(app))
        client = await stack.enter_async_context(as_trainer(url))
        gateway = GatewayUnderTest(client, model, words, folder)
        model.reply = gateway.reply
        (await client.delete("/api/models")).raise_for_status()  # of a gateway before, whose model is gone
        (await client.post("/api/models", json=[{"model": MODEL, "endpoint": model.url}])).raise_for_status()
        yield gateway


async def trained(
    gateway: GatewayUnderTest, rollout: str, limit: int = 2048
) -> tuple[list[list[int]], list[Any], dict[str, float], Any]:
    """Ids of a rollout's training rows, the rows, agent-lightning's metrics, the results of the trainer's manager."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's own
        import torch
        from agentlightning.verl.agl_rollout_manager import EnqueuedRollout
        from agentlightning.verl.rollout_adapter import RolloutAdapter

        from empo2.recipe.gateway_client import GatewayClient
        from empo2.recipe.trainer.manager import Empo2RolloutManager
    url = str(gateway.client.base_url)
    asked = GatewayClient(url, KEY)
    manager = Empo2RolloutManager(
        agl_base_url=url,
        agl_key=KEY,
        model=MODEL,
        step=0,
        train_rollout_n=1,
        max_prompt_tokens=limit,
        settings=load_settings("cpu"),
        gateway=asked,
    )
    detail = (await gateway.client.get(f"/api/rollouts/{rollout}")).json()["rollout"]
    enqueued = EnqueuedRollout(data_id="0", rollout_id=rollout, step=0, sample_idx_in_step=0, enqueue_time=0)
    completed = await asyncio.to_thread(manager._build_completed_rollout, enqueued, Rollout.model_validate(detail))
    manager.client.close()
    asked.close()
    adapter = RolloutAdapter(
        max_prompt_length=limit,
        max_response_length=limit,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    rows, metrics = adapter.get_train_data_batch([manager.results.train(completed)])
    batches = [row.batch for row in rows]
    ids = [batch["input_ids"][batch["attention_mask"].bool()].tolist() for batch in batches]
    return ids, batches, metrics, manager.results


async def sent_again_with_tips(gateway: GatewayUnderTest, sent: Sequence[Seen]) -> str:
    """Send what an agent sent once more, as an off-policy rollout with tips; the rollout.

    Each prompt shows the tip once, and without it is the one that the agent sent.
    """
    rollout = await gateway.create("memory", "off-policy")
    await gateway.play(rollout, [{"max_tokens": 512, **seen.body} for seen in sent])
    played = await recorded(gateway, rollout)
    assert played.tips_shown == [1] * len(sent)
    assert played.tip_free == [seen.prompt_ids for seen in sent]
    return rollout


async def both(gateway: GatewayUnderTest, plain: httpx.AsyncClient, rollout: str, body: Any) -> tuple[Any, Any]:
    told = await gateway.call(rollout, body)
    client, gateway.client = gateway.client, plain
    alone = await gateway.call(rollout, body)
    gateway.client = client
    return (told.status_code, told.content), (alone.status_code, alone.content)


@contextmanager
def controller(settings: Settings, url: str, folder: Path) -> Iterator[None]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), KEY_VARIABLE: AGENT_KEY}
    with (folder / "controller.log").open("wb") as log:
        command = controller_command(settings, url)
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)
