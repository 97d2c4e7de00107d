"""The command line, ``empo2``: a verb each."""

import errno
from typing import Annotated

import typer

from empo2.memory.file import MemoryFileError
from empo2.recipe import __version__
from empo2.recipe.cli import adapt, check, controller, eval, export, init, memory, serve, show, sweep
from empo2.recipe.cli.gateway import gateway
from empo2.recipe.cli.options import HELP
from empo2.recipe.cli.report import report
from empo2.recipe.cli.train import train
from empo2.recipe.errors import Empo2Error, Preempted
from empo2.small_model.demo import demo

# Help is plain text: rich would read the brackets of tasks.args.names='[find-animal]' as markup.
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="EMPO² on agent-lightning: train an LLM agent with tips that it writes for itself, until it needs none.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"empo2 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


app.command(epilog=HELP)(train)
app.command(epilog=check.EXAMPLES)(check.check)
app.command(epilog=sweep.EXAMPLES)(sweep.sweep)
app.command("eval", epilog=eval.EXAMPLES)(eval.evaluate)
app.command(epilog=adapt.EXAMPLES)(adapt.adapt)
app.command(epilog=export.EXAMPLES)(export.export)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=HELP)(gateway)
app.command(epilog=controller.EXAMPLES)(controller.controller)
app.command()(report)
app.command(epilog=show.EXAMPLES)(show.show)
app.command()(demo)
app.add_typer(memory.app, name="memory")
app.command(epilog=init.EXAMPLES)(init.init)

_command = typer.main.get_command(app)


def run(arguments: list[str] | None = None) -> tuple[int, str]:
    """Run a command; return its exit code and what to say about a failure."""
    try:
        return _command.main(arguments, prog_name="empo2", standalone_mode=False) or 0, ""
    except Preempted as end:
        return end.exit_code, f"empo2: {end}"
    except Empo2Error as error:
        return error.exit_code, f"empo2: error: {error}"
    except MemoryFileError as error:
        return 1, f"empo2: error: {error}"
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and error.filename is None:
            raise
        return 1, f"empo2: error: {error.filename or 'a file'}: {error.strerror}{'; make room on that disk' * full}"
    except typer.TyperException as error:  # wrong options
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "empo2"
        message = error.format_message().replace("Value error, ", "").rstrip(".")  # pydantic's prefix
        return 2, f"empo2: error: {message}; see {path} --help"
