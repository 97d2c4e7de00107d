"""empo2 init: real agents, run once before agent-lightning's real gateway, and what the user is told of them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from empo2.recipe.cli import main
from empo2.recipe.config import load_settings
from empo2.recipe.retrofit.findings import examine
from empo2.recipe.retrofit.recorder import Body, Call, Trace
from empo2.recipe.retrofit.scripted_model import sample

PRELUDE = """\
import json, os, sys, time, urllib.error, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["AGL_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def ask(path, **body):
    return post(os.environ["AGL_OPENAI_BASE_URL"] + path, {"model": "x", **body})

def chat(messages, **more):
    return ask("/chat/completions", messages=messages, **more)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

def reward(value):
    post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": value}})

messages = [{"role": "system", "content": "You count."}, user("Count.")]
"""
PLAY = """
for turn in range(4):
    messages += [chat({sent}), user(f"On. {{turn}}")]
"""
WHOLE, LAST, TRUNCATED = (PLAY.format(sent=f"messages{part}") for part in ("", "[-1:]", "[:1] + messages[1:][-3:]"))
TOOLS = """
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties":
    {"way": {"enum": ["north", "south"]}, "far": {"type": "integer"}}}}}]
for turn in range(3):
    said = chat(messages, tools=tools)
    messages.append(said)
    for call in said.get("tool_calls") or []:
        assert json.loads(call["function"]["arguments"]) == {"way": "north", "far": 1}
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "snow"})
    if not said.get("tool_calls"):
        messages.append(user("On."))
"""
FALLS_BACK = """
try:
    ask("/embeddings", input="x")
except urllib.error.HTTPError:
    pass
"""
STREAM = """
def stream(path, **body):
    headers = {"Content-Type": "application/json", "x-api-key": os.environ["AGL_KEY"]}
    body = {"model": "x", "stream": True, **body}
    url = os.environ["AGL_OPENAI_BASE_URL"] + path
    answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
    lines = answer.read().decode().split("\\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
"""
STREAMED = (
    STREAM
    + """
for turn in range(4):
    chunks = stream("/chat/completions", messages=messages)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    messages += [{"role": "assistant", "content": text}, user(f"On. {turn}")]
"""
)
RESPONSES = """
last = None
for turn in range(4):
    said = ask("/responses", input=f"On. {turn}", instructions="You count.", previous_response_id=last)
    last = said["id"]
"""
CLAUDE = (
    STREAM
    + """
messages = messages[1:]
for turn in range(4):
    events = stream("/v1/messages", messages=messages, system="You count.", max_tokens=9)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    messages += [{"role": "assistant", "content": [{"type": "text", "text": text}]}, user(f"On. {turn}")]
"""
)


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> Callable[..., tuple[int, str]]:
    """`empo2 init` in an empty folder; its exit code and all that it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)

    def run(*arguments: str, code: str | None = None) -> tuple[int, str]:
        if code is not None:
            (tmp_path / "play.py").write_text(PRELUDE + code)
        exit_code = main(["init", *arguments])
        printed = capfd.readouterr()
        return exit_code, printed.out + printed.err

    return run


