"""Build a catalogue from the original's data files, or shop in one by hand."""

import argparse
import shlex
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from .catalogue import Catalogue, build
from .environment import Environment
from .json_stream import read_json
from .tasks import MAX_STEPS, OWN, open_catalogue

FEW = 0.5  # of the instructions: if the shop has fewer, --human is probably a mistake


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.agents.webshop", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    builder = commands.add_parser(
        "build",
        help="build a catalogue from the original's data files",
        description="Build a catalogue, a folder that all agents of a machine share. It needs no other file.",
        epilog="The full data, 1.18 million products, takes minutes and some 5 GB of disk. The files are described in "
        "the README of the repository princeton-nlp/WebShop. Nearly all of people's instructions are for products that "
        "the small shop of 1,000 does not have, so it is built without them. examples: "
        "python -m empo2.agents.webshop build --items items_shuffle.json --attributes items_ins_v2.json "
        "--human items_human_ins.json --output webshop; "
        "python -m empo2.agents.webshop build --items items_shuffle_1000.json --attributes items_ins_v2_1000.json "
        "--output webshop-small",
    )
    builder.add_argument("--items", type=Path, required=True, metavar="FILE", help="the products, items_shuffle*.json")
    builder.add_argument(
        "--attributes", type=Path, required=True, metavar="FILE", help="their attributes, items_ins_v2*.json"
    )
    builder.add_argument(
        "--human",
        type=Path,
        metavar="FILE",
        help="people's instructions, items_human_ins.json (default: the synthetic ones of --attributes)",
    )
    builder.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="must not exist")
    builder.set_defaults(run=_build)

    player = commands.add_parser(
        "play",
        help="shop yourself",
        description="Follow an instruction with actions that you type: search[WORDS] and click[TEXT].",
        epilog="example: python -m empo2.agents.webshop play --goal 3",
    )
    player.add_argument(
        "--catalogue", default=OWN, metavar="FOLDER", help="one that was built (default: %(default)s, the project's)"
    )
    player.add_argument("--goal", type=int, default=0, metavar="N", help="which instruction (default: %(default)s)")
    player.add_argument("--max-steps", type=int, default=MAX_STEPS, metavar="N", help="(default: %(default)s)")
    player.set_defaults(run=_play)

    options = parser.parse_args()
    try:
        options.run(options)
    except (OSError, ValueError, sqlite3.Error) as error:
        parser.error(str(error))


def _build(options: argparse.Namespace) -> None:
    build(options.output, options.items, options.attributes, options.human)
    with closing(Catalogue(options.output)) as catalogue:
        products, goals = catalogue.products, catalogue.goals
    print(f"{options.output}: {products:,} products, {goals:,} goals")
    if options.human:
        instructions = sum(
            len(entries) for _, entries in read_json(options.human, "object") if isinstance(entries, list)
        )
        if goals < FEW * instructions:
            words = "python", "-m", "empo2.agents.webshop", "build", "--items", options.items
            words += "--attributes", options.attributes, "--output", options.output
            print(
                f"warning: only {goals:,} of the {instructions:,} instructions of {options.human} are for products of "
                f"{options.items}. For goals of all its products, build it anew without --human:\n"
                f"  {shlex.join(['rm', '-r', str(options.output)])} && {shlex.join(map(str, words))}",
                file=sys.stderr,
            )


def _play(options: argparse.Namespace) -> None:
    with closing(open_catalogue(options.catalogue)) as catalogue:
        if options.goal not in range(catalogue.goals):
            raise ValueError(f"--goal {options.goal} must be one of 0 ... {catalogue.goals - 1}")
        environment = Environment(catalogue)
        state = environment.reset(options.goal, options.max_steps)
        while not state.done:
            print(state.observation.replace(" [SEP] ", "\n"), *state.valid_actions, sep="\n  ")
            try:
                state = environment.step(input("> "))
            except (EOFError, KeyboardInterrupt):
                return
        print(state.observation.replace(" [SEP] ", "\n"))
        print(f"score {state.score:g} of 100")


if __name__ == "__main__":
    main()
