"""Play an episode of a coding agent on a task folder; write the reward of its tests to EMPO2_REWARD_FILE.

The agent runs in a copy of the task's files, which is a repository of one commit, with a HOME of its own. Then the
task's tests run there. An agent that ends with an error fails, unless it has earned a reward nevertheless; one that
meets its time limit does not.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .known import CONTEXT_TOKENS, KNOWN, REPLY_TOKENS
from .room import HOME, LOGS, TESTS, TIMED_OUT, Room
from .task_folders import NeedsContainer, Task, expanded, read_task

_PLACEHOLDER = re.compile(r"\{([A-Z_]+)\}")
# Of agent-lightning and of the task: how to report a reward is not the agent's business. And what would lead it from
# its own HOME, or to another model.
_NOT_FOR_THE_AGENT = re.compile(
    r"AGL_|AGENT_|TASK_|EMPO2_|XDG_|CODEX_HOME$|CLAUDE_CONFIG_DIR$|CLAUDE_CODE_USE_|ANTHROPIC_AUTH_TOKEN$"
)
_DATE = 1_767_225_600  # 2026-01-01, of all files and of the commit, so that episodes begin alike


class Failed(Exception):
    """The episode has no reward; the message says why.

    Args:
        code: of this process then.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.coding", description=__doc__)
    parser.add_argument("--path", action="append", default=[], help="a folder of programs, before PATH")
    parser.add_argument("--home", type=Path, help="a folder whose content each episode finds in its HOME")
    parser.add_argument(
        "--task", type=Path, default=os.environ.get("TASK_FOLDER") or None, help="default: $TASK_FOLDER"
    )
    parser.add_argument(
        "agent",
        choices=[*KNOWN],
        help="`command`: the words that follow, in which CommandAgent fills in each {NAME}",
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="more words for the agent's command")
    given = parser.parse_args()
    try:
        if given.task is None:
            raise Failed("no task is given: set TASK_FOLDER or --task to its folder")
        if given.home is not None and not given.home.is_dir():
            raise Failed(f"--home {given.home}: there is no such folder")
        programs = [os.path.abspath(os.path.expanduser(path)) for path in given.path]
        reward = play(read_task(given.task), given.agent, given.words, programs, given.home)
        if file := os.environ.get("EMPO2_REWARD_FILE"):
            Path(file).write_text(f"{reward}\n")
    except (Failed, NeedsContainer, ValueError, OSError) as error:
        print(f"{given.agent} on {given.task}: {error}", file=sys.stderr)
        sys.exit(error.code if isinstance(error, Failed) else 1)
    print(reward)


def play(task: Task, name: str, words: Sequence[str], programs: Sequence[str] = (), home: Path | None = None) -> float:
    """Play an episode; return the reward. Raises Failed if there is none.

    Args:
        name: of a known agent.
        words: after its command.
        programs: folders of programs, before PATH.
        home: a folder whose content is copied into HOME.
    """
    agent, search = KNOWN[name], os.pathsep.join([*programs, os.environ["PATH"]])
    program = [*shlex.split(agent.command), *words][:1]
    if not program or shutil.which(program[0], path=search) is None:
        fix = f"install it ({agent.install}), " if agent.install else ""
        raise Failed(f"there is no program {program}: {fix}and name its folder with --path")
    # The reward's folder is removed also if this process is killed.
    parent = os.path.dirname(os.environ.get("EMPO2_REWARD_FILE", "")) or None
    with tempfile.TemporaryDirectory(prefix="room-", dir=parent, ignore_cleanup_errors=True) as folder:
        room = Room(Path(folder), task.workdir, hidden=task.folder)
        work, own_home = room.outside(task.workdir), room.outside(HOME)
        task.copy_into(work)
        make_repository(work)
        variables = {name: value for name, value in os.environ.items() if not _NOT_FOR_THE_AGENT.match(name)}
        variables |= {"PATH": search, **room.variables}
        for variable, value in task.variables.items():  # a later one may hold an earlier one
            variables[variable] = expanded(room.shown(value), variables)
        if search not in variables["PATH"]:
            variables["PATH"] += os.pathsep + search
        variables |= room.variables
        variables = {"CONTEXT_TOKENS": str(CONTEXT_TOKENS), "REPLY_TOKENS": str(REPLY_TOKENS)} | variables
        instruction = room.shown(task.instruction)
        # One that begins with a dash would be read as an option.
        known = {**variables, "INSTRUCTION": f"\n{instruction}" if instruction.startswith("-") else instruction}
        variables |= {name: _filled(value, known) for name, value in agent.variables.items()}
        warm = _warm_home(name, search)
        for source in (warm, home):
            if source and source.is_dir():
                shutil.copytree(source, own_home, symlinks=True, dirs_exist_ok=True)
        for file, text in agent.home.items():
            (own_home / file).parent.mkdir(parents=True, exist_ok=True)
            (own_home / file).write_text(_filled(text, known))
        command = [_filled(word, known) for word in shlex.split(agent.command)] + [room.shown(word) for word in words]
        code = room.run(command, variables, task.agent_seconds)
        if code == 0:  # what an installation that was cut has left is of no use
            _keep(agent.kept, own_home, warm)
        if code == TIMED_OUT:
            print(f"the agent met its time limit of {task.agent_seconds:g} s", file=sys.stderr)
        reward = run_tests(task, room, variables)
        if code not in (0, TIMED_OUT) and reward <= 0:
            raise Failed(f"the agent ended with exit code {code}", code)
        return reward


