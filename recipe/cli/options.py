"""Options that commands share: each is declared once, as a field of a class that a command takes as ``options``."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from empo2.recipe.config import Settings, load_settings

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
