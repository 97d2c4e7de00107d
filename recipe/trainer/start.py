"""The order in which a training starts: settings and gateway are checked, then Ray starts, then verl is imported.

verl takes many seconds to import, for which a wrong setting should not wait, and Ray starts first; `ray_environment`
sets variables that both read while they are imported.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from empo2.recipe.config import traces_endpoint
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.marked_lines import say_loading
from empo2.recipe.network import direct
from empo2.recipe.trainer.verl_config import check_tasks, check_tip_tokens, name_middleware, read_settings, take_traces


def start(config: Any, train_dataset: Sequence[Any], val_dataset: Sequence[Any]) -> None:
    """Train in this process, as ``empo2.recipe.run_empo2`` says."""
    settings = read_settings(config)
    check_tasks(settings, config, train_dataset, val_dataset)
    name_middleware(config, settings)
    if endpoint := traces_endpoint(settings):
        take_traces(config, endpoint)
    ours = config.get("empo2") or {}
    url, key = config.agentlightning.agl_base_url, config.agentlightning.agl_key
    os.environ |= direct(url)
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
            if settings.algorithm.name == "empo2":
                check_tip_tokens(config, state.episode_tokens)

        if runs := gateway.answers():
            check()
        if device := ours.get("hardware", {}).get("device"):
            os.environ["EMPO2_DEVICE"] = device

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
