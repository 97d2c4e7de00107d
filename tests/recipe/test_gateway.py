"""The gateway before a scripted model server."""

import asyncio
import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from agentlightning.server.store import _events, _rollouts

from empo2.recipe.config import load_settings
from empo2.recipe.failures import cause_of_failure
from empo2.recipe.gateway.tokens import rendering
from empo2.recipe.gateway.tokens.tokenizer import PolicyTokenizer
from empo2.recipe.protocol import StepProgress

from . import toy_agent
from .harness import (
    BLOCK,
    CHAT,
    MODES,
    ROOMS,
    SECONDS,
    TOOL_TEMPLATE,
    GatewayUnderTest,
    assistant,
    both,
    controller,
    in_reflection,
    is_reflection,
    prompt_ids,
    running_gateway,
    trained,
    turns,
    until,
    user,
)
from .model_server import MODEL, Body, tokenizer

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


ODD_BODIES = [
    b'{"messages": [{"role": "user", "content": "caf\\u00e9 \xe2\x98\x83"}], "seed": 1.50, "max_tokens":4, "x": null}',
    b'{"x": {"b": 1, "a": [1e2, true]}, "messages": [{"content": "hi", "role": "user"}], "temperature": 9, "n": 1}',
    b'{ "prompt":"once", "max_tokens" : 3}',
]


def as_asked(answer: tuple[int, bytes]) -> tuple[int, Any]:
    """An answer of agent-lightning's without what it asked for itself."""
    status, content = answer
    if status != 200 or not isinstance(found := json.loads(content), dict):
        return answer
    found.pop("prompt_token_ids", None)
    for choice in found.get("choices") or []:
        if isinstance(choice, dict):
            choice |= {"logprobs": None} if "logprobs" in choice else {}
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    return status, found


NO_TAGS = [{}, *({"empo2": tag} for tag in ({"rollout_mode": "memory", "scope": 3}, "memory", None, []))]


async def test_an_untagged_call_passes_byte_for_byte_and_is_not_remembered(
    gateway: GatewayUnderTest, plain: httpx.AsyncClient
):
    for metadata in NO_TAGS:
        rollout = await gateway.create_as(metadata)
        for content in ODD_BODIES:
            told, alone = await both(gateway, plain, rollout, content)
            assert as_asked(told) == as_asked(alone) and told[0] == 200 and b"token_ids" not in told[1]
            first, second = gateway.model.seen[-2:]
            assert (first.path, first.raw) == (second.path, second.raw)
        await gateway.finish(rollout)
        assert await gateway.events(rollout, "empo2_call") == []
    metrics = await gateway.drain()
    assert metrics["empo2/calls"] == metrics["empo2/tips_written"] == (await gateway.state())["episodes"] == 0
    assert gateway.words.texts == []


async def test_validation_with_memory_reads_and_leaves_nothing(gateway: GatewayUnderTest):
    await gateway.store_tips(ROOMS, "tip")
    before = await gateway.snapshot()
    rollout = await gateway.create(read_only=True)
    calls = [("completions", {"prompt": "a dark room with a lamp"}), *(("chat/completions", body) for body in ROOMS)]
    for path, body in calls:
        asked = {**body, "top_p": 0.5, "seed": 3}
        (await gateway.client.post(f"{gateway.address(rollout, 'val')}/{path}", json=asked)).raise_for_status()
        sent = gateway.model.seen[-1].body
        assert str(sent).count("- tip") == 1  # in the first turn, and carried along
        assert (sent["temperature"], sent["top_p"], sent["seed"]) == (0.4, 0.5, 3) and "top_k" not in sent
    await gateway.finish(rollout, 100.0)
    reflections = len(gateway.reflections())
    metrics = await gateway.drain()
    assert await gateway.events(rollout, "empo2_call") == []
    assert (metrics["empo2/tips_written"], len(gateway.reflections())) == (0, reflections)
    assert await gateway.snapshot() == before
    assert await gateway.query("SELECT value, (SELECT sum(visits) FROM states) FROM tips") == [(0.0, 3)]
    assert await gateway.query("SELECT * FROM plays") == []
    # At the temperature of training, as an adaptation with a frozen bank plays it, it leaves nothing either.
    await gateway.call(rollout, ROOMS[0])
    assert gateway.last().body["temperature"] == 1
    assert await gateway.events(rollout, "empo2_call") == []


