"""empo2 init: writes a starter configuration for an agent, and checks it by running the agent once."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import yaml

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.launcher.tasks import check_agent, load_tasks

_COMMAND_AGENT = "empo2.agents.command:CommandAgent"
_EPILOG = """\
examples:
  empo2 init --agent my_agent:MyAgent
  empo2 init --command 'python play.py --question {QUESTION}' --env QUESTION=input.question
  empo2 init --command './play' --tasks my_tasks:load --env AGENT_REWARD=stdout
  empo2 init --config empo2.yaml      # check again; nothing is written

An agent class has a run() method and takes the model's address from AGL_OPENAI_BASE_URL, its key from AGL_KEY. A
command gets the same as OPENAI_BASE_URL and OPENAI_API_KEY. The reward goes to AGL_EVENT_URL; a command may write it
to the file that EMPO2_REWARD_FILE names, or print it as its last line (AGENT_REWARD=stdout).

The agent plays the first training task against agent-lightning's own gateway. No model is loaded: replies come from
a script. Exit code 0: it can be trained; 1: it cannot, and why; 2: wrong settings.
"""
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


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "init",
        help="write a starter configuration for an agent or a command line, and check it",
        description="Write a starter configuration for an agent class or a command line, and check it: the agent is "
        "run once, and you are told what was seen.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--agent", metavar="MODULE:CLASS", help="an agent class with a run() method")
    what.add_argument("--command", metavar="LINE", help="a command line; {NAME} stands for a variable")
    what.add_argument("--config", type=Path, metavar="FILE", help="check the agent of this file again; write nothing")
    parser.add_argument(
        "--tasks",
        metavar="MODULE:FUNCTION",
        help="where the tasks come from; default: my_tasks.py, written if there is none",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the agent: input.FIELD of its task, or a literal; default: TASK_FIELD for every field",
    )
    parser.add_argument("--output", type=Path, default=Path("empo2.yaml"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="overwrite what exists")
    parser.add_argument(
        "--reply",
        action="append",
        metavar="TEXT",
        help="what the model says, in order; the last again and again; default: 1",
    )
    parser.add_argument(
        "--time-limit", type=float, default=60, metavar="SECONDS", help="of the agent's run; default: %(default)g"
    )
    parser.set_defaults(run=init)


def init(options: argparse.Namespace) -> None:
    """Write, run, tell.

    Raises:
        ConfigError: a file exists already, or agent, tasks or variables are wrong.
        Empo2Error: the agent cannot be trained as it is.
    """
    from empo2.recipe.retrofit.findings import examine
    from empo2.recipe.retrofit.recorder import record

    file = options.config or _write_config(options)
    settings = load_settings(file=file)
    check_agent(settings)
    task = load_tasks(settings).train[0]
    agent = settings.agent.env.get("AGENT_COMMAND", settings.agent.class_)
    print(f"run    {agent} on {json.dumps(task, ensure_ascii=False)[:200]}", flush=True)
    findings = examine(record(settings, task, options.reply or ["1"], options.time_limit), options.time_limit)
    for finding in findings:
        print(f"{finding.level:6} {finding.text}")
    wrong = sum(finding.level == "wrong" for finding in findings)
    if wrong:
        raise Empo2Error(f"{agent} cannot be trained yet: {wrong} wrong; then: empo2 init --config {file}")
    print(f"done   it can be trained: empo2 train --profile cpu --config {file}")


def _write_config(options: argparse.Namespace) -> Path:
    source = options.tasks or "my_tasks:load"
    agent = _COMMAND_AGENT if options.command else options.agent
    literals = {"AGENT_COMMAND": options.command} if options.command else {}
    env = _variables(options.env)
    fields = [path.split(".")[1] for path in env.values() if path.startswith("input.")]
    if options.tasks is None and not Path("my_tasks.py").exists():
        _write(Path("my_tasks.py"), _TASKS.format(rows=_rows(fields)))
    layer = {"agent": {"class": agent}, "tasks": {"source": source}, "memory": {"scope": []}}
    task = load_tasks(load_settings(layer=layer)).train[0]
    if not any(value.partition(".")[0] == "input" for value in env.values()):
        env = {f"TASK_{re.sub(r'\W', '_', name).upper()}": f"input.{name}" for name in task} | env
    scope = [name for name, value in task.items() if isinstance(value, str | int)]
    lines = "\n".join(f"    {name}: {_yaml(value)}" for name, value in (literals | env).items())
    text = _CONFIG.format(file=options.output, agent=_yaml(agent), env=lines, source=_yaml(source), scope=_yaml(scope))
    if options.output.exists() and not options.force and options.output.read_text() != text:
        raise ConfigError(
            f"{options.output} exists and differs: --force overwrites it, --config {options.output} checks it as it is"
        )
    _write(options.output, text)
    return options.output


def _rows(fields: list[str]) -> str:
    """Python of made-up tasks that have the fields which the agent's variables name."""
    if {*fields} <= {"question", "answer"}:
        return _QUESTIONS
    row = ", ".join(f"{json.dumps(name)}: str(number)" for name in dict.fromkeys(fields))
    return f"[{{{row}}} for number in range(1, 41)]"


def _variables(arguments: list[str]) -> dict[str, str]:
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
