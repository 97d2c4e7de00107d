"""The real stack without a trainer: one vLLM, which `empo2 serve` starts, and which `init` and `adapt` use, too."""

import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from transformers import AutoTokenizer

from empo2.recipe.evaluation.adaptation import TASKS, memory_of
from empo2.recipe.evaluation.episode_results import Result, read_results
from empo2.recipe.launcher.model_files import resolve_model
from empo2.recipe.protocol import MODEL_KEY
from empo2.recipe.run_folder import read_lines

from .processes import marked, marking, until
from .recipe.test_serving import TIP, memory_file
from .stack import CLI, empo2, environment

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3600)]

MODEL = "smollm2-135m-notes"
CHAT: list[Any] = [{"role": "user", "content": "A dark room with a lamp. What do you do?"}]
MINUTES = 60
TASKS_PLAYED, ROLLOUTS, TRIALS = 2, 2, 2


@dataclass(frozen=True)
class Served:
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
            [*CLI, *words, "memory.min_similarity=-1"],
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
            vllm = _vllm_of(process.pid)
            words = vllm.cmdline()
            address = f"http://127.0.0.1:{words[words.index('--port') + 1]}/v1"
            yield Served(said["URL"], said["key"], address, vllm.environ()[MODEL_KEY])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(2 * MINUTES)
        assert process.returncode == 0


def _vllm_of(launcher: int) -> psutil.Process:
    found = psutil.Process(launcher).children(recursive=True)
    return next(process for process in found if "vllm.entrypoints.openai.api_server" in process.cmdline())


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


def part(trial: int) -> str:
    return f"seed 0, trial {trial}, {TASKS}"


def of_trial(trial: int, results: list[Result]) -> list[Result]:
    return [each for each in results if each.part == part(trial)]


def test_adaptation_goes_on_after_a_kill(served: Served, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["adapt", MODEL, "--server", served.vllm, "--profile", "cpu", "--panel", "coin-medium", "--seeds", "1"]
    words += ["--limit", str(TASKS_PLAYED), "--rollouts", str(ROLLOUTS), "--trials", str(TRIALS), "--output", "out"]
    with marking() as mark, (tmp_path / "said").open("w") as said:
        variables = environment(EMPO2_TEST_MARK=mark, OPENAI_API_KEY=served.vllm_key)
        first = subprocess.Popen([*CLI, *words], cwd=tmp_path, env=variables, stdout=said, stderr=subprocess.STDOUT)
        played = TASKS_PLAYED * ROLLOUTS
        until(lambda: len(read_lines(out / "results.jsonl")) > played or first.poll() is not None, 15 * MINUTES)
        assert first.poll() is None, (tmp_path / "said").read_text()
        first.send_signal(signal.SIGKILL)
        first.wait()
        until(lambda: not marked(mark), 2 * MINUTES)
    kept = of_trial(0, read_results(out))
    assert memory_of(out, 0)[0] == 0  # trial 1 had begun

    empo2(tmp_path, *words, OPENAI_API_KEY=served.vllm_key)
    results = read_results(out)
    assert Counter(each.key for each in results) == {
        (part(trial), index, sample): 1
        for trial in range(TRIALS + 1)
        for index in range(TASKS_PLAYED)
        for sample in range(ROLLOUTS)
    }
    assert {each.failed for each in results} == {None}
    assert of_trial(0, results) == kept  # not played again
    assert {each.calls_with_tips for each in kept} == {0}
    assert all(each.calls_with_tips for each in of_trial(TRIALS, results))
    trial, memory = memory_of(out, 0)
    assert trial == TRIALS and memory is not None
    with closing(sqlite3.connect(memory)) as database:
        plays = database.execute("SELECT count(*) FROM plays").fetchone()[0]
        written = database.execute("SELECT count(*) FROM tips").fetchone()[0]
    assert plays == TASKS_PLAYED * ROLLOUTS * TRIALS  # what the trial that was killed had read and written is forgotten
    assert 0 < written <= len(results)
