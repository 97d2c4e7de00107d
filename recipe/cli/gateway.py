"""``empo2 gateway``."""

from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.cli.settings import Config, Key, Overrides, Profile, key_of, settings_of
from empo2.recipe.errors import ConfigError


def gateway(
    overrides: Overrides = None,
    profile: Profile = None,
    config: Config = None,
    key: Key = None,
    memory: Annotated[Path, typer.Option(metavar="FILE", help="Where tips and states are kept.")] = Path(
        "memory.sqlite"
    ),
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,  # a listening socket of the launcher's
) -> None:
    """Start the gateway alone, in the place of agl-server."""
    import logging
    import os
    import socket

    import structlog
    import uvicorn

    from empo2.recipe.gateway.app import make_gateway
    from empo2.recipe.launcher.models import resolve_model
    from empo2.recipe.launcher.processes import bind
    from empo2.recipe.launcher.run_directory import check_memory_file

    os.umask(0o077)  # tips are for their owner only
    settings = settings_of(profile, config, overrides, key)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    host, port = settings.gateway.host, settings.gateway.port
    secret = key_of(settings)
    if not secret and host != "127.0.0.1":
        raise ConfigError(f"gateway.host={host}: other machines can reach it; give a --key")
    if memory.exists():
        check_memory_file(memory, settings, key=f"--memory {memory}")
    try:
        model = str(resolve_model(settings.model.path))
        app = make_gateway(settings, model_path=model, key=secret, memory_file=memory)
    except OSError as error:
        raise ConfigError(f"model.path={settings.model.path!r}: {error}") from None
    listener = bind(host, port) if fd is None else socket.socket(fileno=fd)
    print(f"gateway at http://{listener.getsockname()[0]}:{listener.getsockname()[1]}, model {model}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=120)).run(sockets=[listener])
