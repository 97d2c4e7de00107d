"""One model call of a tagged rollout, from the agent's request to the recorded event.

A failure here is counted and costs the call its tips; the agent's call itself goes on.
"""

import asyncio
import time
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import structlog

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.chat_tokens import ChatTokens, tip_free_prompt
from empo2.recipe.gateway.episodes.episode import Asked, Episode, Turn
from empo2.recipe.gateway.episodes.tip_search import TipSearch, find_tips, withdraw_tips
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tips.injection import PromptRequest
from empo2.recipe.gateway.tokens import sampling
from empo2.recipe.gateway.tokens.rendering import TEMPLATE_ARGUMENTS
from empo2.recipe.gateway.tokens.replies import Ids, Prompt, Replies
from empo2.recipe.gateway.traces import Span
from empo2.recipe.messages import newest_observation, reply_of, spoken
from empo2.recipe.protocol import CALL_EVENT, RolloutTag

log = structlog.get_logger()

# A reflection repeats these fields of the call before it, so that its prompt continues that call's prompt.
_SHARED = ("tools", "chat_template_kwargs", *TEMPLATE_ARGUMENTS)
# In vLLM 0.20's refusals (vllm.renderers.params, vllm.v1.engine.input_processor); the last is of a prompt that is just
# as long as the context.
_TOO_LONG = ("context length", "maximum model length", "max_tokens must be at least 1, got 0")
_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass
class PlainCall:
    """One call of plain GRPO, whose rollouts have no tag: sampled and continued as those of EMPO².

    `answered` or `refused` concludes it.
    """

    services: Services
    sent: Body  # the request that is sent
    tokens: ChatTokens  # of the prompt that is sent
    teaches: bool  # True if the likeliest tokens are recorded beside each sampled one

    async def shorter(self, answer: Body | None) -> Body | None:
        """Return what to send in the place of a request that was refused; None if nothing shorter is left.

        vLLM counts the reply's limit, which clients set to what their own models can: without it the reply may take
        what is left of the context.
        """
        kept = {name: value for name, value in self.sent.items() if name not in _LIMITS}
        if not is_too_long(answer) or len(kept) == len(self.sent):
            return None
        self.services.metrics.counts["reply_limits_lifted"] += 1
        self.sent = kept
        return kept

    def refused(self, status: int, answer: Body | None) -> None:
        """Note an error response, or that there was no response (status 0)."""

    def answered(self, response: Body, number: int, prompt: Ids | None) -> None:
        """Note what the agent is answered.

        Args:
            number: of the call among the recorded ones of the attempt.
            prompt: the token ids of its prompt; None if the server has told none.
        """
        if reply_of(response) is not None and prompt:
            self.tokens.answered(response, prompt)


