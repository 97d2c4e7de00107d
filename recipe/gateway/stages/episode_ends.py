"""End episodes that would go on without end."""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.episodes.call import is_too_long
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.request import SERVED, Answer, Next, Request, refusal

# Refusals as too long, one after another: Claude Code sends less and less five times, and then it fits.
_IN_A_ROW = 8
# No words of a refusal as too long: agents would compact the chat and ask again.
_ENDED = {
    "most_calls": "the episode has ended: it has made agent.most_calls={most} calls; raise that setting for more",
    "too_long": "the episode has ended: its chat has outgrown the model again",
}


@dataclass
class _Calls:
    """The calls of an attempt.

    `overflows` are refusals as too long after an answer, `in_a_row` those since it, `answered` the answers since one.
    """

    made: int = 0
    overflows: int = 0
    in_a_row: int = 0
    answered: int = 0
    ended: str = ""


class EpisodeEnds:
    """Answer 400 to every call of an episode that has made ``agent.most_calls``, or whose chat was too long twice.

    Agents compact a chat that is refused as too long, and go on; where the next one is refused too, they compact again
    and again, 200 times a minute. After eight answers it may be too long again. Each episode that is ended is counted
    as ``episodes_ended/REASON``.
    """

    def __init__(self, most: int, metrics: StepMetrics) -> None:
        self._most = most
        self._metrics = metrics
        self._calls = upstream.PerRollout(partial(defaultdict[str, _Calls], _Calls))  # by rollout and attempt

    async def __call__(self, request: Request, forward: Next) -> Response:
        if request.rollout_id == SERVED:
            return await forward(request)
        calls = self._calls[request.rollout_id][request.attempt_id]
        if not calls.ended and calls.made >= self._most:
            self._end(calls, "most_calls")
        if calls.ended:
            return refusal(400, _ENDED[calls.ended].format(most=self._most))
        calls.made += 1
        answer = await forward(request)
        if answer.status_code == 200:
            calls.in_a_row, calls.answered = 0, calls.answered + 1
        elif answer.status_code == 400 and isinstance(answer, Answer) and is_too_long(answer.value):
            if calls.answered >= _IN_A_ROW:
                calls.overflows = 0
            calls.overflows += not calls.in_a_row
            calls.in_a_row, calls.answered = calls.in_a_row + 1, 0
            if not calls.ended and (calls.overflows == 2 or calls.in_a_row == _IN_A_ROW):
                self._end(calls, "too_long")
        return answer

    def _end(self, calls: _Calls, reason: str) -> None:
        calls.ended = reason
        self._metrics.counts[f"episodes_ended/{reason}"] += 1