ODD_REQUESTS = [
    b'{"prompt": [9690, 198], "max_tokens": 3}',
    b'{"prompt": ["once", "twice"], "max_tokens": 3}',
]
_ODD_CHOICES: list[Any] = [None, ["x"], [{"message": 3}], [{"message": {"content": 3, "tool_calls": [4]}}]]
ODD_ANSWERS = [{}, *({"prompt_token_ids": [1], "choices": choices} for choices in _ODD_CHOICES)]


UNREADABLE = [b'{"x": NaN}', b'{"x": 1e400}', b'{"x": "\\ud83d"}', b'"text"', b'{"x": ']


async def test_an_answer_that_events_cannot_hold_is_refused_and_counted(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    for answer in UNREADABLE:
        gateway.model.answer = lambda body, answer=answer: answer
        refused = await gateway.call(rollout, ROOMS[0])
        assert refused.status_code == 502 and "no JSON object" in refused.json()["error"]["message"], answer
    gateway.model.answer = None
    await gateway.play(rollout, ROOMS[:1])
    # They are recorded, so that the rollout does not fail by its agent; so is a call when there is no server.
    (await gateway.client.delete("/api/models")).raise_for_status()
    assert (await gateway.call(rollout, ROOMS[1])).status_code == 503
    calls = await gateway.events(rollout, "model_request")
    assert [call["http_status"] for call in calls] == [502] * len(UNREADABLE) + [200, 503]
    assert cause_of_failure("subprocess exited with code 1", calls, answered=True) == "failed_by_system"
    assert (await gateway.drain())["empo2/answers_refused"] == len(UNREADABLE)


async def test_odd_requests_and_answers_are_those_of_agent_lightning(
    gateway: GatewayUnderTest, plain: httpx.AsyncClient
):
    await gateway.store_tips(turns("hi"), "tip")
    for content in ODD_REQUESTS:
        rollout = await gateway.create("memory", "off-policy")
        told, alone = await both(gateway, plain, rollout, content)
        assert as_asked(told) == as_asked(alone), content
        await gateway.ended(rollout)  # its reflection is not to come between the next requests
    for odd in ODD_ANSWERS:
        gateway.model.answer = lambda body, odd=odd: odd
        rollout = await gateway.create("memory", "off-policy")
        told, alone = await both(gateway, plain, rollout, turns("hi")[0])
        assert as_asked(told) == as_asked(alone), odd
        assert (await gateway.ended(rollout))["empo2/tips_written"] == 0


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
_LOOK = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "lamp"}'}}]
_WITH_TOOLS = [
    user("find the lamp"),
    assistant(None, tool_calls=_LOOK),
    {"role": "tool", "tool_call_id": "1", "content": "a dark room"},
    assistant("go 1"),
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "a lamp"}]},
]
EFFORT_TEMPLATE = "{% if reasoning_effort %}Effort {{ reasoning_effort }}.{% endif %}{{ style }}" + TOOL_TEMPLATE
_PROMPTS = ("Find it. Action:", "Find it. Action:go 0\nA lamp. Action:", "x\n")
_STYLE: Body = {"chat_template_kwargs": {"style": "terse"}}
_PREFILL = {"add_generation_prompt": False, "continue_final_message": True}

