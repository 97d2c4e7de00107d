"""Walks through a game: at random, near its solution, and full of what cannot be done."""

import random

from empo2.agents.alfworld.engine import Engine
from empo2.agents.alfworld.games import Game

MOVES = ("go to", "look", "inventory", "help", "examine")


def random_walk(game: Game, steps: int, generator: random.Random) -> list[str]:
    """Half of the actions change something besides the player's place, if any does."""
    engine, walk = Engine(game), []
    while len(walk) < steps:
        changes = [command for command in engine.commands if not command.startswith(MOVES)]
        walk.append(generator.choice(changes if changes and generator.random() < 0.5 else engine.commands))
        engine.step(walk[-1])
    return walk


def near_solution(game: Game, steps: int, generator: random.Random) -> list[str]:
    """The walkthrough, with detours; then a random walk in the solved game."""
    engine, walk, left = Engine(game), [], list(game.walkthrough)
    while len(walk) < steps:
        if left and left[0] in engine.commands and generator.random() < 0.6:
            walk.append(left.pop(0))
        else:
            walk.append(generator.choice(engine.commands))
        engine.step(walk[-1])
    return walk


def adversarial(game: Game, steps: int, generator: random.Random) -> list[str]:
    """Every second action is one that the game may not know, or not here and now."""
    engine, walk = Engine(game), ["look"]
    engine.step("look")
    receptacles, things = [part.name for part in game.receptacles], [thing.name for thing in game.things]
    while len(walk) < steps:
        one, other, place = generator.choice(things), generator.choice(things), generator.choice(receptacles)
        wild = [
            *(f"go to {place}", f"open {place}", f"close {place}", f"take {one} from {place}", f"use {one}"),
            *(f"examine {one}", f"examine {place}", f"move {one} to {place}", f"put {one} in/on {place}"),
            *(f"slice {one} with {other}", f"heat {one} with {place}", f"clean {one} with {place}", "inventory"),
            *(f"cool {one} with {place}", f"Go to {place}", f"  go to {place} ", f"go  to {place}", "help", "", "look"),
            *(walk[-1], f"go to {one}", f"examine {one} 1", "LOOK", "take", f"take {one}", "go to"),
        ]
        changes = [command for command in engine.commands if not command.startswith(MOVES)]
        known = changes if changes and generator.random() < 0.6 else engine.commands
        walk.append(generator.choice(wild if len(walk) % 2 else known))
        engine.step(walk[-1])
    return walk


WALKS = (random_walk, near_solution, adversarial)
