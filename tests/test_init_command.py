"""empo2 init: real agents, run once before agent-lightning's real gateway, and what the user is told of them."""

import json
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.cli import main
from empo2.recipe.config import load_settings, parse_yaml
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.tasks import load_tasks
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.retrofit.findings import Finding, examine
from empo2.recipe.retrofit.first_prompt import SWITCHES, FirstPrompt, advice
from empo2.recipe.retrofit.recorder import Body, Call, Trace
from empo2.recipe.retrofit.rows import tell
from empo2.recipe.retrofit.scripted_model import Script
from empo2.recipe.retrofit.starter import config_text, scope_choices
from empo2.recipe.retrofit.states import describe_states

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PRELUDE = """\
import json, os, sys, time, urllib.error, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["AGL_KEY"]}
    text = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read().decode()
    streamed = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return streamed or json.loads(text)

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
WHOLE = """
for turn in range(4):
    messages += [chat(messages), user(f"On. {turn}")]
"""
TOOLS = """
values = {"way": {"enum": ["north", "south"]}, "far": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "rooms": {"type": "array", "items": {"$ref": "#/$defs/Room"}, "minItems": 2}, "unneeded": {"type": "string"}}
schema = {"type": "object", "properties": values, "required": ["way", "far", "rooms"], "$defs": {"Room":
    {"type": "object", "properties": {"name": {"type": "string"}, "open": {"type": "boolean"}}}}}
tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
for turn in range(3):
    said = chat(messages, tools=tools)
    messages.append(said)
    for call in said.get("tool_calls") or []:
        rooms = [{"name": "1", "open": True}] * 2
        assert json.loads(call["function"]["arguments"]) == {"way": "north", "far": 1, "rooms": rooms}
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "snow"})
    if not said.get("tool_calls"):
        messages.append(user("On."))
"""
EMBEDS = """
found = ask("/embeddings", input=["x", "y", "x"], dimensions=4)["data"]
assert [each["index"] for each in found] == [0, 1, 2] and {len(each["embedding"]) for each in found} == {4}
assert found[0]["embedding"] == found[2]["embedding"] != found[1]["embedding"]
"""
SUPERVISOR = """
schema = {"type": "object", "properties": {"next": {"enum": ["writer", "critic", "FINISH"]}}}
form = {"type": "json_schema", "json_schema": {"name": "route", "schema": schema}}
calls = 0
while json.loads(chat(messages, response_format=form)["content"])["next"] != "FINISH":
    messages += [{"role": "assistant", "content": "next"}, user("Done.")]
    calls += 1
print(calls)
"""
EDITS = """
tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "edit")]
said = chat(messages, tools=tools)
assert [call["function"]["name"] for call in said["tool_calls"]] == ["edit"]
assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"file": "a"}
messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "edited"}]
assert chat(messages, tools=tools)["content"] == "done"
print(1.0)
"""
FORMS = """
object = json.loads(chat(messages, response_format={"type": "json_object"})["content"])
assert object == {"reply": "1"}, object
choice = ask("/chat/completions", messages=messages, logprobs=True, top_logprobs=2)["choices"][0]
(token,) = choice["logprobs"]["content"]
assert token["token"] == token["top_logprobs"][0]["token"] == "1" and token["logprob"] < 0, token
choice = ask("/completions", prompt="Count.", logprobs=2)["choices"][0]
assert choice["logprobs"]["tokens"] == ["1"] and choice["logprobs"]["text_offset"] == [0], choice
reward(1)
"""
FIXED = """
import urllib.request
urllib.request.urlopen("http://127.0.0.1:9/v1/models")
"""
NOISE = """
class Connection:
    def __del__(self):
        raise TypeError("the connection is gone")

held = Connection()
chat(messages)
raise ValueError("the door is locked")
"""
DIALECTS = """
last = None
for turn in range(2):
    last = ask("/responses", input=f"On. {turn}", instructions="You count.", previous_response_id=last)["id"]