# name: requests, the chat template, blocks of tips in each of them
CONVERSATIONS: dict[str, tuple[list[Body], str | None, list[int]]] = {
    "whole chat": (ROOMS, None, [1, 2, 3]),
    "a turn of white space": (turns("a room\n", "\n", "  ", ""), None, [1, 2, 3, 4]),
    "looks like tips": (turns(f"{BLOCK} of this task:\n- go\n\nlook", f"- {BLOCK}"), None, [1, 2]),
    "special tokens of its own": (turns("a<|im_end|>\n<|im_start|>user\nb", "<|im_end|>"), None, [1, 2]),
    "parts": (turns([{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}], "c"), None, [1, 2]),
    "truncated": ([ROOMS[0], ROOMS[1], {"messages": ROOMS[2]["messages"][3:]}], None, [1, 2, 1]),
    "tools": ([{"messages": _WITH_TOOLS[:n], "tools": TOOLS} for n in (1, 3, 5)], TOOL_TEMPLATE, [1, 2, 3]),
    "prefilled": ([ROOMS[0], {"messages": [*ROOMS[0]["messages"], assistant("I")], **_PREFILL}], TOOL_TEMPLATE, [1, 1]),
    "reasoning effort": (turns("a", "b", reasoning_effort="high", **_STYLE), EFFORT_TEMPLATE, [1, 2]),
    "prompts": ([{"prompt": text} for text in _PROMPTS], None, [1, 2, 1]),
}


async def test_a_result_of_a_tool_is_no_key_by_default(gateway: GatewayUnderTest):
    """The words "1 passed" find any tip; the chat keeps the tips of its task."""
    bodies, gateway.model.template, _ = CONVERSATIONS["tools"]
    await gateway.store_tips(bodies, "Take the lamp.", "Look again.")
    rollout = await gateway.create("memory")
    sent = await gateway.play(rollout, bodies)
    assert [tokenizer().decode(ids).count(BLOCK) for ids in sent] == [1, 1, 1]
    assert [len(call["tip_ids"]) for call in await gateway.calls(rollout)] == [2, 0, 0]
    assert all(call["visits"] for call in await gateway.calls(rollout))


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_tip_free_prompts_are_those_of_a_chat_that_never_had_tips(tmp_path: Path, name: str):
    """Error 1: the authors search the newest tip by tokens, and miss it. Each turn shows one tip, of odd text.

    No special token of a tip reaches a prompt, nor one that taking out another would make.
    """
    bodies, template, blocks = CONVERSATIONS[name]
    special = set(tokenizer().convert_tokens_to_ids(PolicyTokenizer(MODEL).special_tokens))
    async with running_gateway(tmp_path, "memory.top_k=1", "memory.searched=every-turn") as gateway:
        gateway.model.template = template
        ends = (".\n\n", ":\n- go", "\n", " <|im_<|im_<|im_end|>end|>end|> ...")
        await gateway.store_tips(bodies, *(f"Lamp {number}: read {BLOCK}{end}" for number, end in enumerate(ends)))
        never = await gateway.play(await gateway.create(None), bodies)
        for update in ("on-policy", "off-policy"):
            gateway.model.seen.clear()
            rollout = await gateway.create("memory", update)
            sent = await gateway.play(rollout, bodies)
            calls = await gateway.events(rollout, "empo2_call")
            assert [call["prompt_token_ids"] for call in calls] == sent
            told, plain = ([tokenizer().decode(ids) for ids in each] for each in (sent, never))
            shown = [a.count(BLOCK) - b.count(BLOCK) for a, b in zip(told, plain, strict=True)]
            assert shown == [2 * count for count in blocks]
            for ids, own in zip(sent, never, strict=True):
                assert [i for i in ids if i in special] == [i for i in own if i in special]
            for before, now in itertools.pairwise(range(len(bodies))):  # each extends the last, as without tips
                assert told[now].startswith(told[before]) or not plain[now].startswith(plain[before])
            assert [len(call["tip_ids"]) for call in calls] == ([1, 0] if name == "prefilled" else [1] * len(bodies))
            if update == "off-policy":
                assert [call["tip_free_prompt_token_ids"] for call in calls] == never
                assert len(gateway.model.requests("/tokenize")) == len(bodies)
            else:
                assert [call["tip_free_prompt_token_ids"] for call in calls] == sent
                assert not gateway.model.requests("/tokenize")
        assert (await gateway.drain())["empo2/tokenize_failures"] == 0


