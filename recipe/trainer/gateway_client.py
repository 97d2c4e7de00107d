"""The trainer's HTTP client of the gateway."""

from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from empo2.recipe.errors import Empo2Error, GatewayError
from empo2.recipe.protocol import (
    DRAIN,
    PAUSE,
    RESTORE,
    RESUME,
    SETTLE,
    SNAPSHOT,
    STATE,
    UPDATED,
    FileRequest,
    GatewayState,
    PauseState,
    StepProgress,
    TimeLimit,
    Unsettled,
    UpdatedRequest,
    UpdateResult,
    settle_route,
)
from empo2.recipe.waiting import first_answer

_ANSWER_SECONDS = 1  # of one request to a gateway that may be starting
_PAUSE_SECONDS = 60  # of one request
_SECONDS = 300  # an answer takes milliseconds; a gateway that is silent for so long has failed


class GatewayClient:
    """A connection to an EMPO² gateway, opened at first use."""

    def __init__(self, url: str, key: str, transport: httpx.BaseTransport | None = None) -> None:
        self._url, self._key = url.rstrip("/"), key
        headers = {"Authorization": f"Bearer {key}"} if key else {}  # "Bearer " is not a valid one
        self._http = httpx.Client(base_url=self._url, headers=headers, timeout=_SECONDS, transport=transport)

    def close(self) -> None:
        self._http.close()

    def answers(self) -> bool:
        """Return whether the gateway runs; False for one that is starting.

        Raises:
            Empo2Error: nothing listens at its address.
        """
        try:
            self._http.get(STATE, timeout=_ANSWER_SECONDS)
        except httpx.TransportError as error:
            self._check_listens(error)
            return False
        return True

    def check(self, wanted: Mapping[str, Any]) -> GatewayState:
        """Check that trainer and gateway agree, before anything starts; a gateway that is starting is waited for.

        If the gateway samples at another temperature than the one the trainer computes log-probs at, every importance
        ratio is wrong. Values that one side does not report are not compared.

        Args:
            wanted: the trainer's values by setting: model, temperatures, and the returns by which the gateway asks for
                tips and values them.

        Raises:
            Empo2Error: no EMPO² gateway answers, it refuses the key, or it serves something else.
        """

        response = first_answer(lambda: self._http.get(STATE, timeout=_ANSWER_SECONDS), self._check_listens)
        if response.status_code in (401, 403):
            given = (
                "is not set" if not self._key else "is an agent's key" if response.status_code == 403 else "is wrong"
            )
            raise Empo2Error(f"EMPO2_ADMIN_KEY {given}: give the gateway at {self._url} and its trainer the same one")
        if response.status_code != 200:
            raise Empo2Error(f"{self._url} is not an EMPO² gateway; start `empo2 gateway` in the place of agl-server")
        state = GatewayState.model_validate(response.json())
        for setting, value in wanted.items():
            served = state.model if setting == "model.path" else getattr(state, setting.partition(".")[2])
            if None not in (served, value) and served != value:
                raise Empo2Error(
                    f"the gateway at {self._url} serves {setting}={served!r}, the trainer wants {value!r}; give both "
                    "the same"
                )
        return state

    def progress(self) -> StepProgress:
        """Return how far the rollouts of the step have come."""
        return GatewayState.model_validate(self._http.get(STATE).raise_for_status().json()).progress

    def _check_listens(self, error: httpx.TransportError) -> None:
        if not isinstance(error, httpx.TimeoutException):  # a gateway that starts takes connections, and is silent
            raise Empo2Error(f"no gateway answers at {self._url} ({error}); start one with `empo2 gateway`")

    def settle(self, rollout_id: str | None = None) -> None:
        """Wait until all calls of a finished rollout, or of all rollouts, have their events.

        However slow the embedder is, no state is given up while any of them gets on.

        Raises:
            GatewayError: none did for five minutes.
        """
        route = SETTLE if rollout_id is None else settle_route(rollout_id)
        last, since = None, monotonic()
        while (unsettled := self._unsettled(route)).late:
            if unsettled != last:
                last, since = unsettled, monotonic()
            elif monotonic() - since > _SECONDS:
                raise GatewayError(
                    f"the memory stands still: the gateway at {self._url} has embedded none of {unsettled.of_all} "
                    f"states for {_SECONDS} seconds; see its log, memory.embedder_device and memory.embedder_threads"
                )

    def _unsettled(self, route: str) -> Unsettled:
        response = self._http.post(route)
        response.raise_for_status()
        return Unsettled.model_validate(response.json())

    def pause(self) -> int:
        """Hold the policy's calls and reflections; return how many were under way, when all of these are done."""
        states: list[PauseState] = []
        while not states or states[-1].under_way:
            response = self._http.post(PAUSE, json=TimeLimit(timeout=_PAUSE_SECONDS).model_dump())
            response.raise_for_status()
            states.append(PauseState.model_validate(response.json()))
        return states[0].at_pause

    def resume(self) -> None:
        """Let the policy's calls and reflections go on."""
        self._http.post(RESUME).raise_for_status()

    def drain(self, seconds: float) -> dict[str, float]:
        """Wait at most ``seconds`` for the running reflections; return the gateway's metrics of the step.

        Raises:
            GatewayError: as `settle`, which comes first.
        """
        self.settle()
        response = self._http.post(DRAIN, json=TimeLimit(timeout=seconds).model_dump(), timeout=seconds + _SECONDS)
        response.raise_for_status()
        return response.json()

    def updated(self, step: int, results: list[UpdateResult]) -> None:
        """Tell what an update made of its rollouts, for their traces."""
        request = UpdatedRequest(step=step, results=results)
        self._http.post(UPDATED, json=request.model_dump(exclude_none=True)).raise_for_status()

    def snapshot(self, file: Path) -> None:
        """Write the memory to ``file``.

        Raises:
            GatewayError: the gateway refuses; the message says why.
        """
        self._ask(SNAPSHOT, file, "save")

    def restore(self, file: Path) -> None:
        """Replace the memory by the one in ``file``.

        Raises:
            GatewayError: the gateway refuses; the message says why.
        """
        self._ask(RESTORE, file, "restore")

    def _ask(self, route: str, file: Path, verb: str) -> None:
        response = self._http.post(route, json=FileRequest(path=str(file)).model_dump(), timeout=None)
        if response.status_code == 409:
            raise GatewayError(f"the gateway cannot {verb} the memory: {response.json()['detail']}")
        response.raise_for_status()