messages = messages[1:]
for turn in range(2):
    system = f"x-cost: {turn}\\n\\nYou count."
    events = ask("/v1/messages", messages=messages, system=system, max_tokens=9, stream=True)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    messages += [{"role": "assistant", "content": [{"type": "text", "text": text}]}, user(f"On. {turn}")]
assert ask("/v1/messages/count_tokens", messages=messages)["input_tokens"] > 0
reward(1)
"""
JUDGE = """
chat(messages)
ask("/chat/completions", messages=[user("Good?")], model="judge")
reward(1)
"""
MALFORMED = """
try:
    ask("/completions")
finally:
    chat(messages, tools=[{"name": "look", "input_schema": {}}])
"""
CLASS = """
class Counter:
    def run(self):
        assert chat([user(os.environ["QUESTION"])])["content"] == os.environ["WANTED"]
        if os.environ["TELL"]:
            reward(1.0)
"""


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
        (DIALECTS, 0, "4 model calls to /messages and /responses, 2 of them streamed, in 2 training rows"),
        (WHOLE, 1, "ended without a reward: write a number to the file"),
        (WHOLE + "print(0.5)", 1, "set AGENT_REWARD=stdout; its last line is 0.5: if that is the reward, do the last"),
        (NOISE, 1, "wrong  the agent failed: ValueError: the door is locked (play.py:"),
        (MALFORMED, 1, "is not as OpenAI's API has it: KeyError: 'function'"),
        ("chat(messages)\nraise KeyError('the door')", 1, "wrong  the agent failed: KeyError: 'the door' (play.py:"),
    ],
)
def test_what_the_user_is_told(init, code, exit_code, says):
    ended, printed = init(*COMMAND, code=code)
    assert ended == exit_code and says in printed, printed
    assert not ended or "       | " in printed  # the end of what it wrote
    assert code is not DIALECTS or "lines before the system message are left out of prompts: x-cost; " in printed


def test_an_address_of_its_own_is_said_before_what_came_of_it(init, tmp_path):
    code, printed = init(*COMMAND, code=FIXED)
    wrong = [line for line in printed.splitlines() if line.startswith("wrong")]
    assert code == 1 and len(wrong) == 2, printed
    assert wrong[0].startswith("wrong  no model call came, and what the agent wrote tells of a connection")
    assert wrong[1].startswith("wrong  the agent failed: URLError")
    log = (tmp_path / "empo2.init.log").read_text()
    assert (tmp_path / "empo2.init.log").stat().st_mode & 0o777 == 0o600
    assert "Connection refused" in log and f"has all that the agent wrote, {len(log.splitlines())} lines" in printed


def test_what_training_would_refuse_or_end_is_not_written(init, tmp_path):
    row = {"q": "a", "a-b": 1, "a.b": 2}
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, (row | {"hint": "b"}, row, row | {"hint": "b"}))))
    secret = ("--env", "KEY=my-secret-key", "--time-limit", "400")
    options = ("--command", "python play.py", "--tasks", "tasks.jsonl", *secret)
    assert "has no field 'hint', which agent.env names" in init(*options, "--env", "HINT=input.hint")[1]
    code, printed = init(*options, code="chat(messages)\nimport os, sys\nsys.exit(os.environ['KEY'] + 'x' * 9999)")
    assert code == 1 and "my-secret-key" not in printed and max(map(len, printed.splitlines())) < 2000
    code, printed = init(*options, code=WHOLE + "import os\nopen(os.environ['EMPO2_REWARD_FILE'], 'w').write('1')")
    assert code == 0, printed
    written = (tmp_path / "empo2.yaml").read_text()
    assert "time_limit: 400" in written and "TASK_Q" in written and "HINT" not in written and "input.a.b" not in written
    assert (tmp_path / "empo2.yaml").stat().st_mode & 0o777 == 0o600 and "which has secrets" in printed
    for text in ("x" * 140_000, "a\0b"):
        (tmp_path / "tasks.jsonl").write_text(f"{json.dumps({'q': text})}\n" * 2)
        said = init(*options, "--force")[1]
        assert "training, row 0: agent.env.TASK_Q=input.q, " in said and "at most 130,000 bytes" in said, said
    (tmp_path / "tasks.jsonl").write_text('{"a-b": 1, "a_b": 2}\n' * 2)
    assert "fields 'a-b' and 'a_b' would both be TASK_A_B" in init(*options, "--force")[1]


CLIENT = """
import pathlib, sys
(folder := pathlib.Path("site-packages/openai")).mkdir(parents=True, exist_ok=True)
(folder / "__init__.py").write_text("def create(model): raise TypeError(f'no argument {model}')")
sys.path.insert(0, "site-packages")
import openai
openai.create("of_mine")
"""


@pytest.mark.parametrize("code", ["import a_package_of_mine", "open('of_mine.txt')", CLIENT])
def test_what_is_not_found_is_no_connection_that_failed(init, code):
    ended, printed = init(*COMMAND, code=code)
    assert ended == 1 and "of_mine" in printed and "connection" not in printed, printed


def test_a_run_that_is_killed_while_it_imports_is_said_as_that(init, tmp_path):
    (tmp_path / "library.py").write_text("import time\ntime.sleep(600)\n")
    code, printed = init(*COMMAND, "--time-limit", "60", code="import library\n")
    (wrong,) = [line for line in printed.splitlines() if line.startswith("wrong")]
    assert code == 1 and "killed after 60 s while it was still importing: import library (play.py:" in wrong


ITSELF = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["next"]}
SCHEMAS = [
    ({"$ref": "#/definitions/A", "definitions": {"A": {"enum": ["a"]}}}, "a"),  # of pydantic 1
    ({"$ref": "#/definitions/B"}, "1"),
    ({"type": "object", "properties": {"a": True}, "required": ["a", "b"]}, {"a": "1", "b": "1"}),
    ({"anyOf": [], "type": "integer"}, 1),
    ({"type": "integer", "minimum": 2, "maximum": 5}, 2),
    ({"type": "integer", "exclusiveMinimum": 1}, 2),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
    ({"type": "number", "maximum": -1}, -1),
    ({"type": "string", "minLength": 3, "maxLength": 4}, "1.."),
]


@pytest.mark.parametrize(("schema", "value"), SCHEMAS)
def test_a_schema_that_is_odd_is_one_of_texts(schema: dict, value: Any):
    assert Script().sample(schema, "1") == value


def test_a_schema_that_contains_itself_comes_to_an_end():
    assert "next" in Script().sample({"$ref": "#/$defs/Node", "$defs": {"Node": ITSELF}}, "1")["next"]


def test_forms_without_a_schema_and_log_probs_are_answered(init):
    code, printed = init(*COMMAND, code=FORMS)
    assert code == 0, printed
    code, printed = init(*COMMAND, "--force", code="chat(messages)\nraise ValueError('no move')\n")
    assert code == 1 and "note   a script replied: if the agent could not read a reply, --reply gives" in printed


def test_replies_win_over_schemas_and_may_be_tool_calls(init):
    stdout = [*COMMAND, "--env", "AGENT_REWARD=stdout", "--rewards", "0", "9", "--force"]
    code, printed = init(*stdout, code=SUPERVISOR)  # the values take turns
    assert code == 0 and "the reward was reported: 2" in printed, printed
    code, printed = init(*stdout, "--reply", "critic", "--reply", "FINISH")
    assert code == 0 and "the reward was reported: 1" in printed, printed
    code, printed = init(*stdout, "--reply", '{"next": "FINISH"}')
    assert code == 0 and "the reward was reported: 0" in printed, printed
    edit = '{"name": "edit", "arguments": {"file": "a"}}'
    code, printed = init(*stdout, "--reply", edit, "--reply", "done", "--calls", code=EDITS)
    assert code == 0 and "\n  2  chat        x                 1  no       2        4  You count.\n" in printed, printed


def test_tasks_of_a_small_table_are_counted_and_named_from_the_configuration(init, tmp_path):
    (tmp_path / "questions.csv").write_text("question\n1?\n2?\n3?\n")
    (tmp_path / "mine").mkdir()
    code, printed = init(
        *COMMAND, "--tasks", "questions.csv", "--output", "mine/empo2.yaml", code="chat(messages)\nreward(1)"
    )
    assert code == 0 and "in 6 steps of 2 of the 2 tasks" in printed, printed
    assert load_settings(file=tmp_path / "mine/empo2.yaml").tasks.source == str(tmp_path / "mine/../questions.csv")
    assert init("--config", "mine/empo2.yaml")[0] == 0


def test_a_first_prompt_that_no_row_holds(init, tmp_path, capfd):
    """Its system message has 6,000 words; "a" is one token of SmolLM2's with the space before it."""
    (tmp_path / "tasks.csv").write_text("question\n1?\n2?\n3?\n")
    code, printed = init(
        *COMMAND,
        "--tasks",
        "tasks.csv",
        code="messages[0]['content'] = ' a' * 6000\nchat(messages, max_tokens=9)\nreward(1)",
    )
    assert code == 0, printed
    assert "prompt about 6,002 tokens (system message 6,000) in the first call that is trained" in printed
    needs = "give model.max_prompt_tokens=7168 model.max_context_tokens=10240, and a model with so long a context"
    assert f"max_prompt_tokens=1024 holds 1,024, of which tips may take 512: {needs} (profile cpu)" in printed
    # 6,002 and 2,048 of tips, and five in a hundred
    assert "--profile gpu-1 --config empo2.yaml model.max_prompt_tokens=9216 model.max_context_tokens=17516" in printed
    main(["check", "--profile", "cpu", "--config", "empo2.yaml"])
    assert "first prompt   the first prompt has about 6,002 tokens (system message 6,000)" in capfd.readouterr().out


