"""Sampling of training calls: the model's own distribution, whatever the agent asks for."""

from pathlib import Path
from typing import Any

import pytest

from .harness import CHAT, ROOMS, GatewayUnderTest, running_gateway, turns
from .model_server import Body

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SEEN_BY_NOBODY: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_k": 20},
    {"min_p": 0.1},
    {"repetition_penalty": 1.05},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": {"7": 100}},
    {"bad_words": ["north"]},
    {"allowed_token_ids": [1, 2]},
    {"min_tokens": 5},
    {"thinking_token_budget": 9},
    {"use_beam_search": True},
    {"seed": 0},
]
HARMLESS: list[dict[str, Any]] = [
    {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0},
    {"top_p": None, "logit_bias": None, "bad_words": [], "seed": None, "tool_choice": "auto", "temperature": 0.1},
    {"response_format": {"type": "text"}, "tool_choice": "none", "stop": ["\n"], "n": 2},
]
CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["1", "2"]}},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
]


async def sent(gateway: GatewayUnderTest, mode: str, options: dict[str, Any]) -> tuple[Body, dict[str, float]]:
    await gateway.play(await gateway.create(mode), turns("a room", **options))
    return gateway.last().body, await gateway.drain()


@pytest.mark.parametrize("mode", ["memory", "no-memory"])
async def test_what_the_trainer_cannot_see_is_taken_out(gateway: GatewayUnderTest, mode: str):
    for options in SEEN_BY_NOBODY:
        body, metrics = await sent(gateway, mode, options)
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
        assert not options.keys() & (body.keys() - NEUTRAL.keys())
        assert (metrics["empo2/sampling_overridden"], metrics["empo2/constrained_calls"]) == (1, 0), options


async def test_what_changes_nothing_is_not_counted(gateway: GatewayUnderTest):
    for options in HARMLESS:
        body, metrics = await sent(gateway, "memory", options)
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
        assert metrics["empo2/sampling_overridden"] == metrics["empo2/constrained_calls"] == 0, options
        kept = {name: value for name, value in options.items() if name in ("stop", "response_format", "tool_choice")}
        assert body.items() >= kept.items()


async def test_constraints_stay_and_are_counted(gateway: GatewayUnderTest):
    for options in CONSTRAINTS:
        body, metrics = await sent(gateway, "no-memory", options)
        assert body.items() >= options.items()
        assert (metrics["empo2/sampling_overridden"], metrics["empo2/constrained_calls"]) == (0, 1), options


async def test_vllm_takes_the_neutral_values_as_no_filter_at_all():
    """And its own defaults would be the model's generation_config.json, such as top_p 0.8 and top_k 20 of Qwen2.5."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    qwen = {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    messages = ROOMS[0]["messages"]
    silent = ChatCompletionRequest.model_validate({"messages": messages}).to_sampling_params(8, qwen)
    assert (silent.top_p, silent.top_k, silent.repetition_penalty) == (0.8, 20, 1.05)
    request = ChatCompletionRequest.model_validate({"messages": messages, "temperature": 1.0, **NEUTRAL})
    neutral = request.to_sampling_params(8, qwen)
    assert (neutral.top_p, neutral.top_k, neutral.min_p, neutral.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert (neutral.presence_penalty, neutral.frequency_penalty, neutral.logit_bias, neutral.seed) == (0, 0, None, None)


async def test_validation_and_untagged_calls_keep_their_sampling(gateway: GatewayUnderTest):
    rollout = await gateway.create("memory")
    url = f"/proxy/rollout/{rollout}/attempt/0/mode/val/openai{CHAT}"
    (await gateway.client.post(url, json={**ROOMS[0], "top_p": 0.5})).raise_for_status()
    assert gateway.last().body["top_p"] == 0.5 and "top_k" not in gateway.last().body
    await gateway.play(await gateway.create(None), [{**ROOMS[0], "top_p": 0.5}])
    assert gateway.last().body["top_p"] == 0.5 and "top_k" not in gateway.last().body
    assert (await gateway.drain())["empo2/sampling_overridden"] == 0


async def test_training_calls_of_plain_grpo_are_sampled_likewise(tmp_path: Path):
    """Its rollouts have no tag: the baseline would be trained off its own distribution, and EMPO² would not."""
    async with running_gateway(tmp_path, "algorithm.name=grpo") as gateway:
        rollout = await gateway.create(None)
        for _ in range(2):
            asked = {**ROOMS[0], "top_p": 0.5, "seed": 3, "stop": ["\n"], "tool_choice": "required"}
            await gateway.play(rollout, [asked])
            body = gateway.last().body
            assert {name: body[name] for name in NEUTRAL} == NEUTRAL
            assert "seed" not in body
            assert (body["stop"], body["tool_choice"], body["temperature"]) == (["\n"], "required", 1.0)
            assert body["messages"] == ROOMS[0]["messages"]
        assert await gateway.events(rollout, "empo2_call") == []
        assert len(await gateway.events(rollout, "model_request")) == 2
        metrics = await gateway.drain()
        assert (metrics["empo2/sampling_overridden"], metrics["empo2/constrained_calls"]) == (2, 2)

        url = f"/proxy/rollout/{rollout}/attempt/0/mode/val/openai{CHAT}"
        (await gateway.client.post(url, json={**ROOMS[0], "top_p": 0.5})).raise_for_status()
        assert gateway.last().body["top_p"] == 0.5 and "top_k" not in gateway.last().body
        assert (await gateway.call(rollout, ROOMS[0], headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await gateway.call(rollout, b"{no JSON")).status_code >= 400
        assert (await gateway.drain())["empo2/sampling_overridden"] == 0
