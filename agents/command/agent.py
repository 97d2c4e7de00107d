"""Run any command line as an agent: in any language, any virtual environment, with any packages."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO

from ..process_guard import guarded
from ..rollout import MODEL, Rollout

_TAIL_BYTES = 16_384
_REASON_CHARACTERS = 400
# Not "${NAME}", which is shell syntax.
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
_SHELL, _SHELL_CODE = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh"), re.compile(r"-[a-z]*c")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class CommandFailed(Exception):
    """The command failed, or left no reward.

    Attributes:
        written: the end of what it wrote to stderr.
        code: of the agent's process then.
    """

    def __init__(self, message: str, written: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.written, self.code = written, code


class CommandAgent:
    """Play an episode by running ``AGENT_COMMAND`` and report its reward.

    The command is split as a shell splits it, but runs without a shell; use ``sh -c '...'`` for one. ``{NAME}`` stands
    for the environment variable NAME; words ``NAME=value`` at the front set variables, as in a shell. The command finds

    - the task in the variables of ``agent.env``;
    - the model in ``OPENAI_BASE_URL``, ``OPENAI_API_BASE``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, and for clients of
      Anthropic's in ``ANTHROPIC_BASE_URL`` and ``ANTHROPIC_API_KEY``;
    - agent-lightning's own ``AGL_OPENAI_BASE_URL``, ``AGL_EVENT_URL`` and ``AGL_KEY``.

    The reward is the last line of the file named by ``EMPO2_REWARD_FILE``; else, with ``AGENT_REWARD=stdout``, the last
    line of the command's standard output; else the event that the command posted to ``AGL_EVENT_URL``. All processes
    started by the command end with it, and with this process, even if this process is killed.
    """

    def run(self) -> None:
        """Run the command. Raises ValueError for wrong settings, CommandFailed if it fails or gives no reward."""
        environ = dict(os.environ)
        text = environ.get("AGENT_COMMAND", "")
        source = environ.get("AGENT_REWARD", "file")
        if source not in ("file", "stdout"):
            raise ValueError(f"AGENT_REWARD={source!r}: must be file (the default; also for posted events) or stdout")
        rollout = Rollout.from_env(environ)
        environ |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), rollout.base_url)
        environ["ANTHROPIC_BASE_URL"] = rollout.base_url.removesuffix("/v1")  # its clients add /v1
        environ |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), rollout.key or "none")
        environ["OPENAI_MODEL"] = MODEL
        with tempfile.TemporaryDirectory(prefix="reward-") as scratch:
            file = Path(scratch, "reward")
            environ["EMPO2_REWARD_FILE"] = str(file)
            command, variables = parse(text, environ)
            output, errors, code = _run(command, environ | variables, scratch)
            if code:
                reason = " ".join(errors.split())[-_REASON_CHARACTERS:] or "it wrote nothing to stderr"
                raise CommandFailed(f"{text} ended with exit code {code}: {reason}", errors, code)
            written = file.read_text(errors="replace") if file.exists() else ""
        if written.strip():
            rollout.report(_number(written, "EMPO2_REWARD_FILE"))
        elif source == "stdout":
            rollout.report(_number(output, "standard output (AGENT_REWARD=stdout)"))
        elif not rollout.has_reward():
            last = output.strip().rpartition("\n")[2].strip()
            printed = "" if _finite(last) is None else f"; its last line is {last}: if that is the reward, do the last"
            raise CommandFailed(
                f"{text} ended without a reward: write a number to the file that EMPO2_REWARD_FILE names, "
                f"post an event to AGL_EVENT_URL, or print it as the last line and set AGENT_REWARD=stdout{printed}"
            )


def parse(text: str, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Split ``AGENT_COMMAND`` into an argument list and the variables that it sets.

    Raises:
        ValueError: it is empty, has an unbalanced quote, names an unknown variable or a program that does not exist, or
            lets a shell run a variable as code.
    """

    def fill(word: str) -> str:
        return _PLACEHOLDER.sub(lambda found: environ[found[1]], word)

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"AGENT_COMMAND={text!r}: {error}") from None
    for name in _PLACEHOLDER.findall(text):
        if name not in environ:
            raise ValueError(f"AGENT_COMMAND={text!r}: no variable {name} is set; agent.env sets the task's")
    for flag, word in pairwise(words):
        if _SHELL_CODE.fullmatch(flag) and any(map(_SHELL.fullmatch, words)) and (found := _PLACEHOLDER.search(word)):
            fix = f'write "${found[1]}" there, which is no code'
            raise ValueError(f"AGENT_COMMAND={text!r}: a shell would run what {found[0]} holds; {fix}")
    variables = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        variables[match[1]] = fill(match[2])
        del words[0]
    if not words:
        raise ValueError(f"AGENT_COMMAND={text!r}: names no command; give one, such as 'python play.py'")
    command = [fill(word) for word in words]
    if shutil.which(command[0], path={**environ, **variables}.get("PATH")) is None:
        said = f"there is no program {command[0]!r}; give its path"
        if os.path.isfile(command[0]):
            said = f"{command[0]!r} may not be executed: chmod +x, or 'sh {command[0]}'"
        raise ValueError(f"AGENT_COMMAND={text!r}: {said}")
    return command, variables


def _run(command: list[str], environ: Mapping[str, str], scratch: str) -> tuple[str, str, int]:
    """Run the command and pass its output through. Return the ends of its stdout and stderr, and its exit code."""
    with subprocess.Popen(
        guarded(command, scratch=scratch),
        env=environ,
        stdin=subprocess.PIPE,  # held open while this process lives
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout and process.stderr
        output, errors = bytearray(), bytearray()
        relays = [
            threading.Thread(target=_relay, args=(process.stdout, sys.stdout, output)),
            threading.Thread(target=_relay, args=(process.stderr, sys.stderr, errors)),
        ]
        for relay in relays:
            relay.start()
        for relay in relays:
            relay.join()
        process.wait()
    return output.decode(errors="replace"), errors.decode(errors="replace"), process.returncode


def _relay(source: IO[bytes], sink: IO[str], tail: bytearray) -> None:
    while chunk := os.read(source.fileno(), 65_536):
        sink.buffer.write(chunk)  # pyright: ignore[reportAttributeAccessIssue] (a text file over a binary one)
        sink.flush()
        tail += chunk
        del tail[:-_TAIL_BYTES]


def _number(text: str, where: str) -> float:
    """Return the number in the last line of `text`. Raises CommandFailed unless it is a finite one."""
    line = text.strip().rpartition("\n")[2].strip()
    if (value := _finite(line)) is None:
        raise CommandFailed(f"the last line of {where} is {line!r}: must be a finite number, the reward")
    return value


def _finite(text: str) -> float | None:
    """Return the finite number that a text is; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
