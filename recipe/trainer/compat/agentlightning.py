"""Patches of agent-lightning 1.0.2 and verl 0.8.0 in the trainer's process.

Each function names the upstream symbol that makes it necessary; ``tests/recipe/test_compat.py`` fails when upstream
fixes one, and when one changes that the training step replaces or relies on.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false
import threading
from concurrent.futures import Future
from typing import Any

import agentlightning.verl.trainer as agl_trainer
from omegaconf import DictConfig
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.tracking import Tracking
from verl.workers.rollout.llm_server import LLMServerManager


def use_tracking(tracking: type[Tracking]) -> None:
    """Make ``AgentLightningRayPPOTrainer.fit`` log with ``tracking``; it creates its logger by a global name."""
    agl_trainer.Tracking = tracking


def start_no_load_balancer() -> None:
    """Skip verl's balancer (``LLMServerManager._init_global_load_balancer``), since the gateway chooses the server."""

    async def nothing(self: LLMServerManager) -> None:
        self.global_load_balancer = None  # pyright: ignore[reportAttributeAccessIssue]

    LLMServerManager._init_global_load_balancer = nothing


def start_vllm_beside_the_policy(workers: type[RayWorkerGroup], config: DictConfig) -> type[RayWorkerGroup]:
    """Return worker groups that start vLLM while the policy is loaded; where verl would start it, it waits.

    ``RayPPOTrainer.init_workers`` loads the policy first, so that vLLM finds what memory is left on a GPU.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    create, name_of = LLMServerManager.create, vLLMReplica._get_server_name_prefix
    begun, started = threading.Event(), Future[Any]()

    def name_when_workers_have_answered(replica: Any) -> str:
        begun.set()
        return name_of(replica)

    def start(group: RayWorkerGroup) -> None:
        try:
            started.set_result(create(config=config, worker_group=group))
        except Exception as error:
            started.set_exception(error)
        begun.set()

    class Workers(workers):
        def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
            groups = super().spawn(prefix_set)
            group = groups[next(name for name in groups if name.startswith("actor"))]
            init_model = group.init_model

            def both() -> Any:
                threading.Thread(target=start, args=(group,), daemon=True).start()
                begun.wait()  # a worker that loads its model answers nothing
                return init_model()

            group.init_model = both
            return groups

    vLLMReplica._get_server_name_prefix = name_when_workers_have_answered
    LLMServerManager.create = lambda **_: started.result()
    return Workers
