"""agent-lightning's gateway with a memory: its own app plus one ASGI middleware and the ``/empo2`` routes.

For rollouts that the trainer tagged (``metadata.empo2``) the middleware shows tips in their requests, records one
``empo2_call`` event beside each of agent-lightning's ``model_request`` events, and asks for a tip when they end.
"""

import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import APIRouter, Depends, FastAPI, HTTPException

from empo2.memory import EmbedderError, MemoryFileError, MemoryService
from empo2.recipe import protocol
from empo2.recipe.config import Settings
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.credit import TipCredit
from empo2.recipe.gateway.episode import Episodes
from empo2.recipe.gateway.memory import open_memory
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.middleware import MemoryMiddleware
from empo2.recipe.gateway.reflector import Reflector
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tokenizer import tokenizer_of

log = structlog.get_logger()

_CALL_SECONDS = 300  # as agent-lightning's own client
_MEMORY_ERRORS = (EmbedderError, MemoryFileError, sqlite3.Error, OSError, ValueError)


def make_gateway(
    settings: Settings, *, model_path: str, key: str, memory_file: Path, memory: MemoryService | None = None
) -> FastAPI:
    """Return agent-lightning's app with EMPO²'s middleware and routes, to be served instead of ``agl-server``.

    Args:
        model_path: the name that the trainer registers its vLLM servers under, a resolved ``model.path``.
        key: the key that every caller must present; empty for none.
        memory_file: the run's memory, created if absent.
        memory: replaces the memory that the settings describe.

    Raises:
        OSError: the model's tokenizer cannot be read.
    """
    proxy = upstream.proxy_settings(settings.model, model_path)
    # Not agent-lightning's client: reflections would fill its pool of 100 connections, and agents would wait for them.
    external = settings.model.server is not None
    transport = upstream.OpenAITransport(os.environ.get("OPENAI_API_KEY")) if external else None
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), transport=transport, timeout=_CALL_SECONDS)
    services = Services(
        settings=settings,
        memory=memory or open_memory(settings, memory_file),
        servers=upstream.ModelServers(proxy, client),
        tokenizer=tokenizer_of(model_path, external=external),
        metrics=StepMetrics(),
    )
    episodes, credit = Episodes(), TipCredit(services)
    reflector = Reflector(services, credit)
    app = upstream.agent_lightning_app(proxy, key)
    app.add_middleware(MemoryMiddleware, services=services, episodes=episodes, reflector=reflector, key=key)
    routes = _routes(services, episodes, reflector, credit, model_path)
    app.include_router(routes, dependencies=[Depends(upstream.authentication(key))])
    upstream_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with upstream_lifespan(app) as state, client:
            if external:
                upstream.send_by(app, client)
            try:
                yield state
            finally:
                await reflector.wait(settings.reflection.timeout)
                await services.memory.close()

    app.router.lifespan_context = lifespan
    return app


def _routes(
    services: Services, episodes: Episodes, reflector: Reflector, credit: TipCredit, model_path: str
) -> APIRouter:
    router, memory, model = APIRouter(tags=["empo2"]), services.memory, services.settings.model

    @router.get(protocol.STATE)
    async def state() -> protocol.GatewayState:
        return protocol.GatewayState(
            model=model_path,
            memory_size=await memory.size(),
            episodes=len(episodes),
            reflections=len(reflector),
            temperature=model.temperature,
            val_temperature=model.val_temperature,
        )

    @router.post(protocol.settle_route("{rollout_id}"))
    async def settle(rollout_id: str) -> dict[str, str]:
        await episodes.settle(rollout_id)
        return {"status": "ok"}

    @router.post(protocol.DRAIN)
    async def drain(request: protocol.DrainRequest) -> dict[str, float]:
        await reflector.wait(request.timeout)
        await episodes.settle_all(request.timeout)
        await credit.conclude_pairs()
        try:
            await memory.commit_visits()
        except _MEMORY_ERRORS as error:
            log.error("the memory failed", error=str(error))
            services.metrics.counts["memory_failures"] += 1
        return services.metrics.drain() | {"empo2/memory_size": await memory.size()}

    @router.post(protocol.SNAPSHOT)
    async def snapshot(request: protocol.FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await memory.snapshot(Path(request.path))
        return {"path": request.path}

    @router.post(protocol.RESTORE)
    async def restore(request: protocol.FileRequest) -> dict[str, str]:
        with _refusing(request.path):
            await memory.restore(Path(request.path))
        return {"path": request.path}

    return router


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turn an error of the memory into a response that says why."""
    try:
        yield
    except _MEMORY_ERRORS as error:
        raise HTTPException(409, detail=f"{path}: {error}") from None