def test_switches_of_known_agents_are_those_of_the_page(tmp_path):
    page = (ROOT / "docs" / "agents.md").read_text()
    for name, known in parse_yaml(SWITCHES.read_text()).items():
        (row,) = re.findall(rf"^\| `{name}`, .*", page, re.MULTILINE)
        assert f": {known['tokens']:,} |" in row and f"`{known['add'].partition(', with')[0]}`" in row
    line = "python -m empo2.agents.coding --path /opt/bin qwen --max-session-turns 10"
    settings = load_settings("cpu", layer={"agent": {"class": "a:A", "env": {"AGENT_COMMAND": line}}})
    assert advice(FirstPrompt(9570, 6726, 2586), settings).endswith("what leaves 8,341: --bare")
    assert "what leaves" not in advice(FirstPrompt(0, 0, 8000), settings)
    assert advice(FirstPrompt(0, 0, 512), settings) == ""  # with 512 tokens of tips


def test_training_does_not_start_if_the_model_cannot_call_the_agents_tools(init, tmp_path, capfd):
    (tmp_path / "questions.jsonl").write_text("".join(f'{{"question": "{number}"}}\n' for number in range(20)))
    code, printed = init(*COMMAND, "--tasks", "questions.jsonl", code=TOOLS + "reward(1)")
    assert code == 0, printed
    for says in ("tools are offered: look", "the parser hermes", "3 model calls, each with the whole", "reported: 1"):
        assert says in printed
    share = "83% of the memory rollouts can find tips of earlier steps, in 6 steps of 2 of the 18"
    assert f"scope  all-tasks: {share}" in printed and "made up" not in printed
    settings = load_settings(file=tmp_path / "empo2.yaml")
    assert settings.memory.scope == "all-tasks"
    assert settings.agent.env == {"AGENT_COMMAND": COMMAND[1], "TASK_QUESTION": "input.question"}
    model = tmp_path / "mute"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["train", "--profile", "cpu", "--config", "empo2.yaml", f"model.path={model}"]) == 2
    printed = capfd.readouterr()
    assert f"model.path='{model}': the agent offers look; the chat template of {model} has no tools" in printed.err
    assert not (tmp_path / "runs").exists()


