"""Where tips stand: in the newest turn only, where they stood in all others, and a prompt extends the one before it."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.memory import Tip
from empo2.recipe.gateway.tips.injection import Block, ChatRequest, EpisodeTips
from empo2.recipe.messages import newest_turn, text_of
from empo2.recipe.tip_block import render_tips

from .harness import assistant, user
from .model_server import normal, tokenizer

Message = dict[str, Any]

# Well-known styles in our own words; None is SmolLM2's own ChatML.
TEMPLATES = {
    "chatml": None,
    "strips": "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}",
}


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
    return [index for index, message in enumerate(sent) if f"- {text}" in text_of(message.get("content"))]


def test_tips_stand_in_the_newest_turn_and_again_where_they_stood():
    """Without the second half each turn's prompt would part from the last one's at the first tip."""
    tips, first = EpisodeTips(), [SYSTEM, user("a room")]
    before = copy.deepcopy(first)
    sent = send(tips, first, "one", "two")
    assert first == before  # the agent's own
    assert shown(sent, "one") == shown(sent, "two") == [1]
    assert sent[1]["content"].endswith("\n\na room")

    second = [*first, assistant("look"), user("a lamp")]
    again = send(tips, second, "three")
    assert again[:3] == [*sent, assistant("look")]
    assert shown(again, "three") == [3]

    third = [*second, assistant("take lamp"), user("taken")]
    assert send(tips, third) == [*again, *third[4:]]  # no tips found: nothing put in


@pytest.mark.parametrize("rewritten", [[SYSTEM, assistant("look"), user("a lamp")], [user("a room"), user("a lamp")]])
def test_an_agent_that_rewrites_its_history_starts_anew(rewritten: list[Message]):
    tips = EpisodeTips()
    send(tips, [SYSTEM, user("a room")], "one")
    sent = send(tips, rewritten, "two")
    assert (shown(sent, "one"), shown(sent, "two")) == ([], [len(rewritten) - 1])
    assert ChatRequest(tips, rewritten).carried == [block("two")]  # what counts against the budget


def test_the_newest_turn():
    for messages, turn in (
        ([], None),
        ([SYSTEM, assistant("hello")], None),
        ([user("a room"), assistant("I")], None),  # a prefill: its turn has been sent, or never will be alone
        ([user("a room"), SYSTEM], 0),
        ([user("a room"), assistant("look"), user(None)], None),
        ([user("a"), assistant("b"), {"role": "tool", "content": "c"}, user("d")], 3),
        ([user("a"), assistant("b"), {"role": "tool", "content": "c"}, user("<a-reminder>d</a-reminder>")], 2),
        ([user("<a-reminder>d</a-reminder>"), SYSTEM], 0),
    ):
        assert newest_turn(messages) == turn, messages


REMINDER = "<system-reminder>\ngit status\n</system-reminder>"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("fix it", "{}\n\nfix it"),
        (f"{REMINDER}\n\nfix it", f"{REMINDER}\n\n{{}}\n\nfix it"),
        (f"{REMINDER}\n{REMINDER}fix it\n{REMINDER}", f"{REMINDER}\n{REMINDER}{{}}\n\nfix it\n{REMINDER}"),
        (REMINDER, f"{{}}\n\n{REMINDER}"),
        ([REMINDER, REMINDER, "fix it", REMINDER], [REMINDER, REMINDER, "{}\n", "fix it", REMINDER]),
        ([f"{REMINDER} fix it"], [f"{REMINDER} {{}}\n\nfix it"]),
        ([REMINDER], ["{}\n", REMINDER]),
    ],
)
def test_tips_stand_directly_before_the_task(content: Any, expected: Any):
    def parts(texts: Any) -> Any:
        return texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]

    (sent,) = send(EpisodeTips(), [user(parts(content))], "one")
    text = block("one").text
    assert sent["content"] == parts(
        expected.format(text) if isinstance(expected, str) else [each.format(text) for each in expected]
    )


_text = st.text(max_size=40) | st.sampled_from(["", "\n", " a lamp\n\n", "x\n", "<|im_start|>user\n", "- a note"])
_parts = st.lists(st.builds(dict, type=st.just("text"), text=_text), min_size=1, max_size=3)
_content = _text | _parts
_letters = st.characters(categories=["Ll", "Lu", "Nd", "Zs"], max_codepoint=0x24F)
_reply = st.text(_letters, max_size=20).map("go{}".format)
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
            assert style != "chatml", "where special tokens stand between turns it always does"
        said = [*tokenizer()(reply, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
        told_before, plain_before = told + said, plain + said
        messages.append(assistant(reply))


def ids(messages: list[Message], style: str) -> list[int]:
    text = tokenizer().apply_chat_template(
        normal(messages), chat_template=TEMPLATES[style], add_generation_prompt=True, tokenize=False
    )
    return tokenizer()(text, add_special_tokens=False)["input_ids"]
