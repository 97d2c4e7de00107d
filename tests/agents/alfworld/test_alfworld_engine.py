"""The rules and words of ALFWorld, on a small room by hand and on the project's own games."""

import random
from dataclasses import replace

import pytest

from empo2.agents.alfworld.archive import Archive
from empo2.agents.alfworld.engine import NOTHING_HAPPENS, Engine
from empo2.agents.alfworld.games import NOWHERE, Game, Receptacle, Thing
from empo2.agents.alfworld.tasks import OWN_FILE

from .walks import WALKS

FOOD = ("pickupable", "cleanable", "heatable", "coolable", "sliceable")

# Two receptacles at place 1; the others alone. The player starts at place 0, where nothing is.
KITCHEN = Game(
    task="pick_and_place_simple",
    instruction="Your task is to: put some apple on shelf.",
    wordings=("Bring an apple to the shelf.",),
    target=("apple", "shelf"),
    start=0,
    receptacles=(
        Receptacle("countertop 1", "countertop", 1, ""),
        Receptacle("drawer 1", "drawer", 1, "closed"),
        Receptacle("fridge 1", "fridge", 2, "closed"),
        Receptacle("microwave 1", "microwave", 3, "closed"),
        Receptacle("shelf 1", "shelf", 4, ""),
        Receptacle("sinkbasin 1", "sinkbasin", 5, ""),
    ),
    things=(
        Thing("apple 2", "apple", 1, FOOD, (0,)),
        Thing("apple 1", "apple", 2, (*FOOD, "isCool"), (2,)),
        Thing("desklamp 1", "desklamp", 4, ("toggleable",), (4,)),
        Thing("knife 1", "knife", 1, ("pickupable", "cleanable"), (1,)),
        Thing("mug 1", "mug", 5, ("pickupable", "cleanable", "heatable", "coolable", "isReceptacleObject"), (5,)),
        Thing("spoon 1", "spoon", 5, ("pickupable",), ()),
        Thing("window 1", "window", NOWHERE, (), ()),
    ),
    inside=((5, 4),),
    fits={name: ("apple", "knife", "mug") for name in ("countertop", "drawer", "fridge", "microwave", "shelf")},
    help="Do what you can.\n",
    walkthrough=("go to countertop 1", "take apple 2 from countertop 1", "go to shelf 1", "move apple 2 to shelf 1"),
)


def said(game: Game, *commands: str) -> list[str]:
    """What comes of each command."""
    engine = Engine(game)
    return [engine.step(command) for command in commands]


def test_a_room_is_told_at_the_start_and_not_again():
    engine = Engine(KITCHEN)
    assert engine.intro == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see a "
        "countertop 1, a drawer 1, a fridge 1, a microwave 1, a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put some apple on shelf."
    )
    assert engine.step("look") == "You are in the middle of a room. Looking quickly around you, you see nothing."
    assert engine.step("inventory") == "You are not carrying anything."
    assert engine.step("help") == "Do what you can.\n"
    assert engine.commands == (
        *("go to countertop 1", "go to drawer 1", "go to fridge 1", "go to microwave 1", "go to shelf 1"),
        *("go to sinkbasin 1", "help", "inventory", "look"),
    )


def test_places_are_shared_doors_are_opened_and_content_is_told():
    assert said(KITCHEN, "go to countertop 1", "look", "open drawer 1", "examine drawer 1", "close drawer 1") == [
        "You arrive at countertop 1. On the countertop 1, you see a apple 2.",
        "You are facing the countertop 1, and drawer 1. Next to it, you see nothing.",
        "You open the drawer 1. The drawer 1 is open. In it, you see a knife 1.",
        "The drawer 1 is open. In it, you see a knife 1.",
        "You close the drawer 1.",
    ]


def test_what_was_taken_from_one_receptacle_and_put_into_its_neighbour_lies_beside():
    """As odd as in the official grammar, which asks for a receptacle of this place that the thing has left."""
    walk = ["go to drawer 1", "take apple 2 from countertop 1", "open drawer 1", "move apple 2 to drawer 1", "look"]
    assert said(KITCHEN, *walk)[3:] == [
        "You move the apple 2 to the drawer 1.",
        "You are facing the countertop 1, and drawer 1. Next to it, you see a apple 2.",
    ]