def test_calls_that_are_not_trained_are_named(init, tmp_path):
    code, printed = init(*COMMAND, code=JUDGE)
    assert code == 0, printed
    assert "note   calls name the models judge, x, and all are trained: gateway.trained_calls can choose" in printed
    chosen = "gateway:\n  trained_calls: [{model: x}]\n  other_server: http://127.0.0.1:1/v1\n"
    (tmp_path / "empo2.yaml").write_text((tmp_path / "empo2.yaml").read_text() + chosen)
    code, printed = init("--config", "empo2.yaml", code=JUDGE)
    assert code == 0, printed
    assert "ok     1 model call: the episode is one training row" in printed
    assert "ok     1 call passes to gateway.other_server, and is not trained: /chat/completions" in printed
    assert "state  " in printed and "Good?" not in printed  # the judge sees no tips, its states are not counted


def test_a_class_with_its_own_tasks_and_replies(init, tmp_path):
    (tmp_path / "counting.py").write_text(PRELUDE + CLASS)
    rows = [{"id": 7, "question": "höher: als?", "steps": [1]}]
    (tmp_path / "questions.py").write_text(f"def load(): return {rows!r}, {rows!r}")
    where = ["--agent", "counting.Counter", "--tasks", "questions:load", "--reply", "three", "--output", "mine.yaml"]
    env = ["--env", "QUESTION=input.question", "--env", "WANTED=three", "--env"]
    code, printed = init(*where, *env, "TELL=")
    assert code == 1
    assert 'no reward was reported: post {"event_type": "reward"' in printed
    assert not (tmp_path / "mine.yaml").exists()

    code, printed = init(*where, *env, "TELL=yes", "--rewards", "-1", "2.5")
    assert code == 0, printed
    settings = load_settings(file=tmp_path / "mine.yaml")
    assert (settings.agent.class_, settings.tasks.source) == ("counting:Counter", "questions:load")
    assert settings.agent.env == {"QUESTION": "input.question", "WANTED": "three", "TELL": "yes"}
    assert settings.memory.scope == ["id", "question"]  # one task, which comes in every step
    assert (settings.algorithm.failure_return, settings.algorithm.success_return) == (-1, 2.5)
    assert not (tmp_path / "my_tasks.py").exists()


