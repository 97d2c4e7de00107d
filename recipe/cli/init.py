"""``empo2 init``: write a starter configuration for an agent, and check it by running the agent once."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from empo2.recipe.config import Settings, load_settings, parse_yaml, with_task_files
from empo2.recipe.errors import ConfigError, Empo2Error
from empo2.recipe.messages import shortened
from empo2.recipe.printed import printable, say
from empo2.recipe.redaction import redacted

EXAMPLES = """\b
examples:
  empo2 init --agent my_agent:MyAgent --tasks questions.jsonl
  empo2 init --command 'python play.py --question {QUESTION}' --env QUESTION=input.question
  empo2 init --command './play' --tasks my_tasks:load --env AGENT_REWARD=stdout --rewards -1 1
  empo2 init --command 'claude -p {TASK} --model policy' --env TASK=input.task --tasks tasks.csv --calls
  empo2 init --config empo2.yaml --reply '{"name": "look", "arguments": {}}' --reply done   # check again
"""
_LINE_CHARACTERS = 1000
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
            help="The tasks: MODULE:FUNCTION, a .jsonl, .json, .csv or .parquet file, a folder of Harbor's tasks, or "
            "hub:NAME of a data set on the Hugging Face hub.  "
            "[default: my_tasks.py, written with made-up tasks if there is none]",
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
    rewards: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="WORST BEST", help="The range of the rewards.  [default: 0 1]"),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="The configuration to write.")] = Path("empo2.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite what exists.")] = False,
    reply: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="What the model says; given more than once, in this order, and the last one again and again: a text, "
            'a tool call {"name": "look", "arguments": {}}, or JSON for a schema.  [default: each tool once, then 1]',
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

    The agent needs three things of its environment: the model's address, its key, and its task; and it reports a
    reward. A command finds address and key in OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY), a class with run() in AGL_OPENAI_BASE_URL and AGL_KEY. The task is in the variables of --env.
    The reward is posted to AGL_EVENT_URL; a command can write it to the file named by EMPO2_REWARD_FILE instead, or
    print it as its last line (AGENT_REWARD=stdout).

    The agent plays the first training task against the gateway of a training, and the findings are printed: wrong keeps
    it from being trained, note is worth knowing. No model is loaded: replies come from a script, or from a server. All
    that the agent writes is kept in FILE.init.log beside the configuration, which is written if the agent can be
    trained. Exit code 0: it can; 1: it cannot (the findings say why); 2: wrong settings.
    """
    from empo2.memory import EmbedderError
    from empo2.recipe.files.models import model_of
    from empo2.recipe.files.tasks import load_tasks
    from empo2.recipe.files.tool_calls import tool_support
    from empo2.recipe.gateway.tips.state import StateReader
    from empo2.recipe.launcher.processes import ending_descendants
    from empo2.recipe.preflight.agent import check_fields
    from empo2.recipe.preflight.checks import AGENT, require
    from empo2.recipe.preflight.server import check_server
    from empo2.recipe.preflight.start import Start
    from empo2.recipe.retrofit import starter
    from empo2.recipe.retrofit.calls import call_lines
    from empo2.recipe.retrofit.findings import Finding, examine, offered_tools
    from empo2.recipe.retrofit.first_prompt import advice, first_prompt, holds, needed
    from empo2.recipe.retrofit.recorder import record
    from empo2.recipe.retrofit.rows import tell
    from empo2.recipe.retrofit.states import describe_states, embedder_trouble, states_of

    if [agent, command, config].count(None) != 2:
        raise ConfigError("give one of --agent, --command and --config; see empo2 init --help")
    written = {"--tasks": tasks, "--env": env, "--rewards": rewards}
    if config is not None and (given := [name for name, value in written.items() if value is not None]):
        raise ConfigError(f"{', '.join(given)}: what --config {config} says is checked; change it there")
    if server is not None and model is None:
        raise ConfigError(f"--server {server}: give --model, the server's name of it")
    if model is not None and server is None:
        raise ConfigError(f"--model {model}: give --server, the address of one that has it; `empo2 serve` starts one")
    if output.is_dir():
        raise ConfigError(f"--output {output}: is a folder; give a file, such as {output / 'empo2.yaml'}")
    drafts: dict[Path, str] = {}
    layer: Mapping[str, Any] = {}
    about_scope = ""
    if config is not None:
        settings = load_settings(file=config)
        rows = load_tasks(settings, made_up=True).train
    else:
        variables = starter.parse_variables(env or [])
        source = tasks or "my_tasks:load"
        trial = load_settings("cpu", layer={"tasks": {"source": source}})  # the run that is proposed below
        if tasks is None and not starter.MY_TASKS.exists():
            rows = starter.make_up_tasks(variables)
            drafts[starter.MY_TASKS] = starter.tasks_module(rows)
        else:
            rows = load_tasks(trial, made_up=True).train
        chosen, *others = starter.scope_choices(rows, trial.algorithm.tasks_per_step, trial.run.steps)
        drafts[output] = starter.config_text(
            output,
            agent=agent or starter.COMMAND_AGENT,
            source=starter.source_beside(source, output),
            variables=starter.all_variables(variables, command, rows),
            scope=chosen.fields,
            rewards=rewards or (0.0, 1.0),
            seconds=time_limit,
        )
        layer = with_task_files(parse_yaml(drafts[output]), output.parent)
        about_scope = _scope_line(chosen, others, trial, len({json.dumps(row, sort_keys=True) for row in rows}))
        settings = load_settings(layer=layer)
        if not force and output.exists() and output.read_text() != drafts[output]:
            raise ConfigError(f"{output} exists and differs: --force overwrites it, --config {output} checks it")
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"{output}: No such file or directory")
    check_fields(settings, f"tasks.source={settings.tasks.source!r}, training", rows)
    require(Start(settings), AGENT)
    reader = StateReader(settings.memory)
    name = _name_of(settings, rows[0])
    say("run", f"{name} on {json.dumps(rows[0], ensure_ascii=False)[:200]}")
    chosen_server = (server, model) if server and model else None
    if chosen_server:
        check_server(*chosen_server)
    with ending_descendants():
        trace = record(settings, rows[0], reply or (), time_limit, chosen_server)
    told = tell(trace.calls, settings.gateway)
    findings = examine(trace, told, settings, time_limit)
    profile, trained = "cpu", load_settings("cpu", file=config, layer=layer)
    if offered_tools(trace.calls):
        support = tool_support(trained.model, model_of(trained))
        can = f"model.path={trained.model.path} (profile cpu) can call tools: vLLM reads its calls with the parser"
        read = Finding("ok", f"{can} {support.parser}")
        findings.append(Finding("wrong", support.problem) if support.problem else read)
    turns = [call for call, each in zip(trace.calls, told, strict=True) if each.row]
    prompt, changes = (first_prompt(turns[0].body, trained) if turns else None), list[str]()
    if prompt is not None and (problem := advice(prompt, trained)):
        findings.append(Finding("note", f"{problem} (profile cpu)"))
        if not holds(trained, needed(prompt, trained)):
            profile, trained = "gpu-1", load_settings("gpu-1", file=config, layer=layer)
        changes = needed(prompt, trained)
    for finding in findings:
        say(finding.level, finding.text)
    if prompt is not None:
        say("prompt", f"{prompt} in the first call that is trained")
    if calls:
        print("\n".join(["", *call_lines(trace.calls, told, settings.memory.searched), ""]))
    if trace.exit_code != 0:
        said = redacted(settings.agent.env | {"": _own_words(trace.output)})[""]
        for line in said.strip().splitlines()[-_OUTPUT_LINES:]:
            print(f"       | {printable(shortened(line, _LINE_CHARACTERS))}")
    if trace.output.strip():
        log = (config or output).with_suffix(".init.log")
        _write(log, trace.output, 0o600)  # chats are for their owner only
        lines = len(trace.output.splitlines())
        say("output", f"{log} has all that the agent wrote, {lines} line{'s' * (lines > 1)}")
    if wrong := sum(finding.level == "wrong" for finding in findings):
        again = f"empo2 init --config {config}" if config else "the same command; no configuration was written"
        raise Empo2Error(f"{name} cannot be trained yet: {wrong} wrong; then: {again}")
    for label, text in describe_states(turns, reader):
        first, *more = text.splitlines()
        say(label, first)
        for line in more:
            print(f"       | {line}".rstrip())
    with contextlib.suppress(EmbedderError):  # which training says
        if alike := embedder_trouble(states_of(turns, reader), settings.memory.embedder):
            print(f"note   {alike}")
    if about_scope:
        say("scope", about_scope)
    has_secrets = redacted(settings.agent.env) != settings.agent.env
    for file, text in drafts.items():
        private = has_secrets and file == output
        _write(file, text, 0o600 if private else 0o666)
        say("wrote", f"{file}, which has secrets, for you alone" if private else str(file))
    if any(row.get(starter.MADE_UP) for row in rows):
        say("note", "the tasks are made up: put yours into my_tasks.py, or give tasks.source=FILE.jsonl, then train")
    command = " ".join(["empo2 train --profile", profile, "--config", str(config or output), *changes])
    say("done", f"it can be trained: {command}")


def _own_words(output: str) -> str:
    """Return what a command wrote, without the traceback of the process that runs it."""
    from empo2.recipe.failures import TRACEBACK

    begin = max(0, output.rfind(TRACEBACK))
    own = output[:begin].strip() and "CommandFailed: " in output[begin:]
    return output[:begin] if own else output


def _write(file: Path, text: str, mode: int = 0o666) -> None:
    """Write a file; a new one has the mode from its beginning."""
    try:
        file.touch(mode)
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _name_of(settings: Settings, task: dict[str, Any]) -> str:
    """Return the command line, or the class; a ConfigError if it names a program or variable that is not there."""
    line = settings.agent.env.get("AGENT_COMMAND")
    if line is None:
        return settings.agent.name
    from empo2.agents.command.agent import parse
    from empo2.recipe.files.tasks import agent_variables

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

    each = trial.algorithm.tasks_per_step
    of = f"{each} of the {tasks} tasks" if tasks >= each else f"the one task, {each} times each"
    return (
        f"{said(chosen)} of the memory rollouts can find tips of earlier steps, in {trial.run.steps} steps of {of}. "
        f"{', '.join(map(said, others))}"
    )
