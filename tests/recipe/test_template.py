"""``model.chat_template_kwargs``: the same in rollouts, tip-free prompts and reflections."""

from pathlib import Path

import pytest

from .harness import ROOMS, running_gateway, turns

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


async def test_every_chat_gets_the_arguments_and_the_agents_own_stay(tmp_path: Path):
    arguments = {"enable_thinking": False, "style": "terse"}
    option = "model.chat_template_kwargs={enable_thinking: false, style: terse}"
    async with running_gateway(tmp_path, option) as gateway:
        await gateway.store_tips(ROOMS, "tip")
        await gateway.play(await gateway.create("memory", "off-policy"), ROOMS)
        await gateway.play(await gateway.create(None), ROOMS[:1])
        asked = gateway.model.requests() + gateway.model.requests("/tokenize")
        assert gateway.reflections() and gateway.model.requests("/tokenize")
        assert [seen.body["chat_template_kwargs"] for seen in asked] == [arguments] * len(asked)
        own = turns("a dark room with a lamp", chat_template_kwargs={"style": "long"})
        await gateway.play(await gateway.create("no-memory"), own)
        assert gateway.last().body["chat_template_kwargs"] == {"enable_thinking": False, "style": "long"}
        await gateway.call(await gateway.create("no-memory"), {"prompt": "once", "max_tokens": 3})
        assert "chat_template_kwargs" not in gateway.model.requests("/v1/completions")[-1].body
