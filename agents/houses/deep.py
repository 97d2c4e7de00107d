"""Deep houses: made here, in the games' texts, where TextWorld-Express has none in which chance finds nothing.

A way leads from junction to junction, with three doors forward in each: one on, two into rooms that lead nowhere. An
episode has no move to spare, so whoever opens one wrong door is too late: of a way of n junctions chance finds the coin
in one episode of 3 to the power of n. The rooms' names are the games'; the doors do not fit on a plan.
"""

import random

from .house import DIRECTIONS, OPPOSITE, House

DOORS = 3  # forward, of a junction
ROOMS = (
    *("alley", "attic", "backyard", "bar", "basement", "bathroom", "bedchamber", "bedroom", "canteen", "cellar"),
    *("chamber", "closet", "cookery", "cookhouse", "corridor", "cubicle", "cupboard", "driveway", "garage"),
    *("greenhouse", "kitchen", "kitchenette", "launderette", "laundromat", "laundry place", "laundry room", "library"),
    *(
        "living room",
        "lounge",
        "office",
        "outside",
        "pantry",
        "parlor",
        "playroom",
        "recreation zone",
        "salon",
        "sauna",
    ),
    *("scullery", "shower", "side yard", "spare room", "steam room", "storage room", "street", "studio", "study"),
    *("supermarket", "vault", "washroom", "workshop"),
)


def deep_house(seed: int, junctions: int) -> House:
    """Return the house of a seed, the start being the first junction."""
    generator = random.Random(f"deep house {seed}, {junctions} junctions")
    names = generator.sample(ROOMS, 1 + DOORS * junctions)
    start = room = names.pop()
    doors: dict[str, dict[str, str]] = {start: {}}
    back = generator.choice(DIRECTIONS)  # of the start: a wall
    for _ in range(junctions):
        here, ahead = room, [direction for direction in DIRECTIONS if direction != back]
        on = generator.choice(ahead)
        for direction in ahead:
            behind = names.pop()
            doors[here][direction] = behind
            doors[behind] = {OPPOSITE[direction]: here}
            if direction == on:
                room, back = behind, OPPOSITE[direction]
    return House(start, room, doors)
