"""``empo2 train``."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from empo2.recipe import preemption
from empo2.recipe.cli.options import SettingsOptions, with_options
from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError

if TYPE_CHECKING:
    from empo2.recipe.files.tasks import Tasks

_CALL_SECONDS = 60


@with_options
def train(
    options: SettingsOptions,
    ablation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An arm of recipe/sweeps/ablations.yaml, such as no-mask; the third layer."),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Train against a gateway that runs already, and start nothing else."),
    ] = None,
    run_directory: Annotated[Path | None, typer.Option(hidden=True)] = None,  # the launcher has made it
) -> None:
    """Start gateway, controller and trainer, and train."""
    from rich.console import Console

    from empo2.recipe.evaluation.run_report import show_runs
    from empo2.recipe.files import plan
    from empo2.recipe.files.models import model_of
    from empo2.recipe.files.run_directory import open_run_directory
    from empo2.recipe.launcher.commands import given_keys
    from empo2.recipe.launcher.launch import launch, train_only
    from empo2.recipe.preflight.cluster import require_cluster

    os.umask(0o077)  # chats, tips and weights are for their owner only
    settings = options.settings(plan.ablation(ablation) if ablation is not None else {})
    if gateway is None:
        console = Console()
        run = launch(settings, options.profile, console, check=_check_tools)
        show_runs([run], run, console)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        preemption.expect(*([preemption.WARNING] if run_directory else preemption.WARNINGS))
        if run_directory is None and settings.hardware.cluster is not None:  # else the launcher has looked at it
            say = partial(print, flush=True)
            for warning in require_cluster(settings, model_of(settings), say):
                say(f"warning  {warning}")
        folder = run_directory or open_run_directory(settings, options.profile)[0]
        train_only(settings, gateway, given_keys().admin, folder)


def _check_tools(settings: Settings, tasks: "Tasks", model: str) -> None:
    """Refuse a model without readable tool calls for an agent that offers tools in its first call.

    Only for such a model the agent is started, with its first task and a scripted model.
    """
    from empo2.recipe.files.tool_calls import tool_support
    from empo2.recipe.retrofit.findings import offered_tools
    from empo2.recipe.retrofit.recorder import record

    problem = tool_support(settings.model, model).problem
    trace = record(settings, tasks.train[0], ["1"], _CALL_SECONDS, first_call_only=True) if problem else None
    if trace and (tools := offered_tools(trace.calls[:1])):
        raise ConfigError(f"model.path={settings.model.path!r}: the agent offers {', '.join(tools)}; {problem}")
