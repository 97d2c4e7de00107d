"""Play one episode by hand against any OpenAI-compatible server, and print it. Nothing is trained or posted."""

import argparse
import os
from dataclasses import fields

from ..rollout import MODEL
from ..text_game.agent import MAX_TOKENS, Server, connect
from .agent import play
from .tasks import SIMPLIFICATIONS, Episode, paper_max_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m empo2.agents.scienceworld",
        description=__doc__,
        epilog="example: python -m empo2.agents.scienceworld --task find-animal --variation 0 "
        "--base-url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-7B-Instruct",
    )
    parser.add_argument("--task", required=True, help="a ScienceWorld task, such as find-animal or power-component")
    parser.add_argument("--variation", type=int, default=0, help="which variation of the task (default: %(default)s)")
    parser.add_argument("--base-url", required=True, help="the server's OpenAI address, ending in /v1")
    parser.add_argument("--model", default=MODEL, help="the name it serves the model under (default: %(default)s)")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: $OPENAI_API_KEY")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="per reply (default: %(default)s)")
    parser.add_argument(
        "--actions",
        choices=Episode.forms,
        default="free-text",
        help="write actions; choose one of a numbered list, as small models can; or the protocol of the EMPO2 paper's "
        "authors (default: %(default)s)",
    )
    parser.add_argument("--choices", type=int, default=12, help="actions in that list (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws that list (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, help="actions in the episode (default: the paper's, mostly 30)")
    parser.add_argument(
        "--simplification",
        default="easy",
        help=f"some of {', '.join(SIMPLIFICATIONS)}, joined by commas (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        if args.max_steps is None:
            args.max_steps = paper_max_steps(args.task)
        episode = Episode(**{field.name: getattr(args, field.name) for field in fields(Episode)})
        server = Server(args.base_url, args.key, args.model, args.max_tokens)
        outcome = play(episode, connect(server), show=print)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(outcome.message, *(f"{name} {value:.0%}" for name, value in outcome.metrics.items()), sep="; ")


if __name__ == "__main__":
    main()
