"""The options of every verb that needs a run's settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from empo2.recipe.config import Settings, lay_over, load_settings
from empo2.recipe.protocol import Keys

HELP = """\b
Settings are given as key=value, as they stand in config.yaml, which explains each of them:
  algorithm.memory_probability=0.5 tasks.args.names='[find-animal]' model.path=Qwen/Qwen2.5-1.5B-Instruct
"""

Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="Single settings, the last layer.")]
Profile = Annotated[str | None, typer.Option(help="cpu, gpu-1 or gpu (the paper's settings); the first layer.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="A YAML file with settings, the second layer.")]
Key = Annotated[str | None, typer.Option(help="What agents and controller present.  [default: $EMPO2_KEY]")]
AdminKey = Annotated[str | None, typer.Option(help="What trainer and operator present.  [default: $EMPO2_ADMIN_KEY]")]


def settings_of(
    profile: str | None,
    config: Path | None,
    overrides: list[str] | None,
    key: str | None,
    admin_key: str | None,
    layer: Mapping[str, Any] | None = None,
) -> Settings:
    """Lay the options of a command over config.yaml.

    Args:
        layer: settings that lie over the file of ``config``.

    Raises:
        ConfigError: as ``load_settings``.
    """
    given = {name: value for name, value in (("key", key), ("admin_key", admin_key)) if value}
    layer = lay_over(layer or {}, {"gateway": given} if given else {})
    return load_settings(profile, overrides or (), file=config, layer=layer)


def keys_of(settings: Settings) -> Keys:
    """Return the keys that settings or environment give; empty where they give none."""
    gateway = settings.gateway
    return Keys(
        agent=gateway.key or os.environ.get("EMPO2_KEY", ""),
        admin=gateway.admin_key or os.environ.get("EMPO2_ADMIN_KEY", ""),
    )
