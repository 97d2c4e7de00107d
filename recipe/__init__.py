"""EMPO² for agent-lightning 1.x: gateway memory, reflection and the hybrid objective."""

import contextlib
import os
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
    from empo2.recipe.config import traces_endpoint
    from empo2.recipe.gateway_client import GatewayClient
    from empo2.recipe.trainer.verl_config import (
        check_tasks,
        check_tip_tokens,
        name_middleware,
        read_settings,
        take_traces,
    )

    settings = read_settings(config)
    check_tasks(settings, config, train_dataset, val_dataset)
    name_middleware(config, settings)
    if endpoint := traces_endpoint(settings):
        take_traces(config, endpoint)
    ours = config.get("empo2") or {}
    url, key = config.agentlightning.agl_base_url, config.agentlightning.agl_key
    with contextlib.closing(GatewayClient(url, key)) as gateway:

        def check() -> None:
            wanted = {
                "model.path": config.actor_rollout_ref.model.path,
                "model.temperature": config.actor_rollout_ref.rollout.temperature,
                # The gateway forces the validation temperature; the configuration's value is only compared with it.
                "model.val_temperature": ours.get("model", {}).get("val_temperature"),
                "algorithm.success_return": settings.algorithm.success_return,
                "algorithm.failure_return": settings.algorithm.failure_return,
            }
            state = gateway.check(wanted)
            check_tip_tokens(config, state.episode_tokens)

        if runs := gateway.answers():
            check()
        if device := ours.get("hardware", {}).get("device"):
            os.environ["EMPO2_DEVICE"] = device

        # verl takes many seconds to import: gateway and command line do not need it, and Ray should start first.
        from empo2.recipe.marked_lines import say_loading
        from empo2.recipe.trainer import ray_environment
        from empo2.recipe.trainer.compat import fork_server

        say_loading("Ray")
        if ray_environment.device() == "cpu" and settings.hardware.cluster is None:
            fork_server.start()
        ray_environment.start_ray(config)
        say_loading("verl")
        from empo2.recipe.trainer.entrypoint import train

        if not runs:  # it has loaded its embedder meanwhile
            say_loading("gateway")
            check()
        train(config, settings, gateway, train_dataset, val_dataset)
