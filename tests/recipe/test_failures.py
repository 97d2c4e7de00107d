"""What is told of the exception that ended an agent: of a class, of a command, and on the way to the gateway."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from empo2.agents.command import CommandAgent, CommandFailed
from empo2.recipe.controller.agent_process import ALONE
from empo2.recipe.controller.warm_agents import start_agent, start_fork_server
from empo2.recipe.failures import error_of, first_error, reported_error
from empo2.recipe.protocol import AgentError

from .harness import GatewayUnderTest, worker_command


def raised(folder: Path, code: str) -> BaseException:
    """The exception of a file of the user's."""
    file = folder / "quiz_agent.py"
    file.write_text(code)
    try:
        exec(compile(code, str(file), "exec"), {})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_where_an_agents_exception_came_from(tmp_path: Path) -> None:
    """json.loads fails inside of Python's own library, called in line 3; frames of the runner are not the agent's."""
    error = error_of(raised(tmp_path, "import json\ndef ask():\n    json.loads('{')\nask()\n"), own=__file__)
    assert (error.type, error.where) == ("JSONDecodeError", "quiz_agent.py:3 in ask")
    assert error.message.startswith("Expecting property name enclosed in double quotes")
    assert "json/decoder.py" in error.output and error.output.splitlines()[-1].startswith("json.decoder.JSON")
    own = error_of(raised(tmp_path, "1 / 0\n"), own=str(tmp_path / "quiz_agent.py"))
    assert own.where.startswith("test_failures.py:")


def test_failures_of_one_place_have_one_cause(tmp_path: Path) -> None:
    first, second, third = (
        error_of(raised(tmp_path, f"{lead}raise KeyError({door!r})\n"))
        for lead, door in (("", "red"), ("", "blue"), ("\n", "red"))
    )
    assert first.cause == second.cause == "KeyError at quiz_agent.py:1 in <module>" != third.cause
    assert str(second) == "KeyError: 'blue' (quiz_agent.py:1 in <module>)"
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
    ids=["python", "node", "curl", "silent"],
)
def test_what_a_command_wrote_tells_its_cause(output: str, told: str) -> None:
    error = error_of(CommandFailed("it ended with exit code 1", output), own=__file__)
    assert str(error) == told
    assert error.output.startswith(output[:10])


def test_a_command_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "play.py"
    script.write_text("import os\n\ndef play():\n    os.environ['QUESTION']\n\nplay()\n")
    monkeypatch.setenv("AGENT_COMMAND", f"{sys.executable} {script}")
    for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/v1")
    with pytest.raises(CommandFailed) as failed:
        CommandAgent().run()
    assert str(error_of(failed.value)) == "KeyError: 'QUESTION' (play.py:4 in play)"


def test_the_last_error_that_was_reported_counts() -> None:
    """What is printed of it is one short line without control characters."""

    def reported(*data: dict[str, str]) -> AgentError | None:
        return reported_error([{"event_type": "empo2_agent_error", "data": each} for each in data])

    assert reported({"type": "OSError"}, {"type": "KeyError"}) == AgentError(type="KeyError")
    assert reported({"text": "of another program"}) is reported() is None
    long = {"type": "Key\x1b[31mError", "message": "no\n\x07door " + "x" * 1000, "where": "a.py:1\r"}
    assert reported(long) == AgentError(type="Key [31mError", message="no door " + "x" * 292, where="a.py:1")


async def environment(gateway: GatewayUnderTest, folder: Path) -> dict[str, str]:
    """Of an agent in this folder, with a rollout."""
    rollout = await gateway.create(None)
    return {**os.environ, "PYTHONPATH": str(folder), **gateway.variables(rollout)}


async def told_of(gateway: GatewayUnderTest) -> list[str]:
    """The errors that were reported to the gateway."""
    events = (await gateway.client.get(f"/api/rollouts/{gateway.rollouts[-1]}/events")).json()
    return [str(reported_error([event])) for event in events]


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("import sys; sys.exit('no money left')", 1, ["SystemExit: no money left (my_agent.py:3 in run)"]),
        ("import os; raise OSError(os.environ['AGL_KEY'])", 1, ["OSError: (secret, left out) (my_agent.py:3 in run)"]),
        ("raise SystemExit", 0, []),
    ],
)
async def test_an_agent_process_reports_its_exception(
    code: str, exit_code: int, told: list[str], tmp_path: Path, gateway: GatewayUnderTest
) -> None:
    """As the controller starts one that it cannot fork."""
    (tmp_path / "my_agent.py").write_text(f"class Agent:\n    async def run(self):\n        {code}\n")
    variables = await environment(gateway, tmp_path)
    command = [sys.executable, "-c", ALONE, "my_agent:Agent"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == exit_code, done.stderr
    assert ("Traceback" in done.stderr) == (exit_code == 1 and "sys.exit" not in code)
    assert await told_of(gateway) == told


async def test_a_forked_agent_reports_its_exception(
    tmp_path: Path, gateway: GatewayUnderTest, no_fork_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_agent.py").write_text("class Agent:\n    def run(self):\n        [][3]\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_fork_server("my_agent:Agent")
    agent = await start_agent(*worker_command("my_agent:Agent"), env=await environment(gateway, tmp_path))
    assert await agent.wait() == 1
    assert await told_of(gateway) == ["IndexError: list index out of range (my_agent.py:3 in run)"]


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
