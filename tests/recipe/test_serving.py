"""``empo2 serve``: agents that have no rollout, in every dialect. `tests/test_serve.py` has the command itself."""

import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from agentlightning.server.store import _events, _rollouts

from empo2.memory import MemoryStore, Step
from empo2.recipe.cli.serve import _log_folder, _tag
from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ProcessError
from empo2.recipe.gateway.dialects import dialect
from empo2.recipe.gateway.request import SERVED
from empo2.recipe.gateway.stages import direct_calls
from empo2.recipe.gateway.upstream import unchanged_since
from empo2.recipe.launcher.processes import Processes
from empo2.recipe.launcher.serving import _start_vllm, vllm_command
from empo2.recipe.protocol import RolloutTag, Serving, scope_of

from ..processes import mark, until  # noqa: F401
from .harness import AGENT_KEY, BLOCK, ROOMS, GatewayUnderTest, running_gateway, turns
from .model_server import MODEL, ModelServer

TIP = "Take the lamp first."
CARDS = "CUDA_VISIBLE_DEVICES"
WITHOUT_TIPS = Serving(name="mine")
WITH_TIPS = Serving(name="mine", tag=RolloutTag(rollout_mode="memory", scope="a", read_only=True))


@pytest.fixture
async def serving(quiet: None, empty_stores: None, tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(tmp_path, serving_agents=WITH_TIPS) as gateway:
        await gateway.store_tips(ROOMS[:1], TIP)
        yield gateway


def client_of(gateway: GatewayUnderTest, key: str = AGENT_KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.client.base_url}/v1", api_key=key, max_retries=0)


def texts_of(gateway: GatewayUnderTest) -> list[str]:
    return [message["content"] for message in gateway.last().body["messages"]]


async def test_a_model_is_served_without_tips(quiet: None, empty_stores: None, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, serving_agents=WITHOUT_TIPS) as gateway, client_of(gateway) as client:
        await gateway.store_tips(ROOMS[:1], TIP)
        assert [model.id async for model in client.models.list()] == ["mine"]
        answer = await client.chat.completions.create(model="mine", messages=ROOMS[0]["messages"])
        assert answer.choices[0].message.content == "go 0" and not answer.model_extra
        assert gateway.last().body["messages"] == ROOMS[0]["messages"]
        for key in ("another", ""):
            async with client_of(gateway, key or "none") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()
        async with gateway.as_agent() as agent:
            assert (await agent.get("/empo2/state")).status_code == 403


async def test_tips_are_shown_as_in_validation_and_nothing_is_written(serving: GatewayUnderTest) -> None:
    before, prompts = await serving.snapshot(), []
    async with client_of(serving) as client:
        # At the temperature of validation, unless the agent asks for another one.
        for body, temperature in zip(ROOMS, (0.4, 1.5, 0.4), strict=True):
            asked = {"temperature": temperature, "top_p": 0.9, "seed": 3} if temperature != 0.4 else {}
            await client.chat.completions.create(model="mine", **body, **asked)
            assert serving.last().body.items() >= {"model": MODEL, "temperature": temperature, **asked}.items()
            prompts.append(serving.last().prompt)
    assert prompts[0].count(TIP) == prompts[2].count(TIP) == 1  # once per chat
    assert BLOCK in texts_of(serving)[1]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier)
    assert (await serving.drain())["empo2/tips_written"] == 0
    assert await serving.snapshot() == before


async def test_each_chat_has_its_tips(quiet: None, empty_stores: None, tmp_path: Path) -> None:
    setting = "memory.searched=first-turn"
    async with running_gateway(tmp_path, setting, serving_agents=WITH_TIPS) as gateway, client_of(gateway) as client:
        await gateway.store_tips(ROOMS[:1], TIP)
        other = turns("a dark room with a lamp, again", "the lamp is lit", system="You play another game.")
        for body in (ROOMS[0], other[0], ROOMS[1], other[1]):
            await client.chat.completions.create(model="mine", **body)
            assert [TIP in text for text in texts_of(gateway)].index(True) == 1
            assert sum(TIP in text for text in texts_of(gateway)) == 1


