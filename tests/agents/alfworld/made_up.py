"""Make the games of agents/alfworld/own.zip: small made-up rooms, first as official game files.

.venv/bin/python tests/agents/alfworld/made_up.py
"""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from empo2.agents.alfworld.archive import write
from empo2.agents.alfworld.games import TASKS, Game, read_game
from empo2.agents.alfworld.tasks import OWN_FILE

COUNTS = {"train": 4, "valid_seen": 2, "valid_unseen": 2}  # games of each type
RECEPTACLES = 3  # in a room
WORDING = "Think of the {}, and of the {}."  # a person's, who says less than the game

_APPLIANCES = ("Fridge", "Microwave", "SinkBasin")
_DOORS = ("Fridge", "Microwave", "Cabinet", "Drawer")
_TARGETS = ("CounterTop", "Cabinet", "Drawer", "DiningTable", "Shelf")
_FOOD = ("Apple", "Mug", "Plate")
_SMALL = ("Pen", "CD", "Book")
_TRAITS = {"Apple": ("cleanable", "heatable", "coolable", "sliceable"), "DeskLamp": ("toggleable",)}
_TRAITS |= {name: ("cleanable", "heatable", "coolable", "isReceptacleObject") for name in ("Mug", "Plate")}

_GRAMMAR = """\
grammar :: \"\"\"{{"task": [{{"rhs": {task}}}]}}\"\"\";
action help {{
    feedback :: "go to, open, close, take, move, use, clean, heat, cool, slice, examine, look, inventory";
}}
"""
_PLACED = "(exists (?r - receptacle) (exists (?o - object) (and {more}(objectType ?o {thing}Type) (receptacleType ?r "
_PLACED += "{place}Type) (inReceptacle ?o ?r))))"
_BOTH = "(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {thing}Type) (receptacleType ?r "
_BOTH += "{place}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2)) (inReceptacle ?o2 ?r) "
_BOTH += "(objectType ?o2 {thing}Type))))))"
_LIT = (
    "(exists (?o - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?o DeskLampType) (toggleable ?o) "
)
_LIT += "(isToggled ?o) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?o ?r))) "
_LIT += "(exists (?o - object ?a - agent) (and (objectType ?o {thing}Type) (holds ?a ?o)))"


class _Kind(NamedTuple):
    """A type of task: its goal in words and in PDDL, the things to choose from, and the appliance, with its verb."""

    words: str
    goal: str
    things: Sequence[str]
    verb: str = ""
    appliance: str = ""


def _changed(verb: str, state: str, appliance: str) -> _Kind:
    goal = _PLACED.replace("{more}", f"({verb}able ?o) ({state} ?o) ")
    return _Kind(f"{verb} some {{thing}} and put it in {{place}}", goal, _FOOD, verb, appliance)


_KINDS = {
    "pick_and_place_simple": _Kind("put some {thing} on {place}", _PLACED.replace("{more}", ""), _SMALL),
    "look_at_obj_in_light": _Kind("look at {thing} under the desklamp", _LIT, _SMALL),
    "pick_clean_then_place_in_recep": _changed("clean", "isClean", "SinkBasin"),
    "pick_heat_then_place_in_recep": _changed("heat", "isHot", "Microwave"),
    "pick_cool_then_place_in_recep": _changed("cool", "isCool", "Fridge"),
    "pick_two_obj_and_place": _Kind("put two {thing} in {place}", _BOTH, _SMALL),
}


def own_games() -> dict[str, dict[str, Game]]:
    """Return the games by split and name."""
    return {
        split: {name: read_game(file, [WORDING.format(*target(name))]) for name, file in own_files(split)}
        for split in COUNTS
    }


def target(name: str) -> tuple[str, str]:
    """Return the thing and the place that a game's name names."""
    _, thing, _, place, _ = name.split("-")
    return thing.lower(), place.lower()