async def test_identical_episodes_of_a_step_earn_the_same(gateway: GatewayUnderTest):
    """1/n, in every mode, for each scope by itself, in whatever order calls come; error 2 begins without it."""
    bodies = turns("a room", "a lamp", "a room", "a room", "a cave")
    for step in range(2):
        rollouts = [await gateway.create(*MODES[number % 3]) for number in range(8)]
        await asyncio.gather(*(gateway.play(rollout, bodies) for rollout in rollouts[:5]))
        for rollout in rollouts[5:]:
            await gateway.play(rollout, bodies)
        calls = [await gateway.events(rollout, "empo2_call") for rollout in rollouts]
        assert {call["visits"] * call["intrinsic_reward"] for each in calls for call in each} == {1}
        visits = [[call["visits"] for call in each] for each in calls]
        # Three of the five states are alike, so that the first step leaves 24 visits to them and 8 to each other one.
        assert visits == ([[1, 1, 2, 3, 1]] * 8 if step == 0 else [[25, 9, 26, 27, 9]] * 8)
        await gateway.drain()
    other = await gateway.create(scope="b")
    await gateway.play(other, bodies)
    assert [call["visits"] for call in await gateway.events(other, "empo2_call")] == [1, 1, 2, 3, 1]


@pytest.mark.parametrize(("mode", "update"), MODES)
async def test_a_finished_episode_leaves_its_tip_under_each_of_its_states(
    gateway: GatewayUnderTest, mode: str, update: str
):
    """With its score; and no call of a reflection may be found on the rollout, where it would be trained."""
    await gateway.store_tips(ROOMS[:1], "an old tip")
    rollout = await gateway.create(mode, update)
    await gateway.play(rollout, ROOMS)
    before = [event.event_type for event in _events[rollout]["0"]]
    gateway.tip = "A new tip."
    await gateway.reward(rollout, 100)
    await gateway.finish(rollout, -12.5)  # the last reward counts
    assert (await gateway.drain())["empo2/tips_written"] == 1
    tips, entries = await gateway.snapshot()
    assert tips == [("a", "an old tip", 0.0), ("a", "A new tip.", -12.5)]
    states = [body["messages"][-1]["content"] for body in ROOMS]
    assert entries[1:] == [(state, f"go {number}") for number, state in enumerate(states)]
    assert [event.event_type for event in _events[rollout]["0"]] == [*before, "reward", "reward"]
    assert sorted(before) == ["empo2_call"] * 3 + ["model_request"] * 3
    assert list(_rollouts) == gateway.rollouts


@pytest.mark.parametrize(("bodies", "template"), [(ROOMS, None), (CONVERSATIONS["tools"][0], TOOL_TEMPLATE)])
async def test_a_reflection_extends_the_prompt_that_vllm_has_cached(
    gateway: GatewayUnderTest, bodies: Any, template: Any
):
    gateway.model.template = template
    await gateway.store_tips(bodies, "an old tip\n")
    for mode in ("memory", "no-memory"):
        rollout = await gateway.create(mode)
        await gateway.play(rollout, bodies)
        cached = gateway.last().prompt_ids + gateway.last().reply_ids
        await gateway.ended(rollout)
        reflection = gateway.reflections()[-1]
        assert reflection.prompt_ids[: len(cached)] == cached
        assert ("- an old tip" in reflection.prompt) == (mode == "memory")


