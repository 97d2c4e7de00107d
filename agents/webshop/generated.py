"""The project's own shop: any number of made-up products and instructions, in the original's file formats."""

import json
import math
import os
import random
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..text_game.episode import positive
from .catalogue import FORMAT, build

VERSION = 1  # of what is generated
INSTRUCTIONS = 12_000  # at most, as many as the original's
PER_PRODUCT = 3  # instructions


@dataclass(frozen=True)
class Department:
    """The parts from which a department's products are made. No two options share a value, so each can be clicked."""

    path: str
    nouns: Mapping[str, tuple[str, ...]]  # by the rest of the path
    materials: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, float]  # dollars, from and to


_COLORS = (
    *("black", "white", "navy blue", "forest green", "wine red", "mustard yellow", "light grey", "rose pink"),
    *("burnt orange", "dark brown", "sky blue", "lavender", "ivory", "teal", "copper"),
)
DEPARTMENTS = {
    "fashion": Department(
        "Clothing, Shoes & Jewelry",
        {
            "Men › Shirts": ("polo shirt", "flannel shirt", "linen shirt", "undershirt"),
            "Men › Outerwear": ("rain jacket", "quilted vest", "winter parka"),
            "Women › Tops": ("knit sweater", "silk blouse", "tank top", "wrap cardigan"),
            "Women › Skirts": ("pleated skirt", "denim skirt"),
            "Women › Shoes": ("ankle boot", "ballet flat", "wedge sandal"),
        },
        ("cotton", "merino wool", "polyester", "linen", "bamboo fiber", "recycled nylon"),
        (
            *("machine washable", "slim fit", "loose fit", "quick drying", "wrinkle free", "moisture wicking"),
            *("stretch fabric", "water resistant", "hand wash only", "fade resistant", "tagless", "lined"),
        ),
        {"color": _COLORS, "size": ("x-small", "small", "medium", "large", "x-large", "xx-large")},
        (9, 160),
    ),
    "electronics": Department(
        "Electronics",
        {
            "Audio › Headphones": ("wireless headphone", "studio headphone", "sport earbud"),
            "Audio › Speakers": ("bluetooth speaker", "shelf speaker", "soundbar"),
            "Computers › Accessories": ("laptop stand", "mechanical keyboard", "trackball mouse", "webcam"),
            "Phones › Accessories": ("phone charger", "screen protector", "car mount"),
        },
        ("aluminum", "recycled plastic", "tempered glass", "steel", "silicone"),
        (
            *("fast charging", "noise cancelling", "plug and play", "easy to install", "wall mountable", "backlit"),
            *("long battery life", "splash proof", "carrying case included", "low power", "shock proof", "dual band"),
        ),
        {"color": _COLORS, "cable length": ("1 meter", "2 meters", "3 meters", "5 meters")},
        (7, 420),
    ),
    "beauty": Department(
        "Beauty & Personal Care",
        {
            "Skin Care › Face": ("face cream", "night serum", "clay mask", "eye gel"),
            "Hair Care": ("shampoo bar", "hair oil", "styling comb", "beard balm"),
            "Makeup › Lips": ("lip balm", "lip gloss", "lip liner"),
        },
        ("shea butter", "aloe vera", "argan oil", "beeswax", "rice bran"),
        (
            *("cruelty free", "paraben free", "fragrance free", "for sensitive skin", "long lasting", "alcohol free"),
            *("dermatologist tested", "travel size", "vegan", "easy to apply", "oil free", "sulfate free"),
        ),
        {
            "scent": ("citrus", "vanilla", "sandalwood", "green tea", "peppermint", "unscented", "jasmine"),
            "size": ("1 ounce", "2 ounces", "4 ounces", "8 ounces"),
        },
        (4, 70),
    ),
    "garden": Department(
        "Home & Kitchen",
        {
            "Furniture › Living Room": ("side table", "arm chair", "floor lamp", "book shelf"),
            "Bedding": ("throw blanket", "pillow cover", "duvet cover"),
            "Kitchen › Cookware": ("frying pan", "stock pot", "baking tray"),
            "Decor": ("wall clock", "picture frame", "flower vase"),
        },
        ("oak", "bamboo", "stainless steel", "stoneware", "cast iron", "woven cotton"),
        (
            *("easy to assemble", "easy to clean", "dishwasher safe", "space saving", "heavy duty", "oven safe"),
            *("foldable", "scratch resistant", "hand made", "rust proof", "stackable", "child safe"),
        ),
        {"color": _COLORS, "size": ("10 inch", "12 inch", "16 inch", "20 inch", "24 inch")},
        (12, 380),
    ),
    "grocery": Department(
        "Grocery & Gourmet Food",
        {
            "Snacks › Nuts": ("roasted almond", "cashew mix", "trail mix"),
            "Snacks › Bars": ("granola bar", "protein bar", "fruit bar"),
            "Beverages": ("herbal tea", "ground coffee", "cocoa mix"),
            "Pantry": ("pasta sauce", "maple syrup", "olive oil"),
        },
        ("oats", "dates", "whole grain", "coconut", "cane sugar"),
        (
            *("gluten free", "sugar free", "non gmo", "keto friendly", "low sodium", "kosher"),
            *("plant based", "no artificial colors", "high protein", "organic", "dairy free", "resealable"),
        ),
        {
            "flavor": ("sea salt", "dark chocolate", "honey", "chili lime", "wild berry", "ginger", "cinnamon"),
            "pack": ("pack of 1", "pack of 2", "pack of 4", "pack of 6", "pack of 12"),
        },
        (3, 60),
    ),
}
_SYLLABLES = ("ta", "vo", "ri", "lu", "ken", "mar", "so", "bel", "dra", "fin", "qui", "né", "zan", "hol", "pu", "ester")
_USES = (
    *("everyday use", "travel", "small apartments", "weekend trips", "long work days", "family dinners", "students"),
    *("outdoor gatherings", "beginners", "the office", "winter evenings", "the garden"),
)
_SENTENCES = (
    "The {brand} {noun} is made with {material} and was designed for {use}.",
    "Our workshop in the hills has built every {noun} by the same careful steps for {years} years.",
    "It is {first}, so there is one thing less to think about on a busy day.",
    "Customers tell us that this {noun} is the one they reach for in the morning.",
    "Each piece is checked twice before it leaves the warehouse, and a spare part is in the box.",
    "Because it is {second}, it keeps its good looks for {years} seasons and more.",
    "Whether you shop for {use} or look for a present, {brand} has thought of the details.",
    "The {material} comes from suppliers whom we visit once in a year.",
    "Should anything be wrong with your {noun}, write to us and we will send another.",
)
_BULLETS = (
    "{material}: chosen by {brand} because it lasts",
    "Good for {use}, and just as good as a gift",
    "This {noun} is {first}",
    "Backed by {years} years of service from {brand}",
    "Small details: even seams, firm joints, a clear label",
)
_OPENINGS = ("i am looking for", "i want to buy", "find me", "i need some", "show me")
_BRANCHES = {noun: path for each in DEPARTMENTS.values() for path, nouns in each.nouns.items() for noun in nouns}
_KINDS = [(name, noun) for name, each in DEPARTMENTS.items() for nouns in each.nouns.values() for noun in nouns]


