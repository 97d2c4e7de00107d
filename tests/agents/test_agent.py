"""The agent against a scripted model server and the real ScienceWorld."""

import itertools
import json
import time
from contextlib import nullcontext
from functools import partial

import openai
import pytest

from empo2.agents.frameworks import shared
from empo2.agents.frameworks.shared import FrameworkAgent
from empo2.agents.scienceworld.__main__ import main
from empo2.agents.scienceworld.agent import ScienceWorldAgent
from empo2.agents.text_game import agent as chat
from empo2.agents.text_game.game import NOT_LISTED

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("shared_simulator")]

OVERFLOW = "This model's maximum context length is 2048 tokens. However, you requested 32 output tokens."
JUST_FULL = "max_tokens must be at least 1, got 0."  # of a prompt that is as long as the context (vLLM 0.20)


@pytest.fixture
def run(play_agent, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return partial(play_agent, ScienceWorldAgent)


def test_a_played_task_posts_its_score_once(run, server, episode):
    actions = ["teleport to kitchen", "focus on glass jar", "move glass jar to red box"]
    run(episode(), actions)
    message = "find-non-living-thing variation 0: score 100 after 3 of 10 steps"
    data = {"value": 100, "source": "agent", "message": message, "success": True, "metrics": {}, "actions": actions}
    assert server.events == [{"event_type": "reward", "data": data}]
    asked = {(chat["model"], chat["max_tokens"], chat.get("stream", False)) for chat in server.chats}
    assert asked == {("policy", 32, False)}


def test_every_chat_extends_the_one_before(run, server, episode):
    replies = ["go to kitchen\nat once", "höre 数", "look around"]
    run(episode(max_steps=3), replies, SCIENCEWORLD_MAX_TOKENS="8", SCIENCEWORLD_MODEL="smol")
    chats = [chat["messages"] for chat in server.chats]
    assert [len(chat) for chat in chats] == [2, 4, 6]
    for earlier, later in itertools.pairwise(chats):
        assert later[: len(earlier)] == earlier
    first, last = chats[0], chats[-1]
    assert [message["role"] for message in first] == ["system", "user"]
    assert "teleport OBJ" in first[0]["content"]
    assert first[1]["content"].startswith("Your task is to find a(n) non-living thing.")
    assert "This room is called the hallway." in first[1]["content"]
    assert [message["content"] for message in last[2:]] == [
        "go to kitchen\nat once",
        "You move to the kitchen.",
        "höre 数",
        "No known action matches that input.",
    ]
    assert server.chats[0]["max_tokens"] == 8
    assert server.chats[0]["model"] == "smol"


def test_an_episode_starts_after_its_prefix(run, server, episode):
    """The second episode starts where half of the first has led, is shown the same, and its prefix counts as steps."""
    actions = ["open door to kitchen", "dance", "go to kitchen", "open cupboard", "focus on glass jar", "look around"]
    whole = run(episode(max_steps=6), actions)
    shown = [chat["messages"][-1]["content"] for chat in server.chats]
    server.chats.clear()
    rest = run(episode(max_steps=6), actions[3:], EPISODE_PREFIX=json.dumps(actions[:3]))
    again = [chat["messages"][-1]["content"] for chat in server.chats]
    assert again[0].startswith("Your task is to") and again[0].endswith(f"\n\n{shown[3]}")
    assert again[1:] == shown[4:] and "No known action" not in "".join(shown[3:])
    assert rest == whole and whole["actions"] == actions


def test_an_agent_of_a_framework_starts_after_its_prefix_too(play_agent, episode, environment, monkeypatch):
    monkeypatch.setattr(shared, "Environment", lambda: nullcontext(environment))

    class LooksAround(FrameworkAgent):
        def converse(self, game, server):
            assert "You move to the kitchen." in game.turn
            game.act("look around")

    reward = play_agent(LooksAround, episode(), [], EPISODE_PREFIX='["open door to kitchen", "go to kitchen"]')
    assert reward["actions"] == ["open door to kitchen", "go to kitchen", "look around"]


def test_the_chosen_action_is_what_the_environment_does(run, server, episode, shared_simulator, monkeypatch):
    done = []
    step = shared_simulator.step
    monkeypatch.setattr(shared_simulator, "step", lambda action: done.append(action) or step(action))
    run(episode(actions="choice", max_steps=4), ["2", "nothing of that", "13", "1"])
    turns = [chat["messages"][-1]["content"] for chat in server.chats]
    listed = [turn.split("\n")[-12:] for turn in turns]
    assert done == [listed[0][1].removeprefix("2 "), listed[3][0].removeprefix("1 ")]
    assert [turn.startswith(NOT_LISTED) for turn in turns] == [False, False, True, True]
    assert server.events[0]["data"]["message"].endswith("after 4 of 4 steps")


@pytest.mark.parametrize("said", [OVERFLOW, JUST_FULL])
def test_a_chat_that_outgrows_the_context_ends_the_episode(run, server, episode, said: str):
    def reply(messages: list[dict]) -> str:
        server.refusal = (400, said)
        return "teleport to kitchen"

    server.reply = reply
    reward = run(episode())
    assert reward["value"] == 25
    assert reward["message"].endswith("after 1 of 10 steps; ended there because the chat outgrew the model's context")


@pytest.mark.parametrize(
    ("refusal", "error", "calls"),
    [
        ((400, "Streaming responses are not supported"), openai.BadRequestError, 1),
        ((401, "Invalid or missing API key"), openai.AuthenticationError, 1),
        ((503, "No servers available for model 'policy'"), openai.InternalServerError, 3),
    ],
)
def test_a_failed_model_call_is_raised_and_no_reward_posted(run, server, episode, refusal, error, calls, monkeypatch):
    monkeypatch.setattr(chat, "MODEL_RETRIES", 2)
    server.refusal = refusal
    with pytest.raises(error):
        run(episode())
    assert len(server.chats) == calls
    assert server.events == []


@pytest.fixture
def by_hand(run_main):
    """Run `python -m empo2.agents.scienceworld`."""
    return partial(run_main, main)


def test_by_hand_it_prints_the_episode_and_posts_nothing(by_hand, server):
    server.reply = lambda messages: "go to kitchen"
    flags = ["--task", "find-animal", "--base-url", f"{server.url}/v1", "--model", "m", "--max-steps", "2"]
    code, output, errors = by_hand(*flags)
    assert (code, errors) == (0, "")
    assert "[user] Your task is to find a(n) animal." in output
    assert "[assistant] go to kitchen\n[user] You move to the kitchen." in output
    assert output.endswith("find-animal variation 0: score 25 after 2 of 2 steps\n")
    assert server.events == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--task", "find-aminal"], "error: task 'find-aminal' is unknown; nearest: find-animal"),
        (["--task", "boil", "--variation", "30"], "error: variation 30 of boil does not exist: it has 0 to 29"),
    ],
)
def test_by_hand_a_wrong_flag_gets_one_line(by_hand, flags, says):
    code, _, errors = by_hand(*flags, "--base-url", "http://127.0.0.1:9/v1")
    assert code == 2
    assert says in errors.splitlines()[-1]
