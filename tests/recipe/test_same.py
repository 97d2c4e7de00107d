"""What leaves the gateway for a fixed load is what a recording holds: requests, answers, events, rows, metrics.

``python -m tests.recipe.test_same`` records anew, after a change that is meant to change them; the recording's diff
names each that did.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe import protocol

from .harness import STORES, GatewayUnderTest, calling, fill_memory, is_reflection, running_gateway, turns, user
from .model_server import MODEL, Body

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

RECORDING = Path(__file__).parent / "recorded" / "gateway.txt"
_DRAWN = re.compile(r"\b(msg|resp|fc|rs|call|chatcmpl)[_-][0-9a-f]{20,}")  # ids of answers
_TIMES = ("timestamp", "latency_ms", "created_at", "completed_at", "endpoint")
TAGS = {
    "no memory": {"rollout_mode": "no-memory"},
    "memory": {"rollout_mode": "memory"},
    "off-policy": {"rollout_mode": "memory", "update_mode": "off-policy"},
    "teaches": {"rollout_mode": "memory", "update_mode": "off-policy", "teaches": True},
    "read only": {"rollout_mode": "memory", "read_only": True},
    "untagged": None,
}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]
PLAIN = turns("a room", 'Ünïcode \u2028 🙂 "quotes" \\ back', "a door opens", "the end", system="You play a game.")
PARTS = turns([{"type": "text", "text": "a room"}], [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
ALONE: list[Body] = [
    *({"messages": [user(f"ask {word}")]} for word in ("plain", "tools", "fails", "long", "odd", "empty")),
    {"messages": [user("options")], "seed": 5, "top_p": 0.5, "stop": ["a"], "n": 1, "tools": TOOLS, "logprobs": True},
    {"messages": [user("tops")], "logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    {"messages": [user("numbers")], "a": 2**70, "b": -(2**63), "c": [1e-07, 1e16, -0.0, 0.1 + 0.2, 5e-324], "d": None},
    {"messages": [user("stream")], "stream": True},
]
RAW = [
    b'{"messages":[{"role":"user","content":"twice"}],"a":1,"a":2}',
    b'{"messages":[{"role":"user","content":"\\u00e9 \\u0000"}],"x":' + b"[" * 190 + b"]" * 190 + b"}",
    b'{"messages":[{"role":"user","content":"deeper"}],"x":' + b"[" * 250 + b"]" * 250 + b"}",
    *(b'{"messages":[{"role":"user","content":"x"}],"n":%s}' % number for number in (b"1e400", b"NaN", b"9" * 400)),
    *(b'{"messages":[{"role":"user","content":"\\ud800"}]}', b'\xef\xbb\xbf{"messages":[]}', b"[]", b"", b"{"),
]
OTHERS = [
    ("completions", {"prompt": "a prompt " * 9, "max_tokens": 5}),
    ("completions", {"prompt": [9690, 198], "max_tokens": 3}),
    ("responses", {"input": "hello", "model": "x"}),
    ("messages", {"model": "x", "max_tokens": 9, "messages": [user("hi")]}),
    ("messages/count_tokens", {"model": "x", "messages": [user("hi")]}),
    ("embeddings", {"input": "x"}),
    ("nothing", {"input": "x"}),
]


ODD: dict[bytes, Any] = {b"ask odd": {"choices": [{"message": {"content": 3}}], "big": 1.5e300}, b"ask empty": {}}


def newest(body: Body) -> str:
    return str((body.get("messages") or [{}])[-1].get("content"))


def reply(body: Body) -> str | Body:
    if is_reflection(body):
        return "Take the lamp first."
    if "ask tools" in newest(body):
        return calling("go", {"to": "käse"})
    said = [message for message in body.get("messages", []) if message["role"] == "assistant"]
    return f"go {len(said)}"


def still(value: Any, names: dict[str, str]) -> Any:
    """A value without times and drawn ids; numbers keep their type and every bit."""
    if isinstance(value, dict):
        return {key: still(each, names) for key, each in value.items() if key not in _TIMES}
    if isinstance(value, list):
        return [still(each, names) for each in value]
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, str):
        for rollout, name in names.items():
            value = value.replace(rollout, name)
        return _DRAWN.sub(r"\1", value)
    return value


async def leaves(folder: Path) -> list[str]:
    """A line for each thing that leaves the gateway: what it is, and a digest of it."""
    lines: list[str] = []
    names = {MODEL: "the model"}

    def note(kind: str, value: Any) -> None:
        text = json.dumps(still(value, names))
        lines.append(f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:12]}")

    fill_memory(folder / "memory.sqlite", ["First tip.", "Zweiter Tipp: ünï 🙂."])
    async with running_gateway(folder, "memory.top_k=3") as gateway:
        gateway.model.reply = reply
        gateway.model.fault = lambda path, body: 404 if "ask fails" in newest(body) else None
        for name, tag in TAGS.items():
            rollout = await gateway.create_as({"empo2": {"scope": "a", **tag}} if tag else {})
            names[rollout] = name
            await _play(gateway, rollout, name, note)
        metrics = await gateway.drain()
        events = {}
        for rollout, name in [*names.items()][1:]:
            for query in ("", "?event_type=reward", "?format=triplet"):
                found = (await gateway.client.get(f"/api/rollouts/{rollout}/events{query}")).raise_for_status().json()
                events[name, query] = found
        sent = [[seen.path, seen.key, still(seen.body, names)] for seen in gateway.model.seen]
        for number, request in enumerate(sorted(sent, key=json.dumps)):  # /tokenize and reflections come at any time
            note(f"request {number} to the model server, {request[0]}", request)
        for (name, query), found in events.items():
            for number, event in enumerate(sorted(found, key=lambda event: event["event_type"])):
                note(f"event {number} of {name}{query}: {event['event_type']}", event)
        for table in ("tips", "entries", "states", "plays", "credits"):
            columns = [name for (name,) in await gateway.query(f"SELECT name FROM pragma_table_info('{table}')")]
            kept = ", ".join(name for name in columns if name != "created")
            rows = [still(repr(row), names) for row in await gateway.query(f"SELECT {kept} FROM {table}")]
            for number, row in enumerate(sorted(rows)):
                note(f"row {number} of {table}", row)
        for name, value in sorted(metrics.items()):
            if "_ms_" not in name:  # a time
                note(f"metric {name}", value)
    return lines


async def _play(gateway: GatewayUnderTest, rollout: str, name: str, note: Any) -> None:
    bodies = [*PLAIN, PLAIN[-1], *PARTS, *ALONE]
    calls = [("chat/completions", json.dumps(body).encode()) for body in bodies]
    calls += [("chat/completions", raw) for raw in RAW]
    calls += [(path, json.dumps(body).encode()) for path, body in OTHERS]
    for number, (path, content) in enumerate(calls):
        odd = next((value for words, value in ODD.items() if words in content), None)
        gateway.model.answer = None if odd is None else lambda _, odd=odd: odd
        gateway.model.context = 60 if b"ask long" in content else 8192
        answer = await gateway.client.post(f"{gateway.address(rollout)}/{path}", content=content)
        told: Any = answer.text
        with contextlib.suppress(ValueError):
            told = answer.json()
        note(f"answer {number} of {name} to {path}", [answer.status_code, answer.headers["content-type"], told])
        await gateway.client.post(f"/empo2/rollouts/{rollout}/settle")
    val = await gateway.client.post(f"{gateway.address(rollout, 'val')}/chat/completions", json=PLAIN[0])
    note(f"answer in validation of {name}", [val.status_code, val.json()])
    await gateway.finish(rollout, 0.7)
    # Else it would depend on the machine whether the next rollout's first call finds the tip.
    while (await gateway.client.get(protocol.STATE)).json()["reflections"]:
        await asyncio.sleep(0.01)


async def test_what_leaves_the_gateway_is_what_it_was(tmp_path: Path) -> None:
    assert await leaves(tmp_path) == RECORDING.read_text().splitlines()


if __name__ == "__main__":
    for store in STORES:
        store.clear()
    with tempfile.TemporaryDirectory() as scratch:
        RECORDING.write_text("\n".join(asyncio.run(leaves(Path(scratch)))) + "\n")
