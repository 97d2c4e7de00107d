"""Read the official tasks into one file, and solve each by its own solution."""

import argparse
from pathlib import Path

from ..sandbox import SandboxError
from ..task_file import check_new, write
from .tasks import WORLD, read_official


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.lifelong", description="LifelongAgentBench's tasks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    importer = commands.add_parser(
        "import",
        help="read the official tasks into one file",
        description=__doc__,
        epilog="The files are those of the data set csyq/LifelongAgentBench of the Hugging Face hub as one JSON object "
        "each, as MemRL has them. example: python -m empo2.agents.lifelong import "
        "db_bench_runtime_learning_data.json os_interaction_runtime_learning_data.json",
    )
    importer.add_argument("files", type=Path, nargs="+", metavar="FILE", help="db, os or both")
    importer.add_argument("--output", type=Path, default=Path(f"{WORLD}.json"), metavar="FILE", help="(%(default)s)")
    importer.add_argument(
        "--mysql", metavar="FILE", help="an option file of MySQL's clients: tables in a server, not in SQLite"
    )
    options = parser.parse_args()
    try:
        print(imported(options.files, options.output, options.mysql))
    except (ImportError, OSError, ValueError, SandboxError) as error:
        parser.error(str(error))


def imported(files: list[Path], output: Path, server: str | None) -> str:
    """Import the tasks; return a line that counts them and names those left out."""
    check_new(output)
    found = {name: task for file in files for name, task in read_official(file, server)}
    left_out = [name for name, task in found.items() if task is None]
    kept = {name: task for name, task in found.items() if task is not None}
    write(output, WORLD, kept)
    rest = f"; left out, since their own solutions do not solve them here: {', '.join(left_out)}" if left_out else ""
    return f"{output}: {len(kept)} of {len(found)} tasks{rest}"


if __name__ == "__main__":
    main()