def test_tasks_that_are_made_up_are_not_trained_and_nothing_is_overwritten_unasked(init, tmp_path):
    tasks, settings = tmp_path / "my_tasks.py", tmp_path / "empo2.yaml"
    env = ["--env", "SECRET=input.secret", "--env", "TOP=input.top", "--env", "AGAIN=input.secret"]
    code, printed = init(*COMMAND, *env, code=EMBEDS + WHOLE + "reward(37 * float(os.environ['TOP']))")
    assert code == 0, printed
    assert "4 model calls, each with the whole chat" in printed
    assert "note   1 call went to /embeddings, which the policy does not have: it got made-up vectors" in printed
    assert "the reward 37.0 lies outside" in printed and "--rewards WORST BEST" in printed
    assert 'on {"secret": "1", "top": "1", "made_up": true}' in printed and "note   the tasks are made up" in printed
    assert load_settings(file=settings).memory.scope == ["secret", "top"]
    with pytest.raises(ConfigError, match=r"tasks.source='my_tasks:load': its tasks are made up by `empo2 init`"):
        load_tasks(load_settings(file=settings))
    written = settings.read_text()
    mine, edited = tasks.read_text().replace("1", "2"), written.replace("time_limit: 300 ", "time_limit: 30 ")
    tasks.write_text(mine)
    settings.write_text(edited)

    code, printed = init(*COMMAND, *env)
    assert code == 2 and "empo2.yaml exists and differs: --force overwrites it" in printed

    sys.modules.pop("my_tasks")
    code, printed = init("--config", "empo2.yaml")
    assert (code, settings.read_text()) == (0, edited), printed
    assert "the reward 74.0 lies outside" in printed

    code, printed = init(*COMMAND, "--env", "Q=input.quest", "--force")
    assert code == 2
    assert (
        "training, row 0: has no field 'quest', which agent.env names; it has ['made_up', 'secret', 'top']" in printed
    )

    assert init(*COMMAND, *env, "--force")[0] == 0
    assert (settings.read_text(), tasks.read_text()) == (written, mine)


