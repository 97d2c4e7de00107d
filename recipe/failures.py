"""Whose fault a failed rollout is, by what agent-lightning 1.0.2 leaves of it, and what ended an agent."""

import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from empo2.recipe.printed import one_line
from empo2.recipe.protocol import ERROR_EVENT, REWARD_EVENT, AgentError, data_of

FAILED_BY_AGENT, FAILED_BY_SYSTEM = "failed_by_agent", "failed_by_system"
_MOST_METRICS = 100


def cause_of_failure(error_message: str | None, calls: Sequence[Mapping[str, Any]], *, answered: bool) -> str:
    """Return the cause of a rollout's failure, ``FAILED_BY_AGENT`` or ``FAILED_BY_SYSTEM``.

    It is the agent's failure, and so the policy's, if the agent's process ended with an error after the model had
    answered: an exception in the agent, or a chat that outgrew the model's context (HTTP 400). A time-out, a signal, a
    process that could not be started and a model server that did not answer are the system's failures.

    Args:
        error_message: of the rollout's status.
        calls: data of its ``model_request`` events, in order.
        answered: True if the model has answered at least once.
    """
    # agent-lightning 1.0.2, LocalReconciler._finish_proc; a negative code is a signal, and 128 + n that of a command.
    said = re.fullmatch(r"subprocess exited with code ([1-9]\d*)", error_message or "")
    exited = said and not signal_of(int(said[1]))
    unanswered = bool(calls) and calls[-1].get("status") == "error" and calls[-1].get("http_status") not in (400, 413)
    return FAILED_BY_AGENT if exited and answered and not unanswered else FAILED_BY_SYSTEM


def signal_of(code: int) -> int:
    """Return the signal that ended a process, by its exit code, or a guard's command, which is 128 + n; 0 for none."""
    number = -code if code < 0 else code - 128
    return number if number in {*signal.Signals} else 0


def reported_metrics(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the finite numbers among the first hundred ``metrics`` of the last reward event; ignore all else."""
    rewards = data_of(events, REWARD_EVENT)
    metrics = rewards[-1].get("metrics") if rewards else None
    if not isinstance(metrics, Mapping):
        return {}
    return {
        one_line(str(name)): float(value)
        for name, value in islice(metrics.items(), _MOST_METRICS)
        if type(value) in (int, float) and abs(value) <= sys.float_info.max
    }


_OUTPUT_CHARACTERS = 4000
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|/node_modules/|^<|^node:")
_PYTHON_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)
_NODE_FRAME = re.compile(
    r"^ +at (?:async )?(?:(?P<name>[^\s(]+) \()?(?:file://)?(?P<file>[^\s():]+):(?P<line>\d+):\d+", re.MULTILINE
)
_ERROR_LINE = re.compile(
    r"^(?:Uncaught )?(?:\w+\.)*(\w*(?:Error|Exception|Exit|Timeout|Failed))(?:: *(.*))?$", re.MULTILINE
)


TRACEBACK = "Traceback (most recent call last):"
# What Python writes of an error in a finalizer, often at the interpreter's end. It ends no program.
_IGNORED = re.compile(
    r"^Exception ignored [^\n]*\n(?:Traceback [^\n]*\n)?(?:[ \t][^\n]*\n)*(?:[\w.]+(?:: [^\n]*)?(?:\n|\Z))?",
    re.MULTILINE,
)
# What vLLM and Ray write before a line: (EngineCore pid=7) ERROR 11-23 10:00:00 [core.py:9]
_WRITER = re.compile(r"^\([^()\n]*\) ?(?:[A-Z]+ [\d-]+ [\d:]+ \[[\w./]+:\d+\] ?)?")


def first_error(output: str) -> str | None:
    """Return the last line of the first of Python's tracebacks, those of one chain taken as one; None without any.

    Later ones mostly follow from it, such as those of threads and callbacks at the interpreter's end. Takes linear
    time, whatever the output is: it may be an agent's.
    """
    lines = [_WRITER.sub(lambda writer: "" if "pid=" in writer[0] else writer[0], line) for line in output.split("\n")]
    error: str | None = None
    end = 0  # of the last traceback
    for begin, line in enumerate(lines):
        if begin < end or line != TRACEBACK or (last := _last_line(lines, begin)) is None:
            continue
        # A chain has "During handling of the above exception" or "The above exception was the direct cause" between.
        if error is not None and not any(" above exception" in between for between in lines[end:begin]):
            break
        error, end = lines[last], last + 1
    return error


def _last_line(lines: Sequence[str], begin: int) -> int | None:
    """Return where the traceback that begins in a line says its error; None if it says none.

    The error is the first line after the frames that is not indented. Frames follow Ray's own line on the error of a
    remote process too, and then that error.
    """
    last, framed, follows = None, False, False  # `follows`: a line that is not indented
    for number in range(begin + 1, len(lines)):
        line = lines[number]
        if line.startswith((" ", "\t")):
            framed, follows = True, False
        elif not line.strip() or follows:
            break
        else:
            follows, last = True, number if framed else None
    return last


def reported_error(events: Sequence[Mapping[str, Any]]) -> AgentError | None:
    """Return the exception that ended a rollout's agent, from its events; None if none was reported."""
    errors = data_of(events, ERROR_EVENT)
    try:
        return AgentError.model_validate(errors[-1]) if errors else None
    except ValidationError:  # agents can post any event
        return None


def error_of(error: BaseException, *, own: str = "") -> AgentError:
    """Return what to tell of an exception that ended an agent.

    If it has ``written``, what a command wrote to stderr, its cause is looked for there: the last exception of Python
    or JavaScript, else the last line. The command's frames are none of this process.

    Args:
        own: a file whose frames are not the agent's.
    """
    written = getattr(error, "written", None)
    if output := str(written or "").strip():
        return _error_in(output, type(error).__name__)
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return AgentError(
        type=type(error).__name__,
        message=str(error),
        where=_where([frame for frame in frames if frame[0] != own]) if written is None else "",
        output="".join(traceback.format_exception(error))[-_OUTPUT_CHARACTERS:],
    )


def without_ignored(output: str) -> str:
    """Return a program's output without the errors that Python ignored; all of it if there is nothing else."""
    return _IGNORED.sub("", output).strip() or output


def _error_in(output: str, kind: str) -> AgentError:
    output = without_ignored(output)
    message, where = output.splitlines()[-1], ""
    if found := [*_ERROR_LINE.finditer(output)]:
        last = found[-1]
        kind, message = last[1], last[2] or ""
        python = [*_PYTHON_FRAME.finditer(output, 0, last.start())]
        node = [*_NODE_FRAME.finditer(output, last.end())]  # Node.js writes the innermost frame first
        where = _where([(each["file"], each["line"], each["name"] or "") for each in python or node[::-1]])
    return AgentError(type=kind, message=message, where=where, output=output[-_OUTPUT_CHARACTERS:])


def _where(frames: Sequence[tuple[str, Any, str]]) -> str:
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    if not own:
        return ""
    file, line, name = own[-1]
    return f"{Path(file).name}:{line}" + (f" in {name}" if name else "")
