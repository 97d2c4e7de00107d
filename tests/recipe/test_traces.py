"""The spans that a collector gets of what is played at the real gateway, and what it costs if it does not take them."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentlightning.server.store import _rollouts

from empo2.memory import MemoryService
from empo2.recipe.config import load_settings, traces_endpoint
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway import span_sender, traces, upstream
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.protocol import trace_of, traceparent

from ..needs import need
from .harness import MODEL, ROOMS, GatewayUnderTest, controller, running_gateway, turns, until
from .otlp_receiver import OtlpReceiver, SeenSpan

CLIENT = 3


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", names.CAPTURE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer key-of-the-collector")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")  # which must not count here
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    with OtlpReceiver().serve() as receiver:
        yield receiver


@pytest.fixture
async def gateway(
    receiver: OtlpReceiver, quiet: None, empty_stores: None, tmp_path: Path
) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(tmp_path, f"gateway.traces={receiver.url}") as running:
        yield running


def by_operation(spans: list[SeenSpan]) -> dict[str, list[SeenSpan]]:
    found: dict[str, list[SeenSpan]] = {}
    for span in spans:
        found.setdefault(span.attributes[names.OPERATION], []).append(span)
    return found


async def updated(gateway: GatewayUnderTest, **result: Any) -> None:
    """What the trainer tells after its update, of a rollout that it has read and deleted."""
    await gateway.client.delete(f"/api/rollouts/{result['rollout_id']}")
    body = {"step": 3, "results": [result]}
    (await gateway.client.post("/empo2/updated", json=body)).raise_for_status()


async def test_the_whole_trace_of_a_memory_rollout(gateway: GatewayUnderTest, receiver: OtlpReceiver) -> None:
    await gateway.store_tips(ROOMS[:1], "Take the lamp.", "Open the door.")
    gateway.tip = "Look for a key."
    rollout = await gateway.create("memory", "off-policy", step=3)
    await gateway.play(rollout, [{**body, "top_p": 0.5, "seed": 4} for body in ROOMS[:2]])
    await gateway.ended(rollout, 7.5)
    mode = {"rollout_mode": "memory", "update_mode": "off-policy"}
    await updated(gateway, rollout_id=rollout, return_=7.5, advantage=-0.25, masked_tokens=17, dropped="why", **mode)
    spans = receiver.of(rollout, 7)  # a trace has the rollout's id
    assert receiver.key == "Bearer key-of-the-collector"
    found = by_operation(spans)
    assert {name: len(each) for name, each in found.items()} == {
        "invoke_agent": 1, "chat": 2, "search_memory": 2, "create_memory": 1, "update": 1,
    }  # fmt: skip

    (root,) = found["invoke_agent"]
    assert (root.id, root.parent, root.failed) == (f"{trace_of(rollout)[1]:016x}", "", False)
    assert root.attributes.items() >= {
        "gen_ai.conversation.id": rollout, "gen_ai.provider.name": "vllm", "empo2.return": 7.5, "empo2.step": 3,
        "empo2.attempt": "0", "empo2.phase": "training", "empo2.task": "{}", "empo2.scope": "a", "empo2.tips_shown": 2,
        "empo2.rollout_mode": "memory", "empo2.update_mode": "off-policy",
    }.items()  # fmt: skip
    assert root.events == {"gen_ai.evaluation.result": {names.EVALUATION_NAME: "reward", names.EVALUATION_SCORE: 7.5}}
    assert root.resource.items() >= {"service.name": "empo2", "empo2.run": gateway.folder.name}.items()

    requests = gateway.model.requests()[-3:-1]
    # The state was seen in the two episodes before in the first turn alone.
    for chat, search, sent, visits in zip(found["chat"], found["search_memory"], requests, (3, 1), strict=True):
        assert (chat.name, chat.kind, chat.parent) == ("chat any", CLIENT, root.id)
        assert (search.parent, search.failed) == (chat.id, False)
        assert root.start <= chat.start <= search.start <= search.end <= chat.end <= root.end
        # What was sent: the temperature that agent-lightning forces, no seed, and the whole distribution.
        assert chat.attributes.items() >= {
            "gen_ai.request.temperature": 1.0, "gen_ai.request.top_p": 1.0, "gen_ai.request.max_tokens": 8,
            "gen_ai.request.model": "any", "gen_ai.response.model": MODEL, "gen_ai.response.id": "cmpl-1",
            "gen_ai.usage.input_tokens": len(sent.prompt_ids), "gen_ai.usage.output_tokens": len(sent.reply_ids),
            "empo2.policy_version": 0, "empo2.trained": True, "empo2.visits": visits, "empo2.novelty": 1 / visits,
        }.items()  # fmt: skip
        assert chat.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert "gen_ai.request.seed" not in chat.attributes
        assert sent.traceparent == f"00-{rollout}-{chat.id}-01"  # by which vLLM's span is a child of it
    first, second = found["search_memory"]
    assert (first.attributes["gen_ai.memory.store.id"], first.attributes["gen_ai.memory.record.count"]) == ("a", 2)
    assert first.attributes["empo2.tips_shown"] == found["chat"][0].attributes["empo2.tips_shown"] == 2
    assert sorted(first.attributes["empo2.tip_ids"]) == root.attributes["empo2.tip_ids"]
    assert second.attributes["empo2.tips_shown"] == 0  # both are in the chat already

    (create,), (update,) = found["create_memory"], found["update"]
    assert create.parent == root.id and create.attributes["gen_ai.memory.record.count"] == 1
    assert create.attributes["gen_ai.memory.record.id"] == "3"  # after the two that were there
    assert gateway.reflections()[-1].traceparent == f"00-{rollout}-{create.id}-01"
    assert (update.parent, update.links) == (root.id, [root.id]) and update.start >= root.end
    assert update.attributes.items() >= {
        "empo2.step": 3, "empo2.advantage": -0.25, "empo2.masked_tokens": 17, "empo2.dropped": "why",
        "empo2.rollout_mode": "memory", "empo2.update_mode": "off-policy",
    }.items()  # fmt: skip
    assert "a dark room" not in str(spans) and "Take the lamp" not in str(spans)  # no texts unless they are asked for


async def test_what_failed_says_why(gateway: GatewayUnderTest, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PLAYER_TOKEN", "abcdefgh1234")
    failed, deleted = await gateway.create(), await gateway.create_as({}, room="a hall<|im_end|>", key="1")
    await gateway.play(failed, ROOMS[:1])
    gateway.model.fault = lambda path, body: 400
    assert (await gateway.call(failed, ROOMS[1])).status_code == 400
    assert (await gateway.call(failed, b"{")).status_code == 400
    error = {"type": "KeyError", "message": "'exit'<|im_end|> of abcdefgh1234", "where": "play.py:3 in step"}
    event = {"event_type": "empo2_agent_error", "data": error}
    await gateway.client.post(f"/api/rollouts/{failed}/attempt/0/events", json=event)
    status = {"state": "failed", "error_message": "subprocess exited with code 1"}
    await gateway.client.patch(f"/api/rollouts/{failed}", json={"status": status})
    await gateway.client.delete(f"/api/rollouts/{deleted}")
    found = by_operation(receiver.of(failed, 6))
    (root,), calls = found["invoke_agent"], found["chat"]
    assert root.failed and root.attributes["error.type"] == "KeyError" and "empo2.return" not in root.attributes
    assert root.message == "KeyError: 'exit' of (secret, left out) (play.py:3 in step)"
    assert root.attributes["empo2.failure"] == "failed_by_agent"
    assert [(call.failed, call.attributes.get("error.type")) for call in calls] == [
        (False, None), (True, "400"), (True, "400")
    ]  # fmt: skip
    assert "gen_ai.response.id" not in calls[1].attributes and calls[2].name == "chat"
    (root,) = receiver.of(deleted, 1)
    assert root.failed and root.message == "it was deleted before it ended"
    assert root.attributes["empo2.task"] == '{"room": "a hall ", "key": "(secret, left out)"}'


async def test_a_memory_that_fails_and_a_tip_that_is_refused(gateway: GatewayUnderTest, receiver: OtlpReceiver) -> None:
    rollout, gateway.tip = await gateway.create(), ""
    gateway.words.failure = ValueError("no")
    assert (await gateway.call(rollout, ROOMS[0])).status_code == 200
    gateway.words.failure = None
    await gateway.play(rollout, ROOMS[1:2])
    await gateway.ended(rollout)
    found = by_operation(receiver.of(rollout, 6))
    assert [span.attributes.get("error.type") for span in found["search_memory"]] == ["EmbedderError", None]
    assert found["create_memory"][0].attributes["empo2.refused"] == "empty"

    await gateway.store_tips(ROOMS[:1], "Take the lamp.")
    again = await gateway.episode("no-memory", ROOMS[:1], score=0.0)
    await gateway.drain()
    (create,) = by_operation(receiver.of(again, 3))["create_memory"]
    assert create.attributes["empo2.refused"] == "known" and "gen_ai.memory.record.count" not in create.attributes


async def test_texts_only_where_they_are_asked_for(
    receiver: OtlpReceiver, quiet: None, empty_stores: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the conventions' form, without secrets and special tokens; what is no chat costs the texts, not the call."""
    monkeypatch.setenv(names.CAPTURE, "true")
    monkeypatch.setenv("DOOR_PASSWORD", "open sesame")
    call = {"id": "c1", "type": "function", "function": {"name": "say", "arguments": '{"word": "open sesame"}'}}
    messages = [
        {"role": "system", "content": "Play.<|im_end|>\nWell."},
        {"role": "user", "content": [{"type": "text", "text": "a room"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It opens."},
    ]
    settings = (f"gateway.traces={receiver.url}", "memory.searched=every-turn")
    async with running_gateway(tmp_path, *settings) as gateway:
        await gateway.store_tips(turns("It opens."), "Say open sesame.")
        rollout = await gateway.create()
        await gateway.play(rollout, [{"messages": messages}])
        (await gateway.call(rollout, {"prompt": [1, 2, 3], "max_tokens": 2})).raise_for_status()
        await gateway.ended(rollout)
    found = by_operation(receiver.of(rollout, 5))
    sent = json.loads(found["chat"][0].attributes["gen_ai.input.messages"])
    assert sent[:3] == [
        {"role": "system", "parts": [{"type": "text", "content": "Play.\nWell."}]},
        {"role": "user", "parts": [{"type": "text", "content": "a room"}]},
        {"role": "assistant", "parts": [
            {"type": "tool_call", "id": "c1", "name": "say", "arguments": '{"word": "(secret, left out)"}'}
        ]},
    ]  # fmt: skip
    (part,) = sent[3]["parts"]
    assert (part["type"], part["id"]) == ("tool_call_response", "c1")
    assert part["response"].endswith("- Say (secret, left out).\n\nIt opens.")  # as sent, with the tip
    (reply,) = json.loads(found["chat"][0].attributes["gen_ai.output.messages"])
    assert reply == {"role": "assistant", "parts": [{"type": "text", "content": "go 1"}], "finish_reason": "stop"}
    search = found["search_memory"][0].attributes
    assert search["gen_ai.memory.query.text"] == "It opens."
    assert json.loads(search["gen_ai.memory.records"]) == [{"content": "Say (secret, left out)."}]
    assert "gen_ai.input.messages" not in found["text_completion"][0].attributes  # token ids


async def test_the_agents_own_trace_goes_on(
    gateway: GatewayUnderTest, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that does not know its rollout's trace keeps its own: calls, rollout and update join the first one."""
    monkeypatch.setattr(traces, "_JOINED", 1)  # of the latest rollout alone it is kept
    own, other, rollout = "a" * 32, "b" * 32, await gateway.create()
    for trace, span in ((own, "1" * 16), (own, "2" * 16), (other, "3" * 16)):
        headers = {"traceparent": f"00-{trace}-{span}-01", "tracestate": "team=1"}
        (await gateway.call(rollout, ROOMS[0], headers=headers)).raise_for_status()
    await gateway.ended(rollout)
    await updated(gateway, rollout_id=rollout, advantage=1.0)
    spans = by_operation(receiver.of(own, 6))
    first, second = spans["chat"]
    assert (first.parent, second.parent) == ("1" * 16, "2" * 16)
    (root,) = spans["invoke_agent"]
    assert (root.id, root.parent) == (f"{trace_of(rollout)[1]:016x}", "1" * 16)
    assert spans["create_memory"][0].parent == spans["update"][0].parent == root.id
    (elsewhere,) = [span for span in receiver.of(other, 1) if span.attributes[names.OPERATION] == "chat"]
    assert (elsewhere.parent, elsewhere.links) == ("3" * 16, [root.id])
    assert gateway.model.requests()[0].traceparent == f"00-{own}-{first.id}-01"

    latest = await gateway.create()
    (await gateway.call(latest, ROOMS[0], headers={"traceparent": f"00-{other}-{'4' * 16}-01"})).raise_for_status()
    await updated(gateway, rollout_id=rollout, advantage=2.0)
    assert [span.attributes[names.ADVANTAGE] for span in receiver.of(rollout, 1)] == [2.0]


@pytest.mark.slow
async def test_spans_of_a_langgraph_agent_and_ours_are_one_tree(
    gateway: GatewayUnderTest, receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real controller hands the agent, which it forks, the parent of its spans; so it does with a command."""
    need("langgraph", "langchain-openai")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/v1/traces")
    tag = {"rollout_mode": "memory", "update_mode": "on-policy", "scope": "a"}
    command = 'sh -c "echo $TRACEPARENT > told; echo 1 > $EMPO2_REWARD_FILE"'
    agents = {"traced_agent:TracedAgent": {}, "empo2.agents.command:CommandAgent": {"AGENT_COMMAND": command}}
    requests = [
        {"input": {}, "metadata": {"empo2": tag}, "config": {"local": {"agent_class": agent, "env_map": variables}}}
        for agent, variables in agents.items()
    ]
    settings = load_settings("cpu", ["agent.class=traced_agent:TracedAgent"])
    with controller(settings, str(gateway.client.base_url), tmp_path):
        created = (await gateway.client.post("/api/rollouts", json=requests)).json()
        graph, other = (each["rollout_id"] for each in created)
        await until(lambda: all(upstream.is_over(_rollouts[name]) for name in (graph, other)))
    assert _rollouts[graph].status.state == "succeeded", (tmp_path / "controller.log").read_text()
    assert (tmp_path / "told").read_text().strip() == traceparent(other)
    await gateway.drain()
    spans = await asyncio.to_thread(receiver.of, graph, 10)
    names_by_id = {span.id: span.name for span in spans}
    tree = [(span.name, names_by_id.get(span.parent, "")) for span in spans]
    agent, call = "invoke_agent traced_agent:TracedAgent", [("model", "graph"), ("chat policy", "model")]
    once = [(agent, ""), ("graph", agent), ("world", "graph"), ("create_memory a", agent)]
    assert sorted(tree) == sorted([*once, *call, *call, *2 * [("search_memory a", "chat policy")]])


@pytest.mark.slow
@pytest.mark.usefixtures("empty_stores")
@pytest.mark.parametrize("fault", [401, "hang"])
async def test_a_collector_that_does_not_take_spans_costs_spans_alone(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """They are counted, it is said once, no call waits, and nor does the gateway's end."""
    monkeypatch.setattr(span_sender, "_QUEUE_SPANS", 20)
    monkeypatch.setattr(span_sender, "_BATCH_SPANS", 10)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    receiver.fault, lost, said = fault, 0.0, []
    monkeypatch.setattr(span_sender, "log", SimpleNamespace(warning=said.append))
    async with running_gateway(tmp_path, f"gateway.traces={receiver.url}") as gateway:
        for _ in range(20):
            begun = time.perf_counter()
            await gateway.episode("no-memory", ROOMS[:1])
            assert time.perf_counter() - begun < 10
        while lost < 20:  # of 40 and more
            lost += (await gateway.drain())["empo2/spans_lost"]
        (line,) = said
        ended = time.perf_counter()
    assert time.perf_counter() - ended < 10
    assert line.startswith(f"spans are lost: the collector at {receiver.url}/v1/traces")
    assert ("401" if fault == 401 else "20 wait for it") in line


@pytest.mark.usefixtures("quiet", "empty_stores")
async def test_a_memory_that_fails_at_the_end_costs_no_spans(
    receiver: OtlpReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # so that they are sent at the end alone
    close = MemoryService.close

    async def failing(memory: MemoryService) -> None:
        await close(memory)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(MemoryService, "close", failing)
    async with running_gateway(tmp_path, f"gateway.traces={receiver.url}") as gateway:
        rollout = await gateway.create()
        await gateway.play(rollout, ROOMS[:1])
    assert {span.attributes[names.OPERATION] for span in receiver.of(rollout, 2)} == {"chat", "search_memory"}


def test_where_spans_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def endpoint(*settings: str, **variables: str) -> str | None:
        with monkeypatch.context() as patch:
            for name in ("TRACES_ENDPOINT", "ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
                patch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
            for name, value in variables.items():
                patch.setenv(f"OTEL_{name}", value)
            return traces_endpoint(load_settings("cpu", settings))

    base, whole = {"EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, {"EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/in"}
    assert endpoint() is None
    assert endpoint(**base) == "http://c:4318/v1/traces" and endpoint(**base, **whole) == "http://d/in"
    for given in ("http://e/otel", "http://e/otel/v1/traces"):
        assert endpoint(f"gateway.traces={given}", **base, **whole) == "http://e/otel/v1/traces"
    assert endpoint(**base, SDK_DISABLED="true") is None and endpoint(**whole, TRACES_EXPORTER="none") is None
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL=grpc: must be http/protobuf"):
        endpoint(**base, EXPORTER_OTLP_PROTOCOL="grpc")
    assert endpoint(EXPORTER_OTLP_PROTOCOL="grpc") is None  # traces are off
    with pytest.raises(ConfigError, match=r"gateway\.traces"):
        endpoint("gateway.traces=localhost:4318")
