"""``empo2 adapt``."""

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from empo2.recipe.cli.eval import (
    Bank,
    Limit,
    Model,
    Only,
    Output,
    PanelName,
    Rows,
    Server,
    announce,
    check_agent_of,
    put_bank,
    read_request,
)
from empo2.recipe.cli.options import Config, Overrides, Profile

EXAMPLES = """\b
examples:
  empo2 adapt runs/demo --panel scienceworld-paper-seen --unseen scienceworld-paper --limit 5
  empo2 adapt runs/demo --panel scienceworld-paper-seen --memory off --output runs/adapt-without   # a control
  empo2 adapt runs/demo --panel scienceworld-paper-seen memory.retrieval=random --output runs/adapt-random
  empo2 adapt Qwen/Qwen2.5-7B-Instruct --bank runs/other --memory read --output runs/adapt-others-bank
  empo2 adapt Qwen/Qwen2.5-7B-Instruct --config recipe/evaluation/reflexion.yaml
  empo2 report runs/adapt-demo runs/adapt-without runs/adapt-random
"""


def adapt(
    model: Model,
    overrides: Overrides = None,
    panel: PanelName = "scienceworld-paper-seen",
    unseen: Annotated[
        str | None, typer.Option(metavar="NAME", help="A panel that only reads the tips, played before each trial.")
    ] = None,
    memory: Annotated[
        Literal["write", "read", "off"],
        typer.Option(help="write: tips are written and used; read: the bank is frozen; off: no memory in any trial."),
    ] = "write",
    trials: Annotated[int, typer.Option(min=1, help="After trial 0, which is without memory.")] = 10,
    rollouts: Annotated[int, typer.Option(min=1, help="Of each task in a trial, at model.temperature.")] = 8,
    samples: Annotated[int, typer.Option(min=1, help="Of each unseen task, at model.val_temperature.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Independent repeats, each from the same bank.")] = 3,
    server: Server = None,
    bank: Bank = None,
    empty: Annotated[bool, typer.Option("--empty", help="Begin with an empty bank, not the checkpoint's.")] = False,
    row: Rows = None,
    limit: Limit = None,
    only: Only = None,
    output: Output = None,
    profile: Profile = None,
    config: Config = None,
) -> None:
    """Adapt to tasks by tips alone: trials in which tips are written and used, with frozen weights.

    The same command goes on where it was interrupted. --row, --limit and --only change both panels. The bank of each
    seed stays in the folder of the results.
    """
    from rich.console import Console

    from empo2.recipe.errors import ConfigError
    from empo2.recipe.evaluation.adaptation import TASKS, UNSEEN, Adaptation, Plan, remaining
    from empo2.recipe.evaluation.adaptation_report import show_adaptations
    from empo2.recipe.evaluation.episode_progress import progress
    from empo2.recipe.evaluation.episode_results import Results
    from empo2.recipe.evaluation.panels import load_panel
    from empo2.recipe.evaluation.player import Player
    from empo2.recipe.launcher.serving import serving
    from empo2.recipe.launcher.tasks import check_rows
    from empo2.recipe.protocol import scope_of
    from empo2.recipe.trainer.gateway_client import GatewayClient

    os.umask(0o077)  # chats and tips are for their owner only
    request = read_request(
        model,
        panel,
        overrides,
        profile=profile,
        config=config,
        server=server,
        bank=bank,
        rows=row,
        limit=limit,
        only=only,
        remembers=memory != "off",
        empty=empty,
    )
    if (critic := request.settings.critic.path) is not None:
        raise ConfigError(f"critic.path={critic!r}: is for empo2 eval; set it to null")
    if memory == "read" and request.bank is None:
        raise ConfigError(f"--memory read: {model} has no memory; give one by --bank")
    other = load_panel(unseen, row or (), limit, only or ()) if unseen is not None else None
    if other is not None:
        check_rows(request.settings, other.name, other.rows)
    plan = Plan(request.panel, other, trials, rollouts, samples, seeds, memory)
    console, fields = Console(), request.settings.memory.scope
    known = {scope_of(task, fields) for task in request.panel.rows}
    if other is not None and memory != "off" and known.isdisjoint(scope_of(task, fields) for task in other.rows):
        console.print(
            f"warning  memory.scope={fields}: no unseen task shares a scope with a task, so none sees its tips",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    folder = output or Path(request.settings.run.directory, f"adapt-{request.subject.name}-{request.panel.name}")
    facts = request.facts | {
        "kind": "adapt",
        "memory_use": memory,
        "temperature": request.settings.model.temperature,
        "reflection": request.settings.reflection.model_dump(),
        "unseen": other and [other.name, other.checksum],
        "groups": {TASKS: request.panel.groups()} | ({UNSEEN: other.groups()} if other else {}),
        "episodes": {TASKS: len(plan.tasks.rows) * rollouts, UNSEEN: len(plan.unseen_rows) * samples},
    }
    with closing(Results(folder, facts)) as results:
        total, missing = len(plan.everything()), len(remaining(plan, results))
        announce(console, request, folder, f"{missing:,} of {total:,} episodes to play")
        if missing:
            check_agent_of(request, console)
            resolved = request.subject.resolve()
            put_bank(request.bank, folder)
            with (
                serving(request.settings, folder, resolved) as served,
                closing(GatewayClient(served.url, served.keys.admin)) as gateway,
            ):
                start = (folder / "start.sqlite").absolute()
                if memory != "off":
                    gateway.snapshot(start)
                player = Player(served.client, request.settings, served.check)
                with progress(console, total - missing, total) as show:
                    Adaptation(plan, player, results, gateway, start, request.settings.reflection.timeout, show).run()
    print(f"curves  {show_adaptations([folder], console)}")
