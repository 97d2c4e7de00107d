"""Where tips stand in a request: pure functions on an agent's own chat or prompt, and what an episode remembers.

Tips go into the newest turn, and every earlier turn gets the tips back that it was sent with, so that each prompt
extends the last one token for token: vLLM's prefix cache keeps hitting, and agent-lightning merges the turns into one
row. Nothing is ever searched for in text or tokens: what was sent is found again by the agent's own messages.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from empo2.recipe.messages import Message


def render_tips(texts: Sequence[str]) -> str:
    """The block that stands before a turn's own text; empty for no tips."""
    if not texts:
        return ""
    lines = "\n".join(f"- {text}" for text in texts)
    return f"Notes from earlier episodes of this task (each may be wrong):\n{lines}"


def with_block(message: Message, block: str) -> Message:
    """The message with a block of tips before its own text, in the form that its content has."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{block}\n\n{content}"}
    return {**message, "content": [{"type": "text", "text": f"{block}\n"}, *content]}


@dataclass
class ChatTips:
    """The tips that the turns of one episode's chat were sent with.

    A turn is known by everything that the agent has said up to it. An agent that rewrites its history starts anew:
    its steps stay right, they only may not merge into one row.
    """

    _blocks: dict[bytes, str] = field(default_factory=dict)

    def block_of(self, messages: Sequence[Message], index: int) -> str | None:
        """What the turn was sent with before; "" for no tips, None if it is new. A retry gets the same prompt."""
        return self._blocks.get(_digests(messages)[index])

    def inject(self, messages: Sequence[Message], index: int | None = None, block: str = "") -> list[Message]:
        """The chat with the tips of earlier turns where they stood, and ``block`` in the turn at ``index``."""
        digests = _digests(messages)
        if index is not None:
            self._blocks[digests[index]] = block
        return [
            with_block(message, known) if (known := self._blocks.get(digest)) else message
            for message, digest in zip(messages, digests, strict=True)
        ]


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Element i identifies messages[: i + 1]."""
    hasher, digests = hashlib.blake2b(digest_size=16), []
    for message in messages:
        hasher.update(json.dumps(message, sort_keys=True, default=str).encode() + b"\0")
        digests.append(hasher.digest())
    return digests


@dataclass
class PromptTips:
    """The same for ``completions`` prompts, where a new prompt extends an earlier prompt and its reply."""

    _sent: dict[str, str] = field(default_factory=dict)  # the agent's prompt + reply -> as sent, with its reply
    _retries: dict[str, str] = field(default_factory=dict)  # the agent's prompt -> as sent

    def sent_for(self, prompt: str) -> str | None:
        """The same prompt as it was sent before, if it was."""
        return self._retries.get(prompt)

    def inject(self, prompt: str, block: str) -> str:
        known = max((text for text in self._sent if prompt.startswith(text)), key=len, default="")
        begin, rest = self._sent.get(known, ""), prompt[len(known) :]
        sent = begin + (f"{block}\n\n{rest}" if block and not begin else f"\n{block}\n{rest}" if block else rest)
        self._retries[prompt] = sent
        return sent

    def replied(self, prompt: str, reply: str) -> None:
        self._sent[prompt + reply] = self._retries[prompt] + reply
