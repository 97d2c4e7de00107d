"""Write the starter configuration that ``empo2 init`` checks, and tasks where there are none."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.tasks import load_tasks

_COMMAND_AGENT = "empo2.agents.command:CommandAgent"
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
"""


def write_starter(
    agent: str | None, command: str | None, *, tasks: str | None, env: Sequence[str], output: Path, force: bool
) -> Path:
    """Write ``output``, the configuration of an agent class or of a command line; return it.

    Args:
        agent: ``module:Class``; None with a command line.
        tasks: ``module:function``; None for my_tasks.py, which is written where there is none.
        env: ``NAME=VALUE`` of the agent's variables; where no value is a field of the task, all fields are given.
        force: overwrite an ``output`` that differs.

    Raises:
        ConfigError: ``output`` differs already, or tasks or variables are wrong.
    """
    source = tasks or "my_tasks:load"
    agent = agent or _COMMAND_AGENT
    literals = {"AGENT_COMMAND": command} if command else {}
    variables = _variables(env)
    fields = [path.split(".")[1] for path in variables.values() if path.startswith("input.")]
    if tasks is None and not Path("my_tasks.py").exists():
        _write(Path("my_tasks.py"), _TASKS.format(rows=_rows(fields)))
    layer = {"agent": {"class": agent}, "tasks": {"source": source}, "memory": {"scope": []}}
    task = load_tasks(load_settings(layer=layer)).train[0]
    if not any(value.partition(".")[0] == "input" for value in variables.values()):
        variables = {f"TASK_{re.sub(r'\W', '_', name).upper()}": f"input.{name}" for name in task} | variables
    scope = [name for name, value in task.items() if isinstance(value, str | int)]
    lines = "\n".join(f"    {name}: {_yaml(value)}" for name, value in (literals | variables).items())
    text = _CONFIG.format(file=output, agent=_yaml(agent), env=lines, source=_yaml(source), scope=_yaml(scope))
    if output.exists() and not force and output.read_text() != text:
        raise ConfigError(f"{output} exists and differs: --force overwrites it, --config {output} checks it as it is")
    _write(output, text)
    return output


def _rows(fields: list[str]) -> str:
    """Return Python code of made-up tasks with the fields that the agent's variables name."""
    if {*fields} <= {"question", "answer"}:
        return _QUESTIONS
    row = ", ".join(f"{json.dumps(name)}: str(number)" for name in dict.fromkeys(fields))
    return f"[{{{row}}} for number in range(1, 41)]"


def _variables(arguments: Sequence[str]) -> dict[str, str]:
    for argument in arguments:
        if not re.match(r"[A-Za-z_]\w*=", argument):
            raise ConfigError(f"--env {argument!r}: variables are given as NAME=VALUE, such as QUESTION=input.question")
    return dict(argument.split("=", 1) for argument in arguments)


def _yaml(value: Any) -> str:
    return yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True)[1:-2]


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    print(f"wrote  {file}")
