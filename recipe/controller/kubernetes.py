"""agent-lightning's Kubernetes reconciler (1.0.2), which also says why a Job does not start and how it ended."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from agentlightning.controller.k8s_reconciler import K8sReconciler, build_job_name
from agentlightning.schemas import Rollout, RolloutState
from kr8s.asyncio.objects import Job, Pod

_JOB = "batch.kubernetes.io/job-name"  # Kubernetes puts it on a Job's pods
# What upstream says of an agent that failed or was evicted; there is no reason before the Job has its condition.
_AGENT_FAILED = re.compile(r"Job failed(: BackoffLimitExceeded\b.*)?", re.DOTALL)
_LAST_OWN_CODE = 128  # above it a signal ended the container, such as 137 for want of memory
_STARTING = ("ContainerCreating", "PodInitializing")


class TellingReconciler(K8sReconciler):
    """A rollout's ``error_message`` says why it has no Job, why its pod waits, or with which code its agent ended."""

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

    async def _patch_status(self, rollout_id: str, **status: Any) -> bool:
        """Say of an agent that failed what upstream's reconciler of processes says, which ``failures.py`` reads."""
        if _AGENT_FAILED.fullmatch(status.get("error_message") or ""):
            found = {"namespace": self._namespace, "label_selector": f"{_JOB}={build_job_name(rollout_id)}"}
            with contextlib.suppress(Exception):  # without its pod, the failure is the system's
                async for pod in Pod.async_list(**found, api=await self._get_k8s_api()):
                    raw: Any = getattr(pod, "raw", pod)
                    if code := exit_code(raw.get("status", {})):
                        status["error_message"] = f"subprocess exited with code {code}"
        return await super()._patch_status(rollout_id, **status)

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


def exit_code(status: Mapping[str, Any]) -> int | None:
    """Return the code with which an agent ended by itself, by its pod's status; None if it was killed or evicted."""
    if any((each["type"], each["status"]) == ("DisruptionTarget", "True") for each in status.get("conditions", [])):
        return None
    ends = [container.get("state", {}).get("terminated") or {} for container in status.get("containerStatuses", [])]
    return next((end["exitCode"] for end in ends if 0 < end.get("exitCode", 0) <= _LAST_OWN_CODE), None)
