"""``empo2 gateway``."""

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe import interruption
from empo2.recipe.cli.options import SettingsOptions, with_options
from empo2.recipe.errors import ConfigError
from empo2.recipe.protocol import ADMIN_KEY, KEY, Serving, given_keys

_FINISH_SECONDS = 3  # for calls under way when the gateway is told to end
_STOP_SECONDS = 15  # in all; the launcher's guard kills after 20
# That one thread may hold Python while another waits for it, a tenth of Python's own: where calls keep the event loop
# busy, the memory's thread waits so long each time that it comes back from numpy or SQLite.
_SWITCH_SECONDS = 0.0005


@with_options
def gateway(
    options: SettingsOptions,
    memory: Annotated[Path, typer.Option(metavar="FILE", help="Where tips and states are kept.")] = Path(
        "memory.sqlite"
    ),
    snapshots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Below it the trainer may save and restore.  [default: that of --memory]"),
    ] = None,
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,  # a listening socket of the launcher's
    serving: Annotated[str | None, typer.Option(hidden=True)] = None,  # protocol.Serving, from empo2 serve
) -> None:
    """Start the gateway alone, in the place of agl-server."""
    from empo2.memory import EmbedderError, MemoryFileError
    from empo2.recipe.files.models import model_of
    from empo2.recipe.files.run_directory import memory_file
    from empo2.recipe.gateway import garbage
    from empo2.recipe.gateway.app import make_gateway
    from empo2.recipe.gateway.logs import configure_logs
    from empo2.recipe.gateway.memory import open_memory
    from empo2.recipe.network import bind, gateway_host

    os.umask(0o077)  # tips are for their owner only
    settings = options.settings()
    configure_logs()
    keys, host = given_keys(), gateway_host(settings)
    if bool(keys.agent) != bool(keys.admin):
        given, missing = (KEY, ADMIN_KEY) if keys.agent else (ADMIN_KEY, KEY)
        raise ConfigError(f"{given} is set, {missing} is not: set both, or neither")
    if not keys.admin and host != "127.0.0.1":
        raise ConfigError(f"gateway.host={host}: other machines can reach it; set the keys {KEY} and {ADMIN_KEY}")
    if memory.is_file() and memory.stat().st_size:  # before the embedder is loaded
        memory_file(memory, settings, key=f"--memory {memory}")
    model = settings.model.path if settings.model.server else model_of(settings)  # a server has names of its own
    with bind(host, settings.gateway.port) if fd is None else socket.socket(fileno=fd) as listener:
        try:
            opened = open_memory(settings, memory)
        except EmbedderError as error:
            raise ConfigError(f"memory.embedder={settings.memory.embedder!r}: {error}") from None
        except (MemoryFileError, OSError) as error:
            raise ConfigError(f"--memory {memory}: {error}") from None
        try:
            app = make_gateway(
                settings,
                model_path=model,
                keys=keys,
                folder=snapshots or memory.parent,
                memory=opened,
                serving=Serving.model_validate_json(serving) if serving is not None else None,
            )
        except OSError as error:
            raise ConfigError(f"model.path={settings.model.path!r}: {error}") from None
        garbage.collect_between_steps()
        sys.setswitchinterval(_SWITCH_SECONDS)
        address, port = listener.getsockname()[:2]
        print(f"gateway at http://{address}:{port}, model {model}", flush=True)
        _serve(app, listener)


def _serve(app: object, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, and end within `_STOP_SECONDS` of it, whatever hangs."""
    import uvicorn

    from empo2.recipe.gateway.connections import protocol_with_room
    from empo2.recipe.network import raise_descriptor_limit

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            interruption.check()  # from here on, uvicorn handles it
            await super().startup(sockets)

        def handle_exit(self, sig: int, frame: object) -> None:
            timer = threading.Timer(_STOP_SECONDS, os._exit, [128 + sig])
            timer.daemon = True
            timer.start()
            super().handle_exit(sig, frame)  # pyright: ignore[reportArgumentType]

    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        log_config=None,
        log_level="warning",
        http=protocol_with_room(raise_descriptor_limit()),
        timeout_keep_alive=120,
        proxy_headers=False,
        timeout_graceful_shutdown=_FINISH_SECONDS,
    )
    Server(config).run(sockets=[listener])
