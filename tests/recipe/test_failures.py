"""What is told of the exception that ended an agent: of a class, of a command, and on the way to the gateway."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from empo2.agents.command import CommandFailed
from empo2.recipe.controller.agent_process import ALONE
from empo2.recipe.controller.warm_agents import start_agent, start_fork_server
from empo2.recipe.failures import error_of, first_error, reported_error
from empo2.recipe.protocol import AgentError

from .harness import GatewayUnderTest, worker_command


def test_where_an_agents_exception_came_from(tmp_path: Path) -> None:
    """json.loads fails inside of Python's own library, called in line 3; frames of the runner are not the agent's."""
    file = tmp_path / "quiz_agent.py"
    code = compile("import json\ndef ask():\n    json.loads('{')\nask()\n", str(file), "exec")
    with pytest.raises(ValueError) as raised:
        exec(code, {})
    error = error_of(raised.value, own=__file__)
    assert (error.type, error.where) == ("JSONDecodeError", "quiz_agent.py:3 in ask")
    assert error.message.startswith("Expecting property name enclosed in double quotes")
    assert "json/decoder.py" in error.output and error.output.splitlines()[-1].startswith("json.decoder.JSON")
    assert error_of(raised.value, own=str(file)).where.startswith("test_failures.py:")


def test_a_program_that_an_agent_class_runs_fails_as_other_calls_do(tmp_path: Path) -> None:
    """Its error has an attribute `output`, which is empty, or is what the program wrote to stdout."""
    file = tmp_path / "quiz_agent.py"
    code = compile("import subprocess\nsubprocess.run('exit 3', shell=True, check=True)\n", str(file), "exec")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        exec(code, {})
    told = str(error_of(raised.value, own=__file__))
    assert told == "CalledProcessError: Command 'exit 3' returned non-zero exit status 3. (quiz_agent.py:2 in <module>)"


def test_failures_of_one_place_have_one_cause() -> None:
    red, blue = (AgentError(type="KeyError", message=door, where="quiz.py:1 in run") for door in ("'red'", "'blue'"))
    assert red.cause == blue.cause == "KeyError at quiz.py:1 in run"
    assert str(blue) == "KeyError: 'blue' (quiz.py:1 in run)"
    assert AgentError(type="CommandFailed", message="no reward").cause == "CommandFailed: no reward"


PYTHON = """Playing.
Traceback (most recent call last):
  File "/home/me/play.py", line 5, in main
    client.chat.completions.create(model="m")
  File "/home/me/.venv/lib/python3.11/site-packages/openai/_base_client.py", line 1047, in request
    raise self._make_status_error_from_response(err.response) from None
openai.BadRequestError: Error code: 400 - {'message': 'too long'}
Exception ignored in: <function f at 0x7f>
"""
NODE = """file:///home/me/agent.mjs:12
    throw new TypeError("no door")
          ^

TypeError: no door
    at open (node:internal/modules/run_main:171:5)
    at enter (file:///home/me/agent.mjs:12:11)
    at play (file:///home/me/agent.mjs:30:3)

Node.js v22.1.0
"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (PYTHON, "BadRequestError: Error code: 400 - {'message': 'too long'} (play.py:5 in main)"),
        (NODE, "TypeError: no door (agent.mjs:12 in enter)"),
        ("curl: (22) error: 500\n", "CommandFailed: curl: (22) error: 500"),
        ("", "CommandFailed: it ended with exit code 1"),
    ],
)
def test_what_a_command_wrote_tells_its_cause(output: str, told: str) -> None:
    error = error_of(CommandFailed("it ended with exit code 1", output), own=__file__)
    assert str(error) == told
    assert error.output.startswith(output[:10])


def test_the_last_error_that_was_reported_counts() -> None:
    """What is printed of it is one short line without control characters."""

    def reported(*data: dict[str, str]) -> AgentError | None:
        return reported_error([{"event_type": "empo2_agent_error", "data": each} for each in data])

    assert reported({"type": "OSError"}, {"type": "KeyError"}) == AgentError(type="KeyError")
    assert reported({"text": "of another program"}) is reported() is None
    long = {"type": "Key\x1b[31mError", "message": "no\n\x07door " + "x" * 1000, "where": "a.py:1\r"}
    assert reported(long) == AgentError(type="Key [31mError", message="no door " + "x" * 292, where="a.py:1")


