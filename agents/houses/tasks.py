"""The rows that say what one episode in a house plays."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .games import COIN_COLLECTOR, MAP_READER, Game

BLOCK_TRAIN, BLOCK_UNSEEN = 8, 2  # houses of a block


@dataclass(frozen=True, kw_only=True)
class HouseEpisode(TextEpisode):
    """An episode in the house that follows from the game, the level, the seed and the disguise.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong.
    """

    variables = "HOUSE"
    game: ClassVar[Game]

    level: str  # one of the game's
    disguise: int = 0  # number of the rooms' other names and of the turned compass; 0: the house as the game made it

    def __post_init__(self) -> None:
        one_of(self.game.levels, "level", self.level)
        if self.disguise < 0:
            raise ValueError(f"disguise {self.disguise} must be at least 0")
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"{self.game.name} {self.level}"

    @property
    def title(self) -> str:
        disguise = f", disguise {self.disguise}" if self.disguise else ""
        return f"{self.game.name}, {self.level}, house {self.seed}{disguise}"


class CoinCollectorEpisode(HouseEpisode):
    game = COIN_COLLECTOR


class MapReaderEpisode(HouseEpisode):
    game = MAP_READER


def load(
    episode: type[HouseEpisode],
    level: str,
    train_houses: int = 16,
    unseen_houses: int = 16,
    block: int | None = None,
    max_steps: int | None = None,
    actions: ActionForm = "free-text",
    choices: int = 6,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training and validation rows of a level, for houses that have none in common.

    Without a block they are the first houses of the level's panels, as the game made them. A block has 8 houses to
    train on and 2 others, each in a disguise, and no house is in two blocks: choose settings in one, test them in
    others. `max_steps` is the level's own where it is None. Raises ValueError for a wrong argument.
    """
    one_of(episode.game.levels, "level", level)
    steps = episode.game.levels[level].max_steps if max_steps is None else max_steps
    train, unseen = panel(episode.game, level, block)

    def some(part: str, seeds: Sequence[int], count: int) -> list[dict[str, Any]]:
        positive(f"{part}_houses", count)
        if count > len(seeds):
            where = f"level {level!r}" if block is None else f"a block of level {level!r}"
            raise ValueError(f"{part}_houses {count}: {where} has {len(seeds)}")
        common = {"level": level, "disguise": 0 if block is None else block + 1}
        common |= {"max_steps": steps, "actions": actions, "choices": choices}
        return [asdict(episode(seed=seed, **common)) for seed in seeds[:count]]

    return some("train", train, train_houses), some("unseen", unseen, unseen_houses)


def panel(game: Game, level: str, block: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """Return the seeds of a level's houses to train on and of those never trained on, of one block or of all."""
    train, unseen = game.panel(level).values()
    if block is None:
        return train, unseen
    seeds, size = [*train, *unseen], BLOCK_TRAIN + BLOCK_UNSEEN
    if not 0 <= block < (blocks := len(seeds) // size):
        raise ValueError(f"block {block}: level {level!r} has blocks 0 to {blocks - 1}")
    return seeds[block * size :][:BLOCK_TRAIN], seeds[block * size + BLOCK_TRAIN :][:BLOCK_UNSEEN]


coin_collector = partial(load, CoinCollectorEpisode)
map_reader = partial(load, MapReaderEpisode)


def coin_stream(
    level: str, block: int, houses: int = 16, at_once: int = 2, steps: int = 6
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return tasks of CoinCollector that are to be played in their order (`verl.data.shuffle: false`).

    `at_once` houses at a time are played for `steps` steps, and then never again. Blocks from 1 on are counted from the
    last training house of the level backwards, each in a disguise. Raises ValueError where there are too few houses.
    """
    every, unseen = coin_collector(level, train_houses=len(panel(COIN_COLLECTOR, level, None)[0]), unseen_houses=1)
    if block < 1 or houses * block > len(every):
        raise ValueError(f"block {block} of {houses} houses: level {level!r} has blocks 1 to {len(every) // houses}")
    first = len(every) - houses * block
    played = [row | {"disguise": block + 1} for row in every[first : first + houses]]
    groups = [played[begin : begin + at_once] for begin in range(0, houses, at_once)]
    return [row for group in groups for _ in range(steps) for row in group], unseen
