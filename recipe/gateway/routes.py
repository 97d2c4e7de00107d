"""The routes under ``/empo2``, by which the trainer drains, pauses and saves (protocol.py), and ``/models``."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Response

from empo2.memory import EmbedderError, MemoryFileError
from empo2.recipe import protocol
from empo2.recipe.gateway import garbage, upstream
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.told_apart import Watched
from empo2.recipe.json_text import dumped

_MEMORY_ERRORS = (EmbedderError, MemoryFileError, sqlite3.Error, OSError, ValueError)
_COMMIT_SECONDS = 10  # for the visits of a step; most of it is waiting for another process that holds the file


def empo2_routes(
    services: Services, episodes: Episodes, reflector: Reflector, model_path: str, folder: Path
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

    @router.get(protocol.STATUSES)
    async def statuses() -> Response:
        return Response(dumped(upstream.statuses()), media_type="application/json")

    @router.post(protocol.SETTLE)
    @router.post(protocol.settle_route("{rollout_id}"))
    async def settle(rollout_id: str | None = None) -> protocol.Unsettled:
        late = await episodes.settle(rollout_id, protocol.SETTLE_SECONDS)
        return protocol.Unsettled(late=late, of_all=len(episodes.pending()))

    @router.post(protocol.DRAIN)
    async def drain(request: protocol.TimeLimit) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        end = loop.time() + request.timeout
        if services.gate.is_open:  # behind a closed one none is under way, and those that wait go on later
            await reflector.wait(request.timeout)
        await episodes.settle(None, max(0.0, end - loop.time()))
        await reflector.credit.conclude_pairs(upstream.unread_pairs())
        try:
            async with asyncio.timeout(_COMMIT_SECONDS):
                await memory.commit_visits()
        except (*_MEMORY_ERRORS, TimeoutError) as error:
            services.memory_failed(error)
        garbage.collect()
        alike = isinstance(memory.embedder, Watched) and memory.embedder.warned
        own = {"empo2/memory_size": memory.size, "empo2/states_alike": float(alike)}
        return services.metrics.drain() | services.traces.metrics() | own

    @router.post(protocol.PAUSE)
    async def pause(request: protocol.TimeLimit) -> protocol.PauseState:
        at_pause, under_way = await services.gate.close(request.timeout)
        return protocol.PauseState(at_pause=at_pause, under_way=under_way)

    @router.post(protocol.RESUME)
    async def resume() -> dict[str, str]:
        services.gate.open()
        return {"status": "ok"}

    @router.post(protocol.UPDATED)
    async def updated(request: protocol.UpdatedRequest) -> dict[str, str]:
        services.traces.updated(request.step, request.results)
        return {"status": "ok"}

    async def moved(action: Callable[[Path], Awaitable[None]], path: str) -> dict[str, str]:
        """Write or read a memory file below the folder, links resolved; an error becomes a response that says why.

        Of a file elsewhere it is not said whether it exists.
        """
        try:
            resolved = (folder / path).resolve()
            if not resolved.is_relative_to(folder) or resolved.suffix != ".sqlite":
                where = "`empo2 gateway --snapshots` names another folder"
                raise ValueError(f"must be a *.sqlite below {folder}; {where}")
            await action(resolved)
        except _MEMORY_ERRORS as error:
            raise HTTPException(409, detail=f"{path}: {error}") from None
        return {"path": path}

    @router.post(protocol.SNAPSHOT)
    async def snapshot(request: protocol.FileRequest) -> dict[str, str]:
        return await moved(memory.snapshot, request.path)

    @router.post(protocol.RESTORE)
    async def restore(request: protocol.FileRequest) -> dict[str, str]:
        return await moved(memory.restore, request.path)

    return router


def model_routes(name: str) -> APIRouter:
    """Return ``GET /models``, in a form that is OpenAI's and Anthropic's at once.

    It lists the served model, and knows it under whatever name an agent asks for, since every name reaches it.
    """
    router = APIRouter(prefix="/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai/v1")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name)], "has_more": False, "first_id": name, "last_id": name}

    @router.get("/models/{asked:path}")
    async def model(asked: str) -> dict[str, Any]:
        return _model(asked)

    return router


def _model(name: str) -> dict[str, Any]:
    openai = {"object": "model", "created": 0, "owned_by": "empo2"}
    anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return {"id": name, **openai, **anthropic}