@dataclass
class ModelCall(PlainCall):
    """One call of a tagged rollout, made by `prepare_call`."""

    episode: Episode
    body: Body  # the agent's request
    asked: Asked  # what it asks, maybe not for the first time
    found: TipSearch  # its state and tips
    chat: Body  # the request with the tips in it
    tip_ids: list[int]  # of the tips that its newest turn is sent with
    # The prompt without tips, which the server is asked for while the policy generates; None if it is the one that is
    # sent.
    tip_free: asyncio.Task[Prompt] | None
    span: Span  # of the call

    async def shorter(self, answer: Body | None) -> Body | None:
        """As `PlainCall.shorter`; then the tips go, of all turns: no call fails by its tips."""
        if (unlimited := await super().shorter(answer)) is not None:
            return unlimited
        if not is_too_long(answer) or self.chat == self.body:
            return None
        episode = self.episode
        withdraw_tips(self.services, episode, self.found, self.tip_ids)
        self.span.set({names.TIPS_SHOWN: 0, names.TIP_IDS: []})
        if self.tip_free is not None:
            self.tip_free.cancel()
        self.chat, self.tip_ids, self.tip_free = self.body, [], None
        self.tokens = await ChatTokens.prepare(self.services, episode.rollout_id, episode.replies, self.body)
        self.sent = _sent(self.body, self.tokens, episode.tag, teaches=self.teaches)
        return self.sent

    def refused(self, status: int, answer: Body | None) -> None:
        self.episode.under_way.remove(self.asked)
        if self.tip_free is not None:
            self.tip_free.cancel()
        self.episode.context_full = status == 400 and is_too_long(answer)

    def answered(self, response: Body, number: int, prompt: Ids | None) -> None:
        """Record the call in the background, since the agent already has its reply.

        What the agent did not ask for is taken out of the response, in place, and so out of agent-lightning's event.
        """
        episode, body = self.episode, self.body
        episode.under_way.remove(self.asked)
        tops: sampling.Tops = ([], [])
        if self.teaches:
            asked = body.get("top_logprobs")
            asked = asked if isinstance(asked, int) else 0
            tops = sampling.take_tops(response, asked, self.services.tokenizer.decoded)
        episode.context_full = False
        reply = reply_of(response)
        if reply is None:
            return
        if isinstance(self.found.request, PromptRequest):
            episode.tips.replied(body["prompt"], spoken(reply))
        if prompt:
            self.tokens.answered(response, prompt)
            if self.tip_free is not None:
                episode.replies.add(body, self.tip_free, response, sent=False)
        if episode.tag.read_only or (not prompt and self.services.settings.model.server is None):
            return
        chat = self.chat.get("messages") or [{"role": "user", "content": str(self.chat.get("prompt"))}]
        shared = {name: body[name] for name in _SHARED if name in body}
        before = episode.turns[-1].chat if episode.turns else []
        chat = [old if old == new else new for old, new in zip_longest(before, chat)][: len(chat)]  # share the texts
        turn = Turn(self.found.state, chat, reply, shared, self.found.embedding, len(prompt or ()))
        episode.turns.append(turn)
        visited = bool(turn.state) and response["choices"][0].get("token_ids") != []  # an empty reply is no action
        task = asyncio.create_task(self._record(turn, visited, response, number, tops))
        episode.pending.add(task)
        self.span.wait_for(task)
        task.add_done_callback(episode.pending.discard)

    async def _record(self, turn: Turn, visited: bool, response: Body, number: int, tops: sampling.Tops) -> None:
        episode = self.episode
        async with episode.recording:
            again = self.asked.visits is not None
            visits = self.asked.visits if again else await self._visit(turn) if visited else None
            reward = 0.0
            if visits:
                if not again and turn.embedding is not None:
                    reward = self.services.memory.novelty(turn.embedding, visits)
                self.span.set({names.NOVELTY: reward, names.VISITS: visits})
            # A `CallEvent`. As a model it would check, and copy, each token id.
            event = {
                "call": number,
                "tip_ids": self.tip_ids,
                "scope": episode.tag.scope,
                "observation": newest_observation(self.body.get("messages") or []),
                "visits": visits,
                "intrinsic_reward": reward,
                "top_tokens": tops[0] or None,
                "top_log_probs": tops[1] or None,
            }
            data: Body = {name: value for name, value in event.items() if value is not None}
            if self.tip_free is not None:
                free, chats = await self._tip_free_ids(), upstream.continuations(episode.rollout_id, episode.attempt_id)
                data["tip_free_prompt_token_ids"] = free and chats.code_tip_free(number, free, response)
            if not upstream.record(episode.rollout_id, episode.attempt_id, CALL_EVENT, data):
                log.warning("rollout deleted before its call was recorded", rollout_id=episode.rollout_id)

    async def _visit(self, turn: Turn) -> int | None:
        """Count the visit to the call's state; return None if the memory failed.

        Nothing limits the time: at the end of the step the trainer waits for it (`Episodes.settle`).
        """
        episode, memory, asked, before = self.episode, self.services.memory, self.asked, self.episode.asked
        if before is not None and asked.goes_on(before):
            memory.take_back(episode.rollout_id, before.again)
        try:
            if turn.embedding is None:
                turn.embedding = await memory.embed(turn.state, urgent=False)
            asked.visits = await memory.visit(episode.tag.scope, episode.rollout_id, turn.state, turn.embedding)
        except Exception as error:
            self.services.memory_failed(error)
            return None
        if before is not None and before.content == asked.content:
            asked.again = before.again + 1
        episode.asked = asked
        return asked.visits

    async def _tip_free_ids(self) -> list[int] | None:
        """Return the ids of the agent's own prompt; None if they are unknown, never the ids of the prompt with tips."""
        assert self.tip_free is not None
        try:
            return (await self.tip_free).ids.tolist()
        except Exception as error:
            # The event is recorded without them; the trainer leaves such a turn out of an off-policy update.
            log.error("no tip-free prompt", rollout_id=self.episode.rollout_id, error=described(error))
            self.services.metrics.counts["tokenize_failures"] += 1
            return None


