"""Write the panels of this folder anew from the worlds' own task functions.

    python -m empo2.recipe.evaluation.panels.make [NAME ...]

Equal versions of the worlds give equal files. WebShop's rows name their catalogue's folder by a plain name, which
``--row catalogue=FOLDER`` replaces.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from empo2.recipe.config import read_layer
from empo2.recipe.evaluation.panels import FOLDER, Row

_SCIENCEWORLD = "empo2.agents.scienceworld.agent:ScienceWorldAgent"
_WEBSHOP = "empo2.agents.webshop.agent:WebShopAgent"
_TEXTWORLD = "empo2.agents.textworld_express.agent:TextWorldExpressAgent"

# RLVMR's files of level 1 hold 29 of the 30 tasks (all but this one), each with ScienceWorld's own test split: the
# 1,684 pairs of task and variation that its forks list.
_NOT_IN_RLVMR = "use-thermometer"
# [ours] One or two tasks of each of ScienceWorld's ten topics: which tasks RLVMR's level 2 holds out is not printed.
_HELD_OUT = (
    "freeze",
    "measure-melting-point-unknown-substance",
    "power-component-renewable-vs-nonrenewable-energy",
    "test-conductivity-of-unknown-substances",
    "find-animal",
    "grow-fruit",
    "chemistry-mix-paint-tertiary-color",
    "lifespan-longest-lived-then-shortest-lived",
    "identify-life-stages-2",
    "inclined-plane-friction-unnamed-surfaces",
    "mendelian-genetics-unknown-plant",
)
_ALL = 10**6  # variations of a split
_WEBSHOP_TEST = 500  # goals 0 to 499, in the original's split and in verl-agent's


def scienceworld_paper() -> dict[str, Any]:
    _, test = _scienceworld("paper")
    return _panel("EMPO2's 18 tasks, the first 20 test variations of each (or all).", ["task"], _science(), test)


def scienceworld_paper_seen() -> dict[str, Any]:
    train, _ = _scienceworld("paper")
    return _panel("EMPO2's 18 tasks, the first 5 train variations, which it trains on.", ["task"], _science(), train)


def scienceworld_l0() -> dict[str, Any]:
    train, _ = _scienceworld(_rlvmr_tasks(), train_variations=20)
    return _panel(
        "RLVMR's level 0, seen tasks and variations: the first 20 train variations [ours] of its 29 tasks.",
        ["task"],
        _science(),
        train,
    )


def scienceworld_l1() -> dict[str, Any]:
    _, test = _scienceworld(_rlvmr_tasks(), test_variations=_ALL)
    return _panel("RLVMR's level 1, unseen variations: the test split of its 29 tasks.", ["task"], _science(), test)


def scienceworld_l2() -> dict[str, Any]:
    _, test = _scienceworld(_HELD_OUT, test_variations=20)
    return _panel(
        "As RLVMR's level 2, unseen tasks: the first 20 test variations of eleven held-out tasks, which must not be "
        "trained on [ours: RLVMR's list is not printed].",
        ["task"],
        _science(),
        test,
    )


def webshop_500() -> dict[str, Any]:
    rows = _webshop("original", "webshop")
    return _panel("WebShop's test goals 0 to 499, of the full catalogue.", [], _shop(), rows)


def webshop_verl_agent() -> dict[str, Any]:
    rows = _webshop("verl-agent", "webshop-small")
    return _panel("verl-agent's validation goals 0 to 499, of the original's 1,000 products.", [], _shop(), rows)


def textworld_express() -> dict[str, Any]:
    from empo2.agents.textworld_express.tasks import GAMES, Episode, load

    _, test = load(list(GAMES), test_seeds=20)
    return _panel(
        "TextWorld-Express: the first 20 seeds of the test fold of four games, with their default parameters.",
        ["game"],
        _world(_TEXTWORLD, Episode.env_map(), ["game", "seed"], failure_return=-100.0),
        test,
    )


def houses(name: str, level: str, part: str) -> dict[str, Any]:
    from empo2.agents.houses import tasks
    from empo2.agents.houses.games import GAMES, PANELS

    train, unseen = {"coin": tasks.coin_collector, "mapreader": tasks.map_reader}[name](level)
    settings = read_layer(PANELS.with_name(f"{name}.yaml"))
    config = {section: settings[section] for section in ("algorithm", "agent", "memory", "reflection")}
    config["algorithm"] = {**settings["algorithm"], **_returns(failure=0.0)}
    rows = {"unseen": unseen, "train": train}[part]
    which = {"unseen": "16 houses that are never trained on", "train": "16 houses that are trained on"}[part]
    return _panel(f"{GAMES[name].title}, level {level}: the {which}.", [], config, rows)


_coin = partial(houses, "coin")
_mapreader = partial(houses, "mapreader")

PANELS: dict[str, Callable[[], dict[str, Any]]] = {
    "scienceworld-paper": scienceworld_paper,
    "scienceworld-paper-seen": scienceworld_paper_seen,
    "scienceworld-l0": scienceworld_l0,
    "scienceworld-l1": scienceworld_l1,
    "scienceworld-l2": scienceworld_l2,
    "webshop-500": webshop_500,
    "webshop-verl-agent": webshop_verl_agent,
    "textworld-express": textworld_express,
    "coin-medium": partial(_coin, "medium", "unseen"),
    "coin-medium-seen": partial(_coin, "medium", "train"),
    "coin-hard": partial(_coin, "hard", "unseen"),
    "coin-hard-seen": partial(_coin, "hard", "train"),
    "mapreader-easy": partial(_mapreader, "easy", "unseen"),
    "mapreader-easy-seen": partial(_mapreader, "easy", "train"),
    "mapreader-medium": partial(_mapreader, "medium", "unseen"),
    "mapreader-medium-seen": partial(_mapreader, "medium", "train"),
    "mapreader-hard": partial(_mapreader, "hard", "unseen"),
    "mapreader-hard-seen": partial(_mapreader, "hard", "train"),
}


def _scienceworld(names: str | Sequence[str], **options: Any) -> tuple[list[Row], list[Row]]:
    from empo2.agents.scienceworld.tasks import load

    return load(names, actions="paper", **options)


def _science() -> dict[str, Any]:
    from empo2.agents.scienceworld.tasks import ENV_MAP

    return _world(_SCIENCEWORLD, ENV_MAP, ["task", "variation"], failure_return=-100.0)


def _rlvmr_tasks() -> list[str]:
    from empo2.agents.scienceworld.tasks import TASKS

    return [task for task in TASKS if task != _NOT_IN_RLVMR]


def _webshop(split: Any, catalogue: str) -> list[Row]:
    from empo2.agents.webshop.tasks import load

    _, test = load(split=split, train_goals=1, test_goals=_WEBSHOP_TEST)
    return [row | {"catalogue": catalogue} for row in test]


def _shop() -> dict[str, Any]:
    from empo2.agents.webshop.tasks import Episode

    env = Episode.env_map() | {"WEBSHOP_MAX_TOKENS": "512"}  # per reply [paper]
    return _world(_WEBSHOP, env, ["catalogue"], failure_return=0.0)


def _world(agent: str, env: dict[str, str], scope: list[str], failure_return: float) -> dict[str, Any]:
    return {
        "agent": {"class": agent, "env": env},
        "algorithm": _returns(failure_return),
        "memory": {"scope": scope},
    }


def _returns(failure: float) -> dict[str, float]:
    """Return the range of a world's returns, whole, since a profile's world may lie below."""
    return {"success_return": 100.0, "failure_return": failure, "return_scale": 0.01}


def _panel(description: str, group: list[str], config: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return a panel's content, what all rows share written once."""
    common = {field: value for field, value in rows[0].items() if all(row[field] == value for row in rows)}
    different = [{field: value for field, value in row.items() if field not in common} for row in rows]
    return {"description": description, "group": group, "config": config, "common": common, "rows": different}


def text_of(content: dict[str, Any]) -> str:
    """Return a panel's file: JSON with a row a line."""
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["rows"])
    return f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def main() -> None:
    """Write the panels that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Write the panels anew from the worlds' own task functions.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PANELS)}; all by default")
    names = parser.parse_args().names or list(PANELS)
    if unknown := set(names) - set(PANELS):
        parser.error(f"there is no panel {', '.join(sorted(unknown))}")
    for name in names:
        (FOLDER / f"{name}.json").write_text(text_of(PANELS[name]()))
        print(FOLDER / f"{name}.json")


if __name__ == "__main__":
    main()
