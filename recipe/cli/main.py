"""empo2 init | train | gateway | report | memory."""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from empo2.recipe.cli import init as init_command
from empo2.recipe.cli.memory import add_memory_command
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import ConfigError, Empo2Error

_SETTINGS_HELP = """\
Settings are given as key=value, as they stand in config.yaml, which explains each of them:
  algorithm.memory_probability=0.5 tasks.args.names='[find-animal]' model.path=Qwen/Qwen2.5-1.5B-Instruct
"""


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0 done, 1 failed, 2 wrong settings, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except Empo2Error as error:
        print(f"empo2: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("empo2: interrupted; everything that was started has been stopped", file=sys.stderr)
        return 130
    return 0


class _OneLineParser(argparse.ArgumentParser):
    """A wrong option is one clear line, as any other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"empo2: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="empo2",
        description="EMPO² on agent-lightning: train an LLM agent that writes itself tips, and unlearns to need them.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = _command(commands, "train", _train, "start gateway, controller and trainer, and train")
    train.add_argument("--gateway", metavar="URL", help="train against a gateway that runs already; start nothing else")
    train.add_argument("--run-directory", type=Path, help=argparse.SUPPRESS)  # the launcher has made it

    gateway = _command(commands, "gateway", _gateway, "the gateway alone, in the place of agl-server")
    gateway.add_argument(
        "--memory", type=Path, default=Path("memory.sqlite"), metavar="FILE", help="default: memory.sqlite"
    )
    gateway.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # the launcher has bound the port

    report = commands.add_parser(
        "report",
        help="the table of a run's steps, and its curves as a picture",
        description="Table and curves of runs.",
    )
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, such as runs/demo")
    report.set_defaults(run=_report)
    add_memory_command(commands)
    init_command.add_parser(commands)
    return parser


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_SETTINGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("settings", nargs="*", metavar="key=value", help="single settings, the last layer")
    command.add_argument("--profile", help="cpu, gpu-1 or gpu (the paper's settings); the first layer")
    command.add_argument("--config", type=Path, metavar="FILE", help="a YAML file with settings, the second layer")
    command.add_argument("--key", help="what gateway, trainer and agents present to each other; default: $EMPO2_KEY")
    command.set_defaults(run=run)
    return command


def _settings(options: argparse.Namespace) -> Settings:
    key = {"gateway": {"key": options.key}} if options.key else None
    return load_settings(options.profile, options.settings, file=options.config, layer=key)


def _key(settings: Settings) -> str:
    return settings.gateway.key or os.environ.get("EMPO2_KEY", "")


def _train(options: argparse.Namespace) -> None:
    from rich.console import Console

    from empo2.recipe.launcher.launch import launch, train_only
    from empo2.recipe.launcher.run_directory import open_run_directory

    settings = _settings(options)
    if options.gateway:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        directory = options.run_directory or open_run_directory(settings, options.profile)[0]
        return train_only(settings, options.gateway, _key(settings), directory)
    console = Console()
    directory = launch(settings, options.profile, console)
    _show([directory])
    return None


def _gateway(options: argparse.Namespace) -> None:
    import logging
    import socket

    import structlog
    import uvicorn

    from empo2.recipe.gateway.app import make_gateway
    from empo2.recipe.launcher.launch import bind
    from empo2.recipe.launcher.models import resolve_model
    from empo2.recipe.launcher.run_directory import check_memory_file

    settings = _settings(options)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    key = _key(settings)
    if not key and settings.gateway.host != "127.0.0.1":
        raise ConfigError(f"gateway.host={settings.gateway.host}: other machines can reach it; give a --key")
    if options.memory.exists():
        check_memory_file(options.memory, settings, key=f"--memory {options.memory}")
    try:
        model = str(resolve_model(settings.model.path))
        app = make_gateway(settings, model_path=model, key=key, memory_file=options.memory)
    except OSError as error:
        raise ConfigError(f"model.path={settings.model.path!r}: {error}") from None
    listener = (
        bind(settings.gateway.host, settings.gateway.port) if options.fd is None else socket.socket(fileno=options.fd)
    )
    print(f"gateway at http://{listener.getsockname()[0]}:{listener.getsockname()[1]}, model {model}", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=120)
    uvicorn.Server(config).run(sockets=[listener])


def _report(options: argparse.Namespace) -> None:
    _show(options.runs)


def _show(runs: list[Path]) -> None:
    from empo2.recipe.evaluation.report import print_table, report

    for run in runs:
        print_table(run)
    print(f"curves  {report(*runs)}")