async def prepare_call(services: Services, episode: Episode, body: Body) -> ModelCall:
    """Find a call's tips and build the request that replaces the agent's. Never raises."""
    started = time.perf_counter()
    tag, span = episode.tag, services.traces.current()
    body = episode.replies.sampled.restored(body)
    services.metrics.counts["calls"] += 1
    try:
        found = await find_tips(services, episode, body)
    except Exception as error:
        log.warning("tips left out of a call", rollout_id=episode.rollout_id, error=described(error))
        services.metrics.counts["memory_failures"] += 1
        found = TipSearch()
    chat = {**body, **found.request.fields} if found.request else body
    tip_ids = [tip.id for tip in found.request.newest.tips] if found.request else []
    tokens = await ChatTokens.prepare(services, episode.rollout_id, episode.replies, chat)
    services.metrics.memory_seconds += time.perf_counter() - started
    span.set({names.TIPS_SHOWN: len(tip_ids), names.TIP_IDS: tip_ids})
    teaches = tag.teaches and "messages" in body  # agent-lightning asks for no tops of completions
    if not tag.read_only:
        count_sampling(services, body)
    sent = _sent(chat, tokens, tag, teaches=teaches)
    tip_free = None
    if tag.off_policy and chat != body:
        # At once: what the policy is asked comes after it, and may be refused at once.
        asking = tip_free_prompt(services, episode.rollout_id, episode.replies, body)
        tip_free = asyncio.Task(asking, loop=asyncio.get_running_loop(), eager_start=True)
        # Reading the exception keeps asyncio from logging it when the call fails too and nobody awaits the ids.
        tip_free.add_done_callback(lambda task: task.cancelled() or task.exception())
    return ModelCall(
        services, sent, tokens, teaches, episode, body, episode.ask(body), found, chat, tip_ids, tip_free, span
    )


async def prepare_plain_call(services: Services, rollout_id: str, replies: Replies, body: Body) -> PlainCall:
    """Build the request that replaces one of plain GRPO. Never raises."""
    count_sampling(services, body)
    body = replies.sampled.restored(body)
    tokens = await ChatTokens.prepare(services, rollout_id, replies, body)
    return PlainCall(services, {**sampling.neutral(body), **tokens.fields}, tokens, teaches=False)


def _sent(chat: Body, tokens: ChatTokens, tag: RolloutTag, *, teaches: bool) -> Body:
    """Return the request that is sent for a chat."""
    sampled = chat if tag.read_only else sampling.neutral(chat)
    return {**sampled, **tokens.fields, **(sampling.TOPS if teaches else {})}


def is_too_long(answer: Body | None) -> bool:
    """Return whether a model server's error says that a prompt is longer than the model's context."""
    return any(words in str(answer) for words in _TOO_LONG)


def count_sampling(services: Services, body: Body) -> None:
    """Count calls that set sampling options unknown to the trainer, and log each such option once."""
    counts = services.metrics.counts
    if options := sampling.overridden(body):
        counts["sampling_overridden"] += 1
        for option in options:
            _warn_once(f"{option} of the agent is left out of training calls")
    if options := sampling.constraints(body):
        counts["constrained_calls"] += 1
        for option in options:
            _warn_once(f"{option} of the agent constrains training: the policy learns as if its replies were free")


@cache
def _warn_once(text: str) -> None:
    log.warning(text)
