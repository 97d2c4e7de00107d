"""A game as data: what an episode starts from. Read from the PDDL problem of an official game file."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

# The six types of tasks, in the official order, by the predicates of their goals.
_PLACED = ("inReceptacle", "objectType", "receptacleType")
TASKS = {
    "pick_and_place_simple": {*_PLACED},
    "look_at_obj_in_light": {
        *("objectType", "toggleable", "isToggled", "receptacleAtLocation", "atLocation", "inReceptacle", "holds"),
    },
    "pick_clean_then_place_in_recep": {*_PLACED, "cleanable", "isClean"},
    "pick_heat_then_place_in_recep": {*_PLACED, "heatable", "isHot"},
    "pick_cool_then_place_in_recep": {*_PLACED, "coolable", "isCool"},
    "pick_two_obj_and_place": {*_PLACED, "="},
}

NOWHERE = -1

# Facts of things at the start, and those that are about the planner's costs.
_TRAITS = ("pickupable", "cleanable", "heatable", "coolable", "toggleable", "sliceable", "isReceptacleObject", "isCool")
_IGNORED = ("=", "distance", "total-cost")


class Receptacle(NamedTuple):
    """Something that things lie in or on. `door` is "" if it cannot be opened, else "closed" or "open"."""

    name: str
    type: str
    place: int
    door: str


class Thing(NamedTuple):
    """Anything else. `type` may be "", `place` NOWHERE; `traits` are PDDL predicates; `receptacles` are indices."""

    name: str
    type: str
    place: int
    traits: Sequence[str]
    receptacles: Sequence[int]


@dataclass(frozen=True)
class Game:
    """A game. Receptacles and things are in the order in which the official engine lists them, that of their ids.

    task: one of TASKS.
    instruction: the goal in the game's own words, "Your task is to: ...".
    wordings: the same in people's words.
    target: the goal's types: of the thing, and of the receptacle, or of the lamp.
    start: the player's place.
    inside: pairs of a thing and the thing that it is in.
    fits: the types of things that can be put into a type of receptacle.
    help: the text of the action `help`.
    walkthrough: actions that win.
    """

    task: str
    instruction: str
    wordings: Sequence[str]
    target: tuple[str, str]
    start: int
    receptacles: Sequence[Receptacle]
    things: Sequence[Thing]
    inside: Sequence[tuple[int, int]]
    fits: Mapping[str, Sequence[str]]
    help: str
    walkthrough: Sequence[str]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the game of `row`, the inverse of `as_row`."""
        parts = {"receptacles": [Receptacle(*part) for part in row["receptacles"]]}
        return cls(**{**row, **parts, "things": [Thing(*part) for part in row["things"]]})

    def as_row(self) -> dict[str, Any]:
        """Return the game as JSON has it."""
        return json.loads(json.dumps(asdict(self)))


