"""``empo2 eval`` and what it shares with ``empo2 adapt``: the model, the panel, the folder of the results."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from empo2.recipe.cli.options import Config, Overrides, Profile
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console

    from empo2.recipe.evaluation.panels import Panel
    from empo2.recipe.launcher.subject import Subject

EXAMPLES = """\b
examples:
  empo2 eval runs/demo --panel scienceworld-paper --memory both
  empo2 eval Qwen/Qwen2.5-7B-Instruct --panel scienceworld-l1 --limit 5
  empo2 eval runs/conductivity --panel scienceworld-paper --only test-conductivity
  empo2 eval my-model --server http://127.0.0.1:8000/v1 --panel textworld-express
  empo2 eval runs/demo --panel scienceworld-paper --limit 1 --row actions=choice --row max_steps=6

Settings are given as key=value, as for empo2 train; for a run they are laid over the run's own.
"""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run's folder (its last checkpoint), a checkpoint, a Hugging Face folder or name, or, with --server, "
        "the server's name of the model.",
    ),
]
PanelName = Annotated[str, typer.Option(metavar="NAME", help="A panel by name, or a file like those.")]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="An OpenAI-compatible server, .../v1; OPENAI_API_KEY is its key."),
]
Bank = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A run's folder, a checkpoint or a memory file.  [default: the checkpoint's]"),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD=VALUE", help="Change a field of every row; may be given more than once."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first tasks of each group of the panel.")]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="GROUP", help="Only this group of the panel, such as a task; may be given more than once."),
]
Output = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Of the results.  [default: runs/eval-MODEL-PANEL]")
]


@dataclass(frozen=True)
class Request:
    """What a command evaluates.

    Attributes:
        settings: with everything that the command line says, but for the model's path.
        facts: what decides the results; a folder of results belongs to one set of facts.
    """

    subject: "Subject"
    panel: "Panel"
    settings: Settings
    bank: Path | None
    facts: dict[str, Any]


def read_request(
    model: str,
    panel: str,
    overrides: list[str] | None,
    *,
    profile: str | None,
    config: Path | None,
    server: str | None,
    bank: Path | None,
    rows: list[str] | None,
    limit: int | None,
    only: list[str] | None,
    remembers: bool,
    empty: bool = False,
) -> Request:
    """Check everything that can be checked before a process is started.

    Args:
        remembers: False if no episode uses the memory; the gateway then loads no embedder.
        empty: True to ignore a checkpoint's memory.

    Raises:
        ConfigError: says what is wrong.
    """
    from empo2.recipe.evaluation.panels import load_panel
    from empo2.recipe.launcher.run_directory import check_memory_file
    from empo2.recipe.launcher.subject import find_bank, find_subject
    from empo2.recipe.launcher.tasks import check_rows

    chosen = load_panel(panel, rows or (), limit, only or ())
    subject = find_subject(model, server)
    if config is not None and subject.settings_file is not None:
        raise ConfigError(f"--config {config}: {model} has its run's settings; change some of them by key=value")
    settings = load_settings(
        profile,
        overrides or (),
        world=chosen.config,
        file=config or subject.settings_file,
        layer={"model": {"server": server}, "algorithm": {"name": "empo2" if remembers else "grpo"}},
    )
    check_rows(settings, chosen.name, chosen.rows)
    found = find_bank(bank) if bank is not None else None if empty else subject.memory
    if found is not None:
        check_memory_file(found, settings, key=f"--bank {found}")
    values = redacted(settings.to_dict())
    facts = {
        "model": str(subject.checkpoint or subject.model),
        "panel": chosen.name,
        "rows": chosen.checksum,
        "groups": chosen.groups(),
        "bank": None if found is None else str(found.absolute()),
        "agent": values["agent"],
        "algorithm": {name: values["algorithm"][name] for name in ("success_return",)},
        "sampling": {name: values["model"][name] for name in ("server", "val_temperature", "max_context_tokens")},
        "memory": values["memory"],
    }
    return Request(subject, chosen, settings, found, facts)


def evaluate(
    model: Model,
    overrides: Overrides = None,
    panel: PanelName = "scienceworld-paper",
    memory: Annotated[
        Literal["off", "on", "both"],
        typer.Option(help="Show tips: no, yes (nothing is written), or one and the other."),
    ] = "off",
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task, at model.val_temperature.")] = 4,
    server: Server = None,
    bank: Bank = None,
    row: Rows = None,
    limit: Limit = None,
    only: Only = None,
    output: Output = None,
    keep_turns: Annotated[
        bool, typer.Option("--keep-turns", help="Keep states and actions in turns.jsonl, for empo2 critic.")
    ] = False,
    profile: Profile = None,
    config: Config = None,
) -> None:
    """Evaluate a model on a fixed panel of tasks, without training.

    The same command goes on where it was interrupted. In the folder of the results, results.jsonl has a line for each
    episode, and summary.json the numbers of the table.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.episode_progress import progress
    from empo2.recipe.evaluation.episode_results import Results
    from empo2.recipe.evaluation.evaluation_report import print_evaluation
    from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON, Player, planned_episodes, play_missing
    from empo2.recipe.evaluation.turns import turns_keeper
    from empo2.recipe.launcher.serving import serving
    from empo2.recipe.protocol import DRAIN

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
    )
    parts = {"off": [MEMORY_OFF], "on": [MEMORY_ON], "both": [MEMORY_OFF, MEMORY_ON]}[memory]
    if MEMORY_ON in parts and request.bank is None:
        raise ConfigError(f"--memory {memory}: {model} has no memory; give one by --bank")
    if keep_turns and MEMORY_ON in parts:
        raise ConfigError(f"--memory {memory}: --keep-turns needs --memory off, since tips would be part of the states")
    reranking = critic_facts(request.settings, memory)
    folder = output or Path(request.settings.run.directory, f"eval-{request.subject.name}-{request.panel.name}")
    console = Console()
    planned = planned_episodes(request.panel, parts, samples)
    with closing(Results(folder, {"kind": "eval", **request.facts, "critic": reranking})) as results:
        missing = len(results.missing(planned))
        announce(console, request, folder, f"{missing:,} of {len(planned):,} episodes to play")
        if missing:
            check_agent_of(request, console)
            resolved = request.subject.resolve()
            put_bank(request.bank if MEMORY_ON in parts else None, folder)
            with (
                serving(request.settings, folder, resolved) as served,
                progress(console, len(planned) - missing, len(planned)) as show,
            ):
                keep = turns_keeper(folder, request.settings) if keep_turns else None
                play_missing(Player(served.client, request.settings, served.check, keep), results, planned, show)
                if reranking:
                    metrics = served.client.post(DRAIN, json={"timeout": 1}).raise_for_status().json()
                    console.print(reranking_line(metrics), soft_wrap=True, highlight=False)
    print_evaluation(folder, console)


