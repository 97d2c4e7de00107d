"""The rows that say what one episode in a house plays."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .games import COIN_COLLECTOR, MAP_READER, Game


@dataclass(frozen=True, kw_only=True)
class HouseEpisode(TextEpisode):
    """An episode in the house that follows from the game, the level and the seed.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong.
    """

    variables = "HOUSE"
    game: ClassVar[Game]

    level: str  # one of the game's

    def __post_init__(self) -> None:
        one_of(self.game.levels, "level", self.level)
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"{self.game.name} {self.level}"

    @property
    def title(self) -> str:
        return f"{self.game.name}, {self.level}, house {self.seed}"


class CoinCollectorEpisode(HouseEpisode):
    game = COIN_COLLECTOR


class MapReaderEpisode(HouseEpisode):
    game = MAP_READER


def load(
    episode: type[HouseEpisode],
    level: str,
    train_houses: int = 16,
    unseen_houses: int = 16,
    max_steps: int | None = None,
    actions: ActionForm = "free-text",
    choices: int = 6,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and validation rows of a level: the first houses of its panels, which have none in common.

    `max_steps` is the level's own where it is None. Raises ValueError for a wrong argument.
    """
    one_of(episode.game.levels, "level", level)
    steps = episode.game.levels[level].max_steps if max_steps is None else max_steps

    def some(part: str, count: int) -> list[dict[str, Any]]:
        seeds = episode.game.panel(level)[part]
        positive(f"{part}_houses", count)
        if count > len(seeds):
            raise ValueError(f"{part}_houses {count}: level {level!r} has {len(seeds)}")
        return [
            asdict(episode(level=level, seed=seed, max_steps=steps, actions=actions, choices=choices))
            for seed in seeds[:count]
        ]

    return some("train", train_houses), some("unseen", unseen_houses)


coin_collector = partial(load, CoinCollectorEpisode)
map_reader = partial(load, MapReaderEpisode)
