"""Ask the policy which of the tips found help in the current state, before they are shown."""

import asyncio
import re
from collections.abc import Sequence

from empo2.memory import Tip
from empo2.recipe.gateway.services import Services
from empo2.recipe.messages import reply_of, spoken

_SECONDS = 60  # the agent's call waits
_TOKENS = 4  # of the answer


async def relevant_tips(services: Services, rollout_id: str, state: str, tips: Sequence[Tip]) -> list[Tip]:
    """Return the tips of which the policy says that they help in this state; it is asked of each, at temperature 0.

    Raises:
        TimeoutError: no answer within a minute.
        httpx.HTTPError: the model server refuses.
    """
    async with asyncio.timeout(_SECONDS):
        helps = await asyncio.gather(*(_helps(services, rollout_id, state, tip) for tip in tips))
    services.metrics.counts["tips_judged/irrelevant"] += helps.count(False)
    return [tip for tip, shown in zip(tips, helps, strict=True) if shown]


async def _helps(services: Services, rollout_id: str, state: str, tip: Tip) -> bool:
    question = (
        f"A player is here:\n\n{state}\n\nThis note is from an earlier episode:\n\n{services.shown(tip.text)}\n\n"
        "Does the note help the player? Answer yes or no."
    )
    request = {"messages": [{"role": "user", "content": question}], "max_tokens": _TOKENS, "temperature": 0}
    response = await services.servers.post(rollout_id, "/chat/completions", request, timeout=_SECONDS)
    response.raise_for_status()
    return re.match(r"\W*yes\b", spoken(reply_of(response.json()) or {}), re.IGNORECASE) is not None