async def test_a_tip_has_its_own_length_limit_and_is_stored_unless_it_is_degenerate(gateway: GatewayUnderTest):
    """Error 4: the authors cut tips at the length of an action."""
    gateway.tip = "Look behind the third door, then take the lamp to the cave and light it there before night falls."
    rollout = await gateway.create()
    answer = await gateway.call(rollout, {**ROOMS[0], "max_tokens": 2, "temperature": 0.1, "stop": ["door"]})
    assert answer.json()["usage"]["completion_tokens"] == 2
    await gateway.ended(rollout)
    (reflection,) = gateway.reflections()
    settings = load_settings("cpu").reflection
    assert reflection.body["max_tokens"] == settings.max_tokens == 48
    assert reflection.body["temperature"] == settings.temperature
    assert "stop" not in reflection.body
    stored, gateway.tip = gateway.tip, "Write one note for the next player of this task."
    await gateway.episode()
    metrics = await gateway.drain()
    assert (metrics["empo2/tips_refused/copy"], metrics["empo2/tips_refused"]) == (1, 1)
    assert metrics["empo2/reflections_failed"] == 0
    assert (await gateway.snapshot())[0] == [("a", stored, 1.0)]


@pytest.mark.parametrize("fault", [500, 400, "hang"])
async def test_a_failed_reflection_is_counted_and_costs_the_rollout_nothing(tmp_path: Path, fault: Any):
    """Error 6: in the authors' code it fails the rollout."""
    async with running_gateway(tmp_path, f"reflection.timeout={3 if fault == 'hang' else 60}") as gateway:
        gateway.model.fault = in_reflection(fault)
        rollout = await gateway.episode()
        metrics = await gateway.drain()
        assert (metrics["empo2/tips_written"], metrics["empo2/reflections_failed"]) == (0, 1)
        detail = (await gateway.client.get(f"/api/rollouts/{rollout}")).json()
        assert detail["rollout"]["status"]["state"] == "succeeded"
        assert len(await gateway.events(rollout, "empo2_call")) == 3
        gateway.model.fault = in_reflection(None)
        await gateway.store_tips(ROOMS, "the next one")


async def test_a_chat_too_long_for_a_question_is_asked_about_shorter(gateway: GatewayUnderTest):
    rollout = await gateway.create("no-memory")
    await gateway.play(rollout, turns("a room " + "x " * 2000, "a lamp", "a door"))
    gateway.model.context = 1800
    assert (await gateway.ended(rollout))["empo2/tips_written"] == 1
    *_, refused, asked = gateway.reflections()
    assert not refused.reply_ids and "Observation: a door\nAction: go 2" in asked.prompt


async def test_a_rollout_that_is_deleted_right_after_its_end_is_reflected_on(gateway: GatewayUnderTest):
    """agent-lightning's manager deletes it, with its events, on the poll after it has read it."""
    gateway.model.delay = lambda path, body: 0.3 if is_reflection(body) else 0
    gateway.words.gate.clear()
    rollout = await gateway.create("no-memory")
    await gateway.call(rollout, ROOMS[0])
    await gateway.finish(rollout, 7)
    assert (await gateway.client.delete(f"/api/rollouts/{rollout}")).status_code == 204
    state = await gateway.state()
    assert (state["memory_size"], state["episodes"], state["reflections"]) == (0, 0, 1)
    gateway.words.gate.set()
    metrics = await gateway.drain()
    assert (metrics["empo2/tips_written"], metrics["empo2/memory_failures"]) == (1, 0)
    tips, entries = await gateway.snapshot()
    assert (tips, len(entries)) == ([("a", gateway.tip, 7.0)], 1)


async def test_progress_of_a_step(gateway: GatewayUnderTest):

    async def progress() -> dict:
        found = (await gateway.state())["progress"]
        return {name: value for name, value in found.items() if value != getattr(StepProgress(), name)}

    tagged, untagged, open_ = [await gateway.create(mode) for mode in ("memory", None, "memory")]
    await gateway.play(tagged, ROOMS)
    await gateway.call(untagged, ROOMS[0])
    await gateway.finish(tagged)
    await gateway.patch(untagged, "failed")
    await gateway.client.delete(f"/api/rollouts/{tagged}")
    while "tips" not in await progress():
        await asyncio.sleep(0.01)
    assert await progress() == {"rollouts": 3, "ended": 2, "calls": 4, "tips": 1}
    await gateway.patch(open_, "failed")
    await gateway.drain()
    assert await progress() == {}
    await gateway.client.post("/api/rollouts", json=[{"input": {}, "is_train": False}])
    assert await progress() == {"rollouts": 1, "queued": 1, "validation": True}


