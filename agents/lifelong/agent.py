"""The agent that works on LifelongAgentBench's tasks.

To train it (settings in db.yaml; os.yaml for tasks on a machine):

    empo2 train --profile cpu --config agents/lifelong/db.yaml
"""

import os
import re
from abc import ABC, abstractmethod

from ..sandbox import Sandbox
from ..sandbox import check as check_sandbox
from ..task_file import Task, task_of
from ..text_game.actions import blocks
from ..text_game.agent import Server, TextAgent, connect, play_chat
from ..text_game.game import Outcome
from .tables import StatementError, described, equal_rows, fingerprints, open_table, parse_answer, shown
from .tasks import WORLD, Episode

SERVER = "LIFELONG_MYSQL"  # a variable: an option file of MySQL's clients, in place of SQLite

NOTHING = "Nothing was run: your reply has neither a block nor {ending}."
_OUTPUT_CHARACTERS = 1000
_COMMAND_SECONDS = 20  # as in MemRL
_CHECK_SECONDS = 60  # of a machine's start and check, which are not the player's
_ANSWER = re.compile(r"^\W*(?:final )?answer\W*?:", re.IGNORECASE | re.MULTILINE)
# An answer in a block that is no statement.
_ANSWER_BLOCK = re.compile(r"(answer\W*?:[\s*]*)```(?!sql)\w*\n(.*?)```", re.IGNORECASE | re.DOTALL)


class Game(ABC):
    """One started task as turns: a reply runs a block, or ends the episode. The score is 1 if it is solved, else 0."""

    system: str
    ending: str  # what a reply ends the episode with, for people to read

    def __init__(self, episode: Episode) -> None:
        self.episode, self.task = episode, task_of(WORLD, episode.tasks, episode.name)
        self.turn = self._begin(self.task)
        self._ended = False
        self._steps = self._invalid = 0

    @property
    def done(self) -> bool:
        return self._ended or self._steps == self.episode.max_steps

    def act(self, reply: str) -> None:
        self._steps += 1
        if found := blocks(reply):
            self.turn = self._run(found)
        elif self._ends(reply):
            self._ended = True
        else:
            self._invalid += 1
            self.turn = NOTHING.format(ending=self.ending)

    def outcome(self, remark: str = "") -> Outcome:
        """Return the score, and the share of replies that ran nothing."""
        score = int(self._solved())
        said = f"{self.episode.name}: {'solved' if score else 'not solved'} after {self._steps} replies{remark}"
        invalid = {"invalid_actions": self._invalid / self._steps} if self._steps else {}
        return Outcome(score, said, invalid, full_score=1)

    @abstractmethod
    def _begin(self, task: Task) -> str:
        """Start the table or machine; return the first turn."""

    @abstractmethod
    def _run(self, found: list[str]) -> str:
        """Run a reply's blocks, at least one; return what the player sees of it."""

    @abstractmethod
    def _ends(self, reply: str) -> bool:
        """Return whether a reply without a block ends the episode."""

    @abstractmethod
    def _solved(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...


class TableGame(Game):
    """A question about a table, or a change to it."""

    system = (
        "You work with a table of a MySQL database by statements, to carry out a task.\n"
        "Each reply is either one statement in a block that begins with ```sql and ends with ```, whose result you are "
        'told; or, when the task is done, a line that begins with "Answer:". If rows were asked for, they follow as a '
        'list of lists in JSON, such as Answer: [["Ann", 3], ["Ben", 5]]. If the table was to be changed, say '
        "Answer: done."
    )
    ending = 'a line that begins with "Answer:"'

    def _begin(self, task: Task) -> str:
        self._table = open_table(task["table"], os.environ.get(SERVER))
        self._answer = ""
        return f"{task['instruction']}\n\nTable: {described(task['table'])}"

    def act(self, reply: str) -> None:
        super().act(_ANSWER_BLOCK.sub(r"\1\2", reply))

    def _run(self, found: list[str]) -> str:
        return shown(self._table, found[0])

    def _ends(self, reply: str) -> bool:
        _, *answers = _ANSWER.split(reply)
        if answers:
            self._answer = answers[-1]  # a thought may come before it
        return bool(answers)

    def _solved(self) -> bool:
        if self.task["md5"]:
            try:
                return self.task["md5"] in fingerprints(self._table.rows())
            except StatementError:  # a statement has dropped it
                return False
        rows = parse_answer(self._answer)
        ordered = self.task["ordered"]
        return rows is not None and any(equal_rows(rows, right, ordered=ordered) for right in self.task["answers"])

    def close(self) -> None:
        self._table.close()


class MachineGame(Game):
    """A task on a Linux machine. Raises RuntimeError if the machine cannot be made as the task says."""

    system = (
        "You work as root on a Linux machine by commands, to carry out a task. There is no network.\n"
        "Each reply is either a block that begins with ```bash and ends with ```, whose commands are run, and whose "
        "output you are told; or, when the task is done, the word Finish. No command can be answered: none may ask."
    )
    ending = "the word Finish"

    def _begin(self, task: Task) -> str:
        self._machine = Sandbox("shell")
        code, output = self._machine.run(task["start"], _CHECK_SECONDS)
        if code != 0:
            self.close()
            raise RuntimeError(f"{self.episode.name}: its start ended with {code}: {output[-200:]}")
        return task["instruction"]

    def _run(self, found: list[str]) -> str:
        code, output = self._machine.run("\n\n".join(found), _COMMAND_SECONDS)
        cut = output if len(output) <= _OUTPUT_CHARACTERS else f"{output[:_OUTPUT_CHARACTERS]} ... (cut)"
        return "It took too long, and was ended." if code is None else cut.strip() or f"(no output; exit code {code})"

    def _ends(self, reply: str) -> bool:
        return re.search(r"\bfinish", reply, re.IGNORECASE) is not None

    def _solved(self) -> bool:
        code, _ = self._machine.run(self.task["check"], _CHECK_SECONDS)
        if code is None:
            raise RuntimeError(f"{self.episode.name}: its check took longer than {_CHECK_SECONDS} s")
        return code == 0

    def close(self) -> None:
        self._machine.close()


class LifelongAgent(TextAgent[Episode]):
    """Work on one task on a table; the variables are those of `Episode.env_map()`."""

    episode = Episode
    game: type[Game] = TableGame

    def play(self, episode: Episode, server: Server) -> Outcome:
        game = self.game(episode)
        try:
            return play_chat(game, connect(server))
        finally:
            game.close()


class MachineAgent(LifelongAgent):
    """The same for a task on a machine, which needs a sandbox."""

    game = MachineGame

    @staticmethod
    def check() -> str:
        """Return one line for a launcher to show before the first rollout. Raises OSError without a sandbox."""
        return check_sandbox()
