"""Options that commands share: each is declared once, as a field of a class that a command takes as ``options``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from empo2.recipe.config import Settings, imported, load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.evaluation.panels import Panel, load_panel
from empo2.recipe.files.checkpoints import NamedModel, find_model
from empo2.recipe.files.run_directory import memory_file
from empo2.recipe.preflight.agent import check_rows

if TYPE_CHECKING:
    from empo2.recipe.evaluation.evaluated import Evaluated

HELP = """\b
Settings are given as key=value, as they stand in config.yaml, which explains each of them:
  algorithm.memory_probability=0.5 tasks.args.names='[find-animal]' model.path=Qwen/Qwen2.5-1.5B-Instruct
"""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run's folder (its last checkpoint), a checkpoint, a Hugging Face folder or name, or, with --server, "
        "the server's name of the model.",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="An OpenAI-compatible server, .../v1; OPENAI_API_KEY is its key."),
]
MemoryFrom = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="A run's folder, a checkpoint or a memory file.  [default: the checkpoint's]"),
]
PanelName = Annotated[str, typer.Option(metavar="NAME", help="A panel by name, or a file like those.")]


@dataclass(frozen=True, kw_only=True)
class SettingsOptions:
    """The layers of a command's settings."""

    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Single settings, the last layer.")
    ] = None
    profile: Annotated[
        str | None, typer.Option(help="cpu, gpu-24, gpu-1 or gpu (the paper's settings); the first layer.")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file with settings, the second layer.")
    ] = None

    def settings(self, layer: Mapping[str, Any] | None = None) -> Settings:
        """Return the settings, as ``load_settings``; ``layer`` lies over the file of ``--config``."""
        return load_settings(self.profile, self.overrides or (), file=self.config, layer=layer)


@dataclass(frozen=True, kw_only=True)
class PanelOptions(SettingsOptions):
    """Those of ``empo2 eval`` and ``empo2 adapt``: a model plays a panel, and its results are kept in a folder."""

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

    def load_panel(self, name: str, option: str = "--panel") -> Panel:
        """Return a panel, cut and changed as the options say; a ConfigError if panel, group or field is not there."""
        return load_panel(name, self.row or (), self.limit, self.only or (), option=option)

    def read(self, verb: str, *, remembers: bool, empty: bool = False) -> "Evaluated":
        """Check everything that can be checked before a process is started.

        Args:
            remembers: False if no episode uses the memory; the gateway then loads no embedder.
            empty: True to ignore a checkpoint's memory.
        """
        from empo2.recipe.evaluation.evaluated import Evaluated

        panel = self.load_panel(self.panel)
        named = find_model(self.model, self.server)
        settings = load_settings(
            self.profile,
            self.overrides or (),
            world=panel.config,
            file=settings_file(self, named),
            layer=playing_layer(self.server, remembers=remembers),
        )
        check_panel(settings, "--panel", panel)
        memory = self.memory_from or (None if empty else named.memory)
        if memory is not None:
            memory = memory_file(memory, settings, key=f"--memory-from {memory}")
        folder = self.output or Path(settings.run.directory, f"{verb}-{named.name}-{panel.name}")
        return Evaluated(verb, named, panel, settings, memory, folder)


def check_panel(settings: Settings, option: str, panel: Panel) -> None:
    """Refuse rows as `check_rows`, and a panel of another text game, whose rows may fit the agent's own as well."""
    check_rows(settings, f"{option} {panel.name}", panel.rows)
    own = settings.agent.name
    of_panel = panel.config.get("agent", {}).get("class", own)
    if own == of_panel:
        return
    games = [getattr(imported(name, "agent.class"), "episode", None) for name in (own, of_panel)]
    if None not in games and games[0] is not games[1]:
        raise ConfigError(f"{option} {panel.name}: its tasks are of agent.class={of_panel}, the model plays {own}")


def settings_file(options: SettingsOptions, named: NamedModel) -> Path | None:
    """Return the file of ``--config``, or that of the model's run; a ConfigError if there are both."""
    if options.config is not None and named.settings_file is not None:
        raise ConfigError(f"--config {options.config}: {named.name} has its run's settings; change them by key=value")
    return options.config or named.settings_file


def playing_layer(server: str | None, *, remembers: bool) -> dict[str, Any]:
    """Return the settings of a command that trains nothing; without a memory no embedder is loaded."""
    # Forms, and a KL term of rows with tips, are EMPO²'s.
    plain = {"name": "grpo", "form": "paper", "kl_coefficient": 0.0}
    return {"model": {"server": server}, "algorithm": {"name": "empo2"} if remembers else plain}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the fields of its parameter ``options``, one of these classes, as options of its own."""
    own = dict(inspect.signature(command, eval_str=True).parameters)
    kind = own.pop("options").annotation
    shared = inspect.signature(kind, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(options=kind(**{name: given.pop(name) for name in shared}), **given)

    parameters = [each.replace(kind=each.KEYWORD_ONLY) for each in (*own.values(), *shared.values())]
    parameters.sort(key=lambda each: each.default is not each.empty)  # typer reads arguments in this order
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
