"""The task rows, each of which defines one game."""

from dataclasses import asdict, dataclass
from typing import Any

from ..text_game.episode import ActionForm, TextEpisode, positive
from .environment import game_file


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of TextWorld; size, quest and seed determine its game. Raises ValueError if a field is wrong."""

    variables = "QUEST"

    rooms: int
    objects: int  # things that the quest does not need
    quest: int  # actions of its shortest solution

    def __post_init__(self) -> None:
        for key in ("rooms", "objects", "quest"):
            positive(key, getattr(self, key))
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"textworld {self.rooms} {self.objects} {self.quest}"

    @property
    def title(self) -> str:
        return f"quest of {self.quest} in {self.rooms} rooms, seed {self.seed}"


def load(
    rooms: int = 5,
    objects: int = 6,
    quest: int = 6,
    max_steps: int = 30,
    actions: ActionForm = "free-text",
    choices: int = 12,
    train_games: int = 8,
    test_games: int = 8,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, seeds from 1, and rows to validate on, seeds from 1001; their games are made now."""
    positive("train_games", train_games)
    positive("test_games", test_games)
    if train_games > 1000:
        raise ValueError(f"train_games {train_games} must be at most 1000: the games to validate on come next")
    common: Any = {"rooms": rooms, "objects": objects, "quest": quest}

    def rows(seeds: range) -> list[dict[str, Any]]:
        form: Any = {"max_steps": max_steps, "actions": actions, "choices": choices}
        found = [asdict(Episode(seed=seed, **form, **common)) for seed in seeds]
        for seed in seeds:
            game_file(seed=seed, **common)
        return found

    return rows(range(1, 1 + train_games)), rows(range(1001, 1001 + test_games))
