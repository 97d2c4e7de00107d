"""Tips in requests: put them into the newest turn, and repeat those of earlier turns.

Tips go into the newest turn, and every earlier turn keeps the tips that it was sent with. Each prompt therefore extends
the previous one token for token: vLLM's prefix cache keeps hitting, and agent-lightning merges the turns into one row.
Earlier tips are looked up by the agent's own messages; neither text nor tokens are searched for tips.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from empo2.memory import Tip
from empo2.recipe.messages import Message, newest_turn


@dataclass(frozen=True)
class Block:
    """The tips of one turn.

    Attributes:
        text: the text put before the turn's own text; empty for no tips.
        tips: in the order of the text.
        tokens: length of the text in tokens of the policy.
    """

    text: str = ""
    tips: tuple[Tip, ...] = ()
    tokens: int = 0


class TippedRequest(Protocol):
    """An agent's request and the tips in it."""

    @property
    def takes_tips(self) -> bool:
        """Return False if there is no turn to put tips into, or if it was sent before: a retry gets the same prompt."""
        ...

    @property
    def carried(self) -> list[Block]:
        """Return the blocks that this request is sent with, oldest turn first, without empty ones."""
        ...

    @property
    def newest(self) -> Block:
        """Return the block of the newest turn; an empty block if it has no tips."""
        ...

    def put(self, block: Block) -> None:
        """Put tips into the newest turn, unless another request of the same turn has done so already."""
        ...

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the request's body that hold the tips."""
        ...


@dataclass
class ChatTips:
    """The tips sent with each turn of one episode's chat.

    A turn is identified by all of the agent's messages up to it. If an agent rewrites its history, its turns count as
    new: they are still trained correctly, but may not merge into one row.
    """

    blocks: dict[bytes, Block] = field(default_factory=dict)

    def request(self, messages: Sequence[Message]) -> "ChatRequest":
        return ChatRequest(self.blocks, messages)


class ChatRequest:
    """A chat as an agent sends it; see `TippedRequest`."""

    def __init__(self, blocks: dict[bytes, Block], messages: Sequence[Message]) -> None:
        self._blocks = blocks
        self._messages = messages
        self._digests = _digests(messages)
        turn = newest_turn(messages)
        self._newest = None if turn is None else self._digests[turn]

    @property
    def takes_tips(self) -> bool:
        return self._newest is not None and self._newest not in self._blocks

    @property
    def carried(self) -> list[Block]:
        return [block for digest in self._digests if (block := self._blocks.get(digest)) and block.text]

    @property
    def newest(self) -> Block:
        return Block() if self._newest is None else self._blocks.get(self._newest, Block())

    def put(self, block: Block) -> None:
        assert self._newest is not None
        self._blocks.setdefault(self._newest, block)

    @property
    def fields(self) -> dict[str, Any]:
        messages = [
            with_block(message, block.text) if (block := self._blocks.get(digest)) and block.text else message
            for message, digest in zip(self._messages, self._digests, strict=True)
        ]
        return {"messages": messages}


def with_block(message: Message, block: str) -> Message:
    """Return the message with a block of tips before its own text; string content stays a string, parts stay parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{block}\n\n{content}"}
    return {**message, "content": [{"type": "text", "text": f"{block}\n"}, *content]}


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return a digest for each message; element i identifies messages[: i + 1]."""
    hasher, digests = hashlib.blake2b(digest_size=16), []
    for message in messages:
        hasher.update(json.dumps(message, sort_keys=True, default=str).encode() + b"\0")
        digests.append(hasher.digest())
    return digests


@dataclass(frozen=True)
class _SentPrompt:
    text: str
    blocks: tuple[Block, ...] = ()


@dataclass
class PromptTips:
    """The tips sent with each ``completions`` prompt, where a new prompt extends an earlier prompt and its reply."""

    sent: dict[str, _SentPrompt] = field(default_factory=dict)  # the agent's prompt -> as it was sent
    answered: dict[str, _SentPrompt] = field(default_factory=dict)  # the agent's prompt + reply -> as sent, with reply

    def request(self, prompt: str) -> "PromptRequest":
        return PromptRequest(self, prompt)

    def replied(self, prompt: str, reply: str) -> None:
        """Remember the model's reply to a prompt that was sent."""
        sent = self.sent[prompt]
        self.answered[prompt + reply] = _SentPrompt(sent.text + reply, sent.blocks)


class PromptRequest:
    """A prompt as an agent sends it; see `TippedRequest`."""

    def __init__(self, tips: PromptTips, prompt: str) -> None:
        self._tips = tips
        self._prompt = prompt
        self._known = max((text for text in tips.answered if prompt.startswith(text)), key=len, default="")

    @property
    def takes_tips(self) -> bool:
        return self._prompt not in self._tips.sent

    @property
    def carried(self) -> list[Block]:
        sent = self._tips.sent.get(self._prompt)
        return [block for block in (sent.blocks if sent else self._begin.blocks) if block.text]

    @property
    def newest(self) -> Block:
        sent = self._tips.sent.get(self._prompt)
        return sent.blocks[-1] if sent else Block()

    def put(self, block: Block) -> None:
        begin, rest = self._begin, self._prompt[len(self._known) :]
        if block.text:
            rest = f"\n{block.text}\n{rest}" if begin.text else f"{block.text}\n\n{rest}"
        self._tips.sent.setdefault(self._prompt, _SentPrompt(begin.text + rest, (*begin.blocks, block)))

    @property
    def fields(self) -> dict[str, Any]:
        return {"prompt": self._tips.sent[self._prompt].text}

    @property
    def _begin(self) -> _SentPrompt:
        return self._tips.answered.get(self._known, _SentPrompt(""))
