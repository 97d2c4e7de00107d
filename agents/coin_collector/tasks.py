"""The rows that say what one episode plays."""

from dataclasses import asdict, dataclass
from typing import Any

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .levels import LEVELS, panel


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of CoinCollector, whose house follows from the level's rooms and the seed.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong.
    """

    variables = "COIN"

    level: str  # one of LEVELS

    def __post_init__(self) -> None:
        one_of(LEVELS, "level", self.level)
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"coin {self.level}"

    @property
    def title(self) -> str:
        return f"coin, {self.level}, house {self.seed}"


def load(
    level: str,
    train_houses: int = 16,
    unseen_houses: int = 16,
    max_steps: int | None = None,
    actions: ActionForm = "free-text",
    choices: int = 6,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation rows of a level: the first houses of its panels, which have none in common.

    `max_steps` is the level's own where it is None. Raises ValueError for a wrong argument.
    """
    one_of(LEVELS, "level", level)
    steps = LEVELS[level].max_steps if max_steps is None else max_steps

    def some(part: str, count: int) -> list[dict[str, Any]]:
        seeds = panel(level)[part]
        positive(f"{part}_houses", count)
        if count > len(seeds):
            raise ValueError(f"{part}_houses {count}: level {level!r} has {len(seeds)}")
        return [
            asdict(Episode(level=level, seed=seed, max_steps=steps, actions=actions, choices=choices))
            for seed in seeds[:count]
        ]

    return some("train", train_houses), some("unseen", unseen_houses)
