"""Play episodes through a gateway and its controller, without a trainer."""

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from agentlightning.schemas import RolloutState

from empo2.recipe.config import Settings
from empo2.recipe.errors import ProcessError
from empo2.recipe.evaluation.episode_results import Planned, Result, Results
from empo2.recipe.evaluation.panels import Panel
from empo2.recipe.failures import FAILED_BY_AGENT, FAILED_BY_SYSTEM, cause_of_failure, reported_error, reported_metrics
from empo2.recipe.protocol import MODEL_EVENT, REWARD_EVENT, TAG, RolloutTag, data_of, scope_of
from empo2.recipe.tip_block import blocks_in

_POLL_SECONDS = 0.3
_HOPELESS = 8  # failures of the system one after another, beyond those of one restart of the controller

MEMORY_OFF, MEMORY_ON = "memory off", "memory on"


def planned_episodes(panel: Panel, parts: Sequence[str], samples: int) -> list[Planned]:
    """Return all episodes of an evaluation: each task ``samples`` times in each part, by sample, so that an
    interrupted evaluation has seen all tasks equally often.
    """
    return [
        Planned(part, index, sample, row, memory="read" if part == MEMORY_ON else "off")
        for sample in range(samples)
        for part in parts
        for index, row in enumerate(panel.rows)
    ]


def play_missing(
    player: "Player", results: Results, planned: Sequence[Planned], show: Callable[[Result], None] = lambda result: None
) -> None:
    """Play the episodes that have no result yet, and keep each result as it comes."""
    for result in player.play(results.missing(planned)):
        results.add(result)
        show(result)


@dataclass
class Player:
    """Plays episodes: creates rollouts at the gateway, whose controller starts the agents, and reads what they left."""

    client: httpx.Client  # of the gateway, with its admin key
    settings: Settings  # agent, scope and limits
    check: Callable[[], object]  # called again and again while episodes are played; raises to stop
    _seen: int = field(default=0, init=False)  # rollouts in agent-lightning's list of those that have ended

    def play(self, episodes: Sequence[Planned]) -> Iterator[Result]:
        """Yield the result of each episode, as they end. More are in the queue than can run, but never all.

        Raises:
            ProcessError: nothing but failures of the system; what was yielded before can be kept.
        """
        waiting, running = list(reversed(episodes)), dict[str, Planned]()
        failures, too_many = 0, _HOPELESS + self.settings.agent.concurrency
        while waiting or running:
            self.check()
            while waiting and len(running) < 2 * self.settings.agent.concurrency:
                episode = waiting.pop()
                running[self._create(episode)] = episode
            for rollout_id in self._ended():
                if (episode := running.pop(rollout_id, None)) is None:
                    continue
                address = f"/api/rollouts/{rollout_id}"
                status = self.client.get(address).raise_for_status().json()["rollout"]["status"]
                events = self.client.get(f"{address}/events").raise_for_status().json()
                result = result_of(episode, status, events)
                self.client.delete(address).raise_for_status()
                failures = failures + 1 if result.failed == FAILED_BY_SYSTEM else 0
                yield result
                if failures == too_many:
                    raise ProcessError(
                        f"the last {failures} episodes failed, for example: {result.error} (see controller.log); "
                        "results are kept, and the same command goes on from them"
                    )
            time.sleep(_POLL_SECONDS)

    def _create(self, episode: Planned) -> str:
        agent, rollout_id, metadata = self.settings.agent, uuid.uuid4().hex, {}
        if episode.memory != "off":
            tag = RolloutTag(
                rollout_mode="memory" if "read" in episode.memory else "no-memory",
                scope=scope_of(episode.task, self.settings.memory.scope),
                read_only="write" not in episode.memory,
            )
            metadata = {TAG: tag.model_dump()}
        request = {
            "rollout_id": rollout_id,
            "input": dict(episode.task),
            "is_train": episode.explore,  # decides the temperature
            "config": {
                "timeout_seconds": agent.time_limit,
                "local": {"agent_class": agent.class_, "env_map": agent.env},
            },
            "metadata": metadata,
        }
        self.client.post("/api/rollouts", json=[request]).raise_for_status()
        return rollout_id

    def _ended(self) -> list[str]:
        page = self.client.get("/api/rollouts/terminal", params={"after": self._seen}).raise_for_status().json()
        self._seen = page["next_after"]
        return [item["rollout_id"] for item in page["items"]]


def result_of(episode: Planned, status: dict[str, Any], events: Sequence[dict[str, Any]]) -> Result:
    """Return an episode's result, from agent-lightning's status of its rollout and all its events in order."""
    calls = data_of(events, MODEL_EVENT)
    answered = [call for call in calls if call.get("status") == "ok"]
    rewards = data_of(events, REWARD_EVENT)
    value: Any = rewards[-1].get("value") if rewards else None
    error = status["error_message"]
    failed = None
    if status["state"] != RolloutState.SUCCEEDED:
        failed = cause_of_failure(error, calls, answered=bool(answered))
        error = str(reported_error(events) or error)
    elif type(value) not in (int, float) or not math.isfinite(value):
        failed, error = FAILED_BY_AGENT if answered else FAILED_BY_SYSTEM, "the agent reported no reward"
    usage = [call.get("usage") or {} for call in answered]
    return Result(
        *episode.key,
        return_=None if failed else float(value),
        calls=len(answered),
        calls_with_tips=sum(bool(blocks_in(str(call["request"]))) for call in answered),
        metrics=reported_metrics(events),
        prompt_tokens=sum(each.get("prompt_tokens") or 0 for each in usage),
        reply_tokens=sum(each.get("completion_tokens") or 0 for each in usage),
        failed=failed,
        error=error if failed else None,
    )
