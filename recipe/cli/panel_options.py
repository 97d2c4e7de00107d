"""What ``empo2 eval`` and ``empo2 adapt`` share: a model plays a panel, and its results are kept in a folder."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from empo2.recipe.cli.options import MemoryFrom, Model, Server, SettingsOptions
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.redaction import redacted

if TYPE_CHECKING:
    from empo2.recipe.evaluation.panels import Panel
    from empo2.recipe.launcher.checkpoints import NamedModel
    from empo2.recipe.launcher.serving import Served

PanelName = Annotated[str, typer.Option(metavar="NAME", help="A panel by name, or a file like those.")]


@dataclass(frozen=True)
class Evaluated:
    """What a command evaluates."""

    named: "NamedModel"
    panel: "Panel"
    settings: Settings  # with everything that the command line says, but for the model's path
    memory: Path | None  # the file that the gateway's memory begins with; None for an empty one
    folder: Path  # of the results
    facts: dict[str, Any]  # what decides the results; a folder of results belongs to one set of facts

    def announce(self, missing: int, total: int) -> None:
        """Say what is evaluated, and how many of its episodes have no result yet."""
        print(
            f"model  {self.named.checkpoint or self.named.model}\n"
            f"panel  {self.panel.name}: {self.panel.description}\n"
            f"tasks  {len(self.panel.rows)} in {len(self.panel.groups())} groups; "
            f"{missing:,} of {total:,} episodes to play\nfolder {self.folder}",
            flush=True,
        )

    @contextlib.contextmanager
    def serving(self, memory: Path | None) -> Iterator["Served"]:
        """Check agent and hardware, start all that plays episodes with a memory, and stop it afterwards."""
        from empo2.recipe.launcher.machine import require_gpus
        from empo2.recipe.launcher.serving import serving
        from empo2.recipe.launcher.tasks import check_agent

        if self.settings.model.server is None:
            require_gpus(self.settings)
        if line := check_agent(self.settings):
            print(f"agent  {line}", flush=True)
        model = self.named.resolve()
        put_memory(memory, self.folder)
        with serving(self.settings, self.folder, model) as served:
            yield served


@dataclass(frozen=True, kw_only=True)
class PanelOptions(SettingsOptions):
    """The options of both commands."""

    model: Model
    panel: PanelName = "scienceworld-paper"
    server: Server = None
    memory_from: MemoryFrom = None
    row: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="Change a field of every row; may be given more than once."),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks of each group of the panel.")] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP", help="Only this group of the panel, such as a task; may be given more than once."
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of the results.  [default: runs/VERB-MODEL-PANEL]")
    ] = None

    def load_panel(self, name: str) -> "Panel":
        """Return a panel, cut and changed as the options say; a ConfigError if panel, group or field is not there."""
        from empo2.recipe.evaluation.panels import load_panel

        return load_panel(name, self.row or (), self.limit, self.only or ())

    def read(self, verb: str, *, remembers: bool, empty: bool = False) -> Evaluated:
        """Check everything that can be checked before a process is started.

        Args:
            remembers: False if no episode uses the memory; the gateway then loads no embedder.
            empty: True to ignore a checkpoint's memory.
        """
        from empo2.recipe.launcher.checkpoints import find_model
        from empo2.recipe.launcher.run_directory import memory_file
        from empo2.recipe.launcher.tasks import check_rows

        panel = self.load_panel(self.panel)
        named = find_model(self.model, self.server)
        settings = load_settings(
            self.profile,
            self.overrides or (),
            world=panel.config,
            file=settings_file(self, named),
            layer=playing_layer(self.server, remembers=remembers),
        )
        check_rows(settings, panel.name, panel.rows)
        memory = self.memory_from or (None if empty else named.memory)
        if memory is not None:
            memory = memory_file(memory, settings, key=f"--memory-from {memory}")
        values = redacted(settings.to_dict())
        facts = {
            "kind": verb,
            "model": str(named.checkpoint or named.model),
            "panel": panel.name,
            "rows": panel.checksum,
            "groups": panel.groups(),
            "memory_from": None if memory is None else str(memory.absolute()),
            "agent": values["agent"],
            "algorithm": {"success_return": values["algorithm"]["success_return"]},
            "sampling": {name: values["model"][name] for name in ("server", "val_temperature", "max_context_tokens")},
            "memory": values["memory"],
        }
        folder = self.output or Path(settings.run.directory, f"{verb}-{named.name}-{panel.name}")
        return Evaluated(named, panel, settings, memory, folder, facts)


def settings_file(options: SettingsOptions, named: "NamedModel") -> Path | None:
    """Return the file of ``--config``, or that of the model's run; a ConfigError if there are both."""
    if options.config is not None and named.settings_file is not None:
        raise ConfigError(f"--config {options.config}: {named.name} has its run's settings; change them by key=value")
    return options.config or named.settings_file


def playing_layer(server: str | None, *, remembers: bool) -> dict[str, Any]:
    """Return the settings of a command that trains nothing; without a memory no embedder is loaded."""
    return {"model": {"server": server}, "algorithm": {"name": "empo2" if remembers else "grpo"}}


def put_memory(file: Path | None, folder: Path) -> None:
    """Copy a memory to where the gateway keeps its own; without one, only remove what an earlier command left."""
    from empo2.memory import copy_memory
    from empo2.recipe.run_folder import MEMORY_FILE

    for suffix in ("", "-wal", "-shm", ".lock"):
        (folder / f"{MEMORY_FILE}{suffix}").unlink(missing_ok=True)
    if file is not None:
        copy_memory(file, folder / MEMORY_FILE)
