"""Answer evaluation calls with the best of several samples, by the policy's probability and a critic.

That is Retrospex's rescoring, as in its code. It happens where agent-lightning sends a call, so all that it records of
the call, token ids among them, is of the chosen sample. Training calls pass unchanged, since the policy would not have
sampled what is chosen.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import structlog
from starlette.responses import Response

from empo2.memory import BatchingEmbedder, EmbedderError, SentenceEmbedder
from empo2.recipe.baselines.retrospex.critic import load_critic
from empo2.recipe.config import CriticSettings, Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import Body, Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.messages import reply_of, spoken

log = structlog.get_logger()

_step: ContextVar[int | None] = ContextVar("step", default=None)  # of the evaluation call that this task serves


def facts(settings: Settings, memory: str) -> dict[str, Any]:
    """Return what decides the re-ranking of an evaluation with this --memory, the critic's checksum included.

    Raises:
        ConfigError: as `load_critic`; or tips are shown, which would be part of the states that the critic sees.
    """
    path = str(settings.critic.path)
    if memory != "off":
        raise ConfigError(f"--memory {memory}: critic.path={path!r} needs --memory off; its states have no tips")
    load_critic(path, settings.memory)
    checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {**settings.critic.model_dump(), "path": str(Path(path).absolute()), "sha256": checksum}


def summary(metrics: Mapping[str, float]) -> str:
    """Return one line on the calls that the critic has ranked."""
    calls, changed, failures = (int(metrics.get(f"empo2/critic/{n}", 0)) for n in ("calls", "changed", "failures"))
    failed = f"; it FAILED in {failures:,}, answered by the first sample (gateway.log)" if failures else ""
    return f"critic  ranked the samples of {calls:,} calls, {changed:,} answers are not the most probable{failed}"


class Reranking(httpx.AsyncBaseTransport):
    """Sends an evaluation call as one for several samples, and returns the best of them as the only one.

    It is the transport by which the app sends the agents' calls, and the last stage before the app, where it reads the
    step of the call.

    An agent that asks for several samples itself gets them unchanged. ``usage`` stays that of all samples. Counted are
    ``critic/calls``, ``critic/changed`` (the answer is not the most probable sample) and ``critic/failures`` (it is the
    first one, because samples had no log-probs or an embedding failed).

    Args:
        transport: sends the requests; it is not closed.

    Raises:
        ConfigError: as `load_critic`; or its embedder does not load.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, services: Services) -> None:
        self._settings, memory = services.settings.critic, services.settings.memory
        self._critic = load_critic(str(self._settings.path), memory)
        try:
            embedder = SentenceEmbedder(memory.embedder, device=memory.embedder_device)
        except EmbedderError as error:
            raise ConfigError(f"memory.embedder={memory.embedder!r}: {error}") from None
        self._embedder = BatchingEmbedder(embedder, memory.embedder_threads, accelerated=memory.accelerated)
        self._transport, self._state, self._counts = transport, services.state, services.metrics.counts

    async def __call__(self, request: Request, forward: Next) -> Response:
        """Note the step of an evaluation call: the answered calls before it."""
        evaluation = request.is_completion and request.mode == "val"
        token = _step.set(upstream.answered_calls(request.rollout_id, request.attempt_id) if evaluation else None)
        try:
            return await forward(request)
        finally:
            _step.reset(token)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        step = _step.get()
        body = json.loads(request.content) if step is not None else {}
        if step is None or body.get("n") not in (None, 1):
            return await self._transport.handle_async_request(request)
        log_probs = {} if body.get("logprobs") else {"logprobs": True if "messages" in body else 1}
        asked = {**body, "n": self._settings.samples, **log_probs}
        sent = httpx.Request(request.method, request.url, json=asked, extensions=request.extensions)
        response = await self._transport.handle_async_request(sent)
        await response.aread()
        if response.status_code != 200:
            return httpx.Response(response.status_code, headers=response.headers, content=response.content)
        answer = response.json()
        chosen = answer["choices"][await self._best(step, body, answer["choices"])]
        if log_probs:
            chosen["logprobs"] = None
        return httpx.Response(200, json={**answer, "choices": [{**chosen, "index": 0}]})

    async def aclose(self) -> None:
        await self._embedder.close()

    async def _best(self, step: int, body: Body, choices: Sequence[Body]) -> int:
        self._counts["critic/calls"] += 1
        try:
            probabilities = np.array([probability(choice) for choice in choices])
            scores = ranking_scores(probabilities, await self._values(body, choices), weight(self._settings, step))
        except Exception as error:  # the agent's call goes on
            log.error("the critic failed", error=described(error))
            self._counts["critic/failures"] += 1
            return 0
        best = int(scores.argmax())
        self._counts["critic/changed"] += _text(choices[best]) != _text(choices[int(probabilities.argmax())])
        return best

    async def _values(self, body: Body, choices: Sequence[Body]) -> np.ndarray:
        task, state = self._state.task_and_state(body)
        texts = [task, state, *(_text(choice)[: self._critic.facts["state_characters"]] for choice in choices)]
        keys = await asyncio.gather(*(self._embedder.embed(text, urgent=True) for text in texts))
        return self._critic.values(keys[0], keys[1], keys[2:])


def probability(choice: Body) -> float:
    """Return exp of the mean log-prob of a sample's tokens.

    Raises:
        LookupError, TypeError: the server has not given them.
    """
    found = choice["logprobs"]
    listed = [token["logprob"] for token in found["content"]] if "content" in found else found["token_logprobs"]
    return float(np.exp(np.mean(listed)))


def weight(settings: CriticSettings, step: int) -> float:
    """Return λ_t = max(b, d^t), the weight of the policy's own probability in step t, from 0."""
    return max(settings.least_weight, settings.decay**step)


def ranking_scores(probabilities: np.ndarray, values: np.ndarray, weight: float) -> np.ndarray:
    """Return λ p̂ + (1 - λ) Q̂ of each sample, where p̂ and Q̂ are scaled to 0...1 over the samples."""
    return weight * _scaled(probabilities) + (1 - weight) * _scaled(values)


def _scaled(values: np.ndarray) -> np.ndarray:
    """Return min-max scaled values; 0.5 if all are equal, as Retrospex's WebShop code."""
    width = np.ptp(values)
    return (values - values.min()) / width if width > 0 else np.full(len(values), 0.5)


def _text(choice: Body) -> str:
    return spoken(reply_of({"choices": [choice]}) or {})
