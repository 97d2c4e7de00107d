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

type Content = dict[str, Any]


def _scienceworld(description: str, tasks: str | Sequence[str], part: int, **options: Any) -> Content:
    from empo2.agents.scienceworld.tasks import ENV_MAP, TASKS, load

    names = [task for task in TASKS if task != _NOT_IN_RLVMR] if tasks == "rlvmr" else tasks
    rows = load(names, actions="paper", **options)[part]
    return _panel(description, ["task"], _world(_SCIENCEWORLD, ENV_MAP, ["task", "variation"], -100.0), rows)


def _webshop(description: str, split: Any, catalogue: str) -> Content:
    from empo2.agents.webshop.tasks import Episode, load

    env = Episode.env_map() | {"WEBSHOP_MAX_TOKENS": "512"}  # per reply [paper]
    _, test = load(split=split, train_goals=1, test_goals=_WEBSHOP_TEST)
    rows = [row | {"catalogue": catalogue} for row in test]
    return _panel(description, [], _world(_WEBSHOP, env, ["catalogue"], 0.0), rows)


def _textworld_express() -> Content:
    from empo2.agents.textworld_express.tasks import GAMES, Episode, load

    _, test = load(list(GAMES), test_seeds=20)
    return _panel(
        "TextWorld-Express: the first 20 seeds of the test fold of four games, with their default parameters.",
        ["game"],
        _world(_TEXTWORLD, Episode.env_map(), ["game", "seed"], -100.0),
        test,
    )


def _houses(name: str, level: str, part: int) -> Content:
    from empo2.agents.houses import tasks
    from empo2.agents.houses.games import GAMES, PANELS

    load = {"coin": tasks.coin_collector, "mapreader": tasks.map_reader}[name]
    settings = read_layer(PANELS.with_name(f"{name}.yaml"))
    config = {section: settings[section] for section in ("algorithm", "agent", "memory", "reflection")}
    config["algorithm"] = {**settings["algorithm"], **_returns(failure=0.0)}
    which = ("16 houses that are trained on", "16 houses that are never trained on")[part]
    return _panel(f"{GAMES[name].title}, level {level}: the {which}.", [], config, load(level)[part])


_TRAIN, _TEST = 0, 1  # what `load` returns

PANELS: dict[str, Callable[[], Content]] = {
    "scienceworld-paper": partial(
        _scienceworld, "EMPO2's 18 tasks, the first 20 test variations of each (or all).", "paper", _TEST
    ),
    "scienceworld-paper-seen": partial(
        _scienceworld, "EMPO2's 18 tasks, the first 5 train variations, which it trains on.", "paper", _TRAIN
    ),
    "scienceworld-l0": partial(
        _scienceworld,
        "RLVMR's level 0, seen tasks and variations: the first 20 train variations [ours] of its 29 tasks.",
        "rlvmr",
        _TRAIN,
        train_variations=20,
    ),
    "scienceworld-l1": partial(
        _scienceworld,
        "RLVMR's level 1, unseen variations: the test split of its 29 tasks.",
        "rlvmr",
        _TEST,
        test_variations=_ALL,
    ),
    "scienceworld-l2": partial(
        _scienceworld,
        "As RLVMR's level 2, unseen tasks: the first 20 test variations of eleven held-out tasks, which must not be "
        "trained on [ours: RLVMR's list is not printed].",
        _HELD_OUT,
        _TEST,
        test_variations=20,
    ),
    "webshop-500": partial(_webshop, "WebShop's test goals 0 to 499, of the full catalogue.", "original", "webshop"),
    "webshop-verl-agent": partial(
        _webshop,
        "verl-agent's validation goals 0 to 499, of the original's 1,000 products.",
        "verl-agent",
        "webshop-small",
    ),
    "textworld-express": _textworld_express,
} | {
    f"{name}-{level}{suffix}": partial(_houses, name, level, part)
    for name, levels in (("coin", ("medium", "hard")), ("mapreader", ("easy", "medium", "hard")))
    for level in levels
    for suffix, part in (("", _TEST), ("-seen", _TRAIN))
}


def _world(agent: str, env: dict[str, str], scope: list[str], failure_return: float) -> dict[str, Any]:
    return {
        "agent": {"class": agent, "env": env},
        "algorithm": _returns(failure_return),
        "memory": {"scope": scope},
    }


def _returns(failure: float) -> dict[str, float]:
    """Return the range of a world's returns, whole, since a profile's world may lie below."""
    return {"success_return": 100.0, "failure_return": failure, "return_scale": 0.01}


def _panel(description: str, group: list[str], config: dict[str, Any], rows: Sequence[Row]) -> Content:
    """Return a panel's content, what all rows share written once."""
    common = {field: value for field, value in rows[0].items() if all(row[field] == value for row in rows)}
    different = [{field: value for field, value in row.items() if field not in common} for row in rows]
    return {"description": description, "group": group, "config": config, "common": common, "rows": different}


def text_of(content: Content) -> str:
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
