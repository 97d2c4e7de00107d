"""``empo2 serve``."""

import contextlib
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from empo2.memory.browse import scope_counts
from empo2.memory.file import reading
from empo2.recipe.cli.memory import chosen_scopes
from empo2.recipe.cli.memory_tables import scope_fields, scope_text
from empo2.recipe.cli.options import (
    MemoryFrom,
    Model,
    Server,
    SettingsOptions,
    playing_layer,
    settings_file,
    with_options,
)
from empo2.recipe.config import lay_over, load_settings, read_layer
from empo2.recipe.errors import ConfigError, ProcessError
from empo2.recipe.files.checkpoints import find_model
from empo2.recipe.files.run_directory import memory_file, put_memory
from empo2.recipe.protocol import RolloutTag, Serving, given_keys

_POLL_SECONDS = 0.5

EXAMPLES = """\b
examples:
  empo2 serve runs/demo gateway.port=8080
  empo2 serve runs/demo --memory --scope task=find-animal,variation=3
  empo2 serve smollm2-135m-instruct --profile cpu

Settings are given as key=value; for a run they are laid over the run's own.
"""


@with_options
def serve(
    model: Model,
    options: SettingsOptions,
    memory: Annotated[bool, typer.Option("--memory", help="Show tips. Nothing is written to the memory.")] = False,
    memory_from: MemoryFrom = None,
    scope: Annotated[
        str | None,
        typer.Option(
            metavar="SCOPE",
            help='Whose tips are shown: task=find-animal,variation=3 or {"task": "find-animal"}.  [default: the only]',
        ),
    ] = None,
    server: Server = None,
) -> None:
    """Serve a model to agents, as a server compatible with OpenAI's and Anthropic's, until Ctrl-C.

    The gateway answers /v1/chat/completions, /completions, /responses, /messages and /models, also as streams, for
    whoever has the key. Agents keep their temperature; one that sets none gets model.val_temperature.
    """
    from empo2.recipe.launcher.serving import gateway_of
    from empo2.recipe.preflight.checks import SERVED, require
    from empo2.recipe.preflight.start import Start

    os.umask(0o077)  # chats and tips are for their owner only
    named = find_model(model, server)
    source = settings_file(options, named)
    given = {} if source is None else read_layer(source)
    # No agent is started; its variables may be secrets, which a run's settings lack.
    layer = {section: values for section, values in given.items() if section != "agent"}
    layer = lay_over(layer, playing_layer(server, remembers=memory))
    settings = load_settings(options.profile, options.overrides or (), layer=layer)
    file, tag, said = None, None, "none; --memory shows tips"
    if memory:
        file = memory_from or named.memory
        if file is None:
            raise ConfigError(f"--memory: {model} has no memory; give one by --memory-from")
        file = memory_file(file, settings, key=f"--memory-from {file}")
        tag, said = _tag(file, scope)
    elif memory_from is not None or scope is not None:
        raise ConfigError("--memory-from and --scope: choose the tips that --memory shows; give that, too")
    require(Start(settings, served=named.model), SERVED)
    resolved = named.resolve()
    with _log_folder() as folder:
        put_memory(file, folder)
        print(f"model    {named.name}\nmemory   {said}\nlogs     {folder}, until Ctrl-C\nstarting ...", flush=True)
        name = named.name if server is None else resolved
        with gateway_of(settings, folder, resolved, agents=Serving(name=name, tag=tag)) as served:
            # A secret key, of the environment, is not shown.
            _say(served.url, name, "$EMPO2_KEY" if given_keys().agent else served.keys.agent)
            try:
                while True:
                    served.processes.check()
                    time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt:
                print("stopping ...", flush=True)


@contextlib.contextmanager
def _log_folder() -> Iterator[Path]:
    """Make a folder, and remove it afterwards unless a process has failed: the error names a log in it."""
    folder, kept = Path(tempfile.mkdtemp(prefix="empo2-serve-")), False
    try:
        yield folder
    except ProcessError:
        kept = True
        raise
    finally:
        if not kept:
            shutil.rmtree(folder)


def _tag(file: Path, asked: str | None) -> tuple[RolloutTag, str]:
    """Return the tag of calls that are shown a scope's tips, and what to say of it; a ConfigError unless it is one."""
    with reading(file) as db:
        counts = [count for count in scope_counts(db, chosen_scopes(db, asked)) if count.tips]
    if not counts:
        raise ConfigError(f"--memory: {file} has no tips" + (f" in --scope {asked}" if asked is not None else ""))
    if len(counts) > 1:
        names = ", ".join(scope_text(count.scope) for count in counts[:5])
        raise ConfigError(f"--memory: there are tips in {len(counts)} scopes, such as {names}; give one by --scope")
    (count,) = counts
    tag = RolloutTag(rollout_mode="memory", scope=count.scope, read_only=True)
    scope = f"scope {scope_text(count.scope)}" if scope_fields(count.scope) else "all tasks"
    return tag, f"{count.tips:,} tips of {scope}, read only"


def _say(gateway: str, name: str, key: str) -> None:
    """Print how agents reach the model."""
    url = f"{gateway}/v1"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(
        f"URL      {url}\nkey      {key}\nagents   export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}\n"
        f"         export ANTHROPIC_BASE_URL={gateway} ANTHROPIC_API_KEY={key}\n"
        f'example  curl {url}/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" '
        f"-d {shlex.quote(body)}\nready; Ctrl-C stops it",
        flush=True,
    )
