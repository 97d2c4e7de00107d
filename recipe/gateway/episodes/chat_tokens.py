"""Prompts as token ids: a chat that goes on continues from the ids that were sampled, not from its replies as text.

A text has many tokenizations. A policy samples any of them, and a server that is sent the reply back as text makes its
own: the next prompt then no longer extends the last one, and the turns do not merge into one training row. Where the
chat only grew, the server is therefore sent the last prompt, the sampled ids and the ids of the new turn
(`gateway.cumulative_tokens`). The new turn is what the server's own rendering of the chat has after the reply.
"""

import asyncio
import re
from dataclasses import dataclass

import structlog

from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tokens.rendering import rendered
from empo2.recipe.gateway.tokens.replies import AsText, Ids, Prompt, Replies, Reply, last_reply
from empo2.recipe.gateway.tokens.tokenizer import PolicyTokenizer
from empo2.recipe.messages import has_images

log = structlog.get_logger()

# Understood by vLLM's chat completions with ``recipe/engine/prompt_ids.py``.
FIELD = "prompt_token_ids"
# As vocabularies spell them.
_SPACE = re.compile(r"Ċ|Ġ|▁|<0x0A>|\s")
_NO_THOUGHTS = re.compile(rf"<think>(?:{_SPACE.pattern})*</think>(?:{_SPACE.pattern})*")


@dataclass
class ChatTokens:
    """The token ids of one call of an episode: `fields` are sent with it, `answered` keeps its reply."""

    _services: Services
    _replies: Replies
    _body: Body
    _last: Reply | None
    _prompt: Prompt | None

    @classmethod
    async def prepare(cls, services: Services, rollout_id: str, replies: Replies, body: Body) -> "ChatTokens":
        """Find what the chat goes on from and, with ``gateway.cumulative_tokens``, its ids. Never raises."""
        last, prompt = None, None
        try:
            last = replies.last_in(body)
            if last is not None and services.settings.gateway.cumulative_tokens:
                prompt = await continued(services, rollout_id, last, body)
                if prompt.ids == prompt.rendered:
                    prompt = None  # the chat is sent as text
        except AsText as reason:
            _count_text(services, str(reason))
        except Exception as error:
            log.error("no token ids of a chat", rollout_id=rollout_id, error=described(error))
            _count_text(services, "failed")
        return cls(services, replies, body, last, prompt)

    @property
    def fields(self) -> Body:
        return {FIELD: self._prompt.ids.tolist()} if self._prompt is not None else {}

    def answered(self, response: Body, prompt_ids: Ids) -> None:
        """Keep the reply, and count whether the server tokenizes the one before it as it was sampled. Never raises."""
        counts, prompt = self._services.metrics.counts, Prompt(prompt_ids, prompt_ids)
        try:
            if self._prompt is not None and self._prompt.ids == prompt_ids:
                prompt = self._prompt
                counts["continued_calls"] += 1
            elif self._prompt is not None:  # a server that does not know the field
                _count_text(self._services, "ignored")
            known = asyncio.get_running_loop().create_future()
            known.set_result(prompt)
            self._replies.add(self._body, known, response)
            if (last := self._last) and last.prompt.done() and not (last.prompt.cancelled() or last.prompt.exception()):
                counts["continuing_calls"] += 1
                counts["drifted_calls"] += _after(last.prompt.result().rendered, last.ids, prompt.rendered) is None
        except Exception as error:
            log.error("no token ids of a reply", error=described(error))
            _count_text(self._services, "failed")


async def tip_free_prompt(services: Services, rollout_id: str, replies: Replies, body: Body) -> Prompt:
    """Return the prompt of a chat that is not sent, continued as one that is.

    Raises:
        httpx.HTTPError: the server does not render it.
    """
    if services.settings.gateway.cumulative_tokens:
        try:
            if (last := replies.last_in(body)) is not None:
                return await continued(services, rollout_id, last, body)
        except AsText:
            pass
        except Exception as error:
            log.error("no token ids of a chat without tips", rollout_id=rollout_id, error=described(error))
    ids = await rendered(services.servers, rollout_id, body)
    return Prompt(ids, ids)


async def continued(services: Services, rollout_id: str, last: Reply, body: Body) -> Prompt:
    """Return the prompt of a chat that goes on from a sampled reply.

    Raises:
        AsText: it cannot.
        httpx.HTTPError: the server does not render it.
    """
    if last.stopped:
        raise AsText("stop")
    if any(map(has_images, body["messages"])):
        raise AsText("images")
    # Shielded: others wait for it too.
    before, whole = await asyncio.gather(asyncio.shield(last.prompt), rendered(services.servers, rollout_id, body))
    turn = _after(before.rendered, last.ids, whole)
    if turn is None:
        reply = last_reply(body["messages"])
        assert reply is not None and isinstance(services.tokenizer, PolicyTokenizer)
        closed = {**body, "messages": body["messages"][: reply + 1], "add_generation_prompt": False}
        closed_ids = await rendered(services.servers, rollout_id, closed)
        turn = new_turn(services.tokenizer, last, before.rendered, closed_ids, whole)
    return Prompt(before.ids + last.ids + turn, whole)


def new_turn(tokenizer: PolicyTokenizer, reply: Reply, before: Ids, closed: Ids, whole: Ids) -> Ids:
    """Return the ids after a reply that the server tokenizes differently.

    Args:
        before: the rendering of the chat that the reply answers, which ends where the reply begins.
        closed: of that chat with the reply, which ends after the reply's turn.
        whole: of the whole chat. As texts, each must begin with the one before it: else the template writes the
            history anew, such as without thoughts, and that is what the model shall see. Empty thoughts do not count:
            where a model is not to think, templates write them before the newest reply alone. The reply's own thoughts
            must stand in it.

    Raises:
        AsText: they do not, or how the template ends a turn cannot be told.
    """
    ends = [place for place, number in enumerate(closed) if number in tokenizer.special_ids]
    in_whole = [place for place, number in enumerate(whole) if number in tokenizer.special_ids][: len(ends)]

    def text(ids: Ids) -> str:
        return _NO_THOUGHTS.sub("", tokenizer.text(ids))

    if not ends or len(in_whole) < len(ends):
        raise AsText("template")
    end, end_in_whole = ends[-1], in_whole[-1]
    if (
        not text(closed[:end]).startswith(text(before))
        or not text(whole).startswith(text(closed))
        or text(whole[: end_in_whole + 1]) != text(closed[: end + 1])
    ):
        raise AsText("template")
    if _SPACE.sub("", tokenizer.spelled(reply.thoughts)) not in _SPACE.sub("", text(closed)[len(text(before)) :]):
        raise AsText("reasoning")
    if reply.ids[-1] == closed[end]:
        return whole[end_in_whole + 1 :]
    if reply.cut:
        return whole[end_in_whole:]
    raise AsText("template")  # the model ended its turn by another token than the template does


def _after(before: Ids, reply: Ids, whole: Ids) -> Ids | None:
    """Return the ids after prompt and reply; None if the rendering does not begin with them."""
    said = before + reply
    return whole[len(said) :] if whole[: len(said)] == said else None


def _count_text(services: Services, reason: str) -> None:
    if services.settings.gateway.cumulative_tokens:
        services.metrics.counts["text_calls"] += 1
        services.metrics.counts[f"text_calls/{reason}"] += 1