def critic_facts(settings: Settings, memory: str) -> dict[str, Any] | None:
    """Return what decides the re-ranking, the critic's checksum included; None without a critic.

    Args:
        memory: the option.

    Raises:
        ConfigError: as `load_critic`; or tips are shown, which would be part of the states that the critic sees.
    """
    from empo2.recipe.critic.model import load_critic

    path = settings.critic.path
    if path is None:
        return None
    if memory != "off":
        raise ConfigError(f"--memory {memory}: critic.path={path!r} needs --memory off; its states have no tips")
    load_critic(path, settings.memory)
    checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return {**settings.critic.model_dump(), "path": str(Path(path).absolute()), "sha256": checksum}


def reranking_line(metrics: Mapping[str, float]) -> str:
    """Return one line on the calls that the critic has ranked."""
    calls, changed, failures = (int(metrics.get(f"empo2/critic/{n}", 0)) for n in ("calls", "changed", "failures"))
    failed = f"; it FAILED in {failures:,}, answered by the first sample (gateway.log)" if failures else ""
    return f"critic  ranked the samples of {calls:,} calls, {changed:,} answers are not the most probable{failed}"


def announce(console: "Console", request: Request, folder: Path, work: str) -> None:
    """Say what is evaluated."""
    subject, panel = request.subject, request.panel
    console.print(
        f"model  {subject.checkpoint or subject.model}\npanel  {panel.name}: {panel.description}\n"
        f"tasks  {len(panel.rows)} in {len(panel.groups())} groups; {work}\nfolder {folder}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def check_agent_of(request: Request, console: "Console") -> None:
    """Check agent and hardware, and show the agent's line."""
    from empo2.recipe.launcher.launch import check_gpus
    from empo2.recipe.launcher.tasks import check_agent

    if request.settings.model.server is None:
        check_gpus(request.settings)
    if line := check_agent(request.settings):
        console.print(f"agent  {line}", soft_wrap=True, highlight=False, markup=False)


def put_bank(bank: Path | None, folder: Path) -> None:
    """Copy the bank to where the gateway keeps its memory; without one, only remove what an earlier command left."""
    from empo2.memory import copy_memory
    from empo2.recipe.run_folder import MEMORY_FILE

    for suffix in ("", "-wal", "-shm", ".lock"):
        (folder / f"{MEMORY_FILE}{suffix}").unlink(missing_ok=True)
    if bank is not None:
        copy_memory(bank, folder / MEMORY_FILE)
