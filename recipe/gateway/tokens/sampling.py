"""Neutralize sampling options of agents that would make the sampling policy differ from the trained policy.

The trainer computes π_θ from the model's own distribution at the gateway's temperature. An agent's sampling options
would change π_old only, so they are removed from training calls. Constraints that an agent depends on (JSON, a forced
tool) stay, and are counted.

Names and defaults are those of vLLM 0.20 (`ChatCompletionRequest`, `CompletionRequest`, `SamplingParams`).
"""

from collections.abc import Callable, Iterator
from typing import Any

from empo2.recipe.protocol import IMPOSSIBLE, TOP_TOKENS

# Asks for the likeliest tokens beside each sampled one, all named by their ids.
_BY_ID = "token_id:"
TOPS = {"top_logprobs": TOP_TOKENS, "return_tokens_as_token_ids": True}

# Sent with every call: for missing options vLLM would use the model's generation_config.json.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Left out of every call, since their defaults are neutral. A seed would give all rollouts of a group the same reply.
_REMOVED = (
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "thinking_token_budget",
    "use_beam_search",
    "seed",
)


def neutral(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request that samples from the model's own distribution."""
    return {key: value for key, value in body.items() if key not in _REMOVED} | _NEUTRAL


def overridden(body: dict[str, Any]) -> list[str]:
    """Return the options of an agent's request that `neutral` overrides."""
    changed = [key for key, value in _NEUTRAL.items() if body.get(key) is not None and body[key] != value]
    if body.get("top_k") == -1:  # all tokens, too
        changed.remove("top_k")
    return changed + [key for key in _REMOVED if body.get(key) or (key == "seed" and body.get(key) is not None)]


def constraints(body: dict[str, Any]) -> list[str]:
    """Return the options of an agent's request that exclude tokens and that `neutral` keeps."""
    form = body.get("response_format")
    excludes = {
        "response_format": isinstance(form, dict) and form.get("type") not in (None, "text"),
        "structured_outputs": body.get("structured_outputs"),
        "tool_choice": body.get("tool_choice") not in (None, "none", "auto"),
    }
    return [option for option, does in excludes.items() if does]


type Tops = tuple[list[list[int]], list[list[float]]]
"""Of each token of a reply the likeliest ones, as ids and as log-probs; empty without log-probs."""


def take_tops(response: dict[str, Any], asked: int, decoded: Callable[[int], str]) -> Tops:
    """Take out of a chat's answer what `TOPS` asked for, in place, and return it, of the first choice.

    The agent gets the answer that it would have got without.

    Args:
        asked: the agent's own ``top_logprobs``; vLLM has the sampled token among them, first.
        decoded: returns the text of a token.
    """
    ids: list[list[int]] = []
    log_probs: list[list[float]] = []
    for choice in response.get("choices") or []:
        for token in (choice.get("logprobs") or {}).get("content") or []:
            listed = token.get("top_logprobs") or []
            tops = [*_tops(listed)][:TOP_TOKENS]
            if str(token.get("token")).startswith(_BY_ID):
                token["token"] = bytes(token.get("bytes") or []).decode(errors="replace")
            token["top_logprobs"] = [_as_text(top, decoded) for top in listed[: max(asked, 0)]]
            if choice is response["choices"][0]:
                ids.append([token_id for token_id, _ in tops])
                log_probs.append([log_prob for _, log_prob in tops])
    return ids, log_probs


def _tops(listed: list[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Yield id and log-prob of each entry; pass over those that have none, of a server that knows no `TOPS`."""
    for top in listed:
        token_id, log_prob = _id_of(top), top.get("logprob")
        if token_id is not None and isinstance(log_prob, float | int) and log_prob > IMPOSSIBLE:
            yield token_id, round(log_prob, 5)


def _as_text(top: dict[str, Any], decoded: Callable[[int], str]) -> dict[str, Any]:
    """Return an entry with the token's text in the place of its id."""
    if (token_id := _id_of(top)) is None:
        return top
    text = decoded(token_id)
    return {**top, "token": text, "bytes": [*text.encode()]}


def _id_of(top: dict[str, Any]) -> int | None:
    _, by_id, number = str(top.get("token")).partition(_BY_ID)
    return int(number) if by_id and number.isdecimal() else None
