"""Every reply of our engine beside that of textworld 1.7.0, fast-downward-textworld 20.6.4 and alfworld 0.4.2."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from empo2.agents.alfworld.engine import Engine
from empo2.agents.alfworld.games import read_game

from .official import need_worlds, official_games
from .walks import WALKS

OFFICIAL_PYTHON = Path(__file__).parents[3] / "build" / "alfworld-engine" / "bin" / "python"
GAMES, STEPS = 200, 30

# Games with what hardly any other has: a thing without a type, one without a place, and one that lies there twice.
ODD = (
    ("train", "pick_cool_then_place_in_recep-Apple-None-GarbageCan-19/trial_T20190908_121626_855247"),
    ("train", "pick_heat_then_place_in_recep-Plate-None-Cabinet-13/trial_T20190907_062749_759882"),
    ("train", "pick_and_place_simple-Candle-None-SideTable-420/trial_T20190907_025655_142954"),
    ("valid_unseen", "pick_cool_then_place_in_recep-Mug-None-CoffeeMachine-10/trial_T20190907_183715_299073"),
)


@pytest.mark.rare
@pytest.mark.timeout(7200)
def test_every_reply_is_that_of_the_official_engine() -> None:
    need_worlds()
    if not OFFICIAL_PYTHON.exists():
        pytest.skip("needs ALFWorld's own engine: make alfworld-engine (3 minutes, cmake and g++)")
    generator = random.Random(0)
    names = [(split, name) for split in ("train", "valid_seen", "valid_unseen") for name in official_games(split)]
    played = [*ODD, *generator.sample(names, GAMES - len(ODD))]
    steps, differences = 0, []
    with subprocess.Popen(
        [OFFICIAL_PYTHON, Path(__file__).with_name("official_engine.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as official:
        assert official.stdin and official.stdout
        for number, (split, name) in enumerate(played):
            file = official_games(split)[name]
            engine = Engine(game := read_game(file, []))
            walk = WALKS[number % len(WALKS)](game, STEPS, generator)
            print(json.dumps([file, walk]), file=official.stdin, flush=True)
            said = json.loads(official.stdout.readline())
            for command, theirs in zip([None, *walk], said, strict=True):
                text = engine.intro if command is None else engine.step(command)
                ours = [text, list(engine.commands), engine.won]
                if ours != theirs:
                    differences.append((name, command, ours, theirs))
            steps += len(walk)
            print(number, name, steps, len(differences), flush=True)
        official.stdin.close()
    assert steps >= 5000 and not differences[:1]
