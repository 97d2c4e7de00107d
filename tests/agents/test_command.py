"""Commands as agents, run by agent-lightning's worker before its real gateway."""

import os
import sys
import time
import venv
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from empo2.agents.command import CommandAgent, CommandFailed, parse
from empo2.recipe.config import load_settings
from empo2.recipe.retrofit.recorder import Trace, record

# Only the standard library: it runs in an environment that has nothing else.
PRELUDE = """\
import json, os, sys, time, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def chat(messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]

def reward(value):
    open(os.environ["EMPO2_REWARD_FILE"], "w").write(value)
"""
SAY = "chat([{'role': 'user', 'content': os.environ['QUESTION']}])\n"


def variables_of(folder: Path, code: str) -> dict[str, str]:
    (folder / "play.py").write_text(PRELUDE + code)
    return {"AGENT_COMMAND": "{PYTHON} {SCRIPT}", "PYTHON": sys.executable, "SCRIPT": str(folder / "play.py")}


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Trace]:
    def play_one(code: str, limit: float = 90, **variables: str) -> Trace:
        env = variables_of(tmp_path, code) | {"QUESTION": "input.question"} | variables
        settings = load_settings(layer={"agent": {"class": "empo2.agents.command:CommandAgent", "env": env}})
        return record(settings, {"question": "wie hoch, 数?"}, ["so high"], limit)

    return play_one


@pytest.fixture
def run(server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """The same in this process, before a scripted server; the rewards that it was posted."""

    def run_one(code: str, **variables: str) -> list[float]:
        for name, value in (variables_of(tmp_path, code) | server.variables | variables).items():
            monkeypatch.setenv(name, value)
        CommandAgent().run()
        return [event["data"]["value"] for event in server.events]

    return run_one


def test_a_script_in_an_environment_without_packages_that_posts_its_reward_itself(play, tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    bare = "import importlib.util\nassert importlib.util.find_spec('httpx') is None\n"
    itself = "post(os.environ['AGL_EVENT_URL'], {'event_type': 'reward', 'data': {'value': 3}})"
    trace = play(bare + SAY + itself, PYTHON=str(tmp_path / "other/bin/python"))
    rewards = [event["data"]["value"] for event in trace.events if event["event_type"] == "reward"]
    assert (trace.exit_code, rewards) == (0, [3]), trace.output
    (call,) = trace.calls
    assert (call.status, call.body["messages"][0]["content"]) == (200, "wie hoch, 数?")


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("sys.stdout.buffer.write(b'\\xff\\xfe' * 40000 + b'\\n1e-1\\n\\n')", 0.1),  # beside bytes that are no text
        ("reward('noise\\n0.25\\n')", 0.25),
        # A file that is put into place counts before stdout.
        ("p = os.environ['EMPO2_REWARD_FILE']\nopen(p + '~', 'w').write('-2')\nos.replace(p + '~', p)\nprint(1)", -2),
    ],
)
def test_a_reward_on_stdout_and_in_a_file(run, code, reward):
    assert run(code, AGENT_REWARD="stdout") == [reward]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('well done')", "the last line of standard output (AGENT_REWARD=stdout) is 'well done'"),
        ("reward('nan')", "the last line of EMPO2_REWARD_FILE is 'nan': must be a finite number"),
        ("reward('1')\nsys.stderr.buffer.write(b'no \\xff luck')\nsys.exit(3)", "ended with exit code 3: no � luck"),
        ("reward('1')\nos.kill(os.getpid(), 9)", "ended with exit code 137: it wrote nothing to stderr"),
    ],
)
def test_a_failure_is_one_line_and_leaves_no_reward(run, server, code, says):
    with pytest.raises(CommandFailed) as caught:
        run(code, AGENT_REWARD="stdout")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.code == (137 if "137" in says else 3 if "code 3" in says else 1)
    assert server.events == []


@pytest.mark.parametrize("name", ["AGENT_REWARD", "AGENT_COMMAND", "AGL_EVENT_URL", "AGL_OPENAI_BASE_URL"])
def test_a_wrong_variable_is_named(run, name):
    with pytest.raises(ValueError, match=name):
        run("", **{name: ""})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("A=1 B={C}", "names no command; give one"),
        ("no-such-program x", "there is no program 'no-such-program'"),
        ("PATH=/nowhere sh", "there is no program 'sh'"),
        ("sh -c 'x", "No closing quotation"),
        ("A=1 /bin/bash -lc 'play {C}'", 'a shell would run what {C} holds; write "$C" there'),
        ("sh {TASK}", "no variable TASK is set"),
    ],
)
def test_a_wrong_line_is_named(line, says):
    with pytest.raises(ValueError, match=r"^AGENT_COMMAND=") as caught:
        parse(line, {"PATH": os.environ["PATH"], "C": "c"})
    assert says in str(caught.value)


def test_values_are_never_split_or_read_again():
    environ = {"PATH": os.environ["PATH"], "Q": "a 'b' $(c) {K}", "K": "secret"}
    command, variables = parse("KEY={K} U=x={Q} sh -c 'echo ${Q} {}' --q={Q} '{\"a\": 1}'", environ)
    assert command == ["sh", "-c", "echo ${Q} {}", f"--q={environ['Q']}", '{"a": 1}']
    assert variables == {"KEY": "secret", "U": f"x={environ['Q']}"}


LEAVE_A_CHILD = """
import subprocess
code = "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN); open(sys.argv[1], 'w').write(str(os.getpid()))"
child = subprocess.Popen([sys.executable, "-c", code + "; time.sleep(1000)", os.environ["PID"]], start_new_session=True)
while not os.path.exists(os.environ["PID"]) or not open(os.environ["PID"]).read():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ending", ["reward('1')", "os.abort()"])
def test_what_the_command_leaves_behind_is_ended(run, server, tmp_path, ending):
    with nullcontext() if "reward" in ending else pytest.raises(CommandFailed):
        run(LEAVE_A_CHILD + ending, PID=str(tmp_path / "pid"))
    assert len(server.events) == ("reward" in ending)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_at_the_time_limit_the_whole_tree_is_ended(play, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    trace = play(LEAVE_A_CHILD + SAY + "time.sleep(1000)", limit=60, PID=str(tmp_path / "pid"), TMPDIR=str(scratch))
    assert trace.exit_code is None
    assert len(trace.calls) == 1
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(20)
    deadline = time.monotonic() + 20
    while list(scratch.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(scratch.iterdir()) == []
