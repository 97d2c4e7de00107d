"""The whole stack, real: agents as they are published, streamed, with tools, in Python and JavaScript, are trained."""

import contextlib
import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from .recipe.published_agents import PUBLISHED, table
from .test_train import CLI, _environment, metrics_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1500)]

# Those of which docs/agents.md says so. They stream with a tool through /responses, chat completions and Anthropic's
# /messages, and use tools without a stream.
AGENTS = [agent for agent in PUBLISHED if table()[agent.name].trained == "yes"]
REPLY_TOKENS = 48  # the agents set no max_tokens, and the small model may write on and on


def test_published_agents_are_trained(tmp_path: Path) -> None:
    """Two steps, the second with memory: an agent is a task, of two rollouts in each step."""
    for agent in AGENTS:
        agent.need()
        agent.put_into(tmp_path)
    rows = [{"line": agent.line, "agent": agent.name, **agent.task} for agent in AGENTS]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "validation.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    generation = {"max_new_tokens": REPLY_TOKENS, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    limit = json.dumps(json.dumps(generation))
    vllm = f"{{vllm: {{override_generation_config: {limit}}}}}"
    arguments = [
        "run.name=test",
        "run.steps=2",
        "run.validate_first=false",
        "agent.class=empo2.agents.command:CommandAgent",
        "agent.env={AGENT_COMMAND: input.line, AGENT_REWARD: stdout, QUESTION: input.question, ANSWER: input.answer}",
        "tasks.source=tasks.jsonl",
        "tasks.args={validation: validation.jsonl}",
        "memory.scope=[agent]",
        "algorithm.seed=36",  # no memory, then memory
        "algorithm.return_tolerance=0",
        f"algorithm.tasks_per_step={len(AGENTS)}",
        "algorithm.rollouts_per_task=2",
        f"verl={{actor_rollout_ref: {{rollout: {{engine_kwargs: {vllm}}}}}}}",
    ]
    done = subprocess.run(
        [*CLI, "train", "--profile", "cpu", *arguments],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "test"
    first, second = metrics_of(run)
    for metrics in (first, second):
        assert metrics["empo2/rollouts_dropped"] == 0
        assert metrics["empo2/calls"] >= 2 * len(AGENTS)
    assert first["empo2/hit_rate"] == 0 < second["empo2/hit_rate"]
    with contextlib.closing(sqlite3.connect(f"file:{run / 'memory.sqlite'}?mode=ro", uri=True)) as database:
        shown = dict(database.execute("SELECT scope, min(hits) FROM plays GROUP BY scope"))
    assert {json.loads(scope)["agent"] for scope, hits in shown.items() if hits} == {agent.name for agent in AGENTS}
