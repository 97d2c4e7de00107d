"""agent-lightning's gateway with a memory: its own app plus one ASGI middleware and the ``/empo2`` routes.

For rollouts that the trainer tagged (``metadata.empo2``) the middleware shows tips in their requests, records one
``empo2_call`` event beside each of agent-lightning's ``model_request`` events, and asks for a tip when they end.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import APIRouter, FastAPI, HTTPException

from empo2.memory import EmbedderError, MemoryFileError, MemoryService
from empo2.recipe import protocol
from empo2.recipe.config import Settings
from empo2.recipe.critic.model import load_critic
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.dialects.translator import Translator
from empo2.recipe.gateway.episodes.credit import TipCredit
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.middleware import MemoryMiddleware
from empo2.recipe.gateway.reranking import EvaluationSteps, Reranking
from empo2.recipe.gateway.serve.count_tokens import TokenCounter
from empo2.recipe.gateway.serve.direct_calls import DirectCalls, DirectChats
from empo2.recipe.gateway.serve.models import model_routes
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.access import KeyCheck
from empo2.recipe.gateway.stages.gate import GatedCalls
from empo2.recipe.gateway.stages.guard import RequestGuard
from empo2.recipe.gateway.stages.other_calls import OtherCalls
from empo2.recipe.gateway.stages.trained_calls import choice_of
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.gateway.tokens.tokenizer import tokenizer_of

log = structlog.get_logger()

_NO_LIMIT = httpx.Limits(max_connections=None)
_CALL_SECONDS = 300  # as agent-lightning's own client
_MEMORY_ERRORS = (EmbedderError, MemoryFileError, sqlite3.Error, OSError, ValueError)
_COMMIT_SECONDS = 10  # for the visits of a step; most of it is waiting for another process that holds the file
_CLOSE_SECONDS = 5
_SWEEP_SECONDS = 60


def make_gateway(
    settings: Settings,
    *,
    model_path: str,
    keys: protocol.Keys,
    folder: Path,
    memory: MemoryService,
    serving: protocol.Serving | None = None,
) -> FastAPI:
    """Return agent-lightning's app with EMPO²'s middleware and routes, to be served instead of ``agl-server``.

    Args:
        model_path: the name that the trainer registers its vLLM servers under, a resolved ``model.path``.
        keys: what callers must present; empty for none.
        folder: below it, and nowhere else, snapshots are written and restored.
        memory: closed with the app.
        serving: how agents are answered that have no rollout; None if there are none.

    Raises:
        OSError: the model's tokenizer cannot be read.
        ConfigError: ``gateway.trained_calls`` names a function that cannot be imported; ``critic.path`` no critic.
    """
    proxy = upstream.proxy_settings(settings.model, model_path)
    # Not agent-lightning's client: reflections would fill its pool of 100 connections, and agents would wait for them.
    external = settings.model.server is not None
    transport = partial(upstream.OpenAITransport, os.environ.get("OPENAI_API_KEY")) if external else _transport
    client = httpx.AsyncClient(transport=transport(), timeout=_CALL_SECONDS)
    services = Services(
        settings=settings,
        memory=memory,
        servers=upstream.ModelServers(proxy, client),
        tokenizer=tokenizer_of(model_path, external=external),
        metrics=StepMetrics(),
        state=StateReader(settings.memory),
    )
    episodes, credit = Episodes(), TipCredit(services)
    reflector = Reflector(services, credit)
    app = upstream.agent_lightning_app(proxy, keys.admin)
    app.include_router(model_routes(serving.name if serving else model_path))
    app.include_router(_routes(services, episodes, reflector, credit, model_path, folder.resolve()))
    ranking = None
    if settings.critic.path is not None:
        critic = load_critic(settings.critic.path, settings.memory)
        reranking = Reranking(
            transport(), settings.critic, critic, memory=memory, state=services.state, counts=services.metrics.counts
        )
        ranking = httpx.AsyncClient(transport=reranking, timeout=_CALL_SECONDS)
        app.add_middleware(EvaluationSteps)
    # The one added last is asked first.
    chats = DirectChats(serving.tag) if serving and serving.tag else None
    app.add_middleware(MemoryMiddleware, services=services, episodes=episodes, reflector=reflector, chats=chats)
    app.add_middleware(GatedCalls, gate=services.gate)
    max_bytes = int(settings.gateway.max_request * 2**20)
    app.add_middleware(Translator, max_bytes=max_bytes)
    app.add_middleware(TokenCounter, servers=services.servers)
    others = httpx.AsyncClient(transport=_transport(), timeout=_CALL_SECONDS)
    app.add_middleware(
        OtherCalls,
        trained=choice_of(settings.gateway.trained_calls),
        servers=services.servers,
        gate=services.gate,
        other=settings.gateway.other_server,
        client=others,
        counts=services.metrics.counts,
    )
    app.add_middleware(RequestGuard, max_bytes=max_bytes)
    app.add_middleware(KeyCheck, keys=keys)
    if serving:
        app.add_middleware(DirectCalls)
    upstream_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with upstream_lifespan(app) as state, client, others, ranking or contextlib.nullcontext():
            if ranking is not None or external:
                upstream.send_by(app, ranking or client)
            if serving:
                upstream.serve_agents(app, proxy)
            sweeping = asyncio.create_task(_sweep(services, episodes))
            try:
                yield state
            finally:
                sweeping.cancel()
                await reflector.wait(_CLOSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(services.memory.close(), _CLOSE_SECONDS)

    app.router.lifespan_context = lifespan
    return app


def _transport() -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(limits=_NO_LIMIT)


async def _sweep(services: Services, episodes: Episodes) -> None:
    """Drop forgotten rollouts from time to time, without end."""
    lifetime = services.settings.gateway.rollout_lifetime
    while True:
        await asyncio.sleep(min(_SWEEP_SECONDS, lifetime))
        if dropped := episodes.drop_unchanged(lifetime):
            log.warning(f"{dropped} rollouts dropped: no change for gateway.rollout_lifetime={lifetime} seconds")
            services.metrics.counts["rollouts_expired"] += dropped


def _routes(
    services: Services, episodes: Episodes, reflector: Reflector, credit: TipCredit, model_path: str, folder: Path
) -> APIRouter:
    router, memory, settings = APIRouter(tags=["empo2"]), services.memory, services.settings

    @router.get(protocol.STATE)
    async def state() -> protocol.GatewayState:
        return protocol.GatewayState(
            model=model_path,
            memory_size=memory.size,
            episodes=len(episodes),
            reflections=len(reflector),
            temperature=settings.model.temperature,
            val_temperature=settings.model.val_temperature,
            success_return=settings.algorithm.success_return,
            failure_return=settings.algorithm.failure_return,
            episode_tokens=settings.memory.episode_tokens,
            progress=services.metrics.progress(),
        )

    @router.post(protocol.settle_route("{rollout_id}"))
    async def settle(rollout_id: str) -> dict[str, str]:
        await episodes.settle(rollout_id)
        return {"status": "ok"}

    @router.post(protocol.DRAIN)
    async def drain(request: protocol.DrainRequest) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        end = loop.time() + request.timeout
        if services.gate.is_open:  # behind a closed one none is under way, and those that wait go on later
            await reflector.wait(request.timeout)
        await episodes.settle_all(max(0.0, end - loop.time()))
        await credit.conclude_pairs(upstream.unread_pairs())
        try:
            async with asyncio.timeout(_COMMIT_SECONDS):
                await memory.commit_visits()
        except (*_MEMORY_ERRORS, TimeoutError) as error:
            log.error("the memory failed", error=described(error))
            services.metrics.counts["memory_failures"] += 1
        return services.metrics.drain() | {"empo2/memory_size": memory.size}

    @router.post(protocol.PAUSE)
    async def pause(request: protocol.PauseRequest) -> protocol.PauseState:
        at_pause, under_way = await services.gate.close(request.timeout)
        return protocol.PauseState(at_pause=at_pause, under_way=under_way)

    @router.post(protocol.RESUME)
    async def resume() -> dict[str, str]:
        services.gate.open()
        return {"status": "ok"}

    @router.post(protocol.SNAPSHOT)
    async def snapshot(request: protocol.FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await memory.snapshot(_below(folder, request.path))
        return {"path": request.path}

    @router.post(protocol.RESTORE)
    async def restore(request: protocol.FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await memory.restore(_below(folder, request.path))
        return {"path": request.path}

    return router


def _below(folder: Path, path: str) -> Path:
    """Return the path of a memory file below the folder, links resolved.

    Raises:
        ValueError: it is elsewhere, or its name does not end with .sqlite. Whether it exists is not said.
    """
    resolved = (folder / path).resolve()
    if not resolved.is_relative_to(folder) or resolved.suffix != ".sqlite":
        raise ValueError(f"must be a *.sqlite below {folder}; `empo2 gateway --snapshots` names another folder")
    return resolved


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turn an error of the memory into a response that says why."""
    try:
        yield
    except _MEMORY_ERRORS as error:
        raise HTTPException(409, detail=f"{path}: {error}") from None
