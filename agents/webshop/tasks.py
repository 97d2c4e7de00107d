"""The rows that say what one episode of WebShop plays."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from .catalogue import Catalogue
from .environment import HITS
from .generated import own_catalogue
from .goals import split

OWN = "own"
MAX_STEPS = 15  # as in the EMPO2 paper


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of WebShop. Raises ValueError, naming the value and the nearest right ones, when a field is wrong.

    Whether the catalogue has the goal only `Environment.reset` says.
    """

    variables = "WEBSHOP"

    catalogue: str  # its folder
    goal: int  # the goal's number after the original's shuffle
    hits: int  # products on a page of search results

    def __post_init__(self) -> None:
        positive("hits", self.hits)
        super().__post_init__()

    @property
    def world(self) -> str:
        return f"goal {self.goal}"

    @property
    def title(self) -> str:
        return f"goal {self.goal}"


def load(
    catalogue: str = OWN,
    max_steps: int = MAX_STEPS,
    actions: ActionForm = "free-text",
    choices: int = 12,
    hits: int = HITS,
    train_goals: int | Sequence[int] | None = None,
    test_goals: int | Sequence[int] | None = None,
    test_split: Literal["test", "validation"] = "test",
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train and validation rows: goals of the original's train split, and of its test split or its validation split.

    Args:
        catalogue: a folder that `python -m empo2.agents.webshop build` has made, or "own" for the project's own 1,000
            products, built when they are first asked for.
        hits: products on a page of search results, 10 in the original; fewer make shorter pages for small models.
        train_goals: how many of the split, from its beginning, or the numbers of some; None for all of them.
        test_goals: likewise.
        seed: of the draw of the listed actions.

    Raises ValueError for a wrong argument, and for a folder that is no catalogue.
    """
    one_of(("test", "validation"), "test_split", test_split)
    episode = partial(Episode, max_steps=max_steps, actions=actions, choices=choices, hits=hits, seed=seed)
    episode(catalogue=catalogue, goal=0)  # checks every argument before something is built
    folder = own_catalogue() if catalogue == OWN else Path(catalogue).expanduser()
    with closing(Catalogue(folder)) as opened:
        parts = split(opened.goals)
    episode = partial(episode, catalogue=str(folder.absolute()))
    train = _some(parts["train"], "train_goals", train_goals)
    test = _some(parts[test_split], "test_goals", test_goals)
    return [asdict(episode(goal=goal)) for goal in train], [asdict(episode(goal=goal)) for goal in test]


def _some(part: range, key: str, wanted: int | Sequence[int] | None) -> Sequence[int]:
    if wanted is None:
        return part
    if isinstance(wanted, int):
        positive(key, wanted)
        return part[:wanted]
    if wrong := [goal for goal in wanted if goal not in part]:
        raise ValueError(f"{key} {wrong[0]!r} is not in its split, {part.start} to {part.stop - 1}")
    return wanted
