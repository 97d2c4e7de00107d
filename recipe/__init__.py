"""EMPO² for agent-lightning 1.x: gateway memory, reflection and the hybrid objective."""

from collections.abc import Sequence
from typing import Any

__all__ = ["__version__", "run_empo2"]

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # 0.1 s, in which the command line would not handle Ctrl-C

    return version("empo2")  # which stands in pyproject.toml


def run_empo2(config: Any, train_dataset: Sequence[Any], val_dataset: Sequence[Any]) -> None:
    """Train with EMPO²; has the signature of ``agentlightning.verl.entrypoint.run_ppo``.

    Args:
        config: agent-lightning's configuration (its ``config.yaml`` over verl's). A section ``empo2`` in it overrides
            single settings of EMPO²'s own config.yaml.
        train_dataset: non-empty sequence of JSON-like rows; a row becomes a rollout's ``input``.
        val_dataset: likewise; played without memory.

    Raises:
        empo2.recipe.errors.Empo2Error: a setting is wrong, or ``agentlightning.agl_base_url`` is no EMPO² gateway.
    """
    from empo2.recipe.trainer.start import start

    start(config, train_dataset, val_dataset)
