"""agent-lightning's controller (1.0.2) with warm agents, each of which gets the key of its own rollout only."""

import asyncio
import importlib.resources
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
from agentlightning.controller import local_reconciler
from agentlightning.controller.__main__ import _run_controller
from agentlightning.schemas import TERMINAL_STATES, Rollout
from omegaconf import DictConfig, OmegaConf

from empo2.recipe.controller.warm_agents import is_traced, start_agent, start_fork_server
from empo2.recipe.errors import Empo2Error
from empo2.recipe.protocol import Keys, traceparent
from empo2.recipe.waiting import gateway_answer, gateway_http

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 1  # of one request to a gateway that may be starting
_NO_ROLLOUT = "none"
_LEAVE_SECONDS = 10  # for an agent whose rollout is over


def check_gateway(url: str, key: str) -> None:
    """Return once a gateway that knows the key answers; one that is not there yet is waited for, and this is said.

    Raises:
        Empo2Error: ``url`` is no address, what answers there is no gateway, or ``key`` is not its agents' key.
        ProcessError: nothing answers for half an hour.
    """
    # The admin key opens every route, but no rollout's key is made from it.
    headers = {"x-api-key": Keys(agent=key).of_rollout(_NO_ROLLOUT)}
    with gateway_http(url, headers=headers, timeout=_ANSWER_SECONDS) as client:
        asked = {"event_type": "reward"}
        answer = gateway_answer(url, lambda: client.get(f"/api/rollouts/{_NO_ROLLOUT}/events", params=asked))
    if answer.status_code == 401:
        raise Empo2Error(f"the gateway at {url} refuses the key; EMPO2_KEY must be the gateway's own EMPO2_KEY")
    if answer.status_code != 404 or "Rollout" not in answer.text:
        raise Empo2Error(f"{url} is not an EMPO² gateway; give the address of `empo2 gateway`")


def run_on_this_machine(url: str, key: str, agent_class: str, concurrency: int) -> None:
    """Start each rollout's agent as a process, forked if it is of this class, until SIGTERM or SIGINT.

    Args:
        key: the gateway's agents' key; not in the environment, which agents inherit.
        concurrency: agents at once.
    """
    start_fork_server(agent_class)
    start_agents_with(start_agent)
    local_reconciler.LocalReconciler = OwnKeys
    local = {"maximum_size": concurrency, "poll_interval": _POLL_SECONDS}
    _run(url, key, {"runner_type": "local", "local_runner": local})


def run_on_kubernetes(url: str, key: str, namespace: str) -> None:
    """Start each rollout's agent as a Kubernetes Job, from the template that its rollout carries."""
    from agentlightning.controller import k8s_reconciler

    from empo2.recipe.controller.kubernetes import TellingReconciler

    k8s_reconciler.K8sReconciler = TellingReconciler
    k8s_reconciler.build_job_spec = with_own_key(k8s_reconciler.build_job_spec)
    _run(url, key, {"runner_type": "k8s", "k8s_runner": {"namespace": namespace}})


def start_agents_with(start: object) -> None:
    """Make ``LocalReconciler._spawn_for`` call ``start`` in the place of ``asyncio.create_subprocess_exec``."""
    names = {**vars(asyncio), "create_subprocess_exec": start}
    local_reconciler.asyncio = SimpleNamespace(**names)  # pyright: ignore[reportAttributeAccessIssue]


class OwnKeys(local_reconciler.LocalReconciler):
    """Gives each agent its rollout's key, plays as many as there is room for, and ends those whose rollout is over.

    agent-lightning's reconciler reads the key from the controller's settings, and lists 50 rollouts at a time, those
    that run among them (``_reconcile_once``). It knows the time limit of those alone: an agent whose rollout is gone,
    as with a gateway that was started again, would hold its place for ever.
    """

    def __init__(self, api: Any, config: DictConfig) -> None:
        super().__init__(api, config)
        self._api = self._listing = _Listing(api, 2 * self._pool_size)
        self._over: dict[str, float] = {}  # rollouts that are, and since when, of agents that run

    async def _reconcile_once(self, *, spawn_queued: bool = True) -> None:
        await super()._reconcile_once(spawn_queued=spawn_queued)
        now = time.monotonic()
        running = {rollout: item for rollout, item in self._rid_to_proc.items() if item.proc.returncode is None}
        self._over = {
            rollout: self._over.get(rollout, now)
            for rollout in running.keys() - self._listing.listed
            if rollout in self._over or await self._is_over(rollout)
        }
        for rollout, since in self._over.items():
            if now - since > _LEAVE_SECONDS:
                await self._kill_process_group(rollout, running[rollout])

    async def _is_over(self, rollout: str) -> bool:
        """Return whether the gateway has no such rollout, or one that has ended."""
        answer = await self._api.get(f"/api/rollouts/{rollout}")
        if answer.status_code == 404:
            return True
        return answer.raise_for_status().json()["rollout"]["status"]["state"] in TERMINAL_STATES

    async def _spawn_for(self, rollout: Rollout) -> bool:
        shared, self._config = self._config, _of_rollout(rollout, self._config)
        try:
            return await super()._spawn_for(rollout)  # one rollout after another
        finally:
            self._config = shared


class _Listing:
    """agent-lightning's client, which asks for at most so many rollouts in the place of 50.

    Attributes:
        listed: ids of those that it has got last.
    """

    def __init__(self, api: Any, most: int) -> None:
        self._api, self._most = api, most
        self.listed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    async def get(self, path: str, *, params: httpx.QueryParams | None = None) -> httpx.Response:
        if params is None:
            return await self._api.get(path)
        answer = await self._api.get(path, params=params.set("limit", self._most))
        self.listed = {each["rollout_id"] for each in answer.raise_for_status().json()}
        return answer


def with_own_key(build: Callable[[Rollout, DictConfig], Any]) -> Callable[[Rollout, DictConfig], Any]:
    """Return ``build_job_spec`` such that a Job's containers get their rollout's key and, as processes, TRACEPARENT."""

    def build_with_own_key(rollout: Rollout, config: DictConfig) -> Any:
        job = build(rollout, _of_rollout(rollout, config))
        for container in job["spec"]["template"]["spec"]["containers"] if is_traced() else ():
            container["env"].append({"name": "TRACEPARENT", "value": traceparent(rollout.rollout_id)})
        return job

    return build_with_own_key


def _of_rollout(rollout: Rollout, config: DictConfig) -> Any:
    key = Keys(agent=config.agl_server.key).of_rollout(rollout.rollout_id)
    return OmegaConf.merge(config, {"agl_server": {"key": key}})


def _run(url: str, key: str, settings: dict[str, Any]) -> None:
    defaults = OmegaConf.create((importlib.resources.files("agentlightning.config") / "controller.yaml").read_text())
    config = OmegaConf.merge(defaults, {"agl_server": {"url": url, "key": key}}, settings)
    asyncio.run(_run_controller(config))  # pyright: ignore[reportArgumentType]
