"""Write the files of ``empo2 init``: a configuration, and made-up tasks if there are none."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from empo2.recipe.errors import ConfigError

COMMAND_AGENT = "empo2.agents.command:CommandAgent"
_TASKS = '''\
"""Tasks for EMPO2: put your own here. The fields of a row reach the agent through agent.env."""


def load() -> tuple[list[dict], list[dict]]:
    """Training tasks and validation tasks."""
    tasks = {rows}
    return tasks[::2], tasks[1::2][:20]
'''
_QUESTIONS = '[{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(1, 10) for b in range(1, 10)]'
_CONFIG = """\
# Laid over EMPO2's own config.yaml, which explains every setting: empo2 train --config {file}
agent:
  class: {agent}
  env:                 # the agent's variables: values from its task ("input.x"), or literals
{env}
  time_limit: 300      # seconds; then the rollout is killed and counted as failed
tasks:
  source: {source}  # returns (training tasks, validation tasks), lists of JSON-like rows
memory:
  scope: {scope}  # tasks that agree in these fields share tips
algorithm:
  return_scale: 1      # rewards are multiplied by it; best when they end up in -1..1
  success_return: 1    # an episode whose reward reaches this counts as a success
  failure_return: 0    # what a failed episode counts in val/return: the worst reward
  intrinsic_coefficient: 0.01  # reward of a state never seen before: a hundredth of a success
  return_tolerance: 0.005      # rewards of a group that differ by less count as equal
"""


def parse_variables(arguments: Sequence[str]) -> dict[str, str]:
    """Return the agent's variables from ``NAME=VALUE`` arguments.

    Raises:
        ConfigError: an argument does not have this form.
    """
    for argument in arguments:
        if not re.match(r"[A-Za-z_]\w*=", argument):
            raise ConfigError(f"--env {argument!r}: variables are given as NAME=VALUE, such as QUESTION=input.question")
    return dict(argument.split("=", 1) for argument in arguments)


def write_tasks(variables: Mapping[str, str]) -> str:
    """Write my_tasks.py, unless it exists, with the fields that the variables name; return its ``tasks.source``."""
    fields = [path.split(".")[1] for path in variables.values() if path.startswith("input.")]
    if not Path("my_tasks.py").exists():
        _write(Path("my_tasks.py"), _TASKS.format(rows=_rows(fields)))
    return "my_tasks:load"


def write_config(
    file: Path,
    *,
    agent: str | None,
    command: str | None,
    source: str,
    task: Mapping[str, Any],
    variables: Mapping[str, str],
    force: bool,
) -> None:
    """Write the configuration of an agent class or of a command line.

    Args:
        agent: ``module:Class``; None with a command line.
        source: ``tasks.source``.
        task: one of its tasks.
        variables: the agent's variables; all fields of the task are added if none of them is a field.
        force: overwrite a ``file`` that differs.

    Raises:
        ConfigError: ``file`` differs or cannot be written.
    """
    literals = {"AGENT_COMMAND": command} if command else {}
    if not any(value.partition(".")[0] == "input" for value in variables.values()):
        fields = {f"TASK_{re.sub(r'\W', '_', name).upper()}": f"input.{name}" for name in task}
        variables = {**fields, **variables}
    scope = [name for name, value in task.items() if isinstance(value, str | int)]
    text = _CONFIG.format(
        file=file,
        agent=_yaml(agent or COMMAND_AGENT),
        env="\n".join(f"    {name}: {_yaml(value)}" for name, value in {**literals, **variables}.items()),
        source=_yaml(source),
        scope=_yaml(scope),
    )
    if file.exists() and not force and file.read_text() != text:
        raise ConfigError(f"{file} exists and differs: --force overwrites it, --config {file} checks it as it is")
    _write(file, text)


def _rows(fields: list[str]) -> str:
    """Return Python code of made-up tasks with the fields that the agent's variables name."""
    if {*fields} <= {"question", "answer"}:
        return _QUESTIONS
    row = ", ".join(f"{json.dumps(name)}: str(number)" for name in dict.fromkeys(fields))
    return f"[{{{row}}} for number in range(1, 41)]"


def _yaml(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)[1:-2]


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    print(f"wrote  {file}")