def read_game(file: Mapping[str, Any], wordings: Sequence[str]) -> Game:
    """Return the game of an official `game.tw-pddl`, parsed as JSON.

    Raises ValueError if it has facts, a goal or texts of another form.
    """
    init, goal = file["pddl_problem"].split("(:init", 1)[1].split("(:goal", 1)
    facts = defaultdict[str, list[list[str]]](list)
    for fact in re.findall(r"\(([^()]+)\)", init):
        predicate, *arguments = fact.split()
        facts[predicate].append([argument.lower() for argument in arguments])
    known = ("receptacleType", "receptacleAtLocation", "openable", "opened", "objectType", "objectAtLocation")
    known += ("inReceptacle", "inReceptacleObject", "canContain", "atLocation", *_TRAITS, *_IGNORED)
    if unknown := facts.keys() - set(known):
        raise ValueError(f"its start has facts that no official game has: {', '.join(sorted(unknown))}")

    receptacle_types, types = _one_each(facts["receptacleType"]), _one_each(facts["objectType"])
    places = _one_each(facts["receptacleAtLocation"]) | _one_each(facts["objectAtLocation"])
    ((_, start),) = facts["atLocation"]
    numbers = {place: number for number, place in enumerate(sorted({start, *places.values()}))}
    receptacles = sorted(receptacle_types)
    things = sorted({fact[0] for predicate in ("objectType", "inReceptacle", *_TRAITS) for fact in facts[predicate]})
    names = _names([*receptacles, *things])
    traits = {trait: {arguments[0] for arguments in facts[trait]} for trait in (*_TRAITS, "openable", "opened")}

    def door(id: str) -> str:
        return ("open" if id in traits["opened"] else "closed") if id in traits["openable"] else ""

    in_receptacles = defaultdict[str, set[int]](set)
    for thing, receptacle in facts["inReceptacle"]:
        in_receptacles[thing].add(receptacles.index(receptacle))
    carried = {types.get(id) for id in traits["pickupable"]}
    task, target = _goal(goal)
    return Game(
        task=task,
        instruction=_rule(file["grammar"], "task"),
        wordings=tuple(wordings),
        target=target,
        start=numbers[start],
        receptacles=tuple(
            Receptacle(names[id], _type(receptacle_types[id]), numbers[places[id]], door(id)) for id in receptacles
        ),
        things=tuple(
            Thing(
                names[id],
                _type(types.get(id, "")),
                numbers[places[id]] if id in places else NOWHERE,
                tuple(trait for trait in _TRAITS if id in traits[trait]),
                tuple(sorted(in_receptacles[id])),
            )
            for id in things
        ),
        inside=tuple(
            (things.index(inner), things.index(outer)) for inner, outer in sorted(facts["inReceptacleObject"])
        ),
        fits=_fits(facts["canContain"], {*receptacle_types.values()}, carried),
        help=_help(file["grammar"]),
        walkthrough=tuple(file["walkthrough"]),
    )


def _one_each(facts: Iterable[Sequence[str]]) -> dict[str, str]:
    """Return the second argument by the first. Raises ValueError if there are two, which the engine cannot play."""
    found: dict[str, str] = {}
    for first, second in facts:
        if found.setdefault(first, second) != second:
            raise ValueError(f"{first} is both {found[first]} and {second}")
    return found


def _names(ids: Iterable[str]) -> dict[str, str]:
    """Return the names that players read: the kind and a number, counted down in the order of the ids."""
    kinds = {id: id.split("_bar_", 1)[0] + "basin" * ("basin" in id) for id in sorted(ids)}
    left = Counter(kinds.values())
    names = {}
    for id, kind in kinds.items():
        names[id] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def _goal(text: str) -> tuple[str, tuple[str, str]]:
    """Return the type of the task and the two types that the goal names, of the thing first."""
    predicates = set(re.findall(r"\((\S+) \?", text))
    targets = re.findall(r"\((?:object|receptacle)Type \?\w+ (\w+)\)", text)
    for task, required in TASKS.items():
        if predicates == required:
            first, second = reversed(targets) if task == "look_at_obj_in_light" else targets[:2]
            return task, (_type(first), _type(second))
    raise ValueError(f"its goal is of no type of task: {' '.join(text.split())[:80]}")


def _fits(
    pairs: Iterable[Sequence[str]], receptacles: set[str], carried: set[str | None]
) -> dict[str, tuple[str, ...]]:
    """Return what can be put where, of the types that the game has."""
    found = defaultdict[str, set[str]](set)
    for receptacle, thing in pairs:
        if receptacle in receptacles and thing in carried:
            found[_type(receptacle)].add(_type(thing))
    return {receptacle: tuple(sorted(found[receptacle])) for receptacle in sorted(found)}


def _type(name: str) -> str:
    return name.lower().removesuffix("type")


def _rule(grammar: str, name: str) -> str:
    """Return the first text that the grammar has for a symbol."""
    found = re.search(rf'"{name}":\s*\[\s*\{{\s*"rhs":\s*("(?:[^"\\]|\\.)*")', grammar)
    if found is None:
        raise ValueError(f"its grammar has no rule {name!r}")
    return json.loads(found[1])


def _help(grammar: str) -> str:
    found = re.search(r'action help \{.*?feedback :: "(.*?)";', grammar, re.DOTALL)
    text = found[1] if found else "#help.feedback#"
    return (_rule(grammar, "help.feedback") if text == "#help.feedback#" else text).removeprefix("\n")
