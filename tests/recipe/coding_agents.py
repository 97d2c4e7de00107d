"""Coding agents as their makers ship them: the table of docs/agents.md, and a policy's script for each."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from empo2.agents.coding.known import KNOWN

from .harness import calling, is_reflection
from .model_server import Body

ROOT = Path(__file__).parents[2]
TASK = ROOT / "examples/coding/tasks/add"
TIP = "Read the test first."
TOOL_CALL = "<tool_call>\n{}\n</tool_call>"  # as the small model's chat template has it
LOOK, READ, TEST = "ls -la", "cat calc.py", "python3 test_calc.py"
WRONG, RIGHT = "return a - b", "return a + b"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # which ends mini-swe-agent's episode
FIX = f"sed -i 's/{WRONG}/{RIGHT}/' calc.py"
FILE = "/app/calc.py"
BROKEN = '{"path": "calc.py", "old'

Script = Callable[[Body], str | Body]


@dataclass(frozen=True)
class Row:
    """A row of the table of coding agents in docs/agents.md."""

    version: str
    first_prompt: int
    small_prompt: int | None


def table() -> dict[str, Row]:
    """Return the rows of the table by the agents' names in `empo2.agents.coding`."""
    found = {}
    for line in (ROOT / "docs/agents.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (name := re.match(r"`([a-z-]+)`,", cells[0])):
            small = re.search(r": ([\d,]+)$", cells[3])
            first, least = int(cells[2].replace(",", "")), int(small[1].replace(",", "")) if small else None
            found[name[1]] = Row(cells[1], first, least)
    return found


def _tools(*calls: tuple[str, Body]) -> Script:
    """Call these tools, one a turn; then answer."""

    def reply(body: Body) -> str | Body:
        if not body.get("tools"):
            return "A sum"  # a title
        made = sum(bool(message.get("tool_calls")) for message in body["messages"])
        return calling(*calls[made], made, TOOL_CALL) if made < len(calls) else "Done."

    return reply


def _shell(name: str, key: str = "command", **more: str) -> Script:
    return _tools(*((name, {key: line, **more}) for line in (LOOK, READ, FIX, TEST)))


def _claude() -> Script:
    return _tools(
        ("Bash", {"command": LOOK, "description": "List the files"}),
        ("Read", {"file_path": FILE}),
        ("Edit", {"file_path": FILE, "old_string": WRONG, "new_string": RIGHT}),
        ("Bash", {"command": TEST, "description": "Run the test"}),
    )


def _opencode(**more: str) -> Script:
    return _tools(
        ("bash", {"command": LOOK, **more}),
        ("read", {"filePath": FILE}),
        ("edit", {"filePath": FILE, "oldString": WRONG, "newString": RIGHT}),
        ("bash", {"command": TEST, **more}),
    )


def _aider(_: Body) -> str:
    return f"calc.py\n```\ndef add(a, b):\n    {RIGHT}\n```\n"


def _terminus(body: Body) -> str:
    made = sum(message["role"] == "assistant" for message in body["messages"])
    lines = (LOOK, READ, FIX, TEST)
    commands = [{"keystrokes": f"{line}\n", "duration": 0.5} for line in lines[made : made + 1]]
    return json.dumps({"analysis": "a", "plan": "b", "commands": commands, "task_complete": not commands})


SCRIPTS: dict[str, Script] = {
    "claude": _claude(),
    "claude-sdk": _claude(),
    "codex": _shell("exec_command", "cmd", workdir="/app"),
    "opencode": _opencode(),
    "kilo": _opencode(description="Work"),
    "qwen": _tools(
        ("run_shell_command", {"command": LOOK, "is_background": False, "description": "List the files"}),
        ("read_file", {"file_path": FILE}),
        ("edit", {"file_path": FILE, "old_string": WRONG, "new_string": RIGHT}),
        ("run_shell_command", {"command": TEST, "is_background": False, "description": "Run the test"}),
    ),
    "pi": _tools(
        ("bash", {"command": LOOK}),
        ("read", {"path": FILE}),
        ("edit", {"path": FILE, "edits": [{"oldText": WRONG, "newText": RIGHT}]}),
        ("bash", {"command": TEST}),
    ),
    "mini": _tools(*(("bash", {"command": line}) for line in (LOOK, READ, FIX, TEST, SUBMIT))),
    "openhands": _tools(
        ("terminal", {"security_risk": "LOW", "summary": "look", "command": LOOK}),
        ("file_editor", {"security_risk": "LOW", "summary": "read", "command": "view", "path": FILE}),
        (
            "file_editor",
            {"security_risk": "LOW", "summary": "fix", "command": "str_replace", "path": FILE}
            | {"old_str": WRONG, "new_str": RIGHT},
        ),
        ("terminal", {"security_risk": "LOW", "summary": "test", "command": TEST}),
    ),
    "cline": _tools(
        ("run_commands", {"commands": [LOOK]}),
        ("read_files", {"files": [{"path": FILE}]}),
        ("editor", {"path": FILE, "old_text": WRONG, "new_text": RIGHT}),
        ("run_commands", {"commands": [TEST]}),
    ),
    "aider": _aider,
    "terminus": _terminus,
}


# An agent's own switches for a small model: variables, and words after its command.
SMALL = {
    "claude": (
        {"CLAUDE_CODE_SIMPLE": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096"},
        "--tools Bash,Read,Edit --disable-slash-commands",
    ),
    "pi": ({}, "--tools read,bash,edit"),
    "qwen": ({}, "--bare"),
}


def script(agent: str, variant: str = "") -> Script:
    """The policy's replies; `thinking`: with thoughts, `broken_arguments`: those of the second call are no JSON."""
    asked = 0

    def reply(body: Body) -> str | Body:
        nonlocal asked
        if is_reflection(body):
            return TIP
        said, asked = SCRIPTS[agent](body), asked + 1
        if variant == "thinking":
            whole = {"content": said} if isinstance(said, str) else said
            return {**whole, "reasoning": f"I think for the {asked}. time."}
        if variant == "broken_arguments" and asked == 2 and isinstance(said, dict):
            (call,) = said["tool_calls"]
            broken = {**call, "function": {**call["function"], "arguments": BROKEN}}
            said = {**said, "tool_calls": [broken], "written": BROKEN}
        return said

    return reply


def install(agent: str, version: str, prefix: Path) -> Path:
    """Install an agent into an empty folder; return the folder of its programs. Skips the test if that fails.

    Args:
        version: of the first package; the others may lag behind.
    """
    program, _, *packages = KNOWN[agent].install.split()
    first = next(number for number, word in enumerate(packages) if not word.startswith("-"))
    packages[first] += f"{'@' if program == 'npm' else '=='}{version}"
    if program == "npm":
        _run(["npm", "i", "--no-audit", "--no-fund", "--prefix", str(prefix), "node@24", *packages])
        return prefix / "node_modules/.bin"
    uv = str(Path(sys.executable).with_name("uv"))
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(prefix)])
    _run([uv, "pip", "install", "--quiet", "--python", str(prefix / "bin/python"), *packages])
    return prefix / "bin"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "UV_HTTP_TIMEOUT": "60"})
    if done.returncode:
        pytest.skip(f"{' '.join(command[:3])}: {' '.join(done.stderr.split())[-300:]}")
