"""The trainer's HTTP client of the gateway."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from agentlightning.schemas import RolloutLifecycleStatus
from pydantic import BaseModel

from empo2.recipe import protocol
from empo2.recipe.errors import Empo2Error, GatewayError
from empo2.recipe.waiting import gateway_answer, gateway_http

_ANSWER_SECONDS = 1  # of one request to a gateway that may be starting
_PAUSE_SECONDS = 60  # of one request
_SECONDS = 300  # an answer takes milliseconds; a gateway that is silent for so long has failed


class GatewayClient:
    """A connection to an EMPO² gateway, opened at first use; an Empo2Error if the URL is no address."""

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self._url, self._key = url.rstrip("/"), key
        headers = {"Authorization": f"Bearer {key}"} if key else {}  # "Bearer " is not a valid one
        self._http = gateway_http(url, headers=headers, timeout=_SECONDS, transport=transport)

    def close(self) -> None:
        self._http.close()

    def answers(self) -> bool:
        """Return False for a gateway that takes connections and is silent: it loads. `check` waits for any other."""
        try:
            self._http.get(protocol.STATE, timeout=_ANSWER_SECONDS)
        except httpx.TransportError as error:
            return not isinstance(error, httpx.TimeoutException)
        return True

    def check(self, wanted: Mapping[str, Any]) -> protocol.GatewayState:
        """Check that trainer and gateway agree, before anything starts; a gateway that is not there yet is waited for.

        If the gateway samples at another temperature than the one the trainer computes log-probs at, every importance
        ratio is wrong. Values that one side does not report are not compared.

        Args:
            wanted: the trainer's values by setting: model, temperatures, and the returns by which the gateway asks for
                tips and values them.

        Raises:
            Empo2Error: no EMPO² gateway answers, it refuses the key, or it serves something else.
        """
        response = gateway_answer(self._url, lambda: self._http.get(protocol.STATE, timeout=_ANSWER_SECONDS))
        if response.status_code in (401, 403):
            problem = "is an agent's key" if response.status_code == 403 else "is wrong" if self._key else "is not set"
            raise Empo2Error(f"EMPO2_ADMIN_KEY {problem}: give the gateway at {self._url} and its trainer the same one")
        try:
            state = protocol.GatewayState.model_validate_json(response.raise_for_status().content)
        except (httpx.HTTPStatusError, ValueError):
            other = f"{self._url} is not an EMPO² gateway; start `empo2 gateway` in the place of agl-server"
            raise Empo2Error(other) from None
        for setting, value in wanted.items():
            served = state.model if setting == "model.path" else getattr(state, setting.partition(".")[2])
            if None not in (served, value) and served != value:
                raise Empo2Error(
                    f"the gateway at {self._url} serves {setting}={served!r}, the trainer wants {value!r}; give both "
                    "the same"
                )
        return state

    def progress(self, timeout: float = _SECONDS) -> protocol.StepProgress:
        """Return how far the rollouts of the step have come; an httpx.HTTPError without an answer in ``timeout`` s."""
        response = self._http.get(protocol.STATE, timeout=timeout).raise_for_status()
        return protocol.GatewayState.model_validate(response.json()).progress

    def statuses(self) -> dict[str, RolloutLifecycleStatus]:
        """Return the status of each rollout, by its id."""
        found = self._http.get(protocol.STATUSES).raise_for_status().json()
        return {rollout_id: RolloutLifecycleStatus.model_validate(status) for rollout_id, status in found.items()}

    def settle(self, rollout_id: str | None = None) -> None:
        """Wait until all calls of a finished rollout, or of all rollouts, have their events.

        However slow the embedder is, no state is given up while any of them gets on.

        Raises:
            GatewayError: none did for five minutes.
        """
        route = protocol.SETTLE if rollout_id is None else protocol.settle_route(rollout_id)
        last, since = None, monotonic()
        while (unsettled := protocol.Unsettled.model_validate(self._post(route))).late:
            if unsettled != last:
                last, since = unsettled, monotonic()
            elif monotonic() - since > _SECONDS:
                raise GatewayError(
                    f"the memory stands still: the gateway at {self._url} has embedded none of {unsettled.of_all} "
                    f"states for {_SECONDS} seconds; see its log, memory.embedder_device and memory.embedder_threads"
                )

    def pause(self) -> int:
        """Hold the policy's calls and reflections; return how many were under way, when all of these are done."""
        request = protocol.TimeLimit(timeout=_PAUSE_SECONDS)
        first = state = protocol.PauseState.model_validate(self._post(protocol.PAUSE, request))
        while state.under_way:
            state = protocol.PauseState.model_validate(self._post(protocol.PAUSE, request))
        return first.at_pause

    def hold(self) -> None:
        """Hold the policy's calls and reflections from now on; do not wait for those under way."""
        self._post(protocol.PAUSE, protocol.TimeLimit(timeout=0))

    def resume(self) -> None:
        """Let the policy's calls and reflections go on."""
        self._post(protocol.RESUME)

    def drain(self, seconds: float) -> dict[str, float]:
        """`settle`, wait at most ``seconds`` for running reflections, and return the gateway's metrics of the step."""
        self.settle()
        return self._post(protocol.DRAIN, protocol.TimeLimit(timeout=seconds), seconds + _SECONDS)

    def updated(self, step: int, results: list[protocol.UpdateResult]) -> None:
        """Tell what an update made of its rollouts, for their traces."""
        self._post(protocol.UPDATED, protocol.UpdatedRequest(step=step, results=results))

    def snapshot(self, file: Path) -> None:
        """Write the memory to ``file``.

        Raises:
            GatewayError: the gateway refuses; the message says why.
        """
        self._post(protocol.SNAPSHOT, protocol.FileRequest(path=str(file)), None)

    def restore(self, file: Path) -> None:
        """Replace the memory by the one in ``file``; raises as `snapshot`."""
        self._post(protocol.RESTORE, protocol.FileRequest(path=str(file)), None)

    def _post(self, route: str, request: BaseModel | None = None, timeout: float | None = _SECONDS) -> Any:
        body = request and request.model_dump(exclude_none=True)
        response = self._http.post(route, json=body, timeout=timeout)
        if response.status_code == 409:
            verb = route.rpartition("/")[2]
            raise GatewayError(f"the gateway cannot {verb} the memory: {response.json()['detail']}")
        response.raise_for_status()
        return response.json()
