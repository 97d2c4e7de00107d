"""What ``empo2 eval`` and ``empo2 adapt`` share: a model plays a panel, and its results are kept in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from empo2.recipe.cli.options import MemoryFrom, Model, Server, SettingsOptions
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError

if TYPE_CHECKING:
    from empo2.recipe.evaluation.evaluated import Evaluated
    from empo2.recipe.evaluation.panels import Panel
    from empo2.recipe.files.checkpoints import NamedModel

PanelName = Annotated[str, typer.Option(metavar="NAME", help="A panel by name, or a file like those.")]


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

    def read(self, verb: str, *, remembers: bool, empty: bool = False) -> "Evaluated":
        """Check everything that can be checked before a process is started.

        Args:
            remembers: False if no episode uses the memory; the gateway then loads no embedder.
            empty: True to ignore a checkpoint's memory.
        """
        from empo2.recipe.evaluation.evaluated import Evaluated
        from empo2.recipe.files.checkpoints import find_model
        from empo2.recipe.files.run_directory import memory_file
        from empo2.recipe.preflight.agent import check_rows

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
        folder = self.output or Path(settings.run.directory, f"{verb}-{named.name}-{panel.name}")
        return Evaluated(verb, named, panel, settings, memory, folder)


def settings_file(options: SettingsOptions, named: "NamedModel") -> Path | None:
    """Return the file of ``--config``, or that of the model's run; a ConfigError if there are both."""
    if options.config is not None and named.settings_file is not None:
        raise ConfigError(f"--config {options.config}: {named.name} has its run's settings; change them by key=value")
    return options.config or named.settings_file


def playing_layer(server: str | None, *, remembers: bool) -> dict[str, Any]:
    """Return the settings of a command that trains nothing; without a memory no embedder is loaded."""
    # Forms, and a KL term of rows with tips, are EMPO²'s.
    plain = {"name": "grpo", "form": "paper", "kl_coefficient": 0.0}
    return {"model": {"server": server}, "algorithm": {"name": "empo2"} if remembers else plain}
