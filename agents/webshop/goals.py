"""Goals of customers: the original's human and synthetic goals, its shuffle and its split."""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .json_stream import read_json
from .products import Product, Record, log_left_out, texts

CAPS = [10.0 * tens for tens in range(1, 100)]  # dollars
NEAREST_CAPS = 4  # those above the price from which two are drawn
NO_CAP = 1_000_000.0
SHUFFLE_SEED = 233
TEST, VALIDATION = 500, 1000  # goals

Split = Literal["original", "verl-agent"]


@dataclass(frozen=True, slots=True)
class Goal(Record):
    """A product to buy; rewards are computed against it.

    asin, query, name, product_category: the product's, `name` being its title.
    instruction: what the customer asks for, with the clause on the price.
    attributes, options: what the customer asks for; of options their values.
    option_names: the options' names, if the original compares options as pairs of name and value: in synthetic goals,
        and in instructions that give them as a mapping. Otherwise empty.
    price_cap: the highest price allowed, in dollars; 1,000,000 for none.
    """

    asin: str
    query: str
    name: str
    product_category: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    option_names: tuple[str, ...]
    price_cap: float


def human_goals(products: Iterable[Product], file: Path) -> Iterator[Goal]:
    """Yield one goal per instruction in `items_human_ins.json`, in the order of the products.

    One log line counts what was left out: instructions without attributes, as in the original; those without a text;
    and those of products that are not in the catalogue. Raises ValueError if the file is missing or damaged.
    """
    instructions: dict[str, Any] = {
        asin: entries for asin, entries in read_json(file, "object") if isinstance(entries, list)
    }
    left_out: Counter[str] = Counter()
    for product in products:
        for number, entry in enumerate(instructions.pop(product.asin, [])):
            if fault := _fault(entry):
                left_out[fault] += 1
                continue
            options = entry.get("instruction_options")
            pairs = options.items() if isinstance(options, dict) else ()
            named = {name: value for name, value in pairs if isinstance(value, str)}
            yield _goal(
                product,
                number,
                entry["instruction"].strip("."),
                texts(entry["instruction_attributes"]),
                tuple(named.values()) or texts(options),
                tuple(named),
            )
    left_out.update({"of products that are not in the catalogue": sum(map(len, instructions.values()))})
    log_left_out(file, "instructions", +left_out)


def synthetic_goals(products: Iterable[Product], file: Path) -> Iterator[Goal]:
    """Yield one goal per combination of option values of the products that have an instruction in `items_ins_v2.json`.

    They follow the order of the products and of their sorted option names. A product with an option without values has
    no combination and no goal. One log line counts the instructions left out, as in `human_goals`; the original ends
    with an error there.

    Raises ValueError if the file is missing or damaged.
    """
    instructions: dict[str, Mapping[str, Any]] = {}
    left_out: Counter[str] = Counter()
    for asin, entry in read_json(file, "object"):
        if not isinstance(entry, dict) or entry.get("instruction") is None:
            continue
        if fault := _fault(entry):
            left_out[fault] += 1
        else:
            instructions[asin] = {key: entry[key] for key in ("instruction", "instruction_attributes")}
    log_left_out(file, "instructions", left_out)

    for product in products:
        if entry := instructions.get(product.asin):
            attributes = texts(entry["instruction_attributes"])
            names = sorted(product.options)
            for options in itertools.product(*(product.options[name] for name in names)):
                wishes = ", and ".join(f"{name}: {value}" for name, value in zip(names, options, strict=True))
                instruction = entry["instruction"] + (f" with {wishes}" if wishes else "")
                yield _goal(product, 0, instruction, attributes, options, tuple(names))


def shuffled[T](goals: Iterable[T]) -> list[T]:
    """Return goals in the original's order.

    The order depends only on their number, so `shuffled(range(n))` is the order itself.
    """
    order = list(goals)
    random.Random(SHUFFLE_SEED).shuffle(order)
    return order


def split(goals: int, custom: Split = "original") -> dict[str, range]:
    """Return the indices of the shuffled goals for "test", "validation" and "train".

    "original" is WebShop's usual split: 500, 1,000 and all others. "verl-agent" tests on the same 500 and trains on all
    others; it has no validation goals. Below 3,000 goals, a sixth of them replaces the 500 and a third the 1,000.
    """
    test = min(TEST, goals // 6)
    train = min(TEST + VALIDATION, goals // 2) if custom == "original" else test
    return {"test": range(test), "validation": range(test, train), "train": range(train, goals)}


def _fault(entry: Any) -> str | None:
    """Return the reason to leave an instruction out; None if it makes a goal."""
    if not isinstance(entry, dict) or not isinstance(entry.get("instruction"), str):
        return "without a text"
    return None if texts(entry.get("instruction_attributes")) else "without attributes"


def _goal(
    product: Product,
    number: int,
    instruction: str,
    attributes: tuple[str, ...],
    options: tuple[str, ...],
    option_names: tuple[str, ...],
) -> Goal:
    """Make a goal and cap its price as the original does, but with a seed; the original draws anew each time."""
    price_cap, clause = NO_CAP, ""
    caps = [cap for cap in CAPS if cap > product.price][:NEAREST_CAPS]
    if len(caps) >= 2:
        price_cap = max(random.Random(f"{product.asin} {number}").sample(caps, 2))
        clause = f", and price lower than {price_cap:.2f} dollars"
    return Goal(
        asin=product.asin,
        query=product.query,
        name=product.title,
        product_category=product.product_category,
        instruction=instruction + clause,
        attributes=attributes,
        options=options,
        option_names=option_names,
        price_cap=price_cap,
    )