@pytest.mark.parametrize(
    ("code", "forked", "told"),
    [
        ("import sys; sys.exit('no money left')", False, "SystemExit: no money left"),
        ("import os; raise OSError(os.environ['AGL_KEY'])", False, "OSError: (secret, left out)"),
        ("raise SystemExit", False, None),
        ("[][3]", True, "IndexError: list index out of range"),
    ],
)
async def test_an_agent_process_reports_its_exception(
    code: str,
    forked: bool,
    told: str | None,
    tmp_path: Path,
    gateway: GatewayUnderTest,
    no_fork_server: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is forked, and one as the controller starts it where it cannot fork."""
    (tmp_path / "my_agent.py").write_text(f"class Agent:\n    async def run(self):\n        {code}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rollout = await gateway.create(None)
    variables = {**os.environ, **gateway.variables(rollout)}
    if forked:
        start_fork_server("my_agent:Agent")
        agent = await start_agent(*worker_command("my_agent:Agent"), env=variables)
        exit_code = await agent.wait()
    else:
        exit_code = subprocess.run([sys.executable, "-c", ALONE, "my_agent:Agent"], env=variables).returncode
    events = (await gateway.client.get(f"/api/rollouts/{rollout}/events")).json()
    assert exit_code == (told is not None)
    assert [str(reported_error([each])) for each in events] == ([f"{told} (my_agent.py:3 in run)"] if told else [])


VLLM = """INFO 11-23 10:00:00 [core.py:1] starting
(EngineCore pid=7) ERROR 11-23 10:00:01 [core.py:9] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-23 10:00:01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 10:00:01 [core.py:9]   File "core.py", line 9, in run
(EngineCore pid=7) ERROR 11-23 10:00:01 [core.py:9]     raise ValueError("no room")
(EngineCore pid=7) ERROR 11-23 10:00:01 [core.py:9] ValueError: no room
(APIServer pid=6) Traceback (most recent call last):
(APIServer pid=6)   File "server.py", line 3, in <module>
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
RAY = """Traceback (most recent call last):
  File "trainer.py", line 1, in fit
    ray.get(result)
ray.exceptions.RayTaskError(TypeError): ray::WorkerDict.update() (pid=9, ip=127.0.0.1)
  File "worker.py", line 2, in update
    1 + None
TypeError: unsupported operand
Exception ignored in: <function Client.__del__>
Traceback (most recent call last):
  File "client.py", line 5, in __del__
RuntimeError: Event loop is closed
"""


def test_the_first_error_of_a_log(tmp_path: Path) -> None:
    assert first_error(VLLM) == "ValueError: no room"
    assert first_error(RAY) == "TypeError: unsupported operand"
    assert first_error("no traceback: TypeError: x") is None
    code = "try: {}['door']\nexcept KeyError as e: raise ValueError('two\\nlines') from e"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert first_error(done.stderr + RAY) == "ValueError: two"  # the end of its chain


TRACEBACK = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    "output",
    [
        TRACEBACK + "  x\n" * 60 + "\n",
        TRACEBACK + "  frame\n" * 100_000,
        TRACEBACK * 50_000,
        (TRACEBACK + "  frame\n" * 3) * 20_000,
        TRACEBACK + "said\n  frame\n" * 50_000,
        "(" + "pid=1" * 100_000,
        "(" * 100_000,
        "(a pid=1) " * 20_000,
        TRACEBACK + " " * 200_000,
    ],
)
def test_an_error_is_looked_for_in_linear_time(output: str) -> None:
    """A disk that fills up cuts a traceback, and an agent prints what it likes: 14 frames took 40 s once."""
    begin = time.process_time()
    first_error(output)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("unit", ['  File "', "at a (", "Error: ", "a.", "Uncaught ", "    at file://:", " "])
def test_what_a_command_wrote_is_read_in_linear_time(unit: str) -> None:
    begin = time.process_time()
    error_of(CommandFailed("it ended with exit code 1", unit * 20_000), own=__file__)
    error_of(CommandFailed("it ended with exit code 1", f"{unit}\n" * 20_000), own=__file__)
    assert time.process_time() - begin < 2


def test_a_traceback_that_is_cut_says_no_error() -> None:
    assert first_error(TRACEBACK + '  File "a.py", line 1, in run\n    step()\n') is None
    assert first_error(TRACEBACK + "  a\n\n" + TRACEBACK + "  b\nOSError: [Errno 28] No space left on device\n") == (
        "OSError: [Errno 28] No space left on device"
    )
