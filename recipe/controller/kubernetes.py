"""agent-lightning's Kubernetes reconciler (1.0.2), which also tells the gateway why a Job or pod does not start."""

from collections.abc import Mapping
from typing import Any

from agentlightning.controller.k8s_reconciler import K8sReconciler
from agentlightning.schemas import Rollout, RolloutState
from kr8s.asyncio.objects import Job, Pod

_JOB = "batch.kubernetes.io/job-name"  # Kubernetes puts it on a Job's pods
_STARTING = ("ContainerCreating", "PodInitializing")


class TellingReconciler(K8sReconciler):
    """A rollout's ``error_message`` says why it has no Job, or, once it counts as running, why its pod waits."""

    async def _create_job(self, rollout: Rollout) -> None:
        """Create a Job; upstream only logs that Kubernetes refuses it, such as for want of rights, and tries again."""
        create, patch = Job.async_create, self._patch_status

        async def telling(self: Any) -> None:
            why = None
            try:
                await create(self)
            except Exception as error:
                why = f"Kubernetes refuses the Job: {error}"
                raise
            finally:
                if why != rollout.status.error_message:
                    await patch(rollout.rollout_id, error_message=why)

        Job.async_create = telling
        try:
            await super()._create_job(rollout)  # one rollout after another
        finally:
            Job.async_create = create

    async def _reconcile_once(self) -> None:
        await super()._reconcile_once()
        running = await self._query_rollouts(state_in=[RolloutState.RUNNING], limit=500)
        of_job = {rollout.status.k8s_job_name: rollout for rollout in running}
        found = {"namespace": self._namespace, "label_selector": _JOB, "field_selector": "status.phase=Pending"}
        async for pod in Pod.async_list(**found, api=await self._get_k8s_api()):
            raw: Any = getattr(pod, "raw", pod)
            rollout, why = of_job.get(raw["metadata"]["labels"][_JOB]), waiting_reason(raw.get("status", {}))
            if rollout is not None and why not in (None, rollout.status.error_message):
                await self._patch_status(rollout.rollout_id, error_message=why)


def waiting_reason(status: Mapping[str, Any]) -> str | None:
    """Return why a pod waits, by its status: its image cannot be had, no node has room for it; None if it starts."""
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason", _STARTING[0]) not in _STARTING:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    for condition in status.get("conditions", []):
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    return None
