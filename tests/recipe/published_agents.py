"""Twenty agents as their makers publish them: in `published/`, each with the calls of its makers' first example."""

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..needs import need

HERE = Path(__file__).parent
PROGRAMS = HERE / "published"
PAGE = HERE.parents[1] / "docs" / "agents.md"
NODE_MODULES = HERE / "clients" / "node_modules"
MCP_1 = HERE.parents[1] / "build" / "mcp-1" / "bin"
SCORE = f"{shlex.quote(sys.executable)} {shlex.quote(str(PROGRAMS / 'score.py'))}"
PYTHON = shlex.quote(sys.executable)
WEATHER = {"question": "How is the weather in Rome?", "answer": "sunny"}


class Row(NamedTuple):
    """A row of docs/agents.md's table of published agents; what init said, in words of its findings."""

    lines_changed: int
    training_rows: int
    said: tuple[str, ...]
    trained: bool


def table() -> dict[str, Row]:
    _, _, after = PAGE.read_text().partition("| published agent |")
    lines = after.partition("\n\n")[0].splitlines()[2:]
    found = {}
    for line in lines:
        name, changed, rows, said = (cell.strip() for cell in line.strip("|").split("|"))
        found[name.strip("*")] = Row(int(changed), int(rows), tuple(said.split("; ")), name.startswith("**"))
    return found


def need_node() -> None:
    if not (NODE_MODULES.is_dir() and shutil.which("node")):
        pytest.skip("needs node and its packages: npm ci --prefix tests/recipe/clients")


@dataclass(frozen=True)
class Published:
    """One agent, and how `empo2 init` is called for it; `changes` are lines as published, and what replaces them."""

    name: str
    program: str
    line: str
    packages: tuple[str, ...] = ()
    task: Mapping[str, str] = field(default_factory=lambda: WEATHER)
    env: Mapping[str, str] = field(default_factory=dict)
    replies: tuple[str, ...] = ("sunny",)
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_own_agent(self) -> bool:
        own = {"pydantic-ai-slim", "autogen-ext", "langgraph", "openai-agents", "smolagents"}
        return not own.isdisjoint({*self.packages, self.name})

    def need(self) -> None:
        need(*self.packages)
        if self.program.endswith(".mjs"):
            need_node()
        if "mcp-server-calculator" in self.packages and not MCP_1.is_dir():
            pytest.skip(f"needs {MCP_1.parent}: make frameworks")

    def put_into(self, folder: Path) -> None:
        text = (PROGRAMS / self.program).read_text()
        for line, changed in self.changes.items():
            assert text.count(line) == 1, line
            text = text.replace(line, changed)
        (folder / self.program).write_text(text)
        (folder / "tasks.jsonl").write_text(f"{json.dumps(self.task)}\n" * 2)
        if self.program.endswith(".mjs") and not (folder / "node_modules").exists():
            (folder / "node_modules").symlink_to(NODE_MODULES)

    @property
    def init(self) -> list[str]:
        how = ["--command", self.line] if " " in self.line else ["--agent", self.line]
        env = [word for name, value in self.env.items() for word in ("--env", f"{name}={value}")]
        replies = [word for reply in self.replies for word in ("--reply", reply)]
        return ["init", *how, "--tasks", "tasks.jsonl", *env, *replies]


def quick_start(
    name: str, program: str, *packages: str, runner: str = PYTHON, before: str = "", **given: Any
) -> Published:
    """A program that takes a question and prints an answer."""
    line = f"{before}{SCORE} {{ANSWER}} {runner} {program} {{QUESTION}}"
    env = {"QUESTION": "input.question", "ANSWER": "input.answer", "AGENT_REWARD": "stdout"}
    return Published(name, program, line, packages, env=env, **given)


