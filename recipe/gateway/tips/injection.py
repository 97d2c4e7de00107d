"""Tips in requests: put them into the newest turn, and repeat those of earlier turns.

Tips go into the newest turn, and every earlier turn keeps the tips that it was sent with. Each prompt therefore extends
the previous one token for token: vLLM's prefix cache keeps hitting, and agent-lightning merges the turns into one row.
Earlier tips are looked up by the agent's own messages; neither text nor tokens are searched for tips.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class SentPrompt:
    """A ``completions`` prompt as it was sent, and the blocks of tips in it."""

    text: str
    blocks: tuple[Block, ...] = ()


@dataclass
class EpisodeTips:
    """The tips that the requests of one episode were sent with.

    A turn is identified by all of the agent's messages up to it. If an agent rewrites its history, its turns count as
    new: they are still trained correctly, but may not merge into one row.

    Attributes:
        chat: the block of each turn.
        sent: by the agent's prompt.
        answered: by the agent's prompt and the reply to it, which a new prompt may extend; as sent, with the reply.
    """

    chat: dict[bytes, Block] = field(default_factory=dict)
    sent: dict[str, SentPrompt] = field(default_factory=dict)
    answered: dict[str, SentPrompt] = field(default_factory=dict)

    def replied(self, prompt: str, reply: str) -> None:
        """Remember the model's reply to a prompt that was sent."""
        sent = self.sent[prompt]
        self.answered[prompt + reply] = SentPrompt(sent.text + reply, sent.blocks)


class ChatRequest:
    """A chat as an agent sends it, and the tips in it."""

    def __init__(self, tips: EpisodeTips, messages: Sequence[Message]) -> None:
        self._blocks = tips.chat
        self._messages = messages
        self._digests = _digests(messages)
        turn = newest_turn(messages)
        self._newest = None if turn is None else self._digests[turn]

    @property
    def takes_tips(self) -> bool:
        """Return False if there is no turn to put tips into, or if it was sent before: a retry gets the same prompt."""
        return self._newest is not None and self._newest not in self._blocks

    @property
    def carried(self) -> list[Block]:
        """Return the blocks that this request is sent with, oldest turn first, without empty ones."""
        return [block for digest in self._digests if (block := self._blocks.get(digest)) and block.text]

    @property
    def newest(self) -> Block:
        """Return the block of the newest turn; an empty block if it has no tips."""
        return Block() if self._newest is None else self._blocks.get(self._newest, Block())

    def put(self, block: Block) -> None:
        """Put tips into the newest turn, unless another request of the same turn has done so already."""
        assert self._newest is not None
        self._blocks.setdefault(self._newest, block)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the request's body that hold the tips."""
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


class PromptRequest:
    """A ``completions`` prompt as an agent sends it, and the tips in it; the methods are those of `ChatRequest`."""

    def __init__(self, tips: EpisodeTips, prompt: str) -> None:
        self._tips = tips
        self._prompt = prompt
        self._known = max((text for text in tips.answered if prompt.startswith(text)), key=len, default="")
        self._begin = tips.answered.get(self._known, SentPrompt(""))

    @property
    def takes_tips(self) -> bool:
        return self._prompt not in self._tips.sent

    @property
    def carried(self) -> list[Block]:
        return [block for block in self._tips.sent.get(self._prompt, self._begin).blocks if block.text]

    @property
    def newest(self) -> Block:
        sent = self._tips.sent.get(self._prompt)
        return sent.blocks[-1] if sent else Block()

    def put(self, block: Block) -> None:
        begin, rest = self._begin, self._prompt[len(self._known) :]
        if block.text:
            rest = f"\n{block.text}\n{rest}" if begin.text else f"{block.text}\n\n{rest}"
        self._tips.sent.setdefault(self._prompt, SentPrompt(begin.text + rest, (*begin.blocks, block)))

    @property
    def fields(self) -> dict[str, Any]:
        return {"prompt": self._tips.sent[self._prompt].text}


TippedRequest = ChatRequest | PromptRequest
