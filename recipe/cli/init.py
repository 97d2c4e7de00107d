"""``empo2 init``: write a starter configuration for an agent, and check it by running the agent once."""

import json
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError, Empo2Error

EXAMPLES = """\b
examples:
  empo2 init --agent my_agent:MyAgent
  empo2 init --command 'python play.py --question {QUESTION}' --env QUESTION=input.question
  empo2 init --command './play' --tasks my_tasks:load --env AGENT_REWARD=stdout
  empo2 init --config empo2.yaml      # check again; nothing is written
"""


def init(
    agent: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="An agent class with a run() method.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(metavar="LINE", help="A command line; {NAME} stands for a variable.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Check the agent of this file again; write nothing.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Where the tasks come from.  [default: my_tasks.py, written if there is none]",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the agent: input.FIELD of its task, or a literal; may be given more than once.  "
            "[default: TASK_FIELD for every field]",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The configuration to write.")] = Path("empo2.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what exists.")] = False,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="What the model says; given more than once, in this order, and the last one again and again.  "
            "[default: 1]",
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Of the agent's run.")] = 60,
) -> None:
    """Write a starter configuration for an agent, and check it.

    An agent class has a run() method; it reads the model's address from AGL_OPENAI_BASE_URL and the key from AGL_KEY.
    A command reads them from OPENAI_BASE_URL and OPENAI_API_KEY. The reward is posted to AGL_EVENT_URL; a command can
    write it to the file named by EMPO2_REWARD_FILE instead, or print it as its last line (AGENT_REWARD=stdout).

    The agent plays the first training task against agent-lightning's own gateway, and the findings are printed. No
    model is loaded: replies come from a script. Exit code 0: the agent can be trained; 1: it cannot (the findings say
    why); 2: wrong settings.
    """
    from empo2.recipe.launcher.processes import ending_descendants
    from empo2.recipe.launcher.tasks import check_agent, load_tasks
    from empo2.recipe.retrofit.findings import examine
    from empo2.recipe.retrofit.recorder import record
    from empo2.recipe.retrofit.starter import COMMAND_AGENT, parse_variables, write_config, write_tasks

    if [agent, command, config].count(None) != 2:
        raise ConfigError("give one of --agent, --command and --config; see empo2 init --help")
    if config is None:
        variables = parse_variables(env or [])
        source = tasks or write_tasks(variables)
        layer = {"agent": {"class": agent or COMMAND_AGENT}, "tasks": {"source": source}, "memory": {"scope": []}}
        task = load_tasks(load_settings(layer=layer)).train[0]
        write_config(output, agent=agent, command=command, source=source, task=task, variables=variables, force=force)
    file = config or output
    settings = load_settings(file=file)
    check_agent(settings)
    task = load_tasks(settings).train[0]
    name = settings.agent.env.get("AGENT_COMMAND", settings.agent.name)
    print(f"run    {name} on {json.dumps(task, ensure_ascii=False)[:200]}", flush=True)
    with ending_descendants():
        trace = record(settings, task, reply or ["1"], time_limit)
    findings = examine(trace, time_limit)
    for finding in findings:
        print(f"{finding.level:6} {finding.text}")
    wrong = sum(finding.level == "wrong" for finding in findings)
    if wrong:
        raise Empo2Error(f"{name} cannot be trained yet: {wrong} wrong; then: empo2 init --config {file}")
    print(f"done   it can be trained: empo2 train --profile cpu --config {file}")
