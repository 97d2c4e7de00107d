"""``empo2 train``."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe import preemption
from empo2.recipe.cli.options import SettingsOptions, with_options


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
    from empo2.recipe.files.run_directory import open_run_directory
    from empo2.recipe.launcher.launch import launch, train_only
    from empo2.recipe.preflight.checks import FETCHED, HOST, TRAINER, require
    from empo2.recipe.preflight.cluster import WAIT_SECONDS
    from empo2.recipe.preflight.start import Start
    from empo2.recipe.protocol import given_keys

    os.umask(0o077)  # chats, tips and weights are for their owner only
    for number in preemption.WARNINGS:  # until there is something to save
        signal.signal(number, signal.default_int_handler)
    settings = options.settings(plan.ablation(ablation) if ablation is not None else {})
    if gateway is None:
        console = Console()
        run = launch(settings, options.profile, console)
        show_runs([run], run, console)
    else:
        preemption.expect(*([preemption.WARNING] if run_directory else preemption.WARNINGS))
        if run_directory is None:  # else the launcher has looked
            say = partial(print, flush=True)
            for warning in require(Start(settings, say=say, seconds=WAIT_SECONDS), TRAINER, HOST, FETCHED):
                say(f"warning  {warning}")
        folder = run_directory or open_run_directory(settings, options.profile)[0]
        train_only(settings, gateway, given_keys().admin, folder)
