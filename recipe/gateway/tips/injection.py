"""Tips in requests: put them into the newest turn, and repeat those of earlier turns.

Tips go into the newest turn, and every earlier turn keeps the tips that it was sent with. Each prompt therefore extends
the previous one token for token: vLLM's prefix cache keeps hitting, and agent-lightning merges the turns into one row.
Earlier tips are looked up by the agent's own messages; neither text nor tokens are searched for tips.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from empo2.memory import Tip
from empo2.recipe.messages import Message, digests, newest_turn, task_in


@dataclass(frozen=True)
class Block:
    """The tips of one turn."""

    text: str = ""  # the text put before the turn's own text; empty for no tips
    tips: tuple[Tip, ...] = ()  # in the order of the text
    tokens: int = 0  # length of the text in tokens of the policy


@dataclass
class EpisodeTips:
    """The tips that the requests of one episode were sent with.

    A turn is identified by all of the agent's messages up to it. If an agent rewrites its history, its turns count as
    new: they are still trained correctly, but may not merge into one row.
    """

    blocks: dict[bytes, Block] = field(default_factory=dict)  # of each turn
    # Of each ``completions`` prompt, as the chat that it is: prompts and replies in turn.
    chats: dict[str, list[Message]] = field(default_factory=dict)
    # The same, by a prompt with the reply to it, which a new prompt may extend.
    answered: dict[str, list[Message]] = field(default_factory=dict)
    first: Block | None = None  # of the first search; None before it

    def withdraw(self) -> None:
        """Take the tips out of all turns so far: the prompt with them has outgrown the model's context."""
        self.blocks |= dict.fromkeys(self.blocks, Block())
        self.first = Block()

    def chat_of(self, prompt: str) -> list[Message]:
        """Return a prompt as a chat: what it extends, and a turn of what is new."""
        if prompt not in self.chats:
            known = max((text for text in self.answered if prompt.startswith(text)), key=len, default="")
            new = {"role": "user", "content": prompt[len(known) :]}
            self.chats[prompt] = [*self.answered.get(known, ()), new]
        return self.chats[prompt]

    def replied(self, prompt: str, reply: str) -> None:
        """Remember the model's reply to a prompt."""
        self.answered[prompt + reply] = [*self.chat_of(prompt), {"role": "assistant", "content": reply}]


class ChatRequest:
    """A chat as an agent sends it, and the tips in it.

    Attributes:
        of_tool: True if its newest turn is what a tool returned.
    """

    def __init__(self, tips: EpisodeTips, messages: Sequence[Message]) -> None:
        self._blocks = tips.blocks
        self._messages = messages
        self._digests = digests(messages)
        turn = newest_turn(messages)
        self._newest = None if turn is None else self._digests[turn]
        self.of_tool = turn is not None and messages[turn]["role"] == "tool"

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
    """Return the message with a block of tips directly before the task in it (`task_in`); parts stay parts."""
    content, (number, place) = message["content"], task_in(message["content"])
    if isinstance(content, str):
        return {**message, "content": f"{content[:place]}{block}\n\n{content[place:]}"}
    if place:
        text = content[number]["text"]
        parts = [{**content[number], "text": f"{text[:place]}{block}\n\n{text[place:]}"}]
    else:
        parts = [{"type": "text", "text": f"{block}\n"}, *content[number : number + 1]]
    return {**message, "content": [*content[:number], *parts, *content[number + 1 :]]}


class PromptRequest(ChatRequest):
    """A ``completions`` prompt as an agent sends it, and the tips in it."""

    def __init__(self, tips: EpisodeTips, prompt: str) -> None:
        super().__init__(tips, tips.chat_of(prompt))

    @property
    def fields(self) -> dict[str, Any]:
        text = ""
        for message, digest in zip(self._messages, self._digests, strict=True):
            if (block := self._blocks.get(digest)) and block.text:
                text += f"\n{block.text}\n" if text else f"{block.text}\n\n"
            text += message["content"]
        return {"prompt": text}