COMMAND = ("--command", f"{sys.executable} play.py")


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        (WHOLE + "reward(0.5)", 0, ["4 model calls, each with the whole chat", "reported: 0.5", "done"]),
        (
            TOOLS + "reward(1)",
            0,
            ["tools are offered: look", "the parser hermes", "3 model calls, each with the whole"],
        ),
        (LAST + "reward(1)", 0, ["4 training rows", "only the last turn is sent", "(3 times)"]),
        (TRUNCATED + "reward(1)", 0, ["3 training rows", "history is truncated: message 2 (user: 'Count.') is gone"]),
        (FALLS_BACK + WHOLE + "reward(1)", 0, ["note   1 call went to /embeddings, which the policy does not have"]),
        (STREAMED + "reward(1)", 0, ["4 model calls, streamed, each with the whole chat so far: the episode is one"]),
        (RESPONSES + "reward(1)", 0, ["4 model calls to /responses, each with the whole chat so far: the episode is"]),
        (CLAUDE + "reward(1)", 0, ["4 model calls to /messages, streamed, each with the whole chat so far: the"]),
        (
            "ask('/responses', input='x', background=True)",
            1,
            ["wrong  1 call to responses was answered 400", "OpenAI's"],
        ),
        (WHOLE, 1, ["wrong  the agent failed", "ended without a reward: write a number to the file"]),
        ("chat(messages)\nraise KeyError('the door')", 1, ["wrong  the agent failed", "KeyError: 'the door'"]),
        ("reward(1)", 1, ["no model call came", "AGL_OPENAI_BASE_URL"]),
    ],
    ids=[
        "good",
        "tools",
        "last turn",
        "truncated",
        "falls back",
        "streamed",
        "responses",
        "messages",
        "background",
        "no reward",
        "crash",
        "silent",
    ],
)
def test_what_the_user_is_told(init, code, exit_code, says):
    ended, printed = init(*COMMAND, code=code)
    assert ended == exit_code, printed
    for words in says:
        assert words in printed


def test_an_agent_that_hangs(init):
    code, printed = init(*COMMAND, "--time-limit", "8", code="chat(messages)\ntime.sleep(1000)")
    assert code == 1
    assert "did not end within 8 s, and was killed after 1 model call" in printed


def test_training_does_not_start_if_the_model_cannot_call_the_agents_tools(init, tmp_path, capfd):
    assert init(*COMMAND, code=TOOLS + "reward(1)")[0] == 0
    model = tmp_path / "mute"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["train", "--profile", "cpu", "--config", "empo2.yaml", f"model.path={model}"]) == 2
    printed = capfd.readouterr()
    assert f"model.path='{model}': the agent offers look; the chat template of {model} has no tools" in printed.err
    assert not (tmp_path / "runs").exists()


JUDGE = """
chat(messages)
ask("/chat/completions", messages=[user("Good?")], model="judge")
ask("/embeddings", input="x")
reward(1)
"""


def test_calls_that_are_not_trained_are_named(init, tmp_path):
    code, printed = init(*COMMAND, code=JUDGE.replace('ask("/embeddings", input="x")\n', ""))
    assert code == 0, printed
    assert "note   calls name the models judge, x, and all are trained: gateway.trained_calls can choose" in printed
    chosen = "gateway:\n  trained_calls: [{model: x}]\n  other_server: http://127.0.0.1:1/v1\n"
    (tmp_path / "empo2.yaml").write_text((tmp_path / "empo2.yaml").read_text() + chosen)
    (tmp_path / "play.py").write_text(PRELUDE + JUDGE)
    sys.modules.pop("my_tasks")
    code, printed = init("--config", "empo2.yaml")
    assert code == 0, printed
    assert "ok     1 model call: the episode is one training row" in printed
    assert "ok     2 calls pass to gateway.other_server, and are not trained: /chat/completions, /embeddings" in printed


CLASS = """
class Counter:
    def run(self):
        assert chat([user(os.environ["QUESTION"])])["content"] == os.environ["WANTED"]
        if os.environ["TELL"]:
            reward(1.0)
"""


def test_a_class_with_its_own_tasks_and_replies(init, tmp_path):
    (tmp_path / "counting.py").write_text(PRELUDE + CLASS)
    rows = [{"id": 7, "question": "höher: als?", "steps": [1]}]
    (tmp_path / "questions.py").write_text(f"def load(): return {rows!r}, {rows!r}")
    where = ["--agent", "counting:Counter", "--tasks", "questions:load", "--reply", "three", "--output", "mine.yaml"]
    env = ["--env", "QUESTION=input.question", "--env", "WANTED=three", "--env"]
    code, printed = init(*where, *env, "TELL=yes")
    assert code == 0, printed
    settings = load_settings(file=tmp_path / "mine.yaml")
    assert settings.agent.class_ == "counting:Counter"
    assert settings.agent.env == {"QUESTION": "input.question", "WANTED": "three", "TELL": "yes"}
    assert settings.tasks.source == "questions:load"
    assert settings.memory.scope == ["id", "question"]
    assert not (tmp_path / "my_tasks.py").exists()

    code, printed = init(*where, *env, "TELL=", "--force")
    assert code == 1
    assert 'no reward was reported: post {"event_type": "reward"' in printed


