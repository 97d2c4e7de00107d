"""ALFWorld's rules and words in plain Python: the text game that the official TextWorld engine plays from PDDL.

tests/agents/alfworld/test_real_engine.py compares every reply with that engine's.
"""

from collections import defaultdict
from collections.abc import Sequence

from .games import NOWHERE, Game

NOTHING_HAPPENS = "Nothing happens."
_ANYWHERE = "You are in the middle of a room. Looking quickly around you, you see"
_APPLIANCES = {"clean": ("cleanable", ("sink", "sinkbasin")), "heat": ("heatable", ("microwave",))}
_APPLIANCES |= {"cool": ("coolable", ("fridge",))}
_KNIVES = ("knife", "butterknife")
_NEEDED = {
    "pick_clean_then_place_in_recep": {"cleanable", "isClean"},
    "pick_heat_then_place_in_recep": {"heatable", "isHot"},
    "pick_cool_then_place_in_recep": {"coolable", "isCool"},
}

Action = tuple[str, *tuple[int, ...]]  # a method of Engine and its arguments


class Engine:
    """One started game.

    intro: the first text: the room, and the task.
    actions: what can be done now, by its command.
    held: index of the thing in the player's hand.
    """

    def __init__(self, game: Game) -> None:
        self._game = game
        self._receptacles, self._things = game.receptacles, game.things
        self._place = game.start
        self._is_open = [receptacle.door != "closed" for receptacle in game.receptacles]
        self._in = [set(thing.receptacles) for thing in game.things]  # receptacles of each thing
        self._places = [thing.place for thing in game.things]
        self._traits = [set(thing.traits) for thing in game.things]
        self._taken: set[tuple[int, int]] = set()  # pairs of a thing and a receptacle that it was taken from
        self.held: int | None = None
        self._at = defaultdict[int, list[int]](list)  # receptacles by place
        for index, receptacle in enumerate(game.receptacles):
            self._at[receptacle.place].append(index)
        everything = _listed([f"a {receptacle.name}" for receptacle in game.receptacles])
        around = self._look() if self._here else f"{_ANYWHERE} {everything}."
        self.intro = f"-= Welcome to TextWorld, ALFRED! =-\n\n{around}\n\n{game.instruction}"
        self.actions = self._find_actions()

    @property
    def commands(self) -> tuple[str, ...]:
        """Return the commands of `actions`, sorted as the official engine has them."""
        return tuple(sorted(self.actions))

    def step(self, command: str) -> str:
        """Take an action and return what comes of it; any other text changes nothing."""
        action = self.actions.get(command.strip())
        if action is None:
            return NOTHING_HAPPENS
        method, *arguments = action
        feedback = getattr(self, method)(*arguments)
        self.actions = self._find_actions()
        return feedback

    @property
    def won(self) -> bool:
        wanted, where = self._game.target
        things = [index for index, thing in enumerate(self._things) if thing.type == wanted]
        if self._game.task == "look_at_obj_in_light":
            return self.held in things and any(
                lamp.type == where and {"toggleable", "isToggled"} <= self._traits[index] and self._is_here(index)
                for index, lamp in enumerate(self._things)
            )
        needed = _NEEDED.get(self._game.task, set())
        good = [index for index in things if needed <= self._traits[index]]
        count = 2 if self._game.task == "pick_two_obj_and_place" else 1
        return any(
            receptacle.type == where and sum(index in self._in[thing] for thing in good) >= count
            for index, receptacle in enumerate(self._receptacles)
        )

    # What can be done

    def _find_actions(self) -> dict[str, Action]:
        found: dict[str, Action] = {"look": ("_look",), "inventory": ("_inventory",), "help": ("_help",)}
        for index, receptacle in enumerate(self._receptacles):
            if receptacle.place != self._place:
                found[f"go to {receptacle.name}"] = ("_go", index)
        for index in self._here:
            receptacle = self._receptacles[index]
            found[f"examine {receptacle.name}"] = ("_examine_receptacle", index)
            if receptacle.door:
                verb = "close" if self._is_open[index] else "open"
                found[f"{verb} {receptacle.name}"] = (f"_{verb}", index)
            for thing in self._content(index):
                if self._is_open[index] and self.held is None and "pickupable" in self._traits[thing]:
                    found[f"take {self._things[thing].name} from {receptacle.name}"] = ("_take", thing, index)
                if "toggleable" in self._traits[thing]:
                    found[f"use {self._things[thing].name}"] = ("_use", thing)
        return found if self.held is None else found | self._actions_with(self.held)

    def _actions_with(self, held: int) -> dict[str, Action]:
        thing = self._things[held]
        found: dict[str, Action] = {f"examine {thing.name}": ("_examine_thing", held)}
        for index in self._here:
            receptacle = self._receptacles[index]
            if self._is_open[index] and thing.type in self._game.fits.get(receptacle.type, ()):
                found[f"move {thing.name} to {receptacle.name}"] = ("_move", held, index)
            for verb, (trait, appliances) in _APPLIANCES.items():
                if trait in self._traits[held] and receptacle.type in appliances:
                    found[f"{verb} {thing.name} with {receptacle.name}"] = (f"_{verb}", held, index)
        if thing.type in _KNIVES:
            for index, other in enumerate(self._things):
                if "sliceable" in self._traits[index] and self._places[index] == self._place:
                    found[f"slice {other.name} with {thing.name}"] = ("_slice", index, held)
        return found

    # What comes of it

    def _look(self) -> str:
        if not self._here:
            return f"{_ANYWHERE} nothing."
        # A thing counts as lying beside if it was taken from one receptacle of this place and put into another.
        beside = [
            f"a {self._things[thing].name}"
            for thing, place in enumerate(self._places)
            for receptacle in self._here
            if place == self._place and (thing, receptacle) in self._taken
        ]
        facing = _listed([self._receptacles[index].name for index in self._here])
        return f"You are facing the {facing}. Next to it, you see {_listed(beside)}."

    def _inventory(self) -> str:
        if self.held is None:
            return "You are not carrying anything."
        return f"You are carrying: a {self._things[self.held].name}."

    def _help(self) -> str:
        return self._game.help

    def _go(self, receptacle: int) -> str:
        self._place = self._receptacles[receptacle].place
        return f"You arrive at {self._receptacles[receptacle].name}. {self._examine_receptacle(receptacle)}"

    def _open(self, receptacle: int) -> str:
        self._is_open[receptacle] = True
        return f"You open the {self._receptacles[receptacle].name}. {self._examine_receptacle(receptacle)}"

    def _close(self, receptacle: int) -> str:
        self._is_open[receptacle] = False
        return f"You close the {self._receptacles[receptacle].name}."

    def _take(self, thing: int, receptacle: int) -> str:
        self._in[thing].discard(receptacle)
        self._taken.add((thing, receptacle))
        self.held = thing
        if self._places[thing] == self._place:
            self._places[thing] = NOWHERE
        return f"You pick up the {self._things[thing].name} from the {self._receptacles[receptacle].name}."

    def _move(self, thing: int, receptacle: int) -> str:
        self._in[thing].add(receptacle)
        self._taken.discard((thing, receptacle))
        self.held = None
        self._places[thing] = self._place
        return f"You move the {self._things[thing].name} to the {self._receptacles[receptacle].name}."

    def _clean(self, thing: int, receptacle: int) -> str:
        self._traits[thing].add("isClean")
        return self._used("clean", thing, receptacle)

    def _heat(self, thing: int, receptacle: int) -> str:
        self._traits[thing].add("isHot")
        self._traits[thing].discard("isCool")
        return self._used("heat", thing, receptacle)

    def _cool(self, thing: int, receptacle: int) -> str:
        self._traits[thing].add("isCool")
        self._traits[thing].discard("isHot")
        return self._used("cool", thing, receptacle)

    def _used(self, verb: str, thing: int, receptacle: int) -> str:
        return f"You {verb} the {self._things[thing].name} using the {self._receptacles[receptacle].name}."

    def _use(self, thing: int) -> str:
        self._traits[thing].add("isToggled")  # for good: the official rules know no way back
        return f"You turn on the {self._things[thing].name}."

    def _slice(self, thing: int, knife: int) -> str:
        self._traits[thing].add("isSliced")
        return f"You sliced the {self._things[thing].name} with the {self._things[knife].name}."

    def _examine_receptacle(self, receptacle: int) -> str:
        name, door = self._receptacles[receptacle].name, self._receptacles[receptacle].door
        if not self._is_open[receptacle]:
            return f"The {name} is closed."
        content = _listed([f"a {self._things[thing].name}" for thing in self._content(receptacle)])
        return f"The {name} is open. In it, you see {content}." if door else f"On the {name}, you see {content}."

    def _examine_thing(self, thing: int) -> str:
        name, traits = self._things[thing].name, self._traits[thing]
        if "isReceptacleObject" in traits:
            inner = [f"a {self._things[inner].name}" for inner, outer in self._game.inside if outer == thing]
            return f"This is a normal {name}. In it, you see {_listed(inner)}."
        states = {"isHot": "hot", "isCool": "cool", "isClean": "clean"}
        state = " and ".join(word for trait, word in states.items() if trait in traits)
        if state:
            state = f"{state} sliced" if "isSliced" in traits else {"cool": "cold"}.get(state, state)
        elif {"toggleable", "isToggled"} <= traits:
            return f"This {name} is on."
        elif {"sliceable", "isSliced"} <= traits:
            state = "sliced"
        return f"This is a {state} {name}." if state else f"There's nothing special about {name}."

    # Where things are

    @property
    def _here(self) -> Sequence[int]:
        """Return the receptacles at the player's place."""
        return self._at.get(self._place, ())

    def _content(self, receptacle: int) -> list[int]:
        return [thing for thing, receptacles in enumerate(self._in) if receptacle in receptacles]

    def _is_here(self, thing: int) -> bool:
        return any(receptacle in self._in[thing] for receptacle in self._here)


def _listed(names: Sequence[str]) -> str:
    """Return "a, b, and c"; "nothing" of none."""
    if not names:
        return "nothing"
    *first, last = names
    return f"{', '.join(first)}, and {last}" if first else last
