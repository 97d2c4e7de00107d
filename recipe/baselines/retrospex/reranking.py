"""Answer evaluation calls with the best of several samples, by the policy's probability and the critic's value."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import structlog

from empo2.recipe.config import CriticSettings
from empo2.recipe.errors import ConfigError
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import Body, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.messages import reply_of, spoken, text_of
from empo2.recipe.tip_block import without_tips

log = structlog.get_logger()

READS = ("embedder", "state", "state_characters")  # settings of ``memory`` that a critic is trained and asked with


def network(inputs: int) -> Any:
    """Return a network of one hidden layer, of ``inputs`` numbers of embeddings; the published one trains encodings."""
    from torch import nn

    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 1))


def smaller(twins: Any, inputs: Any) -> Any:
    """Return the smaller value of twin Q networks, [n], of embeddings of task, state and action, [n, 3 * dimension]."""
    return twins[0](inputs).minimum(twins[1](inputs))[:, 0]


def task_of(messages: Iterable[Body]) -> str:
    """Return the first message of the user, or ""."""
    return next((text_of(each.get("content")) for each in messages if each.get("role") == "user"), "")


def scores(settings: CriticSettings, step: int, probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return λ p̂ + (1 - λ) Q̂ of each sample, with λ = max(``least_weight``, ``decay``^step) and steps from 0.

    p̂ and Q̂ are scaled to 0...1 over the samples; all are 0.5 where they are equal, as in the published WebShop code.
    Its ScienceWorld code takes Q - V for Q, which is the same here: V does not depend on the action.
    """
    weight = max(settings.least_weight, settings.decay**step)
    return weight * _scaled(probabilities) + (1 - weight) * _scaled(values)


def _scaled(values: np.ndarray) -> np.ndarray:
    width = np.ptp(values)
    return (values - values.min()) / width if width > 0 else np.full(len(values), 0.5)


def probability(choice: Body) -> float:
    """Return exp of the mean log-prob of a sample's tokens; a LookupError or TypeError if the server gave none."""
    return float(np.exp(np.mean([token["logprob"] for token in choice["logprobs"]["content"]])))


class Reranking:
    """Ask for several samples and pass on the best one, before it is recorded.

    Training calls pass unchanged, since the policy would not have sampled what is chosen; so do those of an agent that
    asks for several itself. ``usage`` stays that of all samples. Counted are ``critic/calls``, ``critic/changed`` (the
    answer is not the most probable sample) and ``critic/failures`` (it is the first one). The constructor raises a
    ConfigError if ``critic.path`` has no critic, or one that was trained with other settings.
    """

    def __init__(self, services: Services) -> None:
        import torch

        self._services, self._settings = services, services.settings.critic
        key = f"critic.path={self._settings.path!r}"
        try:
            stored = torch.load(self._settings.path or "", weights_only=True)
            self._twins = torch.nn.ModuleList([network(len(stored["q"]["0.0.weight"][0])) for _ in range(2)])
            self._twins.load_state_dict(stored["q"])
        except Exception as error:  # what is no critic fails in many ways
            why = str(error).splitlines()[0]
            raise ConfigError(f"{key}: is no critic of recipe/baselines/retrospex/train.py ({why})") from None
        for name, value in stored["reads"].items():
            if value != (wanted := getattr(services.settings.memory, name)):
                raise ConfigError(f"{key}: was trained with memory.{name}={value!r}; this is {wanted!r}")

    def asked(self, request: Request) -> Body:
        """Return the body that asks for several samples, or that of a call that is not ranked."""
        return {**request.body, "n": self._settings.samples, "logprobs": True} if _ranked(request) else request.body

    async def picked(self, request: Request, response: Body, step: int) -> Body:
        """Return a response with the best of its samples alone; ``step`` is the number of calls before it."""
        if not _ranked(request):
            return response
        counts, choices, best = self._services.metrics.counts, response["choices"], 0
        texts = [spoken(reply_of({"choices": [each]}) or {}) for each in choices]
        counts["critic/calls"] += 1
        try:
            found = np.array([probability(choice) for choice in choices])
            best = int(scores(self._settings, step, found, await self._values(request.body, texts)).argmax())
            counts["critic/changed"] += texts[best] != texts[int(found.argmax())]
        except Exception as error:  # the agent's call goes on
            log.error("the critic failed", error=described(error))
            counts["critic/failures"] += 1
        return {**response, "choices": [{**choices[best], "index": 0}]}

    async def _values(self, body: Body, actions: Sequence[str]) -> np.ndarray:
        import torch

        limit = self._services.settings.memory.state_characters
        messages = without_tips(body["messages"])
        texts = [task_of(messages)[:limit], self._services.state.of_chat(messages), *(each[:limit] for each in actions)]
        keys = await asyncio.gather(*(self._services.memory.embed(text, urgent=True) for text in texts))
        with torch.no_grad():
            inputs = torch.tensor(np.stack([np.concatenate([*keys[:2], action]) for action in keys[2:]]))
            return smaller(self._twins, inputs.float()).numpy()


def _ranked(request: Request) -> bool:
    return request.mode == "val" and "messages" in request.body and request.body.get("n", 1) == 1