def test_variables_and_rewards_are_written_as_they_are_given() -> None:
    """YAML reads ON as a truth value, and six digits are too few for some rewards."""
    variables = {"ON": "input.on", "LIMIT": "1e6", "HEX": "0x10", "DAY": "2024-01-01", "NONE": "", "NO": "no"}
    text = config_text(Path("empo2.yaml"), agent="a:A", source="tasks.csv", variables=variables,
                       scope="all-tasks", rewards=(-1.0, 1234567.5), seconds=60)  # fmt: skip
    settings = load_settings(layer=parse_yaml(text))
    assert settings.agent.env == variables
    assert (settings.algorithm.failure_return, settings.algorithm.success_return) == (-1, 1234567.5)
    assert "failure_return: -1 " in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--agent", "nowhere"], "agent.class='nowhere'"),
        ([*COMMAND, "--env", "question"], "--env 'question': variables are given as NAME=VALUE"),
        ([], "give one of --agent, --command and --config"),
        ([*COMMAND, "--agent", "a:A"], "give one of --agent, --command and --config"),
        (["--config", "absent.yaml"], "--config absent.yaml: No such file"),
        (["--config", "a.yaml", "--env", "A=b", "--rewards", "0", "2"], "--env, --rewards: what --config a.yaml says"),
        ([*COMMAND, "--output", "no/such/empo2.yaml"], "no/such/empo2.yaml: No such file"),
        ([*COMMAND, "--output", ".", "--force"], "--output .: is a folder; give a file, such as empo2.yaml"),
        (["--command", "pyhton play.py"], "--command: 'pyhton play.py': there is no program 'pyhton'"),
        (["--command", "echo {QUESTION}"], "--command: 'echo {QUESTION}': no variable QUESTION is set"),
        ([*COMMAND, "--rewards", "1", "0"], "algorithm.success_return=0: must exceed failure_return=1"),
        ([*COMMAND, "--tasks", "absent.jsonl"], "tasks.source='absent.jsonl': No such file"),
        ([*COMMAND, "--server", "http://127.0.0.1:9/v1"], "give --model, the server's name of it"),
        ([*COMMAND, "--model", "m"], "--model m: give --server, the address of one"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_file(init, tmp_path, arguments, says):
    code, printed = init(*arguments)
    assert code == 2
    assert list(tmp_path.iterdir()) == []
    (line,) = [line for line in printed.splitlines() if line.startswith("empo2: error: ")]
    assert says in line


def call(*messages: Any, parallel: bool = False, **more) -> Call:
    """A call that was answered with "ok" after a second, the next one after a further second; text is the user's."""
    chat = [{"role": "user", "content": message} if isinstance(message, str) else message for message in messages]
    answer = {"choices": [{"message": {"role": "assistant", "content": "ok", "refusal": None}}]}
    end = next(SECONDS)
    return Call("chat/completions", {"messages": chat, **more}, end - (3 if parallel else 1), end, 200, answer)


SECONDS = count(0, 2)


def examined(trace: Trace) -> list[Finding]:
    return examine(trace, tell(trace.calls, load_settings().gateway), load_settings(), 60)


def said(text: str, role: str = "assistant") -> Body:
    return {"role": role, "content": text}


def part(**part) -> Body:
    return {"role": "user", "content": [part]}


def prompt(text: str, reply: str) -> Call:
    return Call("completions", {"prompt": text}, 0, 0, 200, {"choices": [{"text": reply}]})


LOOK = {"type": "function", "function": {"name": "look"}}


def event(kind: str, **data: Any) -> Body:
    return {"event_type": kind, "data": data}


REWARD = event("reward", value=1.0)
OK = said("ok")


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([call("a"), call("a", said("no"), "b")], "reply is rewritten in the chat: it said 'ok', the chat holds"),
        ([call("a"), call("a", said("ok "), "b")], "one training row"),
        ([call("a"), call(said("t", "system"), "x"), call("a", OK, "b")], "in 2 training rows"),
        ([call("a"), call(said("t", "system"), "x"), call("a", OK, "b")], "another chat begins"),
        ([call("a"), call("a", "b", said("x"))], "reply is left out of the chat"),
        ([call("a"), call("On. 0"), call("On. 1")], "only the last turn is sent"),
        ([call("a"), call("a", OK, "b"), call("b", OK, "c")], "history is truncated: message 1 (user: 'a') is gone"),
        ([call(said("1", "system"), "a"), call(said("2", "system"), "a", OK)], "system message is rewritten: it was"),
        ([call("a", "b"), call("a", "c", OK, "d")], "history is rewritten: message 2 (user) was 'b', then 'c'"),
        ([call("a", said("x"), "b"), call("a", said("x"))], "goes back to an earlier turn"),
        ([call("a"), call("b", parallel=True)], "in parallel"),
        ([call("a", tools=[LOOK]), call("a", OK, "b")], "tools that are offered change"),
        ([call("a", n=4)], "n=4 choices are asked for: only the first"),
        ([call("a"), call("a")], "an earlier prompt is repeated word for word"),
        (
            [call(state) for state in ("hall", "room", "hall", "room", "hall")],
            "an earlier prompt is repeated word for word: each reply is trained (3 times)",
        ),
        ([call("a"), call("a", parallel=True)], "1 call: each repeats a request whose reply was not there yet"),
        ([call("a"), call("a"), call("a", OK, "b")], "1 call: each repeats a request"),
        ([call("a", said("I say "))], "1 call cannot be shown tips"),
        ([call("a"), call("b", max_tokens=8)], "1 call set no max_tokens"),
        ([call("a", seed=0)], "a seed is sent: it is left out"),
        ([call("a", top_p=0.9, presence_penalty=1, seed=1)], "presence_penalty, top_p are left out in training"),
        ([call("a", top_p=1.0, max_completion_tokens=8, min_p=0.1)], "min_p is left out in training"),
        ([call("a"), call(part(type="text", text="a"), OK, "b")], "one training row"),
        ([prompt("a", " b"), prompt("a b c", " d")], "one training row"),
        ([call("a"), call("helper"), call("a", OK, "b"), call("helper", OK, "x")], "in 2 training rows"),
        ([prompt("a", " b"), prompt("a c", " d")], "does not begin with the prompt and the reply"),
    ],
)
def test_what_is_said_of_calls(calls: list[Call], says: str):
    findings = examined(Trace(calls, [REWARD], exit_code=0))
    assert [finding for finding in findings if says in finding.text], findings
    assert "wrong" not in {finding.level for finding in findings}


