"""Keep the states that episodes have reached, with the actions that lead there, and start new episodes in some of them.

Worlds are deterministic: an agent returns to a state by its task's field ``prefix``, the actions before it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import structlog
from starlette.responses import Response

from empo2.recipe.gateway import upstream
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.request import Body, Next, Request
from empo2.recipe.gateway.services import Services
from empo2.recipe.gateway.upstream import NoServersError
from empo2.recipe.messages import reply_of, spoken
from empo2.recipe.protocol import MODEL_EVENT, REWARD_EVENT, data_of, whole_events
from empo2.recipe.tip_block import without_tips

log = structlog.get_logger()

PREFIX, VARIABLE = "prefix", "EPISODE_PREFIX"  # of a task: actions, a list in JSON; the agent's variable for it
_LISTED, _CHARACTERS, _SECONDS = 12, 300, 60  # states that the policy is asked about, of each, for its answer
_TASK_CHARACTERS = 3000  # of the beginning


@dataclass
class Cell:
    """A state of a task."""

    prefix: Sequence[str]  # the fewest actions known that lead there
    visits: int = 0  # turns in which it was seen, and episodes that started there


@dataclass
class Archive:
    """The states of one task by their text; the first one is the task's beginning."""

    cells: dict[str, Cell] = field(default_factory=dict)

    def note(self, start: Sequence[str], states: Sequence[str], actions: Sequence[str]) -> None:
        """Count the states of an episode, and keep the shortest way to each.

        Args:
            start: the prefix that the episode started with. Its first state is not counted: its text holds the task.
            states: of each turn.
            actions: from the task's beginning; at least one for each turn but the last.
        """
        for turn, state in enumerate(states[: len(actions) - len(start) + 1]):
            if turn or not start:
                way = actions[: len(start) + turn]
                cell = self.cells.setdefault(state, Cell(way))
                cell.visits += 1
                cell.prefix = min(cell.prefix, way, key=len)

    def by_count(self, generator: np.random.Generator) -> Cell:
        """Draw a state with a weight of 1 / sqrt(visits + 1) [Go-Explore]."""
        cells = [*self.cells.values()]
        weights = 1 / np.sqrt([cell.visits + 1 for cell in cells])
        return cells[generator.choice(len(cells), p=weights / weights.sum())]

    def listed(self) -> list[str]:
        """Return the states that the policy chooses from, in the order of their finding.

        They are the beginning, which holds the task, and those seldom visited.
        """
        beginning, *others = self.cells
        rarest = {*sorted(others, key=lambda state: self.cells[state].visits)[: _LISTED - 1]}
        return [beginning, *(state for state in others if state in rarest)]


class Starts:
    """Give each training rollout that is created the field ``prefix``, and note where those that end have been.

    Rollouts of one task that are created together, as a group is, start in the same state. Validation starts at the
    beginning. The archive lives as long as the gateway. Counted are ``go_explore/returns``, the rollouts that start
    elsewhere, ``go_explore/states``, those that are new, and ``go_explore/failures`` of the policy to name one.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._archives: defaultdict[str, Archive] = defaultdict(Archive)
        self._generator = np.random.default_rng(services.settings.algorithm.seed)

    async def __call__(self, request: Request, forward: Next) -> Response:
        if request.kind == "rollouts" and request.method == "POST" and isinstance(request.body, list):
            await self._start(request.body)
            return await forward(request.with_body(request.body))
        before = upstream.rollout_of(request.rollout_id) if request.kind == "rollout" else None
        answer = await forward(request)
        after = upstream.rollout_of(request.rollout_id) if before and not upstream.is_over(before) else None
        if after and upstream.is_over(after) and after.is_train:
            self._note(after.input, whole_events(upstream.events_of(request.rollout_id)))
        return answer

    async def _start(self, rollouts: Sequence[Body]) -> None:
        chosen: dict[str, Cell] = {}
        for rollout in rollouts:
            task = _task(rollout["input"])
            prefix: Sequence[str] = ()
            if rollout.get("is_train", True) and (archive := self._archives[task]).cells:
                if task not in chosen:
                    chosen[task] = await self._choose(archive, rollout.get("rollout_id") or "")
                chosen[task].visits += 1
                prefix = chosen[task].prefix
            self._services.metrics.counts["go_explore/returns"] += bool(prefix)
            rollout["input"] = {**rollout["input"], PREFIX: json.dumps(prefix) if prefix else ""}
            if local := (rollout.get("config") or {}).get("local"):
                local["env_map"] = {**local.get("env_map", {}), VARIABLE: f"input.{PREFIX}"}

    async def _choose(self, archive: Archive, rollout_id: str) -> Cell:
        cell = None
        if self._services.settings.tasks.starts == "by-policy":
            cell = await self._named(archive, rollout_id)
        return cell or archive.by_count(self._generator)

    async def _named(self, archive: Archive, rollout_id: str) -> Cell | None:
        """Return the state that the policy names, asked at temperature 0; None if it names none."""
        states = archive.listed()
        try:
            request = {"messages": [_question(archive, states)], "max_tokens": 8, "temperature": 0}
            answer = await self._services.servers.post(rollout_id, "/chat/completions", request, timeout=_SECONDS)
            number = re.search(r"\d+", spoken(reply_of(answer.raise_for_status().json()) or {}))
            return archive.cells[states[int(number[0]) - 1]] if number and 0 < int(number[0]) <= len(states) else None
        except (NoServersError, httpx.HTTPError) as error:
            log.error("the policy names no state", error=described(error))
            self._services.metrics.counts["go_explore/failures"] += 1
            return None

    def _note(self, task: Any, events: Sequence[Mapping[str, Any]]) -> None:
        rewards = data_of(events, REWARD_EVENT)
        actions = rewards[-1].get("actions") if rewards else None
        if not isinstance(actions, list):
            return
        calls = [call for call in data_of(events, MODEL_EVENT) if call.get("status") == "ok"]
        archive, start = self._archives[_task(task)], task.get(PREFIX, "")
        known = len(archive.cells)
        states = [self._services.state.of_chat(without_tips(call["request"].get("messages") or [])) for call in calls]
        archive.note(json.loads(start) if start else [], states, [str(action) for action in actions])
        self._services.metrics.counts["go_explore/states"] += len(archive.cells) - known


def _task(task: Any) -> str:
    return json.dumps({name: value for name, value in task.items() if name != PREFIX}, sort_keys=True, default=str)


def _question(archive: Archive, states: Sequence[str]) -> Body:
    texts = [" ".join(state.split()) for state in states]
    told = [
        (archive.cells[state].visits, text[: _CHARACTERS if number else _TASK_CHARACTERS])
        for number, (state, text) in enumerate(zip(states, texts, strict=True))
    ]
    lines = [f"{number}. (seen {visits} times) {text}" for number, (visits, text) in enumerate(told, start=1)]
    reached = "These states of a task have been reached, the first at its beginning:"
    ask = "From which of them is exploring the most promising? Answer with its number alone."
    return {"role": "user", "content": "\n".join([reached, "", *lines, "", ask])}