async def test_drain_waits_for_reflections_and_cancels_late_ones(gateway: GatewayUnderTest):
    """At the end of a step vLLM is put to sleep: what still asks it then would hang, or hold the step up."""
    for seconds, patience, written in ((0.4, SECONDS, 1), (600, 0.5, 0)):
        gateway.model.delay = lambda path, body, seconds=seconds: seconds if is_reflection(body) else 0
        rollout = await gateway.create("no-memory", scope=str(seconds))
        await gateway.play(rollout, ROOMS)
        await gateway.finish(rollout)
        await until(lambda: is_reflection(gateway.last().body))
        metrics = await gateway.drain(timeout=patience)
        assert (metrics["empo2/tips_written"], metrics["empo2/reflections_failed"]) == (written, 1 - written)
        assert (await gateway.state())["reflections"] == 0
    await until(lambda: gateway.last().gone)
    assert len((await gateway.snapshot())[0]) == 1


async def test_metrics_are_exact_and_of_one_step(gateway: GatewayUnderTest):
    await gateway.store_tips(ROOMS, "alpha", "beta")
    memory, other = await gateway.create("memory", "off-policy"), await gateway.create("no-memory")
    await gateway.play(memory, ROOMS)
    await gateway.play(memory, ROOMS[:1])  # a retry: no search
    await gateway.play(other, ROOMS[:2])
    gateway.model.fault = in_reflection(500)
    await gateway.finish(memory)
    metrics = await gateway.ended(other)
    assert metrics.pop("empo2/memory_ms_per_call") > 0
    assert metrics.pop("empo2/embedding_ms_per_search") > 0
    tokens = tokenizer()(f"{BLOCK} of this task (each may be wrong):\n- beta\n- alpha\n\n")["input_ids"]
    assert metrics.pop("empo2/tip_tokens_per_episode") == pytest.approx(len(tokens), abs=2)
    expected = {"calls": 6, "tips_injected_per_call": 2 / 3, "hit_rate": 1, "tips_per_episode": 2}
    expected |= {"reflections_failed": 2, "memory_size": 2}
    assert {name.removeprefix("empo2/"): value for name, value in metrics.items() if value} == expected
    assert {name for name, value in (await gateway.drain()).items() if value} == {"empo2/memory_size"}


async def test_every_chat_gets_the_template_arguments_and_the_agents_own_stay(tmp_path: Path):
    option = "model.chat_template_kwargs={enable_thinking: false, style: terse}"
    async with running_gateway(tmp_path, option) as gateway:
        await gateway.store_tips(ROOMS, "tip")
        await gateway.play(await gateway.create("memory", "off-policy"), ROOMS[:1])
        await gateway.play(await gateway.create(None), ROOMS[:1])
        assert gateway.reflections() and gateway.model.requests("/tokenize")
        for seen in gateway.model.seen:
            assert seen.body["chat_template_kwargs"] == {"enable_thinking": False, "style": "terse"}
        await gateway.play(await gateway.create("no-memory"), turns("a room", chat_template_kwargs={"style": "long"}))
        assert gateway.last().body["chat_template_kwargs"] == {"enable_thinking": False, "style": "long"}
        await gateway.play(await gateway.create("no-memory"), [{"prompt": "once"}])
        assert "chat_template_kwargs" not in gateway.model.seen[-1].body


