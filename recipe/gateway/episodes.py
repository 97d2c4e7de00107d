"""The episodes that are being played: their tips before a call, their events after it, their reflection at the end.

Whatever fails here is counted and costs tips, never the agent's call.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import structlog
from agentlightning.schemas import RolloutState
from agentlightning.server.proxy import ProxyRouter
from agentlightning.server.routes.events import record_event
from agentlightning.server.store import _rollouts
from fastapi import HTTPException

from empo2.memory import Step
from empo2.recipe.config import Settings
from empo2.recipe.gateway.injection import ChatTips, PromptTips, render_tips
from empo2.recipe.gateway.recall import Recall
from empo2.recipe.gateway.reflection import question, reflection_chats
from empo2.recipe.gateway.state import chat_state, prompt_state
from empo2.recipe.gateway.tips import clean_tip, refusal, tip_of
from empo2.recipe.messages import Message, newest_turn, reply_of, spoken, text_of

log = structlog.get_logger()

# The fields of a chat completion that decide how vLLM renders its prompt (vLLM 0.20 TokenizeChatRequest).
_RENDERING = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "prompt",
)
# These decide it too, but TokenizeChatRequest knows them only as arguments of the template.
_TEMPLATE_ARGUMENTS = ("documents", "reasoning_effort")
# What a reflection shares with the call before it, or its prompt would not be that call's prompt continued.
_SHARED = ("tools", "chat_template", "chat_template_kwargs", *_TEMPLATE_ARGUMENTS)
_TOKENIZE_SECONDS = 60


@dataclass
class Call:
    """One model call of an episode, as it was sent and answered."""

    state: str
    chat: list[dict[str, Any]]
    reply: dict[str, Any]
    shared: dict[str, Any]
    key: np.ndarray | None = None


@dataclass
class Episode:
    """What the gateway holds of a tagged rollout until it is read."""

    rollout_id: str
    scope: str
    memory: bool
    off_policy: bool
    chat_tips: ChatTips = field(default_factory=ChatTips)
    prompt_tips: PromptTips = field(default_factory=PromptTips)
    calls: list[Call] = field(default_factory=list)
    pending: set[asyncio.Task[None]] = field(default_factory=set)
    searches: int = 0
    hits: int = 0
    shown: Counter[int] = field(default_factory=Counter)  # tip id -> turns
    ended: bool = False


@dataclass
class Plan:
    """One request: what is sent in the place of what the agent asked for, and what is known of its state."""

    body: dict[str, Any]
    state: str
    key: np.ndarray | None = None
    tip_ids: list[int] = field(default_factory=list)


class EpisodeMemory:
    """Tips, events and reflections of the rollouts that are being played."""

    def __init__(self, settings: Settings, recall: Recall, special_tokens: list[str]) -> None:
        self._settings = settings
        self.recall = recall
        self._special_tokens = special_tokens
        self._episodes: dict[str, Episode] = {}
        self._reflections: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._memory_seconds = 0.0
        self._embedding_seconds = 0.0  # of searches: what the agents have waited for
        self.router: ProxyRouter
        self.client: httpx.AsyncClient

    def start(self) -> None:
        """Load the embedder and open the memory, unless the algorithm has no use for them."""
        if self._settings.algorithm.name == "empo2":
            self.recall.start()

    def episode(self, rollout_id: str) -> Episode | None:
        """The episode of a tagged rollout; None for all others."""
        rollout = _rollouts.get(rollout_id)
        tag = getattr(rollout.metadata, "empo2", None) if rollout else None
        if not isinstance(tag, dict) or not tag.keys() >= {"scope", "rollout_mode", "update_mode"}:
            return None
        if rollout_id not in self._episodes:
            self._episodes[rollout_id] = Episode(
                rollout_id,
                scope=str(tag["scope"]),
                memory=tag["rollout_mode"] == "memory",
                off_policy=tag["update_mode"] == "off-policy",
            )
        return self._episodes[rollout_id]

    # A call, before it is sent

    async def plan(self, episode: Episode, body: dict[str, Any]) -> Plan:
        """The request with its tips. Never raises: without the memory the call goes on as the agent wrote it."""
        started = time.perf_counter()
        self._counts["calls"] += 1
        try:
            if isinstance(body.get("messages"), list):
                return await self._plan_chat(episode, body)
            if isinstance(body.get("prompt"), str):
                return await self._plan_prompt(episode, body)
            self._counts["calls_without_text"] += 1  # token ids, or no request at all: the app will say so
            return Plan(body, state="")
        except Exception:
            log.exception("tips left out of a call", rollout_id=episode.rollout_id)
            self._counts["memory_failures"] += 1
            return Plan(body, state="")
        finally:
            self._memory_seconds += time.perf_counter() - started

    async def _plan_chat(self, episode: Episode, body: dict[str, Any]) -> Plan:
        messages, tips = body["messages"], episode.chat_tips
        plan = Plan(body, chat_state(messages))
        if not episode.memory:
            return plan
        turn = newest_turn(messages)
        block = None if turn is None else tips.block_of(messages, turn)
        if turn is not None and block is None:
            block = await self._find_tips(episode, plan)
            # Another request of the same turn may have been faster: both must show the same tips.
            known = tips.block_of(messages, turn)
            block = block if known is None else known
        plan.body = {**body, "messages": tips.inject(messages, turn, block or "")}
        return plan

    async def _plan_prompt(self, episode: Episode, body: dict[str, Any]) -> Plan:
        prompt, tips = body["prompt"], episode.prompt_tips
        plan = Plan(body, prompt_state(prompt))
        if not episode.memory:
            return plan
        sent = tips.sent_for(prompt)
        if sent is None:
            block = await self._find_tips(episode, plan)
            sent = tips.sent_for(prompt) or tips.inject(prompt, block)
        plan.body = {**body, "prompt": sent}
        return plan

    async def _find_tips(self, episode: Episode, plan: Plan) -> str:
        self._counts["searches"] += 1
        episode.searches += 1
        try:
            started = time.perf_counter()
            plan.key = await self.recall.embed(plan.state, urgent=True)
            self._embedding_seconds += time.perf_counter() - started
            tips = await self.recall.search(episode.scope, plan.key)
        except Exception as error:
            log.error("the memory failed", error=str(error))
            self._counts["memory_failures"] += 1
            return ""
        plan.tip_ids = [tip.id for tip in tips]
        episode.shown.update(plan.tip_ids)
        episode.hits += bool(tips)
        self._counts["hits"] += bool(tips)
        self._counts["tips_injected"] += len(tips)
        # A memory may come from another model's run: its tips are cleaned of *this* model's tokens.
        return render_tips([clean_tip(tip.text, self._special_tokens) for tip in tips])

    def tokenize_without_tips(
        self, episode: Episode, body: dict[str, Any], plan: Plan
    ) -> asyncio.Task[list[int]] | None:
        """Ask vLLM for the ids of the agent's own request, while it generates; None where nothing was put in."""
        if not episode.off_policy or plan.body == body:
            return None
        task = asyncio.create_task(self._tokenize(episode, body))
        # Seen: asyncio shall not complain of a failure if the call itself fails too, and nobody asks for the ids.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _tokenize(self, episode: Episode, body: dict[str, Any]) -> list[int]:
        server = self.router.select_server(self.router.model_name, episode.rollout_id)
        url = server.endpoint.rstrip("/").removesuffix("/v1") + "/tokenize"
        request = {key: body[key] for key in _RENDERING if key in body} | {"model": server.model}
        if arguments := {key: body[key] for key in _TEMPLATE_ARGUMENTS if body.get(key) is not None}:
            request["chat_template_kwargs"] = (body.get("chat_template_kwargs") or {}) | arguments
        response = await self.client.post(url, json=request, timeout=_TOKENIZE_SECONDS)
        response.raise_for_status()
        return response.json()["tokens"]

    # A call, after it was answered

    def answered(
        self,
        episode: Episode,
        attempt_id: str,
        body: dict[str, Any],
        plan: Plan,
        tip_free: asyncio.Task[list[int]] | None,
        response: dict[str, Any],
    ) -> None:
        """Record a call in the background: the agent has its reply already."""
        reply = reply_of(response)
        if reply is None:
            return
        prompt_ids = response.get("prompt_token_ids") or response["choices"][0].get("prompt_token_ids")
        if not prompt_ids:
            return
        if "messages" not in body and plan.body is not body:
            episode.prompt_tips.replied(body["prompt"], spoken(reply))
        chat = plan.body.get("messages") or [{"role": "user", "content": str(plan.body.get("prompt"))}]
        shared = {key: body[key] for key in _SHARED if key in body}
        call = Call(plan.state, chat, reply, shared, plan.key)
        episode.calls.append(call)
        task = asyncio.create_task(self._record(episode, attempt_id, call, plan.tip_ids, prompt_ids, tip_free))
        episode.pending.add(task)
        task.add_done_callback(episode.pending.discard)

    async def _record(
        self,
        episode: Episode,
        attempt_id: str,
        call: Call,
        tip_ids: list[int],
        prompt_ids: list[int],
        tip_free: asyncio.Task[list[int]] | None,
    ) -> None:
        data: dict[str, Any] = {"prompt_token_ids": prompt_ids, "tip_ids": tip_ids, "scope": episode.scope}
        try:
            data["tip_free_prompt_token_ids"] = prompt_ids if tip_free is None else await tip_free
        except Exception as error:
            # The event is recorded without them; the trainer leaves such a turn out of an off-policy update.
            log.error("no tip-free prompt", rollout_id=episode.rollout_id, error=repr(error))
            self._counts["tokenize_failures"] += 1
        try:
            if call.state:
                call.key = await self.recall.embed(call.state, urgent=False) if call.key is None else call.key
                visits = await self.recall.visit(episode.scope, call.state, call.key)
                data |= {"visits": visits, "intrinsic_reward": 1 / visits}
        except Exception as error:
            log.error("the memory failed", error=str(error))
            self._counts["memory_failures"] += 1
        try:
            record_event(episode.rollout_id, attempt_id, "empo2_call", data)
        except HTTPException:
            log.warning("rollout deleted before its call was recorded", rollout_id=episode.rollout_id)

    async def settle(self, rollout_id: str) -> None:
        """Wait until all answered calls of a rollout have their events."""
        episode = self._episodes.get(rollout_id)
        if episode is not None and episode.pending:
            await asyncio.wait(set(episode.pending))

    # An episode, after it ended

    def finished(self, episode: Episode, state: RolloutState, events: list[Any]) -> None:
        """Credit the tips that the episode saw and ask for its own, in the background.

        A rollout without states or score has neither.

        Args:
            events: the rollout's own list, held from before its end: the trainer deletes it once it has read it.
        """
        if episode.ended or state != RolloutState.SUCCEEDED or not any(call.state for call in episode.calls):
            return
        episode.ended = True
        rewards = [event.data.get("value") for event in events if event.event_type == "reward"]
        if not rewards or not isinstance(rewards[-1], int | float):
            return
        task = asyncio.create_task(self._conclude(episode, float(rewards[-1])))
        self._reflections.add(task)
        task.add_done_callback(self._reflections.discard)

    async def _conclude(self, episode: Episode, score: float) -> None:
        success = score >= self._settings.algorithm.success_return
        if episode.searches:
            try:
                await self.recall.record_play(
                    episode.scope,
                    episode.rollout_id,
                    score,
                    success,
                    searches=episode.searches,
                    hits=episode.hits,
                    shown=episode.shown,
                )
            except Exception as error:
                log.error("the memory failed", error=str(error))
                self._counts["memory_failures"] += 1
        await self._reflect(episode, score, success)

    async def _reflect(self, episode: Episode, score: float, success: bool) -> None:
        try:
            async with asyncio.timeout(self._settings.reflection.timeout):
                await asyncio.gather(*episode.pending, return_exceptions=True)
                ask = question(self._settings.reflection, score, success)
                tip = await self._ask_for_tip(episode, ask)
            if reason := refusal(tip, [text_of(ask["content"])]):
                self._counts["tips_refused"] += 1
                self._counts[f"tips_refused/{reason}"] += 1
                return
            steps = [Step(c.state, c.key, spoken(c.reply)) for c in episode.calls if c.key is not None]
            if await self.recall.remember(episode.scope, episode.rollout_id, tip, score, success, steps):
                self._counts["tips_written"] += 1  # else it is known, word for word
        except (Exception, asyncio.CancelledError) as error:
            log.error("no tip", rollout_id=episode.rollout_id, error=repr(error))
            self._counts["reflections_failed"] += 1

    async def _ask_for_tip(self, episode: Episode, ask: Message) -> str:
        """Straight to the model server: a call on the rollout's own URL would become a trained row."""
        settings = self._settings.reflection
        server = self.router.select_server(self.router.model_name, episode.rollout_id)
        chats, replies = [call.chat for call in episode.calls], [call.reply for call in episode.calls]
        for chat in reflection_chats(settings, chats, replies, ask):
            response = await self.client.post(
                f"{server.endpoint.rstrip('/')}/chat/completions",
                json={
                    **episode.calls[-1].shared,
                    **({"tool_choice": "none"} if "tools" in episode.calls[-1].shared else {}),
                    "model": server.model,
                    "messages": chat,
                    "max_tokens": settings.max_tokens,
                    "temperature": settings.temperature,
                },
                timeout=settings.timeout,
            )
            if response.status_code != 400:  # 400: longer than the model's context, or a role that it does not know
                response.raise_for_status()
                answer = response.json()
                reply = reply_of(answer)
                truncated = reply is not None and answer["choices"][0].get("finish_reason") == "length"
                return tip_of(spoken(reply or {}), self._special_tokens, settings.max_words, truncated)
        raise ValueError("the model server refuses every form of the transcript")

    async def drain(self, timeout: float) -> dict[str, float]:
        """Wait for the reflections under way, at most ``timeout`` seconds, and hand out the step's metrics."""
        if self._reflections:
            _, late = await asyncio.wait(set(self._reflections), timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        counts, self._counts = self._counts, Counter()
        seconds, self._memory_seconds = self._memory_seconds, 0.0
        embedding, self._embedding_seconds = self._embedding_seconds, 0.0
        return {
            "empo2/calls": counts["calls"],
            "empo2/tips_injected_per_call": counts["tips_injected"] / max(counts["searches"], 1),
            "empo2/tips_written": counts["tips_written"],
            "empo2/tips_refused": counts["tips_refused"],
            **{f"empo2/{name}": count for name, count in counts.items() if name.startswith("tips_refused/")},
            "empo2/reflections_failed": counts["reflections_failed"],
            "empo2/memory_failures": counts["memory_failures"],
            "empo2/tokenize_failures": counts["tokenize_failures"],
            "empo2/hit_rate": counts["hits"] / max(counts["searches"], 1),
            "empo2/memory_ms_per_call": 1000 * seconds / max(counts["calls"], 1),
            "empo2/embedding_ms_per_search": 1000 * embedding / max(counts["searches"], 1),
            "empo2/memory_size": await self.recall.size(),
        }

    def forget(self, rollout_id: str) -> None:
        """The trainer has read the rollout."""
        self._episodes.pop(rollout_id, None)

    def state(self) -> dict[str, int]:
        return {"episodes": len(self._episodes), "reflections": len(self._reflections)}
