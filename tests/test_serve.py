"""The real stack: vLLM and the gateway serve the small model, with a tip, to ordinary clients; Ctrl-C ends them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from empo2.recipe.launcher.models import resolve_model

from .processes import mark, until  # noqa: F401
from .recipe.test_serving import TIP, memory_file

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-notes"
CHAT: list[Any] = [{"role": "user", "content": "A dark room with a lamp. What do you do?"}]


def test_a_model_is_served_with_tips(
    tmp_path: Path,
    mark: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("EMPO2_KEY", "EMPO2_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EMPO2_TEST_MARK", mark)
    words = ["serve", MODEL, "--profile", "cpu", "--memory", "--memory-from", str(memory_file(tmp_path, "{}"))]
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-m", "empo2.recipe.cli", *words, "memory.min_similarity=-1"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: "ready" in (tmp_path / "out").read_text() or process.poll() is not None, 600)
            output = (tmp_path / "out").read_text()
            assert process.poll() is None, output
            said = dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line.strip())
            check_clients(said["URL"], said["key"])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert process.returncode == 0


def check_clients(url: str, key: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MODEL))
    without_tips = len(tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"])
    tip = len(tokenizer(TIP, add_special_tokens=False)["input_ids"])
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
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
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as claude:
        message = claude.messages.create(model=MODEL, messages=CHAT, max_tokens=12, extra_body={"temperature": 0})
        said = "".join(block.text for block in message.content if block.type == "text")
        assert said == answer.choices[0].message.content
        assert message.usage.input_tokens == answer.usage.prompt_tokens
