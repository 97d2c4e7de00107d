"""Products, instructions and data files in the original's format."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
