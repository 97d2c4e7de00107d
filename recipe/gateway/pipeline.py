"""The way of a request through the gateway: its stages, in the order in which they act."""

from collections.abc import Sequence
from functools import partial

import httpx
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from empo2.recipe import baselines
from empo2.recipe.gateway.episodes.episode import DirectChats, Episodes
from empo2.recipe.gateway.episodes.reflector import Reflector
from empo2.recipe.gateway.request import Answer, Next, Request, Stage
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.access import KeyCheck
from empo2.recipe.gateway.stages.aside import Aside
from empo2.recipe.gateway.stages.asked import AsAsked
from empo2.recipe.gateway.stages.dialect import Dialects, ErrorForms
from empo2.recipe.gateway.stages.direct_calls import DirectCalls
from empo2.recipe.gateway.stages.episode_ends import EpisodeEnds
from empo2.recipe.gateway.stages.events import Events
from empo2.recipe.gateway.stages.form import Form
from empo2.recipe.gateway.stages.gate import Gated
from empo2.recipe.gateway.stages.grammars import Grammars
from empo2.recipe.gateway.stages.limits import AgentLimits, CallLimits
from empo2.recipe.gateway.stages.memory import MemoryCalls
from empo2.recipe.gateway.stages.normal_form import NormalForm
from empo2.recipe.gateway.stages.rollout_ends import RolloutEnds
from empo2.recipe.gateway.stages.side_calls import SideCalls
from empo2.recipe.gateway.stages.template import TemplateArguments
from empo2.recipe.gateway.stages.traced import AsSent, Traced
from empo2.recipe.gateway.stages.untrained import UntrainedCalls
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
    """
    settings = services.settings.gateway
    max_bytes = int(settings.max_request * 2**20)
    starts = baselines.asked_for(services.settings, "tasks.starts")
    chats = DirectChats(serving.tag) if serving and serving.tag else None
    traced = services.traces.are_sent
    return [
        *([DirectCalls()] if serving else []),  # /v1/... belongs to the one rollout of agents that have none
        ErrorForms(),  # errors are told as the API that was asked tells them
        KeyCheck(keys, services.metrics),  # who asks?
        *([Traced(services)] if traced else []),  # a span is opened
        Form(max_bytes),  # the body is read, here alone: size, JSON, chat
        AgentLimits(settings.max_rollout * 2**20, services.metrics),  # what may an agent send, and how much?
        UntrainedCalls(services, others),  # is it the policy's to learn from?
        Dialects(max_bytes, services),  # streams, /responses and /messages become chat completions
        CallLimits(settings, services.metrics),  # nothing that holds up the model servers
        Grammars(),  # none that ends them
        AsAsked(),  # no token ids and log-probs that only the training asked for
        NormalForm(),  # the same turn reads the same, whoever sends it
        TemplateArguments(services.settings.model.chat_template_kwargs),  # such as enable_thinking
        Aside(services),  # untrained calls, and prompts whose tokens are counted, go no further
        *([watch] if watch else []),  # `empo2 init` looks
        EpisodeEnds(services.settings.agent.most_calls, services.metrics),  # none goes on without end
        SideCalls(services, chosen=bool(services.settings.gateway.trained_calls) or serving is not None),  # titles
        Gated(services.gate),  # waits while the weights change
        Events(),  # what was recorded of a rollout
        *([starts.Starts(services)] if starts else []),  # an episode starts where an earlier one has been
        RolloutEnds(services, episodes, reflector),  # a rollout that ends is reflected on
        MemoryCalls(services, episodes, chats),  # tips go in, the call is recorded
        *([AsSent(services)] if traced else []),  # the span gets what is sent and answered
    ]


class Pipeline:
    """The ASGI middleware, the only one, that takes each request through the stages to the app."""

    def __init__(self, app: ASGIApp, stages: Sequence[Stage]) -> None:
        self._app = app
        forward: Next = partial(_answer, app)
        for stage in reversed(stages):
            forward = partial(stage, forward=forward)
        self._first = forward

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
