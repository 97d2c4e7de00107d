"""Read the official tasks into one file, and keep those that their own solutions solve here."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from ..task_file import check_new, write
from .tasks import WORLD, read_official

_SHOWN = 5  # reasons


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.bigcodebench", description="BigCodeBench's tasks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    importer = commands.add_parser(
        "import",
        help="read the official tasks into one file",
        description=__doc__,
        epilog="The file is that of the repository bigcode-project/bigcodebench-annotation, or the data set "
        "bigcode/bigcodebench as JSON lines. example: python -m empo2.agents.bigcodebench import "
        "BigCodeBench.jsonl.gz --python build/bigcodebench/bin/python",
    )
    importer.add_argument("file", type=Path, metavar="FILE", help="JSON lines, or such a file compressed by gzip")
    importer.add_argument("--output", type=Path, default=Path(f"{WORLD}.json"), metavar="FILE", help="(%(default)s)")
    importer.add_argument("--python", default=sys.executable, metavar="FILE", help="runs the programs (%(default)s)")
    options = parser.parse_args()
    try:
        print(imported(options.file, options.output, options.python))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def imported(file: Path, output: Path, python: str) -> str:
    """Import the tasks; return lines that count them and the commonest reasons of those left out."""
    check_new(output)
    found = list(read_official(file, python))
    kept = {name: task for name, task, _ in found if task is not None}
    write(output, WORLD, kept)
    lines = [f"{output}: {len(kept)} of {len(found)} tasks"]
    reasons = Counter(failed[0] for _, _, failed in found if failed)
    if reasons:
        lines.append("left out, since their own solutions fail here, by the first failure:")
        lines += [f"  {count} {reason}" for reason, count in reasons.most_common(_SHOWN)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
