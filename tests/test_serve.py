"""The real stack without a trainer: one vLLM, which `empo2 serve` starts, and which `init` uses, too."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from transformers import AutoTokenizer

from empo2.recipe.files.models import resolve_model
from empo2.recipe.protocol import MODEL_KEY

from .hostile_calls import CHATS, COMPLETIONS, fetching
from .processes import marking, until
from .recipe.model_server import serving
from .recipe.test_serving import TIP, memory_file
from .stack import CLI, empo2, environment

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

MODEL = "smollm2-135m-notes"
CHAT: list[Any] = [{"role": "user", "content": "A dark room with a lamp. What do you do?"}]
MINUTES = 60


class Served(NamedTuple):
    """What `empo2 serve` said, and address and key of the vLLM behind it."""

    url: str
    key: str
    vllm: str
    vllm_key: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The model is served with a tip; Ctrl-C ends it, and leaves no process."""
    folder = tmp_path_factory.mktemp("serve")
    words = ["serve", MODEL, "--profile", "cpu", "--memory", "--memory-from", str(memory_file(folder, "{}"))]
    with marking() as mark, (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [*CLI, *words, "memory.min_similarity=-1", "hardware.kv_cache=1"],
            cwd=folder,
            env={**environment(EMPO2_TEST_MARK=mark), "EMPO2_KEY": "", "EMPO2_ADMIN_KEY": ""},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: "ready" in (folder / "out").read_text() or process.poll() is not None, 15 * MINUTES)
            output = (folder / "out").read_text()
            assert process.poll() is None, output
            said = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line.strip())
            started = psutil.Process(process.pid).children(recursive=True)
            vllm = next(each for each in started if "vllm.entrypoints.openai.api_server" in each.cmdline())
            words = vllm.cmdline()
            address = f"http://127.0.0.1:{words[words.index('--port') + 1]}/v1"
            yield Served(said["URL"], said["key"], address, vllm.environ()[MODEL_KEY])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(2 * MINUTES)
        assert process.returncode == 0


def test_vllm_answers_nobody_without_the_key(served: Served) -> None:
    root = served.vllm.removesuffix("/v1")
    for path in ("/v1/models", "/tokenize", "/health", "/metrics", "/version", "/nowhere"):
        assert httpx.get(root + path).status_code == 401, path
        assert httpx.get(root + path, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
    answer = httpx.get(f"{served.vllm}/models", headers={"Authorization": f"Bearer {served.vllm_key}"})
    assert answer.status_code == 200
    assert served.vllm_key not in " ".join(
        word for each in psutil.process_iter(["cmdline"]) for word in each.info["cmdline"] or ()
    )


def test_a_model_is_served_with_tips(served: Served) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    without_tips = len(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"])
    tip = len(tokenizer(TIP, add_special_tokens=False)["input_ids"])
    with openai.OpenAI(base_url=served.url, api_key=served.key, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        request: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 12, "temperature": 0}
        answer = client.chat.completions.create(**request)
        assert answer.model == MODEL and answer.choices[0].message.content
        assert answer.usage.prompt_tokens > without_tips + tip
        stream = client.chat.completions.create(**request, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(pieces) == answer.choices[0].message.content
        response = client.responses.create(model=MODEL, input=CHAT[0]["content"], max_output_tokens=12, temperature=0)
        assert response.output_text == answer.choices[0].message.content
        assert response.usage and response.usage.input_tokens == answer.usage.prompt_tokens
    with anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), api_key=served.key, max_retries=0) as claude:
        message = claude.messages.create(model=MODEL, messages=CHAT, max_tokens=12, extra_body={"temperature": 0})
        said = "".join(block.text for block in message.content if block.type == "text")
        assert said == answer.choices[0].message.content
        assert message.usage.input_tokens == answer.usage.prompt_tokens


def test_init_plays_an_episode_with_a_real_model(served: Served, tmp_path: Path) -> None:
    quiz = Path(__file__).parents[1] / "examples" / "quiz"
    line = f"{sys.executable} {quiz / 'quiz.py'} {{QUESTION}} {{ANSWER}}"
    env = [word for name in ("question", "answer") for word in ("--env", f"{name.upper()}=input.{name}")]
    model = ["--model", MODEL, "--server", served.vllm, "--time-limit", str(5 * MINUTES)]
    tasks = ["--tasks", str(quiz / "questions.jsonl"), *env, "--env", "AGENT_REWARD=stdout"]
    done = empo2(tmp_path, "init", "--command", line, *tasks, *model, OPENAI_API_KEY=served.vllm_key)
    assert "the reward was reported" in done.stdout
    assert (tmp_path / "empo2.yaml").is_file()


@pytest.mark.rare
def test_no_call_holds_up_or_ends_the_server_nor_lets_it_fetch(served: Served) -> None:
    """After each hostile call, which may go on, a plain one is answered."""
    fetched: list[str] = []

    async def fetch(request: Request) -> PlainTextResponse:
        fetched.append(request.url.path)
        return PlainTextResponse("fetched")

    plain = {"messages": CHAT, "max_tokens": 4, "model": MODEL}
    client = httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {served.key}"}, timeout=5 * MINUTES)
    fetcher = Starlette(routes=[Route("/{path:path}", fetch)])
    with client, serving(fetcher) as url, ThreadPoolExecutor() as pool:
        calls = [("chat/completions", name, {**plain, **body}) for name, body in (fetching(f"{url}/x") | CHATS).items()]
        calls += [("completions", name, {"max_tokens": 4, **body}) for name, body in COMPLETIONS.items()]
        assert len(calls) > 58
        for api, name, body in calls:
            hostile = pool.submit(client.post, f"/{api}", json=body)
            wait([hostile], timeout=2)
            begin = time.monotonic()
            answer = client.post("/chat/completions", json=plain)
            assert answer.status_code == 200 and time.monotonic() - begin < 120, (name, answer.text)
    assert fetched == []
