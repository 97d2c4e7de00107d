"""The variables that agent-lightning's controller sets for every rollout, and the report of its reward."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
from httpx_retries import Retry, RetryTransport

MODEL = "policy"  # any model name: agent-lightning's gateway replaces it by the real one

EVENT_TIMEOUT_SECONDS = 30
# POST is retried too: if an event arrives twice, agent-lightning uses the last one, which is equal.
EVENT_RETRIES = Retry(total=3, allowed_methods=("GET", "POST"), backoff_factor=0.5)


@dataclass(frozen=True)
class Rollout:
    """One attempt at one rollout, as agent-lightning's controller describes it to an agent.

    Attributes:
        base_url: the OpenAI address of the model, for this rollout alone (`AGL_OPENAI_BASE_URL`).
        event_url: where events of this attempt are posted (`AGL_EVENT_URL`).
        key: the bearer key of both, "" for none (`AGL_KEY`).
    """

    base_url: str
    event_url: str
    key: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the `AGL_*` variables. Raises ValueError naming an address that is missing or empty."""
        for variable in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
            if not environ.get(variable):
                raise ValueError(f"{variable} is not set: agent-lightning's controller sets it for every rollout")
        return cls(environ["AGL_OPENAI_BASE_URL"], environ["AGL_EVENT_URL"], environ.get("AGL_KEY", ""))

    def report(self, reward: float, **data: Any) -> None:
        """Post the reward event, `data` beside its value. Raises httpx.HTTPError when it cannot be delivered.

        Broken connections, timeouts and the statuses 429, 502, 503 and 504 are retried.
        """
        self.post("reward", {"value": reward, "source": "agent", **data})

    def post(self, event_type: str, data: Mapping[str, Any]) -> None:
        """Post an event of any type, as `report` does."""
        with self._client() as client:
            client.post(self.event_url, json={"event_type": event_type, "data": data}).raise_for_status()

    def has_reward(self) -> bool:
        """Return True if a reward event of this rollout has been posted, by any process and attempt."""
        url = re.sub(r"/attempt/[^/]+/events$", "/events", self.event_url)
        with self._client() as client:
            return bool(client.get(url, params={"event_type": "reward"}).raise_for_status().json())

    def _client(self) -> httpx.Client:
        # Without a key the header would be "Bearer ", which is not a valid one.
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(
            transport=RetryTransport(retry=EVENT_RETRIES), headers=headers, timeout=EVENT_TIMEOUT_SECONDS
        )