def own_files(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the games of a split by name, each as the content of a `game.tw-pddl` without the domain."""
    for room, task in enumerate(TASKS, start=1):
        for number in range(COUNTS[split]):
            generator = random.Random(f"{split} {task} {number}")
            thing, place = generator.choice(_KINDS[task].things), generator.choice(_TARGETS)
            yield f"{task}-{thing}-None-{place}-{room}/trial_{number}", _file(task, thing, place, generator)


def _file(task: str, thing: str, place: str, generator: random.Random) -> dict[str, Any]:
    kind = _KINDS[task]
    chosen = dict.fromkeys(filter(None, (place, kind.appliance)))
    others = [name for name in (*_TARGETS, *_APPLIANCES) if name not in chosen]
    rooms = [*chosen, *generator.sample(others, RECEPTACLES - len(chosen))]
    sources = [name for name in rooms if name != place]
    wanted = [(thing, generator.choice(sources)) for _ in range(2 if task == "pick_two_obj_and_place" else 1)]
    lamp = [("DeskLamp", generator.choice(rooms))] if task == "look_at_obj_in_light" else []
    rest = [name for name in (*_FOOD, *_SMALL, "Knife") if name != thing]
    things = [*wanted, *lamp, *((name, generator.choice(rooms)) for name in generator.sample(rest, 3))]

    facts = ["atLocation agent loc_bar_start"]
    for name in rooms:
        id, location = _id(name), f"loc_bar_{name}"
        facts += [f"receptacleType {id} {name}Type", f"receptacleAtLocation {id} {location}"]
        facts += [f"openable {id}"] * (name in _DOORS)
        facts += [f"canContain {name}Type {other}Type" for other in (*_FOOD, *_SMALL, "Knife")]
    for number, (name, where) in enumerate(things):
        id = f"{name}_bar_{number}"
        facts += [f"objectType {id} {name}Type", f"objectAtLocation {id} loc_bar_{where}"]
        facts += [f"inReceptacle {id} {_id(where)}"]
        facts += [f"{trait} {id}" for trait in _TRAITS.get(name, ())]
        facts += [f"pickupable {id}"] * (name != "DeskLamp")
    goal = kind.goal.format(thing=thing, place=place)
    words = f"Your task is to: {kind.words.format(thing=thing.lower(), place=place.lower())}."
    return {
        "pddl_problem": f"(:init {' '.join(f'({fact})' for fact in facts)})\n(:goal (and {goal}))",
        "grammar": _GRAMMAR.format(task=json.dumps(words)),
        "solvable": True,
        "walkthrough": _walkthrough(kind, wanted, lamp[0][1] if lamp else "", place),
    }


def _id(receptacle: str) -> str:
    """Return an id as the official files have it."""
    return "Sink_bar_0_bar_SinkBasin" if receptacle == "SinkBasin" else f"{receptacle}_bar_0"


def _walkthrough(kind: _Kind, wanted: Sequence[tuple[str, str]], lamp: str, place: str) -> list[str]:
    steps: list[str] = []

    def go(where: str) -> None:
        name = f"{where.lower()} 1"
        if not steps or f"go to {name}" != next(step for step in reversed(steps) if step.startswith("go to")):
            steps.append(f"go to {name}")
        if where in _DOORS and f"open {name}" not in steps:
            steps.append(f"open {name}")

    for left, (thing, source) in zip(range(len(wanted), 0, -1), wanted, strict=True):
        name = f"{thing.lower()} {left}"
        go(source)
        steps.append(f"take {name} from {source.lower()} 1")
        if kind.appliance:
            go(kind.appliance)
            steps.append(f"{kind.verb} {name} with {kind.appliance.lower()} 1")
        if lamp:
            go(lamp)
            steps.append("use desklamp 1")
        else:
            go(place)
            steps.append(f"move {name} to {place.lower()} 1")
    return steps


if __name__ == "__main__":
    write(OWN_FILE, own_games())
