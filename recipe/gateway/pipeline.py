"""The way of a request through the gateway: its stages, in the order in which they act."""

from collections.abc import Sequence
from functools import partial

import httpx
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.recipe import baselines
from empo2.recipe.gateway.episodes.episode import Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.normal_form import normal_form
from empo2.recipe.gateway.request import Answer, Next, Request, Stage
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.access import check_key
from empo2.recipe.gateway.stages.aside import SideCalls, aside
from empo2.recipe.gateway.stages.dialect import Dialects, as_asked, error_forms
from empo2.recipe.gateway.stages.direct_calls import DirectChats, direct_calls
from empo2.recipe.gateway.stages.episode_ends import EpisodeEnds
from empo2.recipe.gateway.stages.form import read_body
from empo2.recipe.gateway.stages.grammars import grammars
from empo2.recipe.gateway.stages.limits import AgentLimits, call_limits
from empo2.recipe.gateway.stages.memory import memory_calls
from empo2.recipe.gateway.stages.rollouts import events, rollout_ends
from empo2.recipe.gateway.stages.traced import as_sent, traced
from empo2.recipe.gateway.stages.untrained import choice_of, untrained_calls
from empo2.recipe.protocol import Keys, Serving


def stages(
    services: Services,
    *,
    keys: Keys,
    episodes: Episodes,
    reflector: Reflector,
    others: httpx.AsyncClient,
    serving: Serving | None,
    watch: Stage | None,
) -> list[Stage]:
    """Return what a request passes before agent-lightning's app, and its answer after it in the opposite order.

    Args:
        others: client of ``gateway.other_server``.
        serving: how agents are answered that have no rollout; None if there are none.
        watch: sees each call that the policy answers as the agent meant it; None for nobody.

    Raises:
        ConfigError: ``gateway.trained_calls`` names a function that cannot be imported.
    """
    settings, metrics = services.settings, services.metrics
    own, max_bytes = settings.gateway, int(settings.gateway.max_request * 2**20)
    starts = baselines.asked_for(settings, "tasks.starts")
    chats = DirectChats(serving.tag) if serving and serving.tag else None
    is_traced = services.traces.are_sent
    chosen = bool(own.trained_calls) or serving is not None  # what is trained is known without `SideCalls`
    return [
        *([direct_calls] if serving else []),  # /v1/... belongs to the one rollout of agents that have none
        error_forms,  # errors are told as the API that was asked tells them
        partial(check_key, keys, metrics),  # who asks?
        *([partial(traced, services)] if is_traced else []),  # a span is opened
        partial(read_body, max_bytes),  # the body is read, here alone: size, JSON, chat
        AgentLimits(own.max_rollout * 2**20, metrics),  # what may an agent send, and how much?
        partial(untrained_calls, services, choice_of(own.trained_calls), others),  # is it the policy's to learn from?
        Dialects(max_bytes, services),  # streams, /responses and /messages become chat completions
        for_completions(
            partial(call_limits, own, metrics),  # nothing that holds up the model servers
            grammars,  # none that ends them
            as_asked,  # no token ids and log-probs that only the training asked for
            partial(normal_form, settings.model.chat_template_kwargs),  # the same turn reads the same, whoever sends it
            partial(aside, services),  # untrained calls, and prompts whose tokens are counted, go no further
        ),
        *([watch] if watch else []),  # `empo2 init` looks
        events,  # what was recorded of a rollout
        *([starts.Starts(services)] if starts else []),  # an episode starts where an earlier one has been
        partial(rollout_ends, services, episodes, reflector),  # a rollout that ends is reflected on
        for_completions(
            EpisodeEnds(settings.agent.most_calls, metrics),  # none goes on without end
            *([] if chosen else [SideCalls(services)]),  # titles
            services.gate.hold,  # waits while the weights change
            partial(memory_calls, services, episodes, chats),  # tips go in, the call is recorded
            *([partial(as_sent, services)] if is_traced else []),  # the span gets what is sent and answered
        ),
    ]


def for_completions(*stages: Stage) -> Stage:
    """Return stages as one, which all other requests pass by."""

    async def stage(request: Request, forward: Next) -> Response:
        return await (_chained(stages, forward) if request.is_completion else forward)(request)

    return stage


def _chained(stages: Sequence[Stage], forward: Next) -> Next:
    """Return the way through the stages, and then on."""
    for stage in reversed(stages):
        forward = partial(stage, forward=forward)
    return forward


class Pipeline:
    """The ASGI middleware, the only one, that takes each request through the stages to the app."""

    def __init__(self, app: ASGIApp, stages: Sequence[Stage]) -> None:
        self._app = app
        self._first = _chained(stages, partial(_answer, app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            answer = await self._first(Request.of(scope, receive))
        except ClientDisconnect:
            return None
        await answer(scope, receive, send)


async def _answer(app: ASGIApp, request: Request) -> Answer:
    """Return the app's answer, whole."""
    start: Message = {}
    chunks: list[bytes] = []

    async def collect(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            chunks.append(message.get("body", b""))

    await app(*request.for_app(), collect)
    answer = Answer(b"".join(chunks), start["status"])
    answer.raw_headers = list(start["headers"])
    return answer