def own_catalogue(products: int = 1000) -> Path:
    """Return the project's own catalogue with the given number of products, and three goals for each of at most 4,000.

    The first call builds it, in seconds for 1,000 products, in `empo2` in $XDG_CACHE_HOME or ~/.cache; if several
    processes ask at once, one of them builds it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "empo2")
    folder = cache / f"webshop-{products}-v{FORMAT}.{VERSION}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as files, suppress(FileExistsError):  # another process was faster
            build(folder, *write(Path(files), products))
    return folder


def write(folder: Path, products: int, seed: int = 0) -> tuple[Path, Path, Path]:
    """Write products, their attributes and human instructions, in the original's formats and under its file names.

    Equal numbers and seeds give equal files. Of more than 4,000 products, only some have instructions: 12,000 in all.
    Every human goal can be reached with reward 1, by its product with the options that it names. Raises ValueError for
    fewer than one product.
    """
    positive("products", products)
    files = folder / "items_shuffle.json", folder / "items_ins_v2.json", folder / "items_human_ins.json"
    generator = random.Random(seed)
    stride = math.ceil(products * PER_PRODUCT / INSTRUCTIONS)
    with ExitStack() as stack:
        items, attributes, human = (stack.enter_context(file.open("w", encoding="utf-8")) for file in files)
        for number in range(products):
            category, noun = generator.choice(_KINDS)
            known = generator.sample(DEPARTMENTS[category].attributes, generator.randint(2, 5))
            item = _item(generator, number, category, noun, known)
            asin = json.dumps(item["asin"])
            wanted = f"{generator.choice(_OPENINGS)} {', '.join(known[:2])} {noun}"
            entry = {"attributes": known, "instruction": wanted, "instruction_attributes": known[:2]}
            items.write(("," if number else "[") + "\n" + json.dumps(item, ensure_ascii=False))
            attributes.write(("," if number else "{") + f"\n{asin}: {json.dumps(entry)}")
            if number % stride == 0:
                entries = [_instruction(generator, item, noun, known) for _ in range(PER_PRODUCT)]
                human.write(("," if number else "{") + f"\n{asin}: {json.dumps(entries)}")
        items.write("\n]\n")
        attributes.write("\n}\n")
        human.write("\n}\n")
    return files


def _item(generator: random.Random, number: int, category: str, noun: str, known: list[str]) -> dict[str, Any]:
    department = DEPARTMENTS[category]
    words = {
        "brand": "".join(generator.choices(_SYLLABLES, k=generator.randint(2, 4))).capitalize(),
        "noun": noun,
        "material": generator.choice(department.materials),
        "use": generator.choice(_USES),
        "years": generator.randint(2, 30),
        "first": known[0],
        "second": known[1],
    }
    model = f"{generator.choice(_SYLLABLES)}{generator.randrange(10_000)}".upper()
    title = f"{words['brand']} {known[0]} {noun} for {words['use']}, {words['material']}, {model}".title()
    bullets = [text.format_map(words) for text in generator.sample(_BULLETS, generator.randint(1, 4))]
    return {
        "asin": f"B0{number * 2_654_435_761 % 2**32:08X}",  # an odd factor: no two are equal
        "name": title,
        "query": f"{noun}s",
        "category": category,
        "product_category": f"{department.path} › {_BRANCHES[noun]} › {noun.title()}s",
        "full_description": " ".join(
            text.format_map(words) for text in generator.sample(_SENTENCES, generator.randint(3, 7))
        ),
        "small_description": bullets if generator.random() < 0.97 else bullets[0],
        "pricing": _pricing(generator, *department.prices),
        "customization_options": {
            name: _contents(generator, values) if generator.random() < 0.95 else None
            for name, values in department.options.items()
        },
        "images": [],
    }


def _pricing(generator: random.Random, low: float, high: float) -> str:
    """Draw a price, uniform in its logarithm; in some cases a range or no price."""
    price = math.exp(generator.uniform(math.log(low), math.log(high)))
    form = generator.random()
    if form < 0.02:
        return ""
    return f"${price:.2f}" if form < 0.85 else f"${price:.2f}${price * generator.uniform(1.1, 2):.2f}"


def _contents(generator: random.Random, values: tuple[str, ...]) -> list[dict[str, Any]]:
    chosen = generator.sample(range(len(values)), generator.randint(2, 4))
    return [{"value": values[index].title(), "image": None} for index in sorted(chosen)]


def _instruction(generator: random.Random, item: dict[str, Any], noun: str, known: list[str]) -> dict[str, Any]:
    wishes = generator.sample(known, generator.randint(1, 2))
    chosen = {
        name: generator.choice(contents)["value"].lower()
        for name, contents in item["customization_options"].items()
        if contents and generator.random() < 0.8
    }
    options = "".join(f", {name} {value}" for name, value in chosen.items())
    return {
        "instruction": f"{generator.choice(_OPENINGS)} {', '.join(wishes)} {noun}{options}.",
        "instruction_attributes": wishes,
        "instruction_options": list(chosen.values()),
    }
