"""TextWorld-Express's games by name, and the task rows, each of which defines one episode."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .environment import Environment

# Games and their action forms, which TextWorld-Express does not list. Of its eight games these are the three that it
# adopted from other benchmarks, and the one that requires planning with a map.
_EVERYWHERE = ("look around", "inventory", "move DIRECTION")
_DOORS = ("open door to DIRECTION", "close door to DIRECTION")
_THINGS = ("take OBJ", "put OBJ in OBJ", "open OBJ", "close OBJ")
GAMES = {
    "coin": (*_EVERYWHERE, *_DOORS, "take OBJ"),
    "cookingworld": (
        *(*_EVERYWHERE, *_DOORS, *_THINGS),
        *("examine OBJ", "read OBJ", "chop OBJ", "slice OBJ", "dice OBJ", "cook OBJ in OBJ", "eat OBJ"),
        *("prepare meal", "eat meal"),
    ),
    "mapreader": (*_EVERYWHERE, *_DOORS, "read map", "task", "take OBJ", "put OBJ in OBJ"),
    "twc": (*_EVERYWHERE, *_DOORS, *_THINGS),
}

FOLDS = ("train", "dev", "test")


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of TextWorld-Express; game, params, fold and seed determine its world.

    Raises ValueError, naming the value and the nearest right ones, when a field is wrong. Only TextWorld-Express
    knows which `params` fit a game: `Environment.reset` checks that.
    """

    variables = "TEXTWORLD"

    game: str  # one of GAMES
    params: str  # the game's parameters, such as "numLocations=3,includeDoors=0"; "" for its defaults
    fold: str  # one of FOLDS: which things the world is made of

    def __post_init__(self) -> None:
        one_of(GAMES, "game", self.game)
        one_of(FOLDS, "fold", self.fold)
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"{self.game} {self.params} {self.fold}"

    @property
    def title(self) -> str:
        return f"{self.game} seed {self.seed}"


def load(
    names: Sequence[str],
    params: str = "",
    max_steps: int = 50,
    actions: ActionForm = "free-text",
    choices: int = 12,
    train_seeds: int = 5,
    test_seeds: int = 20,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return train and validation rows of the named games.

    They are the first seeds of TextWorld-Express's own train and test folds, which have 1,000 different seeds each, and
    in cookingworld and twc also different things. `params` is passed to every named game. 50 steps are the limit of
    TextWorld-Express's own benchmark.

    Starts Java once, for about a second. Raises ValueError for a wrong argument, FileNotFoundError without Java.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"names {names!r}: list some of {', '.join(GAMES)}")
    positive("train_seeds", train_seeds)
    positive("test_seeds", test_seeds)

    common: Any = {"params": params, "max_steps": max_steps, "actions": actions, "choices": choices}

    def row(game: str, fold: str, seed: int) -> dict[str, Any]:
        return asdict(Episode(game=game, fold=fold, seed=seed, **common))

    for game in names:
        row(game, "train", seed=0)  # checks every argument
    train, test = [], []
    with Environment() as environment:
        for game in names:
            train_split, test_split = environment.split(game, params)
            environment.reset(game, params, "train", train_split[0], max_steps)  # some parameters contradict each other
            train += [row(game, "train", seed) for seed in train_split[:train_seeds]]
            test += [row(game, "test", seed) for seed in test_split[:test_seeds]]
    return train, test
