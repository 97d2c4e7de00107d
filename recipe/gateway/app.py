"""The gateway: agent-lightning's app behind EMPO²'s pipeline, and beside it the routes under ``/empo2``."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
from fastapi import FastAPI

from empo2.memory import MemoryService
from empo2.recipe import baselines, protocol
from empo2.recipe.config import Settings
from empo2.recipe.gateway import garbage, server_client, upstream
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.pipeline import Pipeline, stages
from empo2.recipe.gateway.request import Stage
from empo2.recipe.gateway.routes import empo2_routes, model_routes
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.gateway.tokens.tokenizer import tokenizer_of
from empo2.recipe.gateway.traces import Traces

log = structlog.get_logger()

_CLOSE_SECONDS = 5
_TRACES_SECONDS = 2  # to send what is left of the spans
_SWEEP_SECONDS = 60
_LIFETIME_SECONDS = 86_400  # a trainer that was killed leaves its rollouts behind


def make_gateway(
    settings: Settings,
    *,
    model_path: str,
    keys: protocol.Keys,
    folder: Path,
    memory: MemoryService,
    serving: protocol.Serving | None = None,
    watch: Stage | None = None,
) -> FastAPI:
    """Return agent-lightning's app with EMPO²'s pipeline and routes, to be served instead of ``agl-server``.

    Args:
        model_path: the name that the trainer registers its vLLM servers under, a resolved ``model.path``.
        keys: what callers must present; empty for none.
        folder: below it, and nowhere else, snapshots are written and restored.
        memory: closed with the app.
        serving: how agents are answered that have no rollout; None if there are none.
        watch: stage that sees each call that the policy answers, in the form of a chat completion or completion.

    Raises:
        OSError: the model's tokenizer cannot be read.
        ConfigError: ``gateway.trained_calls`` names a function that cannot be imported; as `traces_endpoint`.
    """
    proxy = upstream.proxy_settings(settings.model, model_path)
    external = settings.model.server is not None
    tokenizer = tokenizer_of(model_path, external=external)
    traces = Traces(settings, folder.resolve().name, tokenizer.special_tokens)
    key = os.environ.get("OPENAI_API_KEY") if external else protocol.model_key(keys.admin)
    client = server_client.ServerClient(
        {"Authorization": f"Bearer {key}"} if key else {},
        traces.headers,
        left_out=server_client.NOT_OPENAI if external else (),
    )
    others = httpx.AsyncClient(transport=server_client.Network(), timeout=server_client.CALL_SECONDS)
    services = Services(
        settings=settings,
        memory=memory,
        servers=upstream.ModelServers(proxy, client),
        tokenizer=tokenizer,
        state=StateReader(settings.memory),
        traces=traces,
    )
    episodes, reflector = Episodes(), Reflector(services)
    app = upstream.agent_lightning_app(proxy, keys.admin)
    app.include_router(model_routes(serving.name if serving else model_path))
    app.include_router(empo2_routes(services, episodes, reflector, model_path, folder.resolve()))
    critic = baselines.asked_for(settings, "critic.path")
    picks = critic.Reranking(services) if critic else None
    completions = upstream.Completions(
        app, services.servers, trained=serving is None, counts=services.metrics.counts, paper=picks
    )
    way = stages(
        services, keys=keys, episodes=episodes, reflector=reflector, others=others, serving=serving, watch=watch
    )
    inside = app.build_middleware_stack
    app.build_middleware_stack = lambda: Pipeline(inside(), [*way, completions])  # before FastAPI's own middlewares
    upstream_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with upstream_lifespan(app) as state, client, others:
            sweeping = asyncio.create_task(_sweep(services, episodes))
            try:
                yield state
            finally:
                sweeping.cancel()
                await reflector.wait(_CLOSE_SECONDS)
                try:
                    await asyncio.wait_for(services.memory.close(), _CLOSE_SECONDS)
                except Exception as error:  # such as of a full disk, or too late: spans can be sent all the same
                    services.memory_failed(error)
                await traces.close(_TRACES_SECONDS)

    app.router.lifespan_context = lifespan
    return app


async def _sweep(services: Services, episodes: Episodes) -> None:
    """Drop forgotten rollouts, and garbage, from time to time, without end."""
    while True:
        await asyncio.sleep(min(_SWEEP_SECONDS, _LIFETIME_SECONDS))
        garbage.collect_if_grown()
        if dropped := episodes.drop_unchanged(_LIFETIME_SECONDS):
            log.warning(f"{dropped} rollouts dropped: nobody has changed or deleted them for a day")
            services.metrics.counts["rollouts_expired"] += dropped
