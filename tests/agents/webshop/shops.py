"""A product and a goal; products, instructions and data files in the original's format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from empo2.agents.webshop.goals import Goal
from empo2.agents.webshop.products import Product

PRODUCT = Product(
    asin="B1",
    title="Lamp With Wooden FOOT",
    query="lamps",
    category="home",
    product_category="Home › Lighting › Lamps",
    description="Gives a warm white light.",
    bullet_points=("Energy saving", "Easy to clean"),
    prices=(20.0,),
    price=20.0,
    options={"size": ("small", "large"), "color": ("red", "blue")},
    attributes=("eye protection",),
)
GOAL = Goal(
    asin="B1",
    query="lamps",
    name="Lamp With Wooden FOOT",
    product_category="Home › Lighting › Lamps",
    instruction="Find me a lamp",
    attributes=("eye protection", "energy saving"),
    options=("red", "small"),
    option_names=(),
    price_cap=30.0,
)


def item(asin: str, name: str, options: Mapping[str, Sequence[str]] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "asin": asin,
        "name": name,
        "query": "mug",
        "category": "garden",
        "product_category": "Home & Kitchen › Dining › Cups",
        "full_description": "",
        "small_description": [],
        "pricing": "$12.99",
        "customization_options": {key: [{"value": each} for each in values] for key, values in (options or {}).items()},
        **changes,
    }


def wish(text: str, attributes: Sequence[str], options: Sequence[str] = ()) -> dict[str, Any]:
    return {"instruction": text, "instruction_attributes": attributes, "instruction_options": options}


def write(folder: Path, items: Sequence[Any], attributes: Mapping[str, Any], human: Mapping[str, Any]) -> list[Path]:
    """Write the files of products, of their attributes and of people's instructions; return them in this order."""
    contents = {"items.json": items, "attributes.json": attributes, "human.json": human}
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return [folder / name for name in contents]
