"""Answer calls beside the main chat, such as for a title or a commit message; they leave no trace in a rollout.

So do calls that compact the chat, if ``gateway.compaction`` says so.
"""

from starlette.responses import Response

from empo2.recipe.gateway.request import Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.stages.aside import untrained
from empo2.recipe.gateway.upstream import PerRollout
from empo2.recipe.messages import is_beside, is_compaction


class SideCalls:
    """Leave out of training what an agent that offers tools asks without any, in a chat of one turn.

    Before a rollout's first call with tools nothing tells such a call: it passes, and the trainer leaves it out
    (`rollout_calls.main_calls`). Rules of ``gateway.trained_calls`` take the place of this one.
    """

    def __init__(self, services: Services, *, chosen: bool) -> None:
        self._services = services
        self._chosen = chosen  # by the user's rules
        self._with_tools = PerRollout(bool)

    async def __call__(self, request: Request, forward: Next) -> Response:
        if self._chosen or not request.is_completion:
            return await forward(request)
        self._with_tools[request.rollout_id] |= bool(request.body.get("tools"))
        with_tools = self._with_tools[request.rollout_id]
        if is_compaction(request.body, with_tools=with_tools):
            self._services.metrics.counts["compaction_calls"] += 1
            if self._services.settings.gateway.compaction == "trained":
                return await forward(request)
        elif with_tools and is_beside(request.body):
            self._services.metrics.counts["side_calls"] += 1
        else:
            return await forward(request)
        return await untrained(self._services, request)