def test_a_call_that_was_given_up_and_a_reward_out_of_range_are_told():
    trace = Trace([call("a"), Call("chat/completions", {})], [event("reward", value=7), event("reward", value=5)])
    trace.exit_code = 0
    notes = [finding.text for finding in examined(trace) if finding.level == "note"]
    assert any(note.startswith("1 call given up by the agent before the answer came") for note in notes), notes
    assert any("2 rewards were reported" in note for note in notes)
    assert any(note.startswith("the reward 5 lies outside of") for note in notes)


def failed(output: str, **error: str) -> Trace:
    return Trace([], [event("empo2_agent_error", **error)] if error else [], exit_code=1, output=output)


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (Trace([call("a")], [event("score", value=1)], exit_code=0), "was reported, only events of type score"),
        (Trace([call("a")], [event("reward", value="1")], exit_code=0), "the reward is '1': must be a finite number"),
        (Trace([call("a")], [], [(422, "event_type missing")], exit_code=0), "an event was refused with status 422"),
        (Trace([Call("chat/completions", {}, status=401)], exit_code=1), "1 call came without the key"),
        (Trace([Call("chat/completions", {})], [REWARD], exit_code=0), "gave up on every model call"),
        (Trace([Call("models", {}, status=404)], exit_code=1), "went to /models, answered 404"),
        (Trace([Call("responses", {}, status=400, asked="responses")], exit_code=1), "to responses was answered 400"),
        (Trace([], [REWARD], exit_code=0), "no model call came: the agent must take the model's address from AGL_O"),
        (Trace([call("a")], []), "did not end within 60 s, and was killed after 1 model call"),
        (failed("a\n\nb\n\n"), "the agent failed: b"),
        (failed(""), "the agent failed: exit code 1"),
        (failed("", type="KeyError", message="'KEY'"), "KeyError: 'KEY'; if it is a variable of the env"),
        (failed("", type="ImportError", message="no x"), "ImportError: no x; name the Python that has it"),
        (failed("b", type="ValueError", message="m", where="a.py:3"), "the agent failed: ValueError: m (a.py:3)"),
    ],
)
def test_what_cannot_be_trained(trace: Trace, says: str):
    wrong = [finding.text for finding in examined(trace) if finding.level == "wrong"]
    assert [text for text in wrong if says in text], wrong
    assert len(wrong) == 1 or trace.calls  # an agent that failed is not told that no call came