PUBLISHED = [
    Published(
        "agent-lightning: gsm8k",
        "gsm8k.py",
        "gsm8k:ChatAgent",
        task={"question": "What is 6 times 7?", "answer": "42"},
        env={"QUESTION": "input.question", "ANSWER": "input.answer"},
        replies=("It is 42. ### ANSWER: 42 ###",),
    ),
    Published(
        "agent-lightning: calc_x",
        "calc_x.py",
        f"PATH={MCP_1}:{{PATH}} python calc_x.py",
        ("autogen-agentchat", "mcp-server-calculator"),
        task={"question": "What is 6 times 7?", "result": "42"},
        env={"QUESTION": "input.question", "RESULT": "input.result"},
        replies=("### ANSWER: 42 ###",),
    ),
    Published(
        "agent-lightning: science_world",
        "science_world.py",
        "science_world:SWAgent",
        task={"task_name": "find-animal", "variation": "0"},
        env={"TASK_NAME": "input.task_name", "VARIATION_IDX": "input.variation", "SW_MAX_STEPS": "3"},
        replies=("### ACTION: 1 ###",),
    ),
    Published(
        "agent-lightning: search_r1",
        "search_r1.py",
        "search_r1:SearchR1Agent",
        task={"question": "Where is the lamp?", "answers": '["the cellar"]'},
        env={"QUESTION": "input.question", "GOLDEN_ANSWERS": "input.answers"},
        replies=("<search> lamp </search>", "<answer> the cellar </answer>"),
    ),
    Published(
        "TextArena",
        "textarena_game.py",
        f"{PYTHON} textarena_game.py {{SEED}}",
        ("textarena",),
        task={"seed": "7"},
        env={"SEED": "input.seed", "AGENT_REWARD": "stdout"},
        replies=("[10]", "[5]", "[15]"),
        changes={"ta.agents.OpenRouterAgent(": "ta.agents.OpenAIAgent("},
    ),
    Published(
        "reasoning-gym",
        "reasoning_gym_question.py",
        f"{PYTHON} reasoning_gym_question.py {{NUMBER}}",
        ("reasoning-gym",),
        task={"number": "3"},
        env={"NUMBER": "input.number", "AGENT_REWARD": "stdout"},
        replies=("8",),
    ),
    quick_start(
        "DSPy",
        "dspy_program.py",
        "dspy",
        before="DSPY_CACHEDIR={EMPO2_REWARD_FILE}.cache ",  # DSPy answers what was asked before from a cache on disk
        task={"question": "What is 6 times 7?", "answer": "42.0"},
        replies=("[[ ## reasoning ## ]]\nSix sevens.\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]",),
    ),
    quick_start("agno", "agno_agent.py", "agno"),
    quick_start("google-adk", "google_adk_agent.py", "google-adk", "litellm"),
    quick_start("llama-index", "llama_index_agent.py", "llama-index-llms-openai"),
    quick_start("strands", "strands_agent.py", "strands-agents"),
    quick_start("pydantic-ai 2", "pydantic_ai_agent.py", "pydantic-ai-slim"),
    quick_start("Vercel's AI SDK (JavaScript)", "vercel.mjs", runner="node"),
    quick_start("openai's README (JavaScript)", "openai_readme.mjs", runner="node"),
    quick_start(
        "bash with curl",
        "curl.sh",
        runner="bash",
        changes={"https://api.openai.com/v1/chat/completions": '"$OPENAI_BASE_URL/chat/completions"'},
    ),
    quick_start("langgraph", "langgraph_agent.py", "langgraph", "langchain-openai"),
    quick_start("openai-agents", "openai_agents_agent.py", "openai-agents", before="OPENAI_AGENTS_DISABLE_TRACING=1 "),
    quick_start("autogen", "autogen_agent.py", "autogen-agentchat", "autogen-ext"),
    quick_start(
        "smolagents",
        "smolagents_agent.py",
        "smolagents",
        replies=("I know.\n<code>\nprint(1)\n</code>", "<code>\nfinal_answer('sunny')\n</code>"),
    ),
    quick_start("anthropic's README (Python)", "anthropic_readme.py"),
]


def trained_agents() -> list[Published]:
    return [agent for agent in PUBLISHED if table()[agent.name].trained]