async def test_without_an_embedder_or_a_whole_file_calls_go_on_and_are_counted(gateway: GatewayUnderTest):
    """Error 6: no failure of the memory may be an agent's."""
    await gateway.store_tips(ROOMS, "tip")
    gateway.words.failure = RuntimeError("no keys today")
    rollout = await gateway.create("memory", "off-policy")
    other = turns("never seen", "nor this")
    sent = await gateway.play(rollout, other)
    assert [seen.body["messages"] for seen in gateway.model.requests()[-2:]] == [body["messages"] for body in other]
    calls = await gateway.events(rollout, "empo2_call")
    assert [call["tip_free_prompt_token_ids"] for call in calls] == sent
    assert [(call.get("visits"), call["intrinsic_reward"]) for call in calls] == [(None, 0)] * 2
    metrics = await gateway.drain()
    assert (metrics["empo2/calls"], metrics["empo2/memory_failures"]) == (2, 4)  # the search and the visit of each
    gateway.words.failure = None
    with closing(sqlite3.connect(gateway.folder / "memory.sqlite")) as file:
        for table in ("credits", "states"):
            file.execute(f"DROP TABLE {table}")
    await gateway.episode()
    assert (await gateway.drain())["empo2/memory_failures"] == 2


@pytest.mark.parametrize("fault", [500, "hang"])
async def test_an_unknown_tip_free_prompt_is_left_out_of_the_event(
    gateway: GatewayUnderTest, fault: Any, monkeypatch: pytest.MonkeyPatch
):
    """Never the prompt with its tips in its place."""
    monkeypatch.setattr(rendering, "_SECONDS", 0.3)
    await gateway.store_tips(ROOMS, "tip")
    gateway.model.fault = lambda path, body: fault if path == "/tokenize" else None
    rollout = await gateway.create("memory", "off-policy")
    await gateway.play(rollout, ROOMS)
    calls = await gateway.events(rollout, "empo2_call")
    assert len(calls) == 3 and not any("tip_free_prompt_token_ids" in call for call in calls)
    assert (await gateway.drain())["empo2/tokenize_failures"] == 3


async def test_an_agent_that_gives_up_is_noticed(gateway: GatewayUnderTest):
    """vLLM would otherwise play on for an agent that is gone."""
    gateway.model.delay = lambda path, body: 600 if path == CHAT else 0
    rollout = await gateway.create("memory", "off-policy")
    call = asyncio.create_task(gateway.call(rollout, ROOMS[0]))
    await until(gateway.model.requests)
    call.cancel()
    await until(lambda: gateway.last().gone)
    assert await gateway.events(rollout, "empo2_call") == []


async def test_reflections_never_stand_in_the_agents_way(gateway: GatewayUnderTest):
    """Error 9: a model server that hangs holds up no one; nor do a hundred calls that wait for it."""
    gateway.model.fault = in_reflection("hang")
    await asyncio.gather(*(gateway.episode("no-memory", ROOMS[:1]) for _ in range(105)))
    assert (await gateway.state())["reflections"] == 105
    assert (await gateway.call(await gateway.create("memory"), ROOMS[0])).status_code == 200
    assert (await gateway.drain(timeout=0.1))["empo2/reflections_failed"] == 105


async def test_an_episode_becomes_one_training_row(gateway: GatewayUnderTest):
    await gateway.store_tips(ROOMS, "Take the lamp.\n", "Go north.")
    never = await gateway.play(await gateway.create(None), ROOMS)
    # Events stand in the order of the calls, however long the model server takes for each tip-free prompt.
    gateway.model.delay = lambda path, body: 1.0 / len(body["messages"]) if path == "/tokenize" else 0
    for update in ("on-policy", "off-policy"):
        rollout = await gateway.create("memory", update)
        sent = await gateway.play(rollout, ROOMS)
        assert [call["prompt_token_ids"] for call in await gateway.events(rollout, "empo2_call")] == sent
        await gateway.ended(rollout, 3)
        ids, rows, metrics, results = await trained(gateway, rollout)
        calls = await gateway.events(rollout, "empo2_call")
        observations = [call["observation"] for call in calls]  # without tips, in which rollouts differ
        assert observations == [body["messages"][-1]["content"] for body in ROOMS]
        assert results.kept[rollout].intrinsic == sum(call["intrinsic_reward"] for call in calls)
        assert results.left_out.total() == metrics["training/n_unmerged_rollouts"] == 0
        prompts = never if update == "off-policy" else sent
        last_reply = gateway.model.requests()[-2].reply_ids  # the last request is the reflection
        assert ids == [prompts[-1] + last_reply]
        (row,) = rows
        assert int(row["response_mask"].sum()) == sum(len(seen.reply_ids) for seen in gateway.model.requests()[-4:-1])
        log_probs = row["rollout_log_probs"][row["response_mask"].bool()]
        assert bool((log_probs < 0).all())  # vLLM's own, with tips: the old policy's


