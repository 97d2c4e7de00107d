"""Answer calls beside the main chat, such as for a title or a commit message; they leave no trace in a rollout.

So do calls that compact the chat, if ``gateway.compaction`` says so.
"""

import httpx
from starlette.responses import Response

from empo2.recipe.gateway import trace_names as names
from empo2.recipe.gateway.request import Answer, Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.errors import unanswered
from empo2.recipe.gateway.stages.limits import checked
from empo2.recipe.gateway.upstream import NoServersError, rollout_of
from empo2.recipe.messages import is_beside, is_compaction

_SECONDS = 300  # as the agents' own calls


class SideCalls:
    """Leave out of training what an agent that offers tools asks without any, in a chat of one turn.

    Before a rollout's first call with tools nothing tells such a call: it passes, and the trainer leaves it out
    (`rollout_calls.main_calls`). Rules of ``gateway.trained_calls`` take the place of this one.
    """

    def __init__(self, services: Services, *, chosen: bool) -> None:
        self._services = services
        self._chosen = chosen  # by the user's rules
        self._with_tools: set[str] = set()  # rollouts

    async def __call__(self, request: Request, forward: Next) -> Response:
        if self._chosen or not request.is_completion:
            return await forward(request)
        if request.body.get("tools") and request.rollout_id not in self._with_tools:
            self._with_tools = {each for each in self._with_tools if rollout_of(each)} | {request.rollout_id}
        with_tools = request.rollout_id in self._with_tools
        if is_compaction(request.body, with_tools=with_tools):
            self._services.metrics.counts["compaction_calls"] += 1
            if self._services.settings.gateway.compaction == "trained":
                return await forward(request)
        elif with_tools and is_beside(request.body):
            self._services.metrics.counts["side_calls"] += 1
        else:
            return await forward(request)
        body = checked(request).body
        span = self._services.traces.current()
        span.asked(body)
        span.set({names.TRAINED: False})
        try:
            async with self._services.gate:
                answer = await self._services.servers.post(
                    request.rollout_id, f"/{request.api}", body, timeout=_SECONDS
                )
        except (NoServersError, httpx.HTTPError) as error:
            return unanswered(error)
        return Answer(answer.content, answer.status_code)
