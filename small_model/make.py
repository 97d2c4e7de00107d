"""Make the adapter: `make small-model`.

python -m empo2.small_model.make [--seed 0] [--output small_model/adapter]

Two stages, each with rows of its own: mostly reading notes, then mostly writing them.
"""

import argparse
import hashlib
import json
import os
import random
from pathlib import Path

from empo2.recipe.config import Reflection, load_settings
from empo2.recipe.files.models import ADAPTER_FILES, CHECKSUMS, SMOLLM2, resolve_model
from empo2.small_model.houses import MAKE_SEEDS, disguised, walk_all
from empo2.small_model.rows import READING, WRITING, rows

ADAPTER = Path(__file__).parent / "adapter"
WORLD = Path(__file__).parents[1] / "agents/houses/coin.yaml"
HOUSES = 300
STAGES = ((READING, 2400, 1e-3), (WRITING, 960, 5e-4))  # mix, rows, learning rate


def reflections() -> list[Reflection]:
    """Return the ways to ask for a note that are trained: the world's own, and the default one for several lengths."""
    default = load_settings("cpu").reflection
    lengths = [default.model_copy(update={"max_words": words}) for words in (30, 60, 100)]
    return [load_settings("cpu", file=WORLD).reflection, *lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ADAPTER)
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    from empo2.small_model.train import Settings, encode, train

    base = Path(resolve_model(SMOLLM2))
    tokenizer = AutoTokenizer.from_pretrained(base)
    walked = walk_all(MAKE_SEEDS[:HOUSES])
    start = None
    for number, (mix, count, learning_rate) in enumerate(STAGES):
        generator = random.Random(arguments.seed + number)
        houses = [disguised(walked[index % HOUSES], generator) for index in range(count)]
        made = rows(houses, count, mix, reflections(), generator)
        encoded = [encode(row.messages, tokenizer) for row in made]
        learned, tokens = sum(len(row.learned) for row in encoded), sum(len(row.ids) for row in encoded)
        print(json.dumps({"rows": len(encoded), "tokens": tokens, "learned": learned}), flush=True)
        settings = Settings(seed=arguments.seed, learning_rate=learning_rate)
        train(base, encoded, settings, arguments.output, start)
        start = arguments.output
    sums = [f"{hashlib.sha256((arguments.output / name).read_bytes()).hexdigest()}  {name}\n" for name in ADAPTER_FILES]
    (arguments.output / CHECKSUMS).write_text("".join(sums))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
