"""A scripted player: explores sensibly, uses notes, and sees when they do not fit the house."""

import random
from collections.abc import Mapping, Sequence

from empo2.agents.coin_collector.house import DIRECTIONS, TAKE, Doors, distances
from empo2.small_model.notes import Note, way_to


class Player:
    """One episode's player, who knows what the notes say and what it has seen, and nothing else of the house.

    It goes to the coin that a note names; else to the nearest room not seen in this episode, of two as near to the one
    that no note lists. Rooms that a note calls dead ends come last. A note that what was seen contradicts is not
    believed any more.
    """

    def __init__(self, notes: Sequence[Note], generator: random.Random) -> None:
        self._notes = list(notes)
        self._generator = generator
        self._start: str | None = None
        self.exits: dict[str, Mapping[str, str]] = {}  # of the rooms seen

    def act(self, room: str, exits: Mapping[str, str], coin: bool) -> str:
        """Return the action for what the turn shows; chance decides between equally good ones."""
        self._start = self._start or room
        self.exits[room] = exits
        if coin:
            return TAKE
        self._notes = [note for note in self._notes if not self._contradicted(note)]
        doors = self._doors()
        reach = distances(doors, room)
        goals = [note.coin for note in self._notes if note.found and note.coin in reach]
        if not goals:
            goals = [other for other in reach if other not in self.exits]
        if not goals:
            return f"move {self._generator.choice(sorted(exits))}"
        listed = {other for note in self._notes for other in note.empty}
        dead_ends = {other for note in self._notes for other in note.dead_ends}
        cost = {goal: (goal in dead_ends, reach[goal], goal in listed) for goal in goals}
        cheapest = min(cost.values())
        goal = self._generator.choice(sorted({goal for goal in goals if cost[goal] == cheapest}))
        return f"move {way_to(doors, room, goal)[0][1]}"

    def _contradicted(self, note: Note) -> bool:
        seen = self.exits
        if note.way and note.way[0][0] != self._start:
            return True
        if note.found and note.coin in seen:
            return True
        return any(room in seen and seen[room].get(direction) != behind for room, direction, behind in note.edges())

    def _doors(self) -> Doors:
        doors: dict[str, dict[str, str]] = {room: dict(exits) for room, exits in self.exits.items()}
        for note in self._notes:
            for room, direction, behind in note.edges():
                if room not in self.exits:
                    doors.setdefault(room, {})[direction] = behind
        return doors


def slip(exits: Mapping[str, str], generator: random.Random) -> str:
    """Return an action without sense: mostly through some door, now and then against a wall."""
    return f"move {generator.choice(DIRECTIONS if generator.random() < 0.2 else sorted(exits))}"
