"""A scripted player: explores sensibly, uses notes, and sees when they do not fit the house."""

import random
from collections.abc import Mapping, Sequence

from empo2.agents.houses.house import DIRECTIONS, TAKE, Doors, distances
from empo2.small_model.notes import Note, way_to


class Player:
    """One episode's player, who knows what the notes say and what it has seen, and nothing else of the house.

    It goes to the coin that a note names; else on as a note of a failure says, through a door that this episode has not
    used; else to the nearest room not seen yet, but behind no door that a note says leads nowhere. A note that what was
    seen contradicts is not believed any more.

    Args:
        ignores: how often it acts as if there were no notes.
    """

    def __init__(self, notes: Sequence[Note], generator: random.Random, ignores: float = 0.0) -> None:
        self._all, self._ignores = list(notes), ignores
        self._notes = self._all
        self._generator = generator
        self._start: str | None = None
        self.exits: dict[str, Mapping[str, str]] = {}  # of the rooms seen

    def hear(self, notes: Sequence[Note]) -> None:
        """Know these notes, too, from the next action on."""
        self._all = [*self._all, *notes]

    def act(self, room: str, exits: Mapping[str, str], coin: bool) -> str:
        """Return the action for what the turn shows; chance decides between equally good ones."""
        self._start = self._start or room
        self.exits[room] = exits
        if coin:
            return TAKE
        self._all = [note for note in self._all if not self._contradicted(note)]
        ignored = self._ignores > 0 and self._generator.random() < self._ignores
        self._notes = [] if ignored else self._all
        doors = self._doors()
        reach = distances(doors, room)
        goals = [note.end for note in self._notes if note.found and note.end in reach]
        if not goals:
            # As often as notes name it: what most players found to lead on is the likeliest.
            named = [
                direction
                for note in self._notes
                for here, direction, behind in note.edges()
                if here == room and behind not in self.exits
            ]
            if named:
                return f"move {self._generator.choice(named)}"
            new = [other for other in reach if other not in self.exits]
            nowhere = {self.exits[note.end].get(note.nowhere) for note in self._notes if note.end in self.exits}
            goals = [other for other in new if other not in nowhere] or new
        if not goals:
            return f"move {self._generator.choice(sorted(exits))}"
        nearest = min(reach[goal] for goal in goals)
        goal = self._generator.choice(sorted({goal for goal in goals if reach[goal] == nearest}))
        return f"move {way_to(doors, room, goal)[0][1]}"

    def _contradicted(self, note: Note) -> bool:
        seen = self.exits
        if note.way and note.way[0][0] != self._start:
            return True
        if note.found and note.end in seen:
            return True
        return any(room in seen and seen[room].get(direction) != behind for room, direction, behind in note.edges())

    def _doors(self) -> Doors:
        doors: dict[str, dict[str, str]] = {room: dict(exits) for room, exits in self.exits.items()}
        for note in self._notes:
            for room, direction, behind in note.edges() if note.found else ():
                if room not in self.exits:
                    doors.setdefault(room, {})[direction] = behind
        return doors


def slip(exits: Mapping[str, str], generator: random.Random) -> str:
    """Return an action without sense: mostly through some door, now and then against a wall."""
    return f"move {generator.choice(DIRECTIONS if generator.random() < 0.2 else sorted(exits))}"
