"""Play walks in the official engine. Run by the Python of `make alfworld-engine`, which has no `empo2`.

Each line of the input is JSON: a game file's content, and commands. The answer is a line with what the engine said at
the start and after each: the text, the admissible commands, and whether the game is won.
"""

import json
import sys
import tempfile

import textworld  # pyright: ignore[reportMissingImports]
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # pyright: ignore[reportMissingImports]
from textworld.envs.pddl import PddlEnv  # pyright: ignore[reportMissingImports]


def main() -> None:
    for line in sys.stdin:
        game, commands = json.loads(line)
        with tempfile.NamedTemporaryFile("w", suffix=".tw-pddl") as file:
            json.dump(game, file)
            file.flush()
            env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
            env.load(file.name)
        states = [env.reset()]
        for command in commands:
            states.append(env.step(command)[0])
        said = [(state["feedback"], state["admissible_commands"], state["won"]) for state in states]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