def test_nothing_is_overwritten_unasked(init, tmp_path):
    assert init(*COMMAND, code=WHOLE + "reward(1)")[0] == 0
    written = yaml.safe_load((tmp_path / "empo2.yaml").read_text())
    assert written["agent"]["env"] == {
        "AGENT_COMMAND": COMMAND[1],
        "TASK_QUESTION": "input.question",
        "TASK_ANSWER": "input.answer",
    }
    mine = (tmp_path / "my_tasks.py").read_text().replace("What is", "How much is")
    (tmp_path / "my_tasks.py").write_text(mine)
    edited = (tmp_path / "empo2.yaml").read_text().replace("return_scale: 1 ", "return_scale: 2 ")
    (tmp_path / "empo2.yaml").write_text(edited)

    code, printed = init(*COMMAND)
    assert code == 2
    assert "empo2.yaml exists and differs: --force overwrites it" in printed
    assert (tmp_path / "empo2.yaml").read_text() == edited

    sys.modules.pop("my_tasks")
    code, printed = init("--config", "empo2.yaml")
    assert code == 0, printed
    assert "How much is 1 + 1?" in printed
    assert (tmp_path / "empo2.yaml").read_text() == edited

    assert init(*COMMAND, "--force")[0] == 0
    assert "return_scale: 1 " in (tmp_path / "empo2.yaml").read_text()
    assert (tmp_path / "my_tasks.py").read_text() == mine


def test_the_tasks_that_are_written_have_the_fields_that_the_variables_name(init, tmp_path):
    env = ["--env", "SECRET=input.secret", "--env", "TOP=input.top", "--env", "AGAIN=input.secret"]
    code, printed = init(*COMMAND, *env, code=WHOLE + "reward(float(os.environ['TOP']))")
    assert code == 0, printed
    assert 'on {"secret": "1", "top": "1"}' in printed
    assert yaml.safe_load((tmp_path / "empo2.yaml").read_text())["memory"]["scope"] == ["secret", "top"]

    code, printed = init(*COMMAND, "--env", "Q=input.quest", "--force")
    assert code == 2
    assert "agent.env: the tasks have no 'input.quest'; they have ['secret', 'top']" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--agent", "nowhere:Agent"], "agent.class='nowhere:Agent': cannot be imported"),
        (["--agent", "nowhere"], "agent.class='nowhere'"),
        (["--agent", "json:JSONDecoder"], "has no run() method"),
        ([*COMMAND, "--tasks", "nowhere:load"], "tasks.source='nowhere:load'"),
        ([*COMMAND, "--env", "question"], "--env 'question': variables are given as NAME=VALUE"),
        ([], "give one of --agent, --command and --config"),
        ([*COMMAND, "--agent", "a:A"], "give one of --agent, --command and --config"),
        (["--config", "absent.yaml"], "--config absent.yaml: No such file"),
        ([*COMMAND, "--output", "no/such/empo2.yaml"], "no/such/empo2.yaml: No such file"),
    ],
)
def test_wrong_input_is_one_line(init, arguments, says):
    code, printed = init(*arguments)
    assert code == 2
    (line,) = [line for line in printed.splitlines() if line.startswith("empo2: error: ")]
    assert says in line


def call(
    *messages: str | Body, reply: str = "ok", parallel: bool = False, path: str = "chat/completions", **more
) -> Call:
    """A call that was answered; text is the user's."""
    chat = [{"role": "user", "content": message} if isinstance(message, str) else message for message in messages]
    answer = {"choices": [{"message": {"role": "assistant", "content": reply, "refusal": None}}]}
    return Call(path, {"messages": chat, **more}, parallel, 200, answer)