def test_the_scope_that_is_written_recurs():
    rows = [{"question": f"{n}?", "kind": "ab"[n % 2], "hints": [n]} for n in range(40)]
    choices = scope_choices(rows, tasks_per_step=2, steps=6)
    assert [choice.fields for choice in choices] == ["all-tasks", ["question", "kind"], ["question"], ["kind"]]
    assert [choice.share for choice in choices[:2]] == [pytest.approx(5 / 6), 0]
    chosen, *_ = scope_choices(rows[:3], tasks_per_step=1, steps=9)  # each comes three times
    assert (chosen.fields, chosen.share) == (["question", "kind"], pytest.approx(2 / 3))


def test_states_and_tips_are_shown_as_they_will_be():
    calls = [call("Count."), call("Count.", said("1"), "On. 0"), call("Count.", said("1"), "On. 0", said("2"), "On. 1")]
    state, (label, tips) = describe_states(calls, StateReader(load_settings().memory))
    assert state == ("state", "'Count.', 'On. 0', 'On. 1'")
    assert label == "tips" and tips.startswith("stand before the task in the newest message, here of the first call:\n")
    assert tips.splitlines()[-3:] == ["- (what the policy wrote about an earlier episode)", "", "Count."]


def test_states_that_cannot_be_told_apart():
    """A transcript in one message: of 100 characters a turn, then longer than what is embedded."""
    turns = [f"Turn {number}: ".ljust(100, "x") for number in range(30)]
    short, long = ([call("\n".join(turns[:count])) for count in counts] for counts in ((2, 3), (20, 21)))
    first, end = StateReader(load_settings().memory), load_settings(layer={"memory": {"state": "end"}}).memory
    assert "1 of 1 states begin with the whole state before them" in dict(describe_states(short, first))["note"]
    assert "1 of 1 turns have the state of the turn before" in dict(describe_states(long, first))["note"]
    assert "note" not in dict(describe_states(long, StateReader(end)))
    again = [call("a room"), call("a room", said("look"), "a room")]
    assert "note" not in dict(describe_states(again, first))  # the same state, truly


def test_what_the_normal_form_makes_of_calls_is_named() -> None:
    task = call("<system-reminder>git</system-reminder>Go.", tools=[LOOK])
    summary = call("Go.", said("ok"), "Your task is to create a summary of the conversation so far.", tools=[LOOK])
    listed = call()
    listed.path, listed.body, listed.answer = "completions", {"prompt": [1, 2]}, {"choices": [{"text": "ok"}]}
    texts = [finding.text for finding in examined(Trace([task, summary, listed], [REWARD], exit_code=0))]
    for text in (
        "blocks are left out of states, and stand before tips: system-reminder",
        "1 prompt of token ids or of several texts: without tips and visits; send one text in each call",
        "1 call to summarize the agent's own chat, trained as gateway.compaction says",
    ):
        assert text in texts


def test_calls_with_images_cannot_be_trained() -> None:
    findings = examined(Trace([call(part(type="image_url", image_url={"url": "x"}))], [REWARD], exit_code=0))
    (wrong,) = [finding.text for finding in findings if finding.level == "wrong"]
    assert wrong.startswith("1 call with images, which are not trained: send text, or leave these calls to ")
