"""Draft the files of ``empo2 init``: a configuration, and made-up tasks if there are none."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from empo2.recipe.config import ALL_TASKS, is_task_path, parse_yaml
from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import MADE_UP, PANEL, scope_of
from empo2.recipe.scopes import share_with_tips

COMMAND_AGENT = "empo2.agents.command:CommandAgent"
MY_TASKS = Path("my_tasks.py")
_TASKS = '''\
"""Tasks for EMPO2: put your own in the place of these, which are made up and refused by `empo2 train`."""


def load() -> tuple[list[dict], list[dict]]:
    """Return training and validation tasks; their fields reach the agent through agent.env."""
    tasks = [
{rows}
    ]
    return tasks, tasks
'''
_CONFIG = """\
# Laid over EMPO2's own config.yaml, which explains every setting: empo2 train --config {file}
agent:
  class: {agent}
  env:                 # the agent's variables: values from its task ("input.x"), or literals
{env}
  time_limit: {time_limit}      # seconds; then the rollout is killed and counted as failed
tasks:
  source: {source}
memory:
  scope: {scope}  # who shares tips: all-tasks, or the tasks that agree in these fields
algorithm:
  success_return: {best}    # the best reward; an episode that reaches it is a success
  failure_return: {worst}    # the worst reward; what a failed episode counts in val/return
"""


@dataclass(frozen=True)
class Scope:
    """A choice of ``memory.scope``."""

    fields: str | list[str]  # what to write as ``memory.scope``
    share: float  # of the memory rollouts that can find tips of earlier steps


def parse_variables(arguments: Sequence[str]) -> dict[str, str]:
    """Return the agent's variables from ``NAME=VALUE`` arguments.

    Raises:
        ConfigError: an argument does not have this form.
    """
    for argument in arguments:
        if not re.match(r"[A-Za-z_]\w*=", argument):
            raise ConfigError(f"--env {argument!r}: variables are given as NAME=VALUE, such as QUESTION=input.question")
    return dict(argument.split("=", 1) for argument in arguments)


def make_up_tasks(variables: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return two tasks with the fields that the variables name; a question and its answer if they name none."""
    fields = dict.fromkeys(path.split(".")[1] for path in variables.values() if path.startswith("input."))
    if not fields.keys() - {"question", "answer"}:
        return [{"question": f"What is {n} + {n}?", "answer": str(2 * n), MADE_UP: True} for n in (1, 2)]
    return [{**dict.fromkeys(fields, str(n)), MADE_UP: True} for n in (1, 2)]


def tasks_module(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of my_tasks.py."""
    rows = [", ".join(f"{json.dumps(name)}: {value!r}" for name, value in task.items()) for task in tasks]
    return _TASKS.format(rows="\n".join(f"        {{{row}}}," for row in rows).replace("'", '"'))


def all_variables(
    variables: Mapping[str, str], command: str | None, tasks: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return ``agent.env``: the given variables, the command line, and the fields of all tasks if none of them is one.

    Raises:
        ConfigError: two fields would be one variable.
    """
    if not any(value.partition(".")[0] == "input" for value in variables.values()):
        fields: dict[str, str] = {}
        for name in tasks[0]:
            if name == MADE_UP or "." in name or not all(name in task for task in tasks):
                continue
            variable = f"TASK_{re.sub(r'\W', '_', name).upper()}"
            if variable in fields:
                other = fields[variable].removeprefix("input.")
                raise ConfigError(f"tasks: their fields {other!r} and {name!r} would both be {variable}; give --env")
            fields[variable] = f"input.{name}"
        variables = {**fields, **variables}
    return {**({"AGENT_COMMAND": command} if command else {}), **variables}


def scope_choices(tasks: Sequence[Mapping[str, Any]], tasks_per_step: int, steps: int) -> list[Scope]:
    """Return the scope to take, and the others: all tasks share, each task for itself, equal values of one field.

    The scope of the paper, each task for itself, is taken if at least half of the memory rollouts can then find tips of
    earlier steps; otherwise all tasks share. A single field is never taken: it may be the answer.
    """
    fields = [
        name
        for name in tasks[0]
        if name not in (MADE_UP, PANEL) and all(isinstance(task.get(name), str | int) for task in tasks)
    ]

    def choice(of: str | list[str]) -> Scope:
        return Scope(of, share_with_tips([scope_of(task, of) for task in tasks], tasks_per_step, steps))

    shared, whole = choice(ALL_TASKS), choice(fields)
    others = [choice([name]) for name in fields] if len(fields) > 1 else []
    return [whole, shared, *others] if fields and whole.share >= 0.5 else [shared, whole, *others]


def source_beside(source: str, file: Path) -> str:
    """Return ``tasks.source`` as a configuration names it: a relative file or folder from the configuration's own."""
    path = os.path.expanduser(source)
    if not is_task_path(source) or os.path.isabs(path) or file.parent == Path():
        return source
    relative = os.path.relpath(path, file.parent)
    return relative if is_task_path(relative) else f"./{relative}"


def config_text(
    file: Path,
    *,
    agent: str,
    source: str,
    variables: Mapping[str, str],
    scope: str | list[str],
    rewards: tuple[float, float],
    seconds: float,
) -> str:
    """Return the configuration of an agent; ``rewards`` are the worst and the best, ``seconds`` its run's limit."""
    worst, best = (int(each) if each.is_integer() else each for each in rewards)
    env = "\n".join(f"    {_yaml(name)}: {_yaml(value)}" for name, value in variables.items())
    written = {name: _yaml(value) for name, value in {"agent": agent, "source": source, "scope": scope}.items()}
    return _CONFIG.format(
        file=file, env=env, time_limit=max(300, math.ceil(seconds)), worst=worst, best=best, **written
    )


def _yaml(value: Any) -> str:
    """Return a value in YAML, in quotes where a file of settings would read another one, such as of 1e6."""
    plain, quoted = (
        yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True, default_style=style)[1:-2]
        for style in (None, '"')
    )
    return plain if parse_yaml(f"value: {plain}") == {"value": value} else quoted