def said(text: str) -> Body:
    return {"role": "assistant", "content": text}


def system(text: str) -> Body:
    return {"role": "system", "content": text}


LOOK = {"type": "function", "function": {"name": "look"}}
REWARD = ("reward", {"value": 1.0})


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (
            [call("a"), call("a", said("ok "), "b")],
            "reply is rewritten in the chat: it said 'ok', the chat holds 'ok '",
        ),
        ([call("a"), call("a", "b", said("x"))], "reply is left out of the chat"),
        ([call(system("1"), "a"), call(system("2"), "a", said("ok"), "b")], "system message is rewritten: it was '1'"),
        ([call("a", "b"), call("a", "c", said("ok"), "d")], "history is rewritten: message 2 (user) was 'b', then 'c'"),
        ([call("a", said("x"), "b"), call("a", said("x"))], "goes back to an earlier turn"),
        ([call("a"), call("b", parallel=True)], "in parallel"),
        ([call("a", tools=[LOOK]), call("a", said("ok"), "b")], "tools that are offered change"),
        ([call("a", n=4)], "n=4 choices are asked for: only the first"),
        ([call("a"), call("a")], "1 call repeated an earlier prompt word for word"),
        ([call("a", said("I say "))], "1 call cannot be shown tips"),
        (
            [call("a"), call({"role": "user", "content": [{"type": "text", "text": "a"}]}, said("ok"), "b")],
            "one training row",
        ),
    ],
)
def test_what_is_said_of_calls(calls: list[Call], says: str):
    findings = examine(Trace(calls, [REWARD], exit_code=0), 60)
    assert [finding for finding in findings if says in finding.text], findings
    assert "wrong" not in {finding.level for finding in findings}


def test_prompts_of_completions_merge_where_they_extend():
    def prompt(text: str, reply: str) -> Call:
        return Call("completions", {"prompt": text}, False, 200, {"choices": [{"text": reply}]})

    merged = examine(Trace([prompt("a", " b"), prompt("a b c", " d")], [REWARD], exit_code=0), 60)
    assert "one training row" in merged[0].text
    apart = examine(Trace([prompt("a", " b"), prompt("a c", " d")], [REWARD], exit_code=0), 60)
    assert [finding for finding in apart if "does not begin with the prompt and the reply" in finding.text]


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (
            Trace([call("a")], [("score", {"value": 1})], exit_code=0),
            "no reward was reported, only events of type score",
        ),
        (Trace([call("a")], [("reward", {"value": "1"})], exit_code=0), "the reward is '1': must be a finite number"),
        (Trace([call("a")], [], [(422, "event_type missing")], exit_code=0), "an event was refused with status 422"),
        (Trace([Call("chat/completions", {}, False, 401)], exit_code=1), "1 call came without the key"),
        (Trace([Call("chat/completions", {}, False)], [REWARD], exit_code=0), "gave up on every model call"),
        (Trace([Call("models", {}, False, 404)], exit_code=1), "went to /models, answered 404"),
    ],
)
def test_what_cannot_be_trained(trace: Trace, says: str):
    assert [finding for finding in examine(trace, 60) if finding.level == "wrong" and says in finding.text]


def test_values_made_from_a_schema():
    schema = {
        "type": "object",
        "$defs": {"Room": {"type": "object", "properties": {"name": {"type": "string"}}}},
        "properties": {
            "room": {"$ref": "#/$defs/Room"},
            "steps": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "unneeded": {"type": "string"},
        },
        "required": ["room", "steps", "maybe"],
    }
    assert sample(schema) == {"room": {"name": "1"}, "steps": [1, 1], "maybe": True}


def test_help_teaches(capsys):
    assert main(["init", "--help"]) == 0
    printed = capsys.readouterr().out
    for word in ("empo2 init --agent my_agent:MyAgent", "AGL_OPENAI_BASE_URL", "EMPO2_REWARD_FILE", "Exit code 0"):
        assert word in printed
