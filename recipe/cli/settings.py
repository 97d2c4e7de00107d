"""The options of every verb that needs a run's settings."""

import os
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.config import Settings, load_settings

HELP = """\b
Settings are given as key=value, as they stand in config.yaml, which explains each of them:
  algorithm.memory_probability=0.5 tasks.args.names='[find-animal]' model.path=Qwen/Qwen2.5-1.5B-Instruct
"""

Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Single settings, the last layer.")]
Profile = Annotated[str | None, typer.Option(help="cpu, gpu-1 or gpu (the paper's settings); the first layer.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file with settings, the second layer.")]
Key = Annotated[
    str | None, typer.Option(help="What gateway, trainer and agents present to each other.  [default: $EMPO2_KEY]")
]


def settings_of(profile: str | None, config: Path | None, overrides: list[str] | None, key: str | None) -> Settings:
    """Lay the options of a command over config.yaml.

    Raises:
        ConfigError: as ``load_settings``.
    """
    layer = {"gateway": {"key": key}} if key else None
    return load_settings(profile, overrides or (), file=config, layer=layer)


def key_of(settings: Settings) -> str:
    """Return the key of gateway, trainer and agents; empty if there is none."""
    return settings.gateway.key or os.environ.get("EMPO2_KEY", "")
