"""``empo2 init``: write a starter configuration for an agent, and check it by running the agent once."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from empo2.recipe.config import Settings, load_settings, parse_yaml
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.printed import printable

EXAMPLES = """\b
examples:
  empo2 init --agent my_agent:MyAgent --tasks questions.jsonl
  empo2 init --command 'python play.py --question {QUESTION}' --env QUESTION=input.question
  empo2 init --command './play' --tasks my_tasks:load --env AGENT_REWARD=stdout --rewards -1 1
  empo2 init --config empo2.yaml      # check again; nothing is written
"""
_OUTPUT_LINES = 12


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
            metavar="SOURCE",
            help="The tasks: MODULE:FUNCTION, FILE.jsonl, FILE.parquet, a folder of Harbor's tasks, or hub:NAME of "
            "a data set on the Hugging Face hub.  [default: my_tasks.py, written with made-up tasks if there is none]",
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
    rewards: Annotated[tuple[float, float], typer.Option(metavar="WORST BEST", help="The range of the rewards.")] = (
        0.0,
        1.0,
    ),
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
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Play with this model of --server, instead of scripted replies."),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible server, .../v1, such as that of `empo2 serve`."),
    ] = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Of the agent's run.")] = 60,
    calls: Annotated[
        bool, typer.Option("--calls", help="Show each model call: its training row, and why it opens one.")
    ] = False,
) -> None:
    """Check an agent by running it once, and write a starter configuration for it.

    An agent class has a run() method; it reads the model's address from AGL_OPENAI_BASE_URL and the key from AGL_KEY.
    A command reads them from OPENAI_BASE_URL and OPENAI_API_KEY. The reward is posted to AGL_EVENT_URL; a command can
    write it to the file named by EMPO2_REWARD_FILE instead, or print it as its last line (AGENT_REWARD=stdout).

    The agent plays the first training task against agent-lightning's own gateway, and the findings are printed. No
    model is loaded: replies come from a script, or from a server. Files are written if the agent can be trained. Exit
    code 0: it can; 1: it cannot (the findings say why); 2: wrong settings.
    """
    from empo2.recipe.files.models import model_of
    from empo2.recipe.files.tasks import load_tasks
    from empo2.recipe.files.tool_calls import tool_support
    from empo2.recipe.gateway.tips.state import StateReader
    from empo2.recipe.launcher.processes import ending_descendants
    from empo2.recipe.preflight.checks import AGENT, require
    from empo2.recipe.preflight.server import check_server
    from empo2.recipe.preflight.start import Start
    from empo2.recipe.retrofit import starter
    from empo2.recipe.retrofit.calls import call_lines
    from empo2.recipe.retrofit.findings import Finding, examine, offered_tools
    from empo2.recipe.retrofit.recorder import record
    from empo2.recipe.retrofit.rows import tell
    from empo2.recipe.retrofit.states import describe_states

    if [agent, command, config].count(None) != 2:
        raise ConfigError("give one of --agent, --command and --config; see empo2 init --help")
    if server is not None and model is None:
        raise ConfigError(f"--server {server}: give --model, the server's name of it")
    if model is not None and server is None:
        raise ConfigError(f"--model {model}: give --server, the address of one that has it; `empo2 serve` starts one")
    drafts: dict[Path, str] = {}
    layer: dict[str, Any] = {}
    about_scope = ""
    if config is not None:
        settings = load_settings(file=config)
        rows = load_tasks(settings, made_up=True).train
    else:
        variables = starter.parse_variables(env or [])
        source = tasks or "my_tasks:load"
        if tasks is None and not starter.MY_TASKS.exists():
            rows = starter.make_up_tasks(variables)
            drafts[starter.MY_TASKS] = starter.tasks_module(rows)
        else:
            rows = load_tasks(load_settings(layer={"tasks": {"source": source}}), made_up=True).train
        trial = load_settings("cpu", layer={"tasks": {"source": source}})  # the run that is proposed below
        chosen, *others = starter.scope_choices(rows, trial.algorithm.tasks_per_step, trial.run.steps)
        drafts[output] = starter.config_text(
            output,
            agent=agent or starter.COMMAND_AGENT,
            source=source,
            variables=starter.all_variables(variables, command, rows[0]),
            scope=chosen.fields,
            rewards=rewards,
        )
        layer = parse_yaml(drafts[output])
        about_scope = _scope_line(chosen, others, trial, len(rows))
        settings = load_settings(layer=layer)
        if not force and output.exists() and output.read_text() != drafts[output]:
            raise ConfigError(f"{output} exists and differs: --force overwrites it, --config {output} checks it")
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"{output}: No such file or directory")
    require(Start(settings), AGENT)
    reader = StateReader(settings.memory)
    name = _name_of(settings, rows[0])
    print(f"run    {name} on {json.dumps(rows[0], ensure_ascii=False)[:200]}", flush=True)
    chosen_server = (server, model) if server and model else None
    if chosen_server:
        check_server(*chosen_server)
    with ending_descendants():
        trace = record(settings, rows[0], reply or ["1"], time_limit, chosen_server)
    told = tell(trace.calls, main_chat_only=not settings.gateway.trained_calls)
    findings = examine(trace, told, settings, time_limit)
    if offered_tools(trace.calls):
        trained = load_settings("cpu", file=config, layer=layer)
        support = tool_support(trained.model, model_of(trained))
        can = f"model.path={trained.model.path} (profile cpu) can call tools: vLLM reads its calls with the parser"
        read = Finding("ok", f"{can} {support.parser}")
        findings.append(Finding("wrong", support.problem) if support.problem else read)
    for finding in findings:
        print(f"{finding.level:6} {finding.text}")
    if calls:
        print("\n".join(["", *call_lines(trace.calls, told), ""]))
    if trace.exit_code != 0:
        for line in trace.output.strip().splitlines()[-_OUTPUT_LINES:]:
            print(f"       | {printable(line)}")
    if wrong := sum(finding.level == "wrong" for finding in findings):
        again = f"empo2 init --config {config}" if config else "the same command; no file was written"
        raise Empo2Error(f"{name} cannot be trained yet: {wrong} wrong; then: {again}")
    turns = [call for call, each in zip(trace.calls, told, strict=True) if each.row]
    for label, text in describe_states(turns, reader):
        first, *more = text.splitlines()
        print(f"{label:6} {first}")
        for line in more:
            print(f"       | {line}".rstrip())
    if about_scope:
        print(about_scope)
    for file, text in drafts.items():
        try:
            file.write_text(text)
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        print(f"wrote  {file}")
    if any(row.get(starter.MADE_UP) for row in rows):
        print("note   the tasks are made up: put yours into my_tasks.py, or give tasks.source=FILE.jsonl, then train")
    print(f"done   it can be trained: empo2 train --profile cpu --config {config or output}")


def _name_of(settings: Settings, task: dict[str, Any]) -> str:
    """Return the command line, or the class; a ConfigError if it names a program or variable that is not there."""
    line = settings.agent.env.get("AGENT_COMMAND")
    if line is None:
        return settings.agent.name
    from empo2.agents.command.agent import parse
    from empo2.recipe.retrofit.recorder import agent_variables

    try:
        model = dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_MODEL"), "x")
        own = dict.fromkeys(("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL", "AGL_KEY", "EMPO2_REWARD_FILE"), "x")
        parse(line, {**os.environ, **model, **own, **agent_variables(task, settings.agent.env)})
    except ValueError as error:
        raise ConfigError(f"--command: {str(error).removeprefix('AGENT_COMMAND=')}") from None
    return line


def _scope_line(chosen: Any, others: Any, trial: Settings, tasks: int) -> str:
    """Return one line on ``memory.scope``: what was chosen, and how often the others would recur."""

    def said(choice: Any) -> str:
        fields = choice.fields if isinstance(choice.fields, str) else f"[{', '.join(choice.fields)}]"
        return f"{fields}: {choice.share:.0%}"

    return (
        f"scope  {said(chosen)} of the memory rollouts can find tips of earlier steps, in {trial.run.steps} steps of "
        f"{trial.algorithm.tasks_per_step} of the {tasks} tasks. {', '.join(map(said, others))}"
    )