@pytest.mark.slow
async def test_the_real_controller_plays_many_agents_at_once(gateway: GatewayUnderTest, tmp_path: Path):
    """Errors 6 and 12. Agents that raise, hang or report nothing fail by themselves and disturb no other."""
    tag = {"rollout_mode": "memory", "update_mode": "off-policy", "scope": "doors"}
    local = {"agent_class": "toy_agent:ToyAgent", "env_map": {"TOY_DOOR": "input.door", "TOY_TROUBLE": "input.trouble"}}

    def request(door: int, trouble: str = "none") -> Body:
        limit = 4 if trouble == "hang" else 90
        config = {"timeout_seconds": limit, "local": local}
        return {"input": {"door": door, "trouble": trouble}, "metadata": {"empo2": tag}, "config": config}

    async def played(requests: list[Body]) -> list[Body]:
        created = (await gateway.client.post("/api/rollouts", json=requests)).json()
        names = [rollout["rollout_id"] for rollout in created]
        await until(lambda: all(_rollouts[name].status.state in ("succeeded", "failed") for name in names), 120)
        return [(await gateway.client.get(f"/api/rollouts/{name}")).json()["rollout"] for name in names]

    numbers = itertools.count()
    gateway.model.reply = lambda body: (
        f"{next(numbers)}: the lamp is behind door 7." if is_reflection(body) else "3 please"
    )
    gateway.model.delay = lambda path, body: 0.2
    settings = load_settings("cpu", ["agent.class=toy_agent:ToyAgent", "agent.concurrency=32"])
    with controller(settings, str(gateway.client.base_url), tmp_path):
        first = await played([request(7), request(1)])
        assert (await gateway.drain())["empo2/tips_written"] == 2
        troubles = ["raise", "hang", "no reward"]
        rollouts = await played([*(request(door % 10) for door in range(16)), *(request(5, t) for t in troubles)])
    states = [rollout["status"]["state"] for rollout in [*first, *rollouts]]
    ended = [*["succeeded"] * 18, "failed", "failed", "succeeded"]
    assert states == ended, (tmp_path / "controller.log").read_text()
    assert "timed out" in rollouts[17]["status"]["error_message"]
    for rollout in rollouts[:16]:
        name = rollout["rollout_id"]
        await gateway.client.post(f"/empo2/rollouts/{name}/settle")
        calls, requests = await gateway.events(name, "empo2_call"), await gateway.events(name, "model_request")
        assert len(calls) == len(requests) == toy_agent.CALLS
        assert [call["prompt_token_ids"] for call in calls] == [prompt_ids(event) for event in requests]
        for call in calls:
            assert "behind door 7" in tokenizer().decode(call["prompt_token_ids"])
            assert "behind door 7" not in tokenizer().decode(call["tip_free_prompt_token_ids"])
        (reward,) = await gateway.events(name, "reward")
        assert reward["value"] == pytest.approx(1 - abs(3 - rollout["input"]["door"]) / 10)
    metrics = await gateway.drain()
    assert (metrics["empo2/tips_written"], metrics["empo2/reflections_failed"]) == (16, 0)
    assert metrics["empo2/memory_failures"] == metrics["empo2/tokenize_failures"] == 0
