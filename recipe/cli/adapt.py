"""``empo2 adapt``."""

import os
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from empo2.recipe.cli.options import PanelName, PanelOptions, check_panel, with_options
from empo2.recipe.errors import ConfigError

EXAMPLES = """\b
examples:
  empo2 adapt runs/demo --panel scienceworld-paper-seen --unseen scienceworld-paper --limit 5
  empo2 adapt runs/demo --panel scienceworld-paper-seen --memory off --output runs/adapt-without   # a control
  empo2 adapt runs/demo --panel scienceworld-paper-seen memory.retrieval=random --output runs/adapt-random
  empo2 adapt Qwen/Qwen2.5-7B-Instruct --memory-from runs/other --memory read --output runs/adapt-others-memory
  empo2 adapt Qwen/Qwen2.5-7B-Instruct --config recipe/baselines/reflexion/reflexion.yaml
  empo2 report runs/adapt-demo runs/adapt-without runs/adapt-random
"""


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(PanelOptions):
    panel: PanelName = "scienceworld-paper-seen"


@with_options
def adapt(
    options: AdaptOptions,
    unseen: Annotated[
        str | None, typer.Option(metavar="NAME", help="A panel that only reads the tips, played before each trial.")
    ] = None,
    memory: Annotated[
        Literal["write", "read", "off"],
        typer.Option(help="write: tips are written and used; read: the memory is frozen; off: no memory in any trial."),
    ] = "write",
    trials: Annotated[int, typer.Option(min=1, help="After trial 0, which is without memory.")] = 10,
    rollouts: Annotated[int, typer.Option(min=1, help="Of each task in a trial, at model.temperature.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Of each unseen task, at model.val_temperature.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Independent repeats, each from the same memory.")] = 3,
    empty: Annotated[bool, typer.Option("--empty", help="Begin with an empty memory, not the checkpoint's.")] = False,
) -> None:
    """Adapt to tasks by tips alone: trials in which tips are written and used, with frozen weights.

    The same command goes on where it was interrupted. --row, --limit and --only change both panels. The memory of each
    seed stays in the folder of the results.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.adaptation import TASKS, UNSEEN, Plan, play_trials, remaining
    from empo2.recipe.evaluation.adaptation_report import show_adaptations
    from empo2.recipe.evaluation.episode_progress import progress
    from empo2.recipe.evaluation.episode_results import Results
    from empo2.recipe.evaluation.player import Player
    from empo2.recipe.gateway_client import GatewayClient
    from empo2.recipe.protocol import scope_of

    os.umask(0o077)  # chats and tips are for their owner only
    evaluated = options.read("adapt", remembers=memory != "off", empty=empty)
    settings, panel, folder = evaluated.settings, evaluated.panel, evaluated.folder
    if memory == "read" and evaluated.memory is None:
        raise ConfigError(f"--memory read: {options.model} has no memory; give one by --memory-from")
    other = options.load_panel(unseen, "--unseen") if unseen is not None else None
    if other is not None:
        check_panel(settings, "--unseen", other)
        fields = settings.memory.scope
        written, read = ({scope_of(task, fields) for task in rows} for rows in (panel.rows, other.rows))
        if memory != "off" and written.isdisjoint(read):
            print(f"warning  memory.scope={fields}: no unseen task shares a scope with a task, so none sees its tips")
    plan = Plan(panel, other, trials, rollouts, samples, seeds, memory)
    # What the values of tips are learned by. One that is 0 or null is no fact, as in `Evaluated.facts`.
    learned = {name: getattr(settings.algorithm, name) for name in ("failure_return", "return_scale")}
    algorithm = {name: value for name, value in learned.items() if value and memory == "write"}
    facts = evaluated.facts | {
        "memory_use": memory,
        "algorithm": evaluated.facts["algorithm"] | algorithm,
        "temperature": settings.model.temperature,
        "reflection": settings.reflection.model_dump(),
        "unseen": other and [other.name, other.checksum],
        "groups": {TASKS: panel.groups()} | ({UNSEEN: other.groups()} if other else {}),
        "episodes": plan.sizes(),
    }
    console = Console()
    with closing(Results(folder, facts)) as results:
        total, missing = plan.total(), len(remaining(plan, results))
        evaluated.announce(missing, total)
        if missing:
            with (
                evaluated.serving(evaluated.memory) as served,
                closing(GatewayClient(served.url, served.keys.admin)) as gateway,
                progress(console, total - missing, total) as show,
            ):
                start = (folder / "start.sqlite").absolute()
                if memory != "off":
                    gateway.snapshot(start)
                player = Player(served.client, settings, served.processes.check)
                play_trials(plan, player, results, gateway, start, settings.reflection.timeout, show)
    print(f"curves  {show_adaptations([folder], console, folder)}")