async def test_a_chat_keeps_to_one_of_several_servers(serving: GatewayUnderTest) -> None:
    chats = [turns("a dark room with a lamp", "it is lit", "a door", system=f"Agent {number}.") for number in range(8)]
    serving.model.seen.clear()
    with ModelServer().serve() as second:
        for server in (serving.model, second):
            registered = [{"model": MODEL, "endpoint": server.url}]
            (await serving.client.post("/api/models", json=registered)).raise_for_status()
        async with client_of(serving) as client:
            for turn in zip(*chats, strict=True):
                for body in turn:
                    await client.chat.completions.create(model="mine", **body)
        asked = [[seen.body["messages"][0]["content"] for seen in each.requests()] for each in (serving.model, second)]
    assert set(asked[0]) and set(asked[1]) and not set(asked[0]) & set(asked[1])


async def test_every_dialect_is_served(serving: GatewayUnderTest) -> None:
    def shown() -> int:
        return str(serving.model.seen[-1].body).count(TIP)

    text = "a dark room with a lamp"
    async with client_of(serving) as client:
        response = await client.responses.create(model="mine", input=text)
        assert (response.output_text, shown()) == ("go 0", 1)
        more = await client.responses.create(model="mine", input="it is lit", previous_response_id=response.id)
        assert (more.output_text, shown()) == ("go 1", 1)
        prompt = await client.completions.create(model="mine", prompt=text, max_tokens=8)
        assert (prompt.choices[0].text, shown()) == ("go 0", 1)
    url = str(serving.client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=AGENT_KEY) as claude:
        message = await claude.messages.create(model="mine", max_tokens=8, messages=[{"role": "user", "content": text}])
        assert message.content[0].to_dict()["text"] == "go 0" and shown() == 1
    azure, body = "/v1/deployments/mine/chat/completions?api-version=2025-01-01", {**ROOMS[0], "max_tokens": 8}
    answer = await serving.client.post(azure, json=body, headers={"api-key": AGENT_KEY})
    assert answer.json()["choices"][0]["message"]["content"] == "go 0" and shown() == 1


async def test_no_agent_can_use_up_or_end_what_serves_all(quiet: None, empty_stores: None, tmp_path: Path) -> None:
    setting = "gateway.max_rollout=0.01"  # as much as ten of these calls have
    async with running_gateway(tmp_path, setting, serving_agents=WITHOUT_TIPS) as gateway, client_of(gateway) as client:
        for _ in range(12):
            await client.chat.completions.create(model="mine", **turns("x" * 1000)[0])
        async with gateway.as_agent() as agent:
            ended = await agent.patch(f"/api/rollouts/{SERVED}", json={"status": {"state": "failed"}})
            event = {"event_type": "reward", "data": {"value": 1}}
            posted = await agent.post(f"/api/rollouts/{SERVED}/attempt/0/events", json=event)
            assert (ended.status_code, posted.status_code) == (403, 403) and "has only calls" in ended.json()["detail"]
        await client.chat.completions.create(model="mine", **ROOMS[0])


async def test_nothing_grows(serving: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_calls, "_MOST_CHATS", 2)
    monkeypatch.setattr(dialect, "_MOST", 1)
    async with client_of(serving) as client:
        for text in ("one", "two", "three"):
            for body in turns(text, "next"):
                await client.chat.completions.create(model="mine", **body)
        assert _events[SERVED] == {}
        assert SERVED in _rollouts and SERVED not in unchanged_since(time.time() + 1)  # a day later it is still there
        first = await client.responses.create(model="mine", input="a dark room with a lamp")
        second = await client.responses.create(model="mine", input="it is lit", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="no response"):
            await client.responses.create(model="mine", input="and now?", previous_response_id=first.id)
        assert second.output_text == "go 1"
    url = str(serving.client.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key=AGENT_KEY, max_retries=0) as claude:
        asked: Any = {"model": "mine", "max_tokens": 8, "messages": [{"role": "user", "content": "go on"}]}
        threads = [
            (await claude.messages.create(**asked, extra_body={"thread": {"type": "create"}})).id for _ in range(2)
        ]
        more: Any = {"thread": {"type": "continue", "previous_message_id": threads[0]}}
        with pytest.raises(anthropic.BadRequestError, match="no reply of a thread"):
            await claude.messages.create(**asked, extra_body=more)


