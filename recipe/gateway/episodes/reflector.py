"""Ask the current policy for a tip about each finished episode."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from empo2.memory import Step
from empo2.recipe import baselines
from empo2.recipe.config import Reflection
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway.episodes.credit import TipCredit
from empo2.recipe.gateway.episodes.episode import Episode, Turn
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.normal_form import normal_message
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tips.text import refusal, shown_tip, tip_of
from empo2.recipe.gateway.traces import Span
from empo2.recipe.messages import Message, newest_observation, reply_of, shortened, spoken, text_of
from empo2.recipe.protocol import is_success

log = structlog.get_logger()

_CHAT_TOKENS = 8_000  # of a chat that is sent whole, with tools: most of a longer one has been read before
_TOKEN_CHARACTERS = 4  # where the model server tells no tokens
_TRANSCRIPT_CHARACTERS = (12_000, 3_000)  # the second one if the model refuses the first
_RESULT_CHARACTERS = 300  # of an action, and of what came of it
_ERROR = re.compile(r"(?:Error|Exception)\b|\bTraceback\b|\b(?:error|fatal|panic): ")
_TESTS = re.compile(r"\b\d+ (?:passed|failed)\b|\bFAILED\b|\bRan \d+ tests?\b|\btest result: |\bTests: +\d")


class RefusedTip(Exception):
    """An answer that is no tip, with the reason (`refusal`)."""


class Reflector:
    """Background worker that credits the tips a finished episode saw and asks the policy for a new one."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.credit = TipCredit(services)
        self.writing = asyncio.Lock()  # for papers that read what they change
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def finished(self, episode: Episode, *, succeeded: bool, rewards: Sequence[Any]) -> None:
        """Credit the episode's tips and start its reflection.

        A rollout that failed, or has no states or no score, is neither credited nor reflected on; nor is validation.

        Args:
            rewards: values of the reward events of the attempt that counts; the last one counts.
        """
        if episode.tag.read_only:
            return
        self._count(episode)
        score: Any = rewards[-1] if rewards else None
        if succeeded and type(score) in (int, float) and any(turn.state for turn in episode.turns):
            task = asyncio.create_task(self._conclude(episode, float(score)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds for the reflections under way, then cancel the rest."""
        if self._running:
            _, late = await asyncio.wait(set(self._running), timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _count(self, episode: Episode) -> None:
        counts = self.services.metrics.counts
        counts["episodes"] += 1
        counts["context_ended"] += episode.context_full
        if episode.tag.memory:
            counts["memory_episodes"] += 1
            counts["distinct_tips"] += len(episode.shown)
            counts["tip_tokens"] += episode.tip_tokens

    async def _conclude(self, episode: Episode, score: float) -> None:
        async with self.services.gate:  # the memory does not change either while the weights do
            await self.credit.finished(episode, score)
            success = is_success(score, self.services.settings.algorithm.success_return)
            if not success or self.services.settings.reflection.of == "all":
                with self.services.traces.memory(names.CREATE, episode.rollout_id, episode.tag) as span:
                    await self._reflect(episode, score, success, span)

    async def _reflect(self, episode: Episode, score: float, success: bool, span: Span) -> None:
        counts, settings = self.services.metrics.counts, self.services.settings.reflection
        try:
            if episode.pending:
                await asyncio.wait(set(episode.pending))  # which takes as long as the embedder
            async with asyncio.timeout(settings.timeout):
                if paper := baselines.asked_for(self.services.settings, "reflection.form"):
                    tip = await paper.tip(self, episode, score, success)
                elif settings.form == "transcript":
                    tip = self.transcript(episode, score, success)
                else:
                    tip = await self.ask_for_tip(episode, question(settings, score, success))
            if tip is None:
                return
            steps = [
                Step(turn.state, turn.embedding, spoken(turn.reply))
                for turn in episode.turns
                if turn.embedding is not None
            ]
            span.tell({names.RECORDS: [tip]})
            tip_id = await self.services.memory.add_episode(
                episode.tag.scope, episode.rollout_id, tip, score, success, steps
            )
            if tip_id is None:
                span.set({names.REFUSED: "known"})  # word for word
            else:
                counts["tips_written"] += 1
                span.set({names.RECORD_COUNT: 1, names.RECORD_ID: str(tip_id)})
        except RefusedTip as refused:
            counts["tips_refused"] += 1
            counts[f"tips_refused/{refused}"] += 1
            span.set({names.REFUSED: str(refused)})
        except (Exception, asyncio.CancelledError) as error:
            log.error("no tip", rollout_id=episode.rollout_id, error=described(error))
            span.fail(type(error).__name__)
            counts["reflections_failed"] += 1

    def transcript(self, episode: Episode, score: float, success: bool) -> str:
        """Return the episode as one line, without the tips that it was shown."""
        turns = " ".join(f"Observation: {turn.state} Action: {spoken(turn.reply)}" for turn in episode.turns)
        text = f"{_outcome(success).capitalize()}, score {score:g}. {turns}"
        return shown_tip(text, self.services.tokenizer.special_tokens, self.services.settings.reflection.max_words)

    async def ask_for_tip(self, episode: Episode, ask: Message) -> str:
        """Return the policy's answer to a question about an episode, as one line.

        Raises:
            RefusedTip: it is no tip.
            ValueError, httpx.HTTPError: there is none.
        """
        settings, turns = self.services.settings.reflection, of_main_agent(episode.turns)
        last, chats, replies = turns[-1], [turn.chat for turn in turns], [turn.reply for turn in turns]
        tokens = last.tokens or sum(len(spoken(each)) for each in last.chat) // _TOKEN_CHARACTERS
        for chat in reflection_chats(chats, replies, ask, tokens):
            request = {
                **last.shared,
                **({"tool_choice": "none"} if "tools" in last.shared else {}),
                "messages": chat,
                "max_tokens": settings.max_tokens,
                "temperature": settings.temperature,
            }
            response = await self.services.servers.post(
                episode.rollout_id, "/chat/completions", request, timeout=settings.timeout
            )
            if response.status_code != 400:  # 400: longer than the model's context, or a role that it does not know
                response.raise_for_status()
                answer = response.json()
                reply = reply_of(answer)
                truncated = reply is not None and answer["choices"][0].get("finish_reason") == "length"
                special_tokens = self.services.tokenizer.special_tokens
                tip = tip_of(spoken(reply or {}), special_tokens, settings.max_words, truncated)
                if reason := refusal(tip, [text_of(ask["content"])]):
                    raise RefusedTip(reason)
                return tip
        raise ValueError("the model server refuses every form of the transcript")


def question(settings: Reflection, score: float, success: bool) -> Message:
    """Return the user message that asks for the tip."""
    prompt = settings.prompt.format(score=f"{score:g}", outcome=_outcome(success), words=settings.max_words)
    return {"role": "user", "content": prompt}


def _outcome(success: bool) -> str:
    return "the task was completed" if success else "the task was not completed"


def reflection_chats(
    chats: Sequence[list[Message]], replies: Sequence[Message], ask: Message, tokens: int = 0
) -> Iterable[list[Message]]:
    """Yield chats that ask for the tip, the best first; the next one is tried if the model refuses one as too long.

    Args:
        chats: each call's messages as sent, tips included, so that vLLM has their prefix cached.
        tokens: of the last prompt.
    """
    first, last = chats[0], chats[-1]
    replies_in_chat = sum(message.get("role") == "assistant" for message in last[len(first) :])
    # The agent sends its whole chat, so the last call holds the transcript.
    whole = last[: len(first)] == first and replies_in_chat >= len(chats) - 1
    if whole and tokens <= _CHAT_TOKENS:
        reply = normal_message(replies[-1])
        # Thoughts and vLLM's extra fields break templates.
        sent_back = {key: reply[key] for key in ("role", "content", "tool_calls") if reply.get(key) is not None}
        yield [*last, sent_back, ask]
    observed = [newest_observation(chat) for chat in chats]
    for limit in _TRANSCRIPT_CHARACTERS:
        text = transcript(observed, [*map(spoken, replies)], limit)
        yield [{"role": "user", "content": f"An episode:\n\n{text}\n\n{ask['content']}"}]


def transcript(observed: Sequence[str], actions: Sequence[str], characters: int) -> str:
    """Return an episode as a text: of each call what was observed and done, both shortened.

    There is more room for the task, the last result, the last error and the last output of tests; where there are too
    many calls, those in the middle are left out.
    """
    room: dict[int, int] = {}
    for pattern in (_ERROR, _TESTS):
        found = [number for number in range(1, len(observed)) if pattern.search(observed[number])]
        room |= dict.fromkeys(found[-1:], characters // 8)
    room |= {len(observed) - 1: characters // 4} | {0: characters // 3}
    brief = min(_RESULT_CHARACTERS, characters // 40)
    calls = [
        f"Observation: {shortened(seen, room.get(number, _RESULT_CHARACTERS))}\nAction: {shortened(action, brief)}"
        for number, (seen, action) in enumerate(zip(observed, actions, strict=True))
    ]
    left, kept = characters - sum(len(calls[number]) + 1 for number in room), {*room}
    ends = sorted(set(range(len(calls))) - kept, key=lambda number: min(number, len(calls) - 1 - number))
    for number in ends:
        left -= len(calls[number]) + 1
        if left < 0:
            break
        kept.add(number)
    lines = [calls[number] if number in kept else "" for number in range(len(calls))]
    gaps = [line or "..." for number, line in enumerate(lines) if line or lines[number - 1]]
    return shortened("\n".join(gaps), characters)


def of_main_agent(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns of the agent that has most of them, the first of equals: sub-agents are asked otherwise.

    An agent is known by its system message and its tools; one that writes these anew each time has all turns.
    """
    agents: defaultdict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        system = turn.chat[0].get("content") if turn.chat[0].get("role") == "system" else None
        agents[json.dumps([system, turn.shared.get("tools")], default=str)].append(turn)
    main = max(agents.values(), key=len)
    return main if len(main) > 1 else list(turns)
