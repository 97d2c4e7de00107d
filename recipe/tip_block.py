"""The block of tips in a prompt: the gateway writes it, and who reads a recorded chat finds it here again."""

import re
from collections.abc import Sequence

from empo2.recipe.messages import Message, text_of

TIPS_HEADING = "Notes from earlier episodes of this task (each may be wrong):"

_BLOCK = re.compile(re.escape(TIPS_HEADING) + r"(?:\n- .*)*")


def render_tips(texts: Sequence[str]) -> str:
    """Return the block to put before a turn's own text; empty for no tips."""
    return "\n".join([TIPS_HEADING, *map(tip_line, texts)]) if texts else ""


def tip_line(text: str) -> str:
    """Return a tip's line in the block."""
    return f"- {text}"


def without_tips(messages: Sequence[Message]) -> list[Message]:
    """Return messages as text, without their blocks."""
    texts = [text_of(each.get("content")) for each in messages]
    plain = [_BLOCK.sub("", text).strip() if TIPS_HEADING in text else text for text in texts]
    return [{**each, "content": text} for each, text in zip(messages, plain, strict=True)]


def blocks_in(text: str) -> list[str]:
    """Return the blocks in a text, in their order."""
    return _BLOCK.findall(text)