def test_a_thing_is_heated_cooled_cleaned_and_sliced():
    walk = ["go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "inventory", "examine apple 1"]
    walk += ["go to microwave 1", "heat apple 1 with microwave 1", "examine apple 1"]
    walk += ["go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "examine apple 1"]
    walk += ["go to countertop 1", "move apple 1 to countertop 1", "open drawer 1", "take knife 1 from drawer 1"]
    walk += [
        "examine knife 1",
        "slice apple 1 with knife 1",
        "move knife 1 to drawer 1",
        "take apple 1 from countertop 1",
    ]
    walk += ["examine apple 1", "go to fridge 1", "cool apple 1 with fridge 1", "examine apple 1"]
    assert [said(KITCHEN, *walk)[index] for index in (3, 4, 6, 7, 9, 10, 15, 16, 19, 21, 22)] == [
        "You are carrying: a apple 1.",
        "This is a cold apple 1.",
        "You heat the apple 1 using the microwave 1.",
        "This is a hot apple 1.",
        "You clean the apple 1 using the sinkbasin 1.",
        "This is a hot and clean apple 1.",
        "There's nothing special about knife 1.",
        "You sliced the apple 1 with the knife 1.",
        "This is a hot and clean sliced apple 1.",
        "You cool the apple 1 using the fridge 1.",
        "This is a cool and clean sliced apple 1.",
    ]


def test_a_container_in_the_hand_tells_what_is_in_it():
    walk = "go to sinkbasin 1", "take mug 1 from sinkbasin 1", "examine mug 1"
    assert said(KITCHEN, *walk)[-1] == "This is a normal mug 1. In it, you see a spoon 1."


def test_what_cannot_be_done_changes_nothing():
    engine = Engine(KITCHEN)
    for command in ("go to countertop 1", "take apple 2 from countertop 1"):
        engine.step(command)
    before = engine.commands
    for command in (
        *("go to countertop 1", "go to drawer 1", "take knife 1 from drawer 1", "examine knife 1", "close drawer 1"),
        *("move apple 2 to drawer 1", "put apple 2 in/on countertop 1", "heat apple 2 with microwave 1", "Look", ""),
        *("slice apple 2 with knife 1", "use desklamp 1", "go to bed 1", "take spoon 1 from mug 1", "go  to shelf 1"),
    ):
        assert (engine.step(command), engine.commands) == (NOTHING_HAPPENS, before), command
    assert engine.step("  examine apple 2 ") == "There's nothing special about apple 2."


def test_a_second_thing_is_not_taken_and_not_put_where_its_type_does_not_fit():
    engine = Engine(replace(KITCHEN, fits={"shelf": ("mug",)}))
    for command in ("go to countertop 1", "open drawer 1", "take apple 2 from countertop 1"):
        engine.step(command)
    assert not [command for command in engine.commands if command.startswith(("take", "move"))]


WON = {
    "pick_clean_then_place_in_recep": ("sinkbasin 1", "clean"),
    "pick_heat_then_place_in_recep": ("microwave 1", "heat"),
    "pick_cool_then_place_in_recep": ("fridge 1", "cool"),
}


@pytest.mark.parametrize("task", WON)
def test_a_task_of_an_appliance_is_won_when_the_changed_thing_is_in_its_place(task: str):
    engine, (appliance, verb) = Engine(replace(KITCHEN, task=task)), WON[task]
    for command in KITCHEN.walkthrough:
        engine.step(command)
    assert not engine.won
    for command in ("take apple 2 from shelf 1", f"go to {appliance}", f"{verb} apple 2 with {appliance}"):
        engine.step(command)
    assert not engine.won
    for command in ("go to shelf 1", "move apple 2 to shelf 1"):
        engine.step(command)
    assert engine.won


def test_two_things_must_be_in_one_receptacle():
    engine = Engine(replace(KITCHEN, task="pick_two_obj_and_place"))
    for command in (*KITCHEN.walkthrough, "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1"):
        engine.step(command)
        assert not engine.won
    for command in ("go to shelf 1", "move apple 1 to shelf 1"):
        engine.step(command)
    assert engine.won


def test_a_lit_lamp_must_be_here_and_the_thing_in_the_hand():
    engine = Engine(replace(KITCHEN, task="look_at_obj_in_light", target=("apple", "desklamp")))
    won = []
    for command in ("go to shelf 1", "use desklamp 1", *KITCHEN.walkthrough):
        engine.step(command)
        won.append(engine.won)
    assert won == [False, False, False, False, True, False]
    assert said(KITCHEN, "go to shelf 1", "use desklamp 1", "use desklamp 1")[1:] == ["You turn on the desklamp 1."] * 2


def own() -> list[Game]:
    archive = Archive(OWN_FILE)
    return [archive.game(split, name) for split, names in archive.names.items() for name in names]


def test_each_of_the_projects_own_games_is_won_by_its_walkthrough_at_the_last_step():
    for game in own():
        engine, won = Engine(game), []
        for command in game.walkthrough:
            assert engine.step(command) != NOTHING_HAPPENS
            won.append(engine.won)
        assert won == [False] * (len(won) - 1) + [True]


@pytest.mark.parametrize("walk", WALKS)
def test_on_any_walk_each_thing_is_in_the_hand_or_where_it_was_put(walk):
    generator = random.Random(0)
    for game in own():
        engine = Engine(game)
        lies = {thing.name: {game.receptacles[index].name for index in thing.receptacles} for thing in game.things}
        for command in walk(game, 40, generator):
            known, feedback = command.strip() in engine.commands, engine.step(command)
            assert known == (feedback != NOTHING_HAPPENS)
            verb, *rest = command.split() or [""]
            if known and verb in ("take", "move"):
                name, where = " ".join(rest[:2]), " ".join(rest[3:])
                lies[name] = {where} if verb == "move" else set()
            held = [thing.name for index, thing in enumerate(game.things) if index == engine.held]
            assert held == [name for name, places in lies.items() if not places]
            if known and verb in ("go", "open", "examine") and feedback.split(". ")[-1].startswith(("On", "In")):
                place = " ".join(command.split()[-2:])
                listed = {name for name in lies if f"a {name}" in feedback.split("you see ")[-1]}
                assert listed == {name for name, places in lies.items() if place in places}
