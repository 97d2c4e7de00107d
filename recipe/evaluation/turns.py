"""Keep the turns of episodes for a critic, in the folder of their results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2.recipe.config import Settings
from empo2.recipe.critic.episodes import Episode, Turn, append_episode
from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.messages import reply_of, spoken


def turns_keeper(folder: Path, settings: Settings) -> Callable[[Result, Sequence[Mapping[str, Any]]], None]:
    """Return a function that keeps the turns of an episode, given its result and its events.

    No text of a turn is longer than ``memory.state_characters``.
    """
    reader, characters = StateReader(settings.memory), settings.memory.state_characters

    def keep(result: Result, events: Sequence[Mapping[str, Any]]) -> None:
        turns = []
        for call in (event["data"] for event in events if event["event_type"] == "model_request"):
            reply = reply_of(call["response"]) if call.get("status") == "ok" else None
            if reply is not None:
                turns.append(Turn(*reader.task_and_state(call["request"]), spoken(reply)[:characters]))
        if result.return_ is not None:
            append_episode(folder, Episode(result.key, result.return_, turns))

    return keep
