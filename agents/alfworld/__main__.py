"""Read the official games into one file of a megabyte, which all agents of a machine share."""

import argparse
from pathlib import Path

from ..task_file import check_new
from .archive import SPLITS, read_official, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.alfworld", description="ALFWorld's games.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    importer = commands.add_parser(
        "import",
        help="read the official games into one file",
        description=__doc__,
        epilog="`alfworld-download` of the package alfworld 0.4 fetches the folder, which has train, valid_seen and "
        "valid_unseen. example: python -m empo2.agents.alfworld import ~/.cache/alfworld/json_2.1.1",
    )
    importer.add_argument("folder", type=Path, metavar="FOLDER", help="the official json_2.1.1")
    default = Path("alfworld.zip")
    importer.add_argument("--output", type=Path, default=default, metavar="FILE", help="(default: %(default)s)")
    options = parser.parse_args()
    try:
        print(imported(options.folder, options.output))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def imported(folder: Path, output: Path) -> str:
    """Import the games and return a line that counts them. Raises FileExistsError, or ValueError for a wrong folder."""
    check_new(output)
    games = {split: dict(read_official(folder, split)) for split in SPLITS}
    if missing := [split for split, of_split in games.items() if not of_split]:
        raise ValueError(f"{folder} has no game.tw-pddl in {', '.join(missing)}: give the folder json_2.1.1")
    write(output, games)
    counts = ", ".join(f"{len(of_split):,} of {split}" for split, of_split in games.items())
    return f"{output}: {counts}; the walkthrough of each wins"


if __name__ == "__main__":
    main()
