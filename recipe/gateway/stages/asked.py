"""Leave out of an answer what the agent did not ask for."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.request import Answer, Body, Next, Request

_IDS = ("prompt_token_ids", "token_ids")


class AsAsked:
    """Stand behind the dialects: the agent gets token ids and log-probs only if it asked for them itself.

    agent-lightning asks for them in its place, and its event keeps them, for the training rows.
    """

    async def __call__(self, request: Request, forward: Next) -> Response:
        answer = await forward(request)
        if not (request.is_completion and answer.status_code == 200 and isinstance(answer, Answer)):
            return answer
        if not (unasked := _unasked(request.body)) or answer.value is None:
            return answer
        return Answer.of(_without(answer.value, unasked))


def _unasked(body: Body) -> set[str]:
    wanted = body.get("logprobs")
    # Of a completion it is a number, and 0 asks for the sampled token's.
    log_probs = () if wanted or (wanted == 0 and wanted is not False) else ("logprobs",)
    return {*log_probs, *(() if body.get("return_token_ids") else _IDS)}


def _without(completion: Body, names: set[str]) -> Body:
    """Return a completion without these fields; what others hold of it is not changed."""
    choices: Any = completion.get("choices")
    if isinstance(choices, list):
        choices = [_cut(choice, names) if isinstance(choice, dict) else choice for choice in choices]
        completion = {**completion, "choices": choices}
    return _cut(completion, names)


def _cut(value: Mapping[str, Any], names: set[str]) -> Body:
    kept = {name: each for name, each in value.items() if name not in names}
    return kept | ({"logprobs": None} if "logprobs" in names & value.keys() else {})
