"""Make the adapter: `make small-model`.

python -m empo2.small_model.make [--seed 0] [--output small_model/adapter]
python -m empo2.small_model.make --deep --output FOLDER [--workers 1]

Two stages, each with rows of its own: mostly reading notes, then mostly writing them. With --deep two more go on from
the adapter that is kept here: deep houses, whose notes of failures say what led nowhere. This command, if it was ended,
goes on where it was when it is given again.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from empo2.recipe.config import Reflection, load_settings
from empo2.recipe.files.models import ADAPTER_FILES, CHECKSUMS, SMOLLM2, resolve_model
from empo2.small_model import failures
from empo2.small_model.houses import MAKE_SEEDS, disguised, walk_all
from empo2.small_model.rows import READING, WRITING, Row, rows
from empo2.small_model.train import WORKERS, Settings, encode, train

ADAPTER = Path(__file__).parent / "adapter"
WORLD = Path(__file__).parents[1] / "agents/houses/coin.yaml"
HOUSES = 300
STAGES = ((READING, 2400, 1e-3), (WRITING, 960, 5e-4))  # mix, rows, learning rate
DEEP_STAGES = ((failures.READING, 3200, 1e-3), (failures.WRITING, 1920, 5e-4))


def reflections() -> list[Reflection]:
    """Return the ways to ask for a note that are trained: the world's own, and the default one for several lengths."""
    default = load_settings("cpu").reflection
    lengths = [default.model_copy(update={"max_words": words}) for words in (30, 60, 100)]
    return [load_settings("cpu", file=WORLD).reflection, *lengths]


def stages(seed: int) -> Iterator[tuple[list[Row], float]]:
    """Yield the rows of each stage and its learning rate."""
    walked = walk_all(MAKE_SEEDS[:HOUSES])
    for number, (mix, count, learning_rate) in enumerate(STAGES):
        generator = random.Random(seed + number)
        houses = [disguised(walked[index % HOUSES], generator) for index in range(count)]
        yield rows(houses, count, mix, reflections(), generator), learning_rate


def deep_stages(seed: int) -> Iterator[tuple[list[Row], float]]:
    """Yield the rows of each stage of deep houses and its learning rate."""
    generator = random.Random(f"deep {seed}")
    for mix, count, learning_rate in DEEP_STAGES:
        yield failures.rows(count, mix, reflections(), generator), learning_rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ADAPTER)
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes of one thread each")
    parser.add_argument("--deep", action="store_true", help="the stages of deep houses")
    arguments = parser.parse_args()
    if arguments.deep and arguments.output.resolve() == ADAPTER.resolve():
        parser.error("--deep goes on from the adapter in that folder: give another one as --output")

    from transformers import AutoTokenizer

    base = Path(resolve_model(SMOLLM2))
    tokenizer = AutoTokenizer.from_pretrained(base)
    start, drawn = (ADAPTER, deep_stages) if arguments.deep else (None, stages)
    for number, (made, learning_rate) in enumerate(drawn(arguments.seed), 1):
        last, start = start, arguments.output / f"stage-{number}"
        if start.exists():  # made before the command was ended
            continue
        encoded = [encode(row.messages, tokenizer) for row in made]
        learned, tokens = sum(len(row.learned) for row in encoded), sum(len(row.ids) for row in encoded)
        print(json.dumps({"rows": len(encoded), "tokens": tokens, "learned": learned}), flush=True)
        settings = Settings(seed=arguments.seed, learning_rate=learning_rate)
        train(base, encoded, settings, start.with_suffix(".part"), last, arguments.workers)
        start.with_suffix(".part").rename(start)
    made_stages = sorted(arguments.output.glob("stage-*"))
    for name in ADAPTER_FILES:
        shutil.copy(made_stages[-1] / name, arguments.output)
    for stage in made_stages:
        shutil.rmtree(stage)
    sums = [f"{hashlib.sha256((arguments.output / name).read_bytes()).hexdigest()}  {name}\n" for name in ADAPTER_FILES]
    (arguments.output / CHECKSUMS).write_text("".join(sums))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
