"""The task rows, each of which defines one episode of ALFWorld."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .archive import SPLITS, Archive, require
from .games import TASKS, Game

OWN = "own"  # the project's made-up games
OWN_FILE = Path(__file__).with_name("own.zip")
MAX_STEPS = 50  # as in ALFWorld's paper and verl-agent
Admissible = Literal["shown", "hidden"]


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of ALFWorld. Raises ValueError, naming the value and the nearest right ones, when a field is wrong.

    A file that is not there is an error, too. Only `game_of` checks that the file has the game, and only `Environment`
    that the game has the wording.
    """

    variables = "ALFWORLD"
    forms = ("free-text", "choice", "tags", "meta")

    games: str  # the file that `python -m empo2.agents.alfworld import` has made, or "own"
    split: str  # one of SPLITS
    task: str  # one of TASKS
    game: str  # the rest of its name, such as "Mug-None-Desk-308/trial_T20190909_145219_123456"
    wording: int  # of the goal: 0 the game's own, 1 to 3 people's
    admissible: Admissible  # whether turns list the admissible actions; the choice form lists some in any case
    history: int  # last observations and actions that a request repeats, in place of the whole chat; 0: the whole chat
    reward: int  # of a won game

    def __post_init__(self) -> None:
        require(_file(self.games))
        one_of(SPLITS, "split", self.split)
        one_of(TASKS, "task", self.task)
        one_of(get_args(Admissible), "admissible", self.admissible)
        positive("reward", self.reward)
        for key in ("wording", "history"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} {getattr(self, key)} must be at least 0")
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"{self.task}-{self.game}"

    @property
    def full_score(self) -> float:
        return self.reward

    @property
    def title(self) -> str:
        return self.world


def load(
    games: str = OWN,
    tasks: Sequence[str] = tuple(TASKS),
    test_split: str = "valid_unseen",
    train_games: int | None = None,
    test_games: int | None = None,
    max_steps: int = MAX_STEPS,
    actions: ActionForm = "free-text",
    choices: int = 12,
    admissible: Admissible = "shown",
    history: int = 0,
    wording: int = 0,
    reward: int = 10,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training rows, of the split `train`, and validation rows, of `test_split`.

    Args:
        games: a file that `python -m empo2.agents.alfworld import` has made, or "own" for the project's made-up games.
        tasks: some of the six types of tasks.
        train_games: games of each type, from the first by name; None for all.
        test_games: likewise.
        seed: of the draw of the listed actions.

    The official environment plays the games in the order of the file system, which differs between machines; the rows
    are in the order of the types' numbers, then of the names.

    Raises ValueError for a wrong argument, and for a file that holds no games.
    """
    one_of(("valid_seen", "valid_unseen"), "test_split", test_split)
    if isinstance(tasks, str) or not tasks:
        raise ValueError(f"tasks {tasks!r}: list some of {', '.join(TASKS)}")
    common: Any = {"max_steps": max_steps, "actions": actions, "choices": choices, "seed": seed, "wording": wording}
    common |= {"admissible": admissible, "history": history, "reward": reward}
    for task in tasks:  # checks every argument before the file is read
        Episode(games=games, split=test_split, task=task, game="", **common)
    names = Archive(_file(games)).names
    if games != OWN:
        games = str(_file(games).absolute())

    def rows(split: str, key: str, count: int | None) -> list[dict[str, Any]]:
        if count is not None:
            positive(key, count)
        found = []
        for task in TASKS:
            of_task = [name.removeprefix(f"{task}-") for name in names[split] if name.startswith(f"{task}-")]
            kept = of_task[:count] if task in tasks else []
            found += [asdict(Episode(games=games, split=split, task=task, game=game, **common)) for game in kept]
        return found

    return rows("train", "train_games", train_games), rows(test_split, "test_games", test_games)


def game_of(episode: Episode) -> Game:
    """Return an episode's game. Raises ValueError if its file has no such game or cannot be read."""
    return Archive(_file(episode.games)).game(episode.split, episode.world)


def _file(games: str) -> Path:
    return OWN_FILE if games == OWN else Path(games).expanduser()
