"""Measure how often a reply is tokenized differently when it is sent back, and the training rows of episodes.

Uses real vLLM on a CPU with SmolLM2-135M, at temperature 1, through `empo2 gateway` as plain GRPO does: no tips, no
embedder. Each way of playing is measured without and with gateway.cumulative_tokens.

  prose         free text, mostly cut at the length limit
  tools         a tool is offered, and three calls of it are in the chat; vLLM's own parser reads the calls
  forced tools  tool_choice=required: vLLM lets the model write nothing but a call, as JSON
  actions       replies of a few words

  drift         calls whose chat ends with a reply that the server tokenizes differently, of those that continue a chat
  as ids, text  calls that were sent as token ids; that could not be, although the option is on
  rows          training rows of an episode: a turn joins a row whose tokens its prompt begins with
  one row       share of episodes that are one row
  tool calls    share of replies that vLLM read a tool call in
  second        mean seconds of a call in the last third of the episodes, /tokenize included
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from shared import HEADERS, Goal, empo2_gateway, empty_table, report, say, turns, vllm

from empo2.recipe.files.models import NOTES, SMOLLM2, resolve_model

_CALL_SECONDS = 600
_RATIO_GOAL = "training rows of as many episodes without the option / with it: above 1"
_ONE_ROW_GOAL = "with the option, at least 0.95 of the episodes are one row"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Do something in the world.",
        "parameters": {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]},
    },
}
_SYSTEM = {
    "prose": "You act in a small text world. Say in your own words what you see, what you think and what you do.",
    "tools": "You act in a small text world by calling the function act.",
    "forced tools": "You act in a small text world by calling the function act.",
    "actions": "You look for a coin in a house. Reply with one action, such as: move west",
}
_REPLY_TOKENS = {"actions": 12, "prose": 28, "tools": 40, "forced tools": 40}


@dataclass
class Played:
    """What the calls of one way of playing showed; rows by episode."""

    metrics: dict[str, float]
    rows: list[int] = field(default_factory=list)
    replies: int = 0
    tool_calls: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 episodes of 4 turns")
    parser.add_argument("--episodes", type=int, default=6, metavar="N", help="at once (default: 6)")
    parser.add_argument("--turns", type=int, default=30, metavar="N", help="model calls of an episode (default: 30)")
    parser.add_argument("--ways", nargs="+", choices=[*_SYSTEM], default=[*_SYSTEM], help="of playing (default: all)")
    names = [SMOLLM2, NOTES]
    parser.add_argument("--model", choices=names, default=SMOLLM2, help="the second one was trained to write actions")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.turns = 2, 4
    with tempfile.TemporaryDirectory() as folder:
        played = asyncio.run(measure(Path(folder), options))
    columns = ("drift", "as ids", "text", "rows", "one row", "tool calls", "second")
    title = f"{options.model}, {options.episodes} episodes of {options.turns} turns"
    table = empty_table(title, ["replies", "cumulative tokens"], columns)
    for (way, cumulative), found in played.items():
        table.add_row(way, "on" if cumulative else "off", *_cells(found))
    report(table, _goals(played))


def _cells(found: Played) -> list[str]:
    metrics = found.metrics
    reasons = [
        f"{name.partition('/text_calls/')[2]} {count:g}" for name, count in metrics.items() if "text_calls/" in name
    ]
    return [
        f"{metrics['empo2/token_drift']:.3f}",
        f"{metrics['empo2/continued_calls']:g}",
        ", ".join(reasons) or f"{metrics['empo2/text_calls']:g}",
        f"{sum(found.rows) / len(found.rows):.2f}",
        f"{found.rows.count(1) / len(found.rows):.2f}",
        f"{found.tool_calls / found.replies:.2f}",
        f"{sum(found.seconds) / len(found.seconds):.2f}",
    ]


def _goals(played: dict[tuple[str, bool], Played]) -> list[Goal]:
    off, on = ([rows for (_, on), found in played.items() if on is way for rows in found.rows] for way in (False, True))
    ratio, share = sum(off) / sum(on), on.count(1) / len(on)
    return [Goal(_RATIO_GOAL, f"{ratio:.2f}", ratio > 1), Goal(_ONE_ROW_GOAL, f"{share:.2f}", share >= 0.95)]


async def measure(folder: Path, options: argparse.Namespace) -> dict[tuple[str, bool], Played]:
    """Play each way without the option and with it."""
    model = str(resolve_model(options.model))
    settings = ["gateway.cumulative_tokens=true", "model.max_context_tokens=8192"]
    variables = {"EMPO2_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}
    played = {}
    async with AsyncExitStack() as stack:
        url = stack.enter_context(vllm(folder, model, *settings, **variables))
        clients = []
        for cumulative in False, True:
            own = ["algorithm.name=grpo", f"gateway.cumulative_tokens={cumulative}", f"model.path={model}"]
            gateway, _ = stack.enter_context(empo2_gateway(folder, folder / "memory.sqlite", *own))
            client = httpx.AsyncClient(base_url=gateway, headers=HEADERS, timeout=_CALL_SECONDS)
            clients.append(await stack.enter_async_context(client))
            register = [{"model": model, "endpoint": f"{url}/v1"}]
            (await client.post("/api/models", json=register)).raise_for_status()
        for way in options.ways:
            for cumulative, client in enumerate(clients):
                found = await _play_all(client, way, options)
                say(f"{way}, {'on' if cumulative else 'off'}: {' | '.join(_cells(found))}")
                played[way, bool(cumulative)] = found
    return played


async def _play_all(client: httpx.AsyncClient, way: str, options: argparse.Namespace) -> Played:
    found = Played({})
    await asyncio.gather(*(_play(client, way, seed, options.turns, found) for seed in range(options.episodes)))
    drained = await client.post("/empo2/drain", json={"timeout": _CALL_SECONDS})
    found.metrics = drained.raise_for_status().json()
    return found


async def _play(client: httpx.AsyncClient, way: str, seed: int, count: int, found: Played) -> None:
    created = await client.post("/api/rollouts", json=[{"input": {}, "metadata": {}}])
    rollout = created.raise_for_status().json()[0]["rollout_id"]
    path = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"
    messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM[way]}]
    tools: dict[str, Any] = {"tools": [_TOOL]} if "tools" in way else {}
    if way == "forced tools":
        tools["tool_choice"] = "required"
    if way == "tools":
        for number, action in enumerate(("open door", "take lamp", "go north")):
            messages += [{"role": "user", "content": f"Action {number}?"}, _call(action, f"shown-{number}")]
            messages.append({"role": "tool", "tool_call_id": f"shown-{number}", "content": "Done."})
    said: dict[str, Any] = {}
    for number, text in enumerate(turns(random.Random(seed), count)):
        calls = said.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": text})
        started = time.perf_counter()
        body = {"model": "policy", "messages": messages, "max_tokens": _REPLY_TOKENS[way], **tools}
        answer = await client.post(path, json=body)
        if number >= 2 * count // 3:
            found.seconds.append(time.perf_counter() - started)
        reply = answer.raise_for_status().json()["choices"][0]["message"]
        # As openai's client gives it: without the fields that are null.
        said = {name: value for name, value in reply.items() if name in ("role", "content", "tool_calls") and value}
        messages.append({"content": None, **said})
        found.replies += 1
        found.tool_calls += bool(said.get("tool_calls"))
    events = (await client.get(f"/api/rollouts/{rollout}/events", params={"event_type": "model_request"})).json()
    found.rows.append(_rows([event["data"]["response"] for event in events]))
    (await client.delete(f"/api/rollouts/{rollout}")).raise_for_status()


def _call(action: str, name: str) -> dict[str, Any]:
    call = {"id": name, "type": "function", "function": {"name": "act", "arguments": f'{{"action": "{action}"}}'}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _rows(responses: Sequence[dict[str, Any]]) -> int:
    """Return the number of rows that agent-lightning merges an episode's calls into."""
    rows, row = 0, [-1]
    for response in responses:
        prompt = response["prompt_token_ids"]
        rows += prompt[: len(row)] != row
        row = [*prompt, *response["choices"][0]["token_ids"]]
    return rows


if __name__ == "__main__":
    main()