def memory_file(folder: Path, *scopes: str) -> Path:
    file = folder / "tips.sqlite"
    with closing(MemoryStore(file, embedder="all-MiniLM-L6-v2", dimension=384)) as store:
        for number, scope in enumerate(scopes):
            key = np.eye(384, dtype=np.float32)[number]
            steps = [Step("a room", key, "go")]
            store.add_episode(scope, f"e{number}", tip=TIP, score=1.0, success=True, steps=steps)
    return file


def test_the_tips_that_are_shown_are_said_with_their_scope(tmp_path: Path) -> None:
    for name, scope, said in (
        ("a", scope_of({}, "all-tasks"), "all tasks"),
        ("b", '{"task": "boil"}', "scope task=boil"),
    ):
        (tmp_path / name).mkdir()
        tag, text = _tag(memory_file(tmp_path / name, scope), None)
        assert (tag.scope, text) == (scope, f"1 tips of {said}, read only")


def test_what_cannot_be_served(tmp_path: Path) -> None:
    several = str(memory_file(tmp_path, '{"task": "boil"}', '{"task": "melt"}'))
    tips = ["--memory", "--memory-from", several]
    url = ["--server", "http://127.0.0.1:9/v1"]
    (tmp_path / "distilled.yaml").write_text("algorithm: {off_policy_loss: distillation}")
    for arguments, problem in (
        (["--memory"], "m has no memory; give one by --memory-from"),
        (["--memory-from", several], "choose the tips that --memory shows"),
        (tips, "tips in 2 scopes, such as task=boil, task=melt; give one by --scope"),
        ([*tips, "--scope", "task=freeze"], "--scope task=freeze: there is no such scope"),
        ([*tips, "--scope", "task=boil"], "no server answers"),
        (["--config", str(tmp_path / "distilled.yaml")], "no server answers"),  # without its memory, too
    ):
        code, message = run(["serve", "m", *url, "--profile", "cpu", *arguments])
        assert code == 2 and problem in message, message


@pytest.mark.parametrize("ending", [ProcessError("vllm ended; see its log"), KeyboardInterrupt(), None])
def test_the_logs_stay_only_if_an_error_names_one(ending: BaseException | None) -> None:
    with contextlib.suppress(ProcessError, KeyboardInterrupt), _log_folder() as folder:
        (folder / "vllm.log").write_text("why")
        if ending is not None:
            raise ending
    assert folder.exists() == isinstance(ending, ProcessError)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("visible", ["", "2,3,5,7"])
def test_each_vllm_server_has_gpus_of_its_own(visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CARDS, visible)
    started: dict[str, tuple[list[str], str | None]] = {}
    processes = Processes(tmp_path, {})
    monkeypatch.setattr(
        processes, "start", lambda name, command, *, secrets: started.update({name: (command, secrets.get(CARDS))})
    )
    own = ["model.tool_parser=none", "hardware.gpus_per_node=4"]
    addresses = _start_vllm(load_settings("gpu", [*own, "hardware.tensor_parallel=2"]), "m", processes)
    cards = {"": ["0,1", "2,3"], "2,3,5,7": ["2,3", "5,7"]}[visible]
    assert {name: given for name, (_, given) in started.items()} == {"vllm-0": cards[0], "vllm-1": cards[1]}
    ports = [command[command.index("--port") + 1] for command, _ in started.values()]
    assert addresses == [f"http://127.0.0.1:{port}/v1" for port in ports] and len({*ports}) == 2
    started.clear()
    _start_vllm(load_settings("gpu", [*own, "hardware.tensor_parallel=4"]), "m", processes)
    assert {name: given for name, (_, given) in started.items()} == {"vllm": None}


def test_vllm_answers_under_the_name_that_is_served() -> None:
    cpu, gpu = (load_settings(profile, ["model.tool_parser=none"]) for profile in ("cpu", "gpu"))  # asks no hub
    words = vllm_command(cpu, "/somewhere/merged", 1, "mine")
    place = words.index("--served-model-name")
    assert words[place + 1 : place + 3] == ["mine", "/somewhere/merged"]
    # CUDA graphs, as in training: decoding a small model waits for launches. A CPU has none.
    assert "--enforce-eager" in words and "--enforce-eager" not in vllm_command(gpu, "m", 1)
