"""Leave out of an answer what the agent did not ask for."""

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from empo2.recipe.gateway.request import Answer, Body, Next, Request


async def as_asked(request: Request, forward: Next) -> Response:
    """Stand behind the dialects: the agent gets token ids and log-probs only if it asked for them itself.

    agent-lightning asks for them in its place, and its event keeps them, for the training rows.
    """
    answer = await forward(request)
    unasked = _unasked(request.body)
    if not (unasked and isinstance(answer, Answer) and answer.status_code == 200 and answer.value is not None):
        return answer
    completion, choices = answer.value, answer.value.get("choices")
    if isinstance(choices, list):
        choices = [_without(unasked, choice) if isinstance(choice, dict) else choice for choice in choices]
        completion = {**completion, "choices": choices}  # a copy: others hold the choices, too
    return Answer.of(_without(unasked, completion))


def _unasked(body: Body) -> set[str]:
    wanted = body.get("logprobs")
    unasked = set() if body.get("return_token_ids") else {"prompt_token_ids", "token_ids"}
    # Of a completion it is a number, and 0 asks for the sampled token's.
    return unasked if wanted or (wanted == 0 and wanted is not False) else {*unasked, "logprobs"}


def _without(names: set[str], value: Mapping[str, Any]) -> Body:
    kept = {name: each for name, each in value.items() if name not in names}
    return kept | ({"logprobs": None} if "logprobs" in names & value.keys() else {})
