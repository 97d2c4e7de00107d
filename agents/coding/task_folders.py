"""Read task folders of Harbor and of Terminal-Bench 1, as far as they can be played without a container."""

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import yaml

_SECONDS = 600.0  # of an agent and of tests that name no limit
_UNDERSTOOD = ("FROM", "WORKDIR", "COPY", "ENV", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT")
_OF_A_MODEL = re.compile(r"(OPENAI|ANTHROPIC)_")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_OF_THE_HOST = "bin boot dev etc home lib lib64 opt proc root run sbin sys tmp usr var"


class NeedsContainer(Exception):
    """The task cannot be played without a container; the message says what needs it."""


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        folder: absolute.
        form: which program tests it, and what the reward is.
        workdir: absolute path that the agent's folder has for it.
        copies: source in the task, and the destination below the agent's folder; a folder is copied by its content.
        variables: of agent and tests.
        verifier_variables: of the tests alone.
        agent_seconds: the agent's time limit.
        verifier_seconds: the tests' time limit.
    """

    folder: Path
    form: Literal["harbor", "terminal-bench"]
    instruction: str
    workdir: str
    copies: tuple[tuple[Path, PurePosixPath], ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    agent_seconds: float = _SECONDS
    verifier_seconds: float = _SECONDS

    @property
    def test_script(self) -> str:
        """Path of the tests' program, relative to the task."""
        return "tests/test.sh" if self.form == "harbor" else "run-tests.sh"

    def copy_into(self, folder: Path) -> None:
        """Put the agent's files into a folder, which is made."""
        folder.mkdir(parents=True)
        for source, below in self.copies:
            target = folder / below
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


def read_folder(source: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for each task below a folder, and the reason for each that needs a container.

    A row has the fields ``folder`` (absolute) and ``instruction``.

    Raises:
        ValueError: a task is broken.
        OSError: a file of it cannot be read.
    """
    rows, left_out = [], {}
    for folder in sorted({file.parent for name in ("task.toml", "task.yaml") for file in source.rglob(name)}):
        try:
            task = read_task(folder)
            rows.append({"folder": str(task.folder), "instruction": task.instruction})
        except NeedsContainer as error:
            left_out[str(folder.relative_to(source))] = str(error)
    return rows, left_out


def read_task(folder: Path) -> Task:
    """Return the task of a folder with a ``task.toml`` (Harbor) or a ``task.yaml`` (Terminal-Bench 1).

    Raises:
        NeedsContainer: its environment is more than files in one folder.
        ValueError: it is broken.
        OSError: a file of it cannot be read.
    """
    folder = folder.resolve()
    try:
        return _harbor(folder) if (folder / "task.toml").exists() else _terminal_bench(folder)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: {type(error).__name__}: {' '.join(str(error).split())}") from None


def _harbor(folder: Path) -> Task:
    settings = tomllib.loads((folder / "task.toml").read_text())
    agent, verifier, environment = (settings.get(name, {}) for name in ("agent", "verifier", "environment"))
    if settings.get("steps"):
        raise NeedsContainer("it has several steps")
    built = folder / "environment"
    if environment.get("docker_image") and not (built / "Dockerfile").exists():
        raise NeedsContainer(f"its environment is the image {environment['docker_image']}")
    if own := [name for name in verifier.get("env", {}) if _OF_A_MODEL.match(name)]:
        raise NeedsContainer(f"its tests ask a model, by {', '.join(own)}; an episode's own is the agent's")
    if services := [*built.glob("*compose.y*ml")]:
        raise NeedsContainer(f"it has services: {services[0].name}")
    workdir, copies, variables = _built(built)
    if (other := environment.get("workdir") or workdir) != workdir:
        raise NeedsContainer(f"its environment's workdir is {other}, its Dockerfile's {workdir}")
    return Task(
        folder,
        "harbor",
        (folder / "instruction.md").read_text().strip(),
        workdir,
        copies,
        {**variables, **environment.get("env", {})},
        verifier.get("env", {}),
        float(agent.get("timeout_sec") or _SECONDS),
        float(verifier.get("timeout_sec") or _SECONDS),
    )


def _terminal_bench(folder: Path) -> Task:
    settings = yaml.safe_load((folder / "task.yaml").read_text())
    for file in folder.glob("*compose.y*ml"):
        if others := yaml.safe_load(file.read_text())["services"].keys() - {"client"}:
            raise NeedsContainer(f"it has services: {', '.join(sorted(others))}")
    workdir, copies, variables = _built(folder)
    return Task(
        folder,
        "terminal-bench",
        settings["instruction"].strip(),
        workdir,
        copies,
        variables,
        agent_seconds=float(settings.get("max_agent_timeout_sec") or _SECONDS),
        verifier_seconds=float(settings.get("max_test_timeout_sec") or _SECONDS),
    )


def _built(context: Path) -> tuple[str, tuple[tuple[Path, PurePosixPath], ...], dict[str, str]]:
    """Return the working folder, what is copied into it and the variables of the Dockerfile of a folder."""
    workdir, copied, variables = PurePosixPath("/"), [], dict[str, str]()
    known = dict[str, str]()  # the variables, expanded
    for word, rest in _instructions((context / "Dockerfile").read_text()):
        if word not in _UNDERSTOOD or (word == "COPY" and rest.startswith(("--", "["))):
            raise NeedsContainer(f"its Dockerfile has {word} {rest[:60]}".rstrip())
        try:
            words = shlex.split(rest) if word in ("WORKDIR", "COPY", "ENV") else []
        except ValueError as error:
            raise NeedsContainer(f"its Dockerfile has {word} {rest[:60]}: {error}") from None
        if word == "WORKDIR":
            workdir = PurePosixPath(os.path.normpath(workdir / expanded(words[0], known)))
        elif word == "COPY":
            *sources, target = (expanded(each, known) for each in words)
            place = PurePosixPath(os.path.normpath(workdir / target))
            copied += [(context / source, place, target.endswith("/")) for source in sources]
        elif word == "ENV":
            pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
            for name, _, value in (pair.partition("=") for pair in pairs):
                variables[name], known[name] = value, expanded(value, known)
    if len(workdir.parts) < 2:
        raise NeedsContainer("its Dockerfile names no WORKDIR")
    if workdir.parts[1] in _OF_THE_HOST.split():
        raise NeedsContainer(f"WORKDIR {workdir} lies in a folder of the host")
    copies = []
    for source, target, into in copied:
        if not target.is_relative_to(workdir):
            raise NeedsContainer(f"its Dockerfile copies to {target}, outside of WORKDIR {workdir}")
        if not source.exists():
            raise NeedsContainer(f"its Dockerfile copies {source.name}, which is not in the folder")
        below = target.relative_to(workdir)
        copies.append((source, below / source.name if source.is_file() and (into or target == workdir) else below))
    return str(workdir), tuple(copies), variables


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` filled in, as a build does."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[3]) or found[2] or "", text)


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()
