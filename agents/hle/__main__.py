"""Make a panel of HLE's text questions, for `empo2 eval` and `empo2 adapt`."""

import argparse
import json
from pathlib import Path

from ..task_file import check_new
from .questions import panel_of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.hle", description="Humanity's Last Exam.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    importer = commands.add_parser(
        "import",
        help="make a panel of the text questions",
        description=__doc__,
        epilog="The data set is gated: accept its terms on the Hugging Face hub, and do not publish the panel. "
        "example: python -m empo2.agents.hle import hub:cais/hle",
    )
    importer.add_argument("source", metavar="SOURCE", help="hub:cais/hle, or a .parquet or .jsonl file of its fields")
    importer.add_argument("--output", type=Path, default=Path("hle.json"), metavar="FILE", help="(%(default)s)")
    options = parser.parse_args()
    try:
        check_new(options.output)
        panel, others = panel_of(options.source)
        options.output.write_text(json.dumps(panel, indent=1))
        print(f"{options.output}: {len(panel['rows'])} text questions; {others} with images are left out")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
