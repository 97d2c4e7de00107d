"""``empo2 sweep``."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.cli.options import SettingsOptions, with_options
from empo2.recipe.errors import ConfigError, ProcessError

EXAMPLES = """\b
FILE is YAML; runs/FILE holds the runs, ARM-SEED, and report.html:
  seeds: 3                                            # of each arm
  settings: {run: {steps: 100}}                       # of all arms, as in config.yaml
  arms:
    grpo: {settings: {algorithm: {name: grpo}}}
    empo2: {title: EMPO², seeds: 5}
    no-mask: {ablation: no-mask}                      # an arm of recipe/sweeps/ablations.yaml
  grid: {algorithm.learning_rate: [1.0e-6, 2.0e-6]}   # each arm with each value

\b
examples:
  empo2 sweep recipe/sweeps/ablations.yaml --profile gpu --list
  empo2 sweep recipe/sweeps/ablations.yaml --profile gpu --only empo2-1 --only no-mask-1
  empo2 sweep recipe/sweeps/p.yaml --profile cpu --config agents/houses/coin.yaml run.steps=20
"""


@with_options
def sweep(
    options: SettingsOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Arms, grid and seeds, such as recipe/sweeps/p.yaml.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="ARM-SEED", help="Only this run; may be given more than once.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Only list the runs, and which have ended.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the runs.  [default: runs/FILE]", show_default=False)
    ] = None,
) -> None:
    """Train configurations with several seeds, one run after another, and report them together.

    The first seed of every arm comes first. The same command goes on where it was interrupted: a run that has ended is
    not repeated. A run that fails is reported, and the others are trained; the same command tries it again.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.run_lines import Line, read_run
    from empo2.recipe.evaluation.run_report import show_lines
    from empo2.recipe.files.plan import read_plan
    from empo2.recipe.launcher.processes import ending_descendants
    from empo2.recipe.launcher.sweep import check_settings, has_ended, train_all
    from empo2.recipe.preflight.checks import SETTINGS, require
    from empo2.recipe.preflight.start import Start

    os.umask(0o077)  # chats, tips and weights are for their owner only
    folder, trials = read_plan(
        file, output, profile=options.profile, config=options.config, overrides=options.overrides or ()
    )
    names = [trial.name for trial in trials]
    if unknown := [name for name in only or () if name not in names]:
        raise ConfigError(f"--only {unknown[0]}: {file} has {', '.join(names)}")
    chosen = [trial for trial in trials if not only or trial.name in only]
    if show:
        for trial in chosen:
            print(f"{trial.name:40} {'has ended' if has_ended(trial, folder) else 'to be trained'}")
        return
    check_settings(chosen, folder)
    with ending_descendants():  # such as a world that lists its tasks
        for trial in {trial.arm: trial for trial in reversed(chosen) if not has_ended(trial, folder)}.values():
            try:
                require(Start(trial.settings), SETTINGS)
            except ConfigError as error:
                raise ConfigError(f"{trial.name}: {error}") from None
    print(f"sweep  {file}: {len(chosen)} runs in {folder}", flush=True)
    failed = train_all(chosen, folder, lambda text: print(f"{time.strftime('%H:%M')}  {text}", flush=True))
    arms: dict[str, list[Path]] = {}
    for trial in trials:
        if has_ended(trial, folder):
            arms.setdefault(trial.title, []).append(folder / trial.name)
    if arms:
        show_lines([Line(title, [read_run(run) for run in runs]) for title, runs in arms.items()], folder, Console())
    if failed:
        count = f"{len(failed)} of {len(chosen)} runs failed"
        raise ProcessError(f"{count}: {', '.join(failed)}; try again with this command")