def make_repository(folder: Path) -> None:
    """Commit all files of a folder, with the same hash and the same times in each copy."""
    for each in folder.rglob("*"):
        os.utime(each, (_DATE, _DATE), follow_symlinks=False)
    of_none = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), f"{_DATE} +0000")
    names = {f"GIT_{who}_{what}": "task" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {"PATH": os.environ["PATH"], **of_none, **dates, **names}
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-q", "--allow-empty", "-m", "The task"]):
        done = subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"git {words[0]}: {done.stderr.strip()}")
    os.utime(folder, (_DATE, _DATE))


def run_tests(task: Task, room: Room, variables: Mapping[str, str]) -> float:
    """Run a task's tests in the room; return their reward. Raises Failed if they give none."""
    tests, logs = room.outside(TESTS), room.outside(LOGS) / "verifier"
    if (task.folder / "tests").is_dir():
        shutil.copytree(task.folder / "tests", tests, symlinks=True)
    else:
        tests.mkdir()
    script = tests / Path(task.test_script).name
    if not script.exists():
        shutil.copy2(task.folder / task.test_script, script)
    for file in tests.rglob("*"):
        with contextlib.suppress(UnicodeDecodeError):
            if file.is_file() and not file.is_symlink() and (shown := room.shown(text := file.read_text())) != text:
                file.write_text(shown)
    if logs.is_symlink() or logs.is_file():  # what the agent has left there could be a reward, or a link to any file
        logs.unlink()
    elif logs.exists():
        shutil.rmtree(logs)
    logs.mkdir()
    command = ["bash", room.shown(f"{TESTS}/{script.name}")]
    own = {name: expanded(room.shown(value), variables) for name, value in task.verifier_variables.items()}
    tests_variables = {"TEST_DIR": room.shown(TESTS), **variables, **own}
    with (logs / "test-stdout.txt").open("wb") as output:
        code = room.run(command, tests_variables, task.verifier_seconds, output)
    if task.form == "terminal-bench":
        return float(code == 0)
    if code == TIMED_OUT:
        raise Failed(f"the tests met their time limit of {task.verifier_seconds:g} s")
    return _reward(logs)


def _reward(logs: Path) -> float:
    """Return ``reward.json``'s field ``reward``, or its only one; or else the number of ``reward.txt``."""
    there = (logs / name for name in ("reward.json", "reward.txt"))
    if (file := next((each for each in there if each.is_file() and not each.is_symlink()), None)) is None:
        said = " ".join((logs / "test-stdout.txt").read_text(errors="replace").split())[-200:]
        raise Failed(f"the tests wrote no reward to /logs/verifier/reward.txt; their output: {said}")
    try:
        value = json.loads(file.read_text()) if file.suffix == ".json" else float(file.read_text())
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else value.popitem()[1] if len(value) == 1 else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise Failed(f"{file.name} is {file.read_text()[:200]!r}: must be one finite number") from None
    return float(value)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    for name in _PLACEHOLDER.findall(text):
        if name not in variables:
            raise Failed(f"{name} is not set; empo2.agents.command:CommandAgent sets it")
    return _PLACEHOLDER.sub(lambda found: variables[found[1]], text)


def _warm_home(agent: str, path: str) -> Path:
    """Return the folder of what an agent's first episode made; it has another one after an update."""
    program = Path(shutil.which(shlex.split(KNOWN[agent].command or "sh")[0], path=path) or "/").resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "empo2" / "coding" / f"{agent}-{program.stat().st_mtime_ns:x}"


def _keep(paths: tuple[str, ...], home: Path, warm: Path) -> None:
    for path in paths:
        if (home / path).is_dir() and not (warm / path).exists():
            with contextlib.suppress(OSError):
                (warm / path).parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=warm.parent) as folder:
                    # By a rename, and only once: other episodes may be doing the same.
                    os.rename(shutil.copytree(home / path, Path(folder, "copy"), symlinks=True), warm / path)


if __name__ == "__main__":
    main()
