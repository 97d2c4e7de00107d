"""``empo2 eval``."""

import os
from contextlib import closing
from typing import Annotated, Literal

import typer

from empo2.recipe.cli.options import PanelOptions, with_options
from empo2.recipe.errors import ConfigError

EXAMPLES = """\b
examples:
  empo2 eval runs/demo --panel scienceworld-paper --memory both
  empo2 eval Qwen/Qwen2.5-7B-Instruct --panel scienceworld-l1 --limit 5
  empo2 eval runs/conductivity --panel scienceworld-paper --only test-conductivity
  empo2 eval my-model --server http://127.0.0.1:8000/v1 --panel textworld-express
  empo2 eval runs/demo --panel scienceworld-paper --limit 1 --row actions=choice --row max_steps=6

Settings are given as key=value, as for empo2 train; for a run they are laid over the run's own.
"""


@with_options
def evaluate(
    options: PanelOptions,
    memory: Annotated[
        Literal["off", "on", "both"],
        typer.Option(help="Show tips: no, yes (nothing is written), or one and the other."),
    ] = "off",
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task, at model.val_temperature.")] = 4,
) -> None:
    """Evaluate a model on a fixed panel of tasks, without training.

    The same command goes on where it was interrupted. In the folder of the results, results.jsonl has a line for each
    episode, and summary.json the numbers of the table.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.episode_progress import progress
    from empo2.recipe.evaluation.episode_results import Results
    from empo2.recipe.evaluation.evaluation_report import show_evaluations
    from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON, Player, planned_episodes, play_missing

    os.umask(0o077)  # chats and tips are for their owner only
    evaluated = options.read("eval", remembers=memory != "off")
    settings, folder = evaluated.settings, evaluated.folder
    parts = {"off": [MEMORY_OFF], "on": [MEMORY_ON], "both": [MEMORY_OFF, MEMORY_ON]}[memory]
    if memory != "off" and evaluated.memory is None:
        raise ConfigError(f"--memory {memory}: {options.model} has no memory; give one by --memory-from")
    console = Console()
    planned = planned_episodes(evaluated.panel, parts, samples)
    with closing(Results(folder, evaluated.facts)) as results:
        missing = len(results.missing(planned))
        evaluated.announce(missing, len(planned))
        if missing:
            with (
                evaluated.serving(evaluated.memory if memory != "off" else None) as served,
                progress(console, len(planned) - missing, len(planned)) as show,
            ):
                play_missing(Player(served.client, settings, served.processes.check), results, planned, show)
    show_evaluations([folder], console)
