"""The task rows, each of which defines one game in the cave."""

from dataclasses import asdict, dataclass
from typing import Any

from ..text_game.episode import TextEpisode, positive
from .environment import FULL_SCORE


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """A game in the cave. Raises ValueError, naming the value, when a field is wrong."""

    variables = "CAVE"
    forms = ("free-text",)

    @property
    def world(self) -> str:
        return "colossal cave"

    @property
    def title(self) -> str:
        return f"Colossal Cave, seed {self.seed}"

    @property
    def full_score(self) -> float:
        return FULL_SCORE


def load(games: int = 8, max_steps: int = 100) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two rows to try training on, and those of the panel: other seeds of the one cave that there is."""
    positive("games", games)
    rows = [
        asdict(Episode(seed=seed, max_steps=max_steps, actions="free-text", choices=1)) for seed in range(games + 2)
    ]
    return rows[games:], rows[:games]
