"""The task rows, each of which defines one episode of WebShop."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ..text_game.episode import ActionForm, TextEpisode, one_of, positive
from . import goals
from .catalogue import Catalogue
from .environment import HITS
from .generated import own_catalogue
from .goals import Split
from .reward import OptionMatching

OWN = "own"
MAX_STEPS = 15  # as in the EMPO2 paper


@dataclass(frozen=True, kw_only=True)
class Episode(TextEpisode):
    """An episode of WebShop. Raises ValueError, naming the value and the nearest right ones, when a field is wrong.

    Only `Environment.reset` checks that the catalogue has the goal.
    """

    variables = "WEBSHOP"

    catalogue: str  # its folder, or "own"
    goal: int  # the goal's number after the original's shuffle
    hits: int  # products on a page of search results
    option_matching: OptionMatching  # how the options of synthetic goals are compared with the chosen ones

    def __post_init__(self) -> None:
        positive("hits", self.hits)
        one_of(get_args(OptionMatching), "option_matching", self.option_matching)
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
    option_matching: OptionMatching = "original",
    split: Split = "original",
    train_goals: int | Sequence[int] | None = None,
    test_goals: int | Sequence[int] | None = None,
    test_split: Literal["test", "validation"] = "test",
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return train and validation rows: goals of the train split, and of the test split or the validation split.

    Args:
        catalogue: a folder that `python -m empo2.agents.webshop build` has made, or "own" for the project's own 1,000
            products, built when they are first asked for.
        hits: products on a page of search results, 10 in the original; fewer make shorter pages for small models.
        option_matching: how the options of a synthetic goal are compared with the chosen ones: as in the original, or
            by their values alone.
        split: "original" tests on goals 0 to 499, validates on 500 to 1,499 and trains on 1,500 and up; "verl-agent"
            tests on 0 to 499 and trains on 500 and up.
        train_goals: number of goals from the beginning of the split, or a list of goal numbers; None for all.
        test_goals: likewise.
        seed: of the draw of the listed actions.

    Raises ValueError for a wrong argument, and for a folder that is not a catalogue.
    """
    one_of(("test", "validation"), "test_split", test_split)
    one_of(get_args(Split), "split", split)
    if (split, test_split) == ("verl-agent", "validation"):
        raise ValueError("test_split 'validation' is not in split 'verl-agent': take test_split 'test'")
    common: Any = {"max_steps": max_steps, "actions": actions, "choices": choices, "seed": seed}
    common |= {"hits": hits, "option_matching": option_matching}
    Episode(catalogue=catalogue, goal=0, **common)  # checks every argument before something is built
    if catalogue != OWN:
        catalogue = str(Path(catalogue).expanduser().absolute())
    with closing(open_catalogue(catalogue)) as opened:
        parts = goals.split(opened.goals, split)

    def rows(split: str, key: str, wanted: int | Sequence[int] | None) -> list[dict[str, Any]]:
        chosen = _some(parts[split], key, wanted)
        return [asdict(Episode(catalogue=catalogue, goal=goal, **common)) for goal in chosen]

    return rows("train", "train_goals", train_goals), rows(test_split, "test_goals", test_goals)


def open_catalogue(name: str) -> Catalogue:
    """Open the catalogue in a folder, or for "own" the project's own, built when it is first asked for.

    Raises CatalogueError for a folder that is not a catalogue.
    """
    return Catalogue(own_catalogue() if name == OWN else Path(name).expanduser())


def _some(part: range, key: str, wanted: int | Sequence[int] | None) -> Sequence[int]:
    if wanted is None:
        return part
    if isinstance(wanted, int):
        positive(key, wanted)
        return part[:wanted]
    if wrong := [goal for goal in wanted if goal not in part]:
        raise ValueError(f"{key} {wrong[0]!r} is not in its split, {part.start} to {part.stop - 1}")
    return wanted
