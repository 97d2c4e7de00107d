"""Where tips stand: in the newest turn only, where they stood in all others, and a prompt extends the one before it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import Tip
from empo2.recipe.gateway.tips.injection import Block, ChatRequest, EpisodeTips, PromptRequest
from empo2.recipe.gateway.tips.text import render_tips
from empo2.recipe.messages import newest_turn, text_of

from .harness import assistant, user
from .model_server import normal, tokenizer

Message = dict[str, Any]

# Well-known styles in our own words; None is SmolLM2's own ChatML.
TEMPLATES = {
    "chatml": None,
    "headers": "{% for m in messages %}<|im_start|>[{{ m.role }}]\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant]\n{% endif %}",
    "instruct": "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n' %}"
    "{% elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]{% set ns.system = '' %}"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
    "strips": "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}",
}


def tool(content: Any) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": content}


SYSTEM = {"role": "system", "content": "You play a game."}


def block(*texts: str) -> Block:
    tips = tuple(Tip(number, "e", text, "look", 0.0, None, 0.0, 1.0) for number, text in enumerate(texts))
    return Block(render_tips(texts), tips, tokens=10 * len(texts))


def send(tips: EpisodeTips, messages: list[Message], *texts: str) -> list[Message]:
    """One call of an agent, for whose newest turn the memory found these tips."""
    request = ChatRequest(tips, messages)
    if request.takes_tips:
        request.put(block(*texts))
    return request.fields["messages"]


def shown(sent: list[Message], text: str) -> list[int]:
    """Where a tip stands in what was sent."""
    return [index for index, message in enumerate(sent) if f"- {text}" in text_of(message.get("content"))]


def test_tips_stand_in_the_newest_turn_and_again_where_they_stood():
    """Without the second half each turn's prompt would part from the last one's at the first tip."""
    tips, first = EpisodeTips(), [SYSTEM, user("a room")]
    before = copy.deepcopy(first)
    sent = send(tips, first, "one", "two")
    assert first == before  # the agent's own
    assert shown(sent, "one") == shown(sent, "two") == [1]
    assert sent[0] == SYSTEM
    assert sent[1]["content"].endswith("\n\na room")

    second = [*first, assistant("look"), user("a lamp")]
    again = send(tips, second, "three")
    assert again[:2] == sent
    assert again[2] == assistant("look")
    assert shown(again, "three") == [3]

    third = [*second, assistant("take lamp"), user("taken")]
    last = send(tips, third)
    assert last[:4] == again
    assert last[4:] == third[4:]  # no tips found: nothing put in


@pytest.mark.parametrize(
    "rewritten",
    [
        [SYSTEM, user("summary: a room"), assistant("look"), user("a lamp")],
        [SYSTEM, assistant("look"), user("a lamp")],
        [{**SYSTEM, "content": "You play on."}, user("a room"), assistant("look"), user("a lamp")],
        [SYSTEM, user("a lamp")],
    ],
    ids=["rewritten", "truncated", "other system text", "emptied"],
)
def test_an_agent_that_rewrites_its_history_starts_anew(rewritten: list[Message]):
    """Tips never go where they were not shown before, and the newest turn gets its own."""
    tips = EpisodeTips()
    send(tips, [SYSTEM, user("a room")], "one")
    sent = send(tips, rewritten, "two")
    assert shown(sent, "two") == [len(rewritten) - 1]
    assert not shown(sent, "one")


def test_a_list_of_parts_stays_one_and_reads_as_text_would():
    parts = [{"type": "text", "text": "a room"}, {"type": "text", "text": "a door"}]
    sent = send(EpisodeTips(), [user(parts)], "one")
    assert sent[0]["content"][1:] == parts
    plain = send(EpisodeTips(), [user("a room\na door")], "one")
    assert normal(sent) == normal(plain)


@pytest.mark.parametrize(
    ("messages", "turn"),
    [
        ([], None),
        ([SYSTEM], None),
        ([SYSTEM, assistant("hello")], None),
        ([user("a room"), assistant("I")], None),  # a prefill: its turn has been sent, or never will be alone
        ([user("a room"), SYSTEM], 0),
        ([user("a room"), assistant("look"), user(None)], None),
        ([user("one"), user("two")], 1),
        ([user("a"), assistant("b"), tool("c"), user("d")], 3),
    ],
)
def test_the_newest_turn(messages: list[Message], turn: int | None):
    assert newest_turn(messages) == turn


def send_prompt(tips: EpisodeTips, prompt: str, *texts: str) -> str:
    request = PromptRequest(tips, prompt)
    if request.takes_tips:
        request.put(block(*texts))
    return request.fields["prompt"]


def carried(request: ChatRequest) -> list[str]:
    return [tip.text for block in request.carried for tip in block.tips]


def test_a_chat_carries_the_tips_that_it_is_sent_with():
    tips, first = EpisodeTips(), [SYSTEM, user("a room")]
    assert carried(ChatRequest(tips, first)) == []
    send(tips, first, "one", "two")
    second = [*first, assistant("look"), user("a lamp")]
    request = ChatRequest(tips, second)
    assert carried(request) == ["one", "two"]
    request.put(block("three"))
    assert carried(request) == carried(ChatRequest(tips, second)) == ["one", "two", "three"]
    assert sum(block.tokens for block in request.carried) == 30
    # An agent that forgets its first turns, or goes another way from them, has forgotten their tips, too.
    assert carried(ChatRequest(tips, [SYSTEM, *second[2:]])) == []
    assert carried(ChatRequest(tips, [*first, assistant("wait"), user("a lamp")])) == ["one", "two"]


def test_the_faster_of_two_requests_of_a_turn_decides_on_its_tips():
    tips, messages = EpisodeTips(), [user("a room")]
    fast, slow = ChatRequest(tips, messages), ChatRequest(tips, messages)
    assert fast.takes_tips and slow.takes_tips
    fast.put(first := block("one"))
    slow.put(block("two"))
    assert slow.newest is first
    assert slow.fields == fast.fields


def test_a_prompt_extends_what_was_sent_and_answered():
    tips = EpisodeTips()
    first = "Task: find the lamp.\nAction:"
    sent = send_prompt(tips, first, "one")
    assert sent.endswith(first)
    assert send_prompt(tips, first, "another") == sent
    tips.replied(first, " look")
    second = first + " look\nYou see a lamp.\nAction:"
    again = send_prompt(tips, second, "two")
    assert again.startswith(sent + " look")
    assert again.endswith("\nYou see a lamp.\nAction:")
    assert "- two" in again.removeprefix(sent)
    tips.replied(second, " take")
    third = second + " take\nTaken."
    assert PromptRequest(tips, third).fields["prompt"] == again + " take\nTaken."  # no tips were looked up
    assert send_prompt(tips, third, "three").startswith(again + " take")


_text = st.text(max_size=40) | st.sampled_from(["", "\n", " a lamp\n\n", "x\n", "<|im_start|>user\n", "- a note"])
_content = _text | st.lists(_text, min_size=1, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)
_reply = st.text(st.characters(categories=["Ll", "Lu", "Nd", "Zs"], max_codepoint=0x24F), max_size=20).map(
    lambda text: "go" + text
)
_turn = st.tuples(_content, _reply, st.lists(_text, max_size=3))


@pytest.mark.parametrize("style", TEMPLATES)
@given(turns=st.lists(_turn, min_size=1, max_size=4), system=st.booleans())
@settings(max_examples=40)
def test_each_prompt_extends_the_one_before_it(style: str, turns: list[Any], system: bool):
    """Token for token, wherever the same chat without tips does: else no row merges and no prefix is cached."""
    tips, messages = EpisodeTips(), [SYSTEM] if system else []
    told_before: list[int] = []
    plain_before: list[int] = []
    for content, reply, texts in turns:
        messages = [*messages, user(content)]
        sent = send(tips, messages, *texts)
        assert send(tips, messages, "a retry") == sent
        told, plain = ids(sent, style), ids(messages, style)
        assert (told != plain) or not texts
        if plain[: len(plain_before)] == plain_before:
            assert told[: len(told_before)] == told_before
        else:
            assert style not in ("chatml", "headers"), "where special tokens stand between turns it always does"
        said = [*tokenizer()(reply, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
        told_before, plain_before = told + said, plain + said
        messages.append(assistant(reply))


def ids(messages: list[Message], style: str) -> list[int]:
    text = tokenizer().apply_chat_template(
        normal(messages), chat_template=TEMPLATES[style], add_generation_prompt=True, tokenize=False
    )
    return tokenizer()(text, add_special_tokens=False)["input_ids"]
