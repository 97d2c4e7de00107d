"""Find the tips for a request, within what its chat may still carry."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from empo2.memory import Tip
from empo2.recipe import baselines
from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway.episodes.episode import Episode
from empo2.recipe.gateway.request import Body
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tips.injection import Block, ChatRequest, PromptRequest
from empo2.recipe.gateway.traces import Span
from empo2.recipe.messages import is_compaction
from empo2.recipe.tip_block import TIPS_HEADING, render_tips, tip_line


@dataclass
class TipSearch:
    """The result of looking up tips for a request."""

    state: str = ""  # the text of the current state; empty where the request has none
    embedding: np.ndarray | None = None  # of the state, [dimension]; None if no tips were looked up
    request: ChatRequest | None = None  # the request with the tips in it; None if the rollout does not use tips
    hit: bool = False  # True if tips were looked up, and the request has some


async def find_tips(services: Services, episode: Episode, body: Body) -> TipSearch:
    """Read the request's state and, for a memory rollout, put tips into its newest turn.

    A request for a summary of the chat has no state, and gets none.
    """
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        state = services.state.of_chat(messages)
    elif isinstance(prompt, str):
        state = services.state.of_prompt(prompt)
    else:
        return TipSearch()  # token ids, or an invalid request, which the app refuses
    episode.with_tools |= bool(body.get("tools"))
    if is_compaction(body, with_tools=episode.with_tools):
        state = ""
    if not episode.tag.memory:
        return TipSearch(state)
    request = (
        ChatRequest(episode.tips, messages) if isinstance(messages, list) else PromptRequest(episode.tips, str(prompt))
    )
    embedding, hit, turns = None, False, services.settings.memory.searched
    takes_tips = request.takes_tips and state and not (turns == "user-turns" and request.of_tool)
    if takes_tips and turns == "first-turn" and episode.tips.first is not None:
        if not request.carried:  # another chat, such as of an agent that sends the newest turns alone
            request.put(episode.tips.first)
    elif takes_tips:
        carried = [tip.text for block in request.carried for tip in block.tips]
        room = services.settings.memory.episode_tokens - _tokens(request) - _line_tokens(services, TIPS_HEADING) - 1
        block = Block()
        if room > 0:
            with services.traces.memory(names.SEARCH, episode.rollout_id, episode.tag) as span:
                span.tell({names.QUERY: state})
                block, embedding = await _search(services, episode, state, carried, room, span)
                span.set({names.TIPS_SHOWN: len(block.tips), names.TIP_IDS: [tip.id for tip in block.tips]})
                span.tell({names.RECORDS: [services.shown(tip.text) for tip in block.tips]})
            hit = bool(carried or block.tips)
            episode.hits += hit
            services.metrics.counts["hits"] += hit
        request.put(block)
        episode.tips.first = episode.tips.first or block
        if request.newest is block:
            episode.shown.update(tip.id for tip in block.tips)
            services.metrics.counts["tips_injected"] += len(block.tips)
    episode.tip_tokens = max(episode.tip_tokens, _tokens(request))
    return TipSearch(state, embedding, request, hit)


def withdraw_tips(services: Services, episode: Episode, found: TipSearch, newest: Sequence[int]) -> None:
    """Take the tips out of all turns so far, and take back what `find_tips` has counted.

    Args:
        newest: ids of those of the newest turn, which the policy has not seen.
    """
    counts = services.metrics.counts
    episode.tips.withdraw()
    episode.shown -= Counter(newest)
    episode.hits -= found.hit
    counts["tips_withdrawn"] += 1
    counts["tips_injected"] -= len(newest)
    counts["hits"] -= found.hit


async def _search(
    services: Services, episode: Episode, state: str, carried: Sequence[str], room: int, span: Span
) -> tuple[Block, np.ndarray | None]:
    """Find tips beside those that the request carries, within ``room`` tokens; also return the embedding."""
    memory, metrics = services.memory, services.metrics
    metrics.counts["searches"] += 1
    episode.searches += 1
    settings, embedding = services.settings.memory, None
    started = time.perf_counter()
    try:
        async with asyncio.timeout(settings.deadline / 1000):
            embedding = await memory.embed(state, urgent=True)
            metrics.embedding_seconds += time.perf_counter() - started
            tips = await memory.search(episode.tag.scope, embedding, exclude=carried)
        span.set({names.RECORD_COUNT: len(tips)})
        if judge := baselines.asked_for(services.settings, "memory.judged"):
            tips = await judge.relevant_tips(services, episode.rollout_id, state, tips)
    except TimeoutError:
        metrics.counts["memory_late"] += 1
        span.fail("timeout")
        return Block(), embedding
    except Exception as error:
        services.memory_failed(error)
        span.fail(type(error).__name__)
        return Block(), embedding
    return _block(services, tips, room), embedding


def _block(services: Services, tips: Sequence[Tip], room: int) -> Block:
    """Render the tips that fit into ``room`` tokens, the best first."""
    shown, texts, left = [], [], room
    for tip in tips:
        text = services.shown(tip.text)
        tokens = _line_tokens(services, tip_line(text))
        if tokens <= left:
            shown.append(tip)
            texts.append(text)
            left -= tokens
    if not shown:
        return Block()
    return Block(render_tips(texts), tuple(shown), _line_tokens(services, TIPS_HEADING) + 1 + room - left)


def _line_tokens(services: Services, line: str) -> int:
    return services.tokenizer.count(f"{line}\n")


def _tokens(request: ChatRequest) -> int:
    return sum(block.tokens for block in request.carried)
