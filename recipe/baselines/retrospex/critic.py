"""The critic's networks, their file, and what they say about the actions of a state. Needs numpy alone."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from empo2.recipe.config import Memory
from empo2.recipe.errors import ConfigError

FACTS = ("embedder", "state", "state_characters")
"""Settings of the section ``memory`` that a critic was trained with; it can be asked with no others."""

type Weights = dict[str, Any]
"""``in`` [networks, inputs, hidden], ``in_bias`` [networks, 1, hidden], ``out`` [networks, hidden, 1] and ``out_bias``
[networks, 1], of numpy or of torch."""


def outputs(weights: Weights, inputs: Any) -> Any:
    """Return what each network says about each row, [networks, n]; numpy and torch alike.

    One hidden layer of ReLU and one output, as the head of Retrospex's critic, whose inputs are trained encodings.

    Args:
        inputs: embeddings side by side, [n, inputs].
    """
    hidden = (inputs @ weights["in"] + weights["in_bias"]).clip(min=0)
    return (hidden @ weights["out"])[..., 0] + weights["out_bias"]


@dataclass(frozen=True)
class Critic:
    """Twin Q networks over the embeddings of task, state and action.

    Attributes:
        facts: `FACTS` by name.
        weights: of the target networks, of which Retrospex asks.
    """

    facts: Mapping[str, Any]
    weights: Weights

    def values(self, task: np.ndarray, state: np.ndarray, actions: Sequence[np.ndarray]) -> np.ndarray:
        """Return Q of each action, the minimum of the networks; all arguments are embeddings, [dimension] each.

        Retrospex's ScienceWorld code takes Q - V; V is the same for all actions of a state, and their order, too.
        """
        inputs = np.stack([np.concatenate([task, state, action]) for action in actions])
        return outputs(self.weights, inputs).min(axis=0)

    def save(self, file: Path) -> None:
        """Write the critic, so that no reader finds half of it."""
        content = io.BytesIO()
        np.savez(content, facts=np.array(json.dumps(dict(self.facts))), **self.weights)
        temporary = file.with_name(f"{file.name}.tmp")
        temporary.write_bytes(content.getvalue())
        temporary.replace(file)


def load_critic(path: str, memory: Memory) -> Critic:
    """Return the critic in a file.

    Args:
        path: ``critic.path``.
        memory: the settings that it will be asked with.

    Raises:
        ConfigError: there is no critic in the file, or it was trained with other settings.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            facts = {name: json.loads(str(arrays["facts"]))[name] for name in FACTS}
            weights = {name: arrays[name] for name in ("in", "in_bias", "out", "out_bias")}
    except OSError as error:
        raise ConfigError(f"critic.path={path!r}: {error.strerror or error}; empo2 critic makes one") from None
    except Exception:  # what is no archive, and an archive of something else, fail in many ways
        raise ConfigError(f"critic.path={path!r}: is no critic; empo2 critic makes one") from None
    for name, has in facts.items():
        if has != (wanted := getattr(memory, name)):
            raise ConfigError(f"critic.path={path!r}: was trained with memory.{name}={has!r}; this is {wanted!r}")
    return Critic(facts, weights)
