"""A shop of 24 products: 22 plain mugs, a blue one, and a teapot with odd options. Each has one instruction."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from empo2.agents.webshop.catalogue import Catalogue, build


def product(asin: str, name: str, options: dict[str, list[str]], **more: object) -> dict:
    return {
        "asin": asin,
        "name": name,
        "query": "mug",
        "category": "garden",
        "product_category": "Home & Kitchen › Dining › Cups",
        "full_description": "",
        "small_description": [],
        "pricing": "$12.99",
        "customization_options": {key: [{"value": value} for value in values] for key, values in options.items()},
        **more,
    }


def wish(text: str, attributes: list[str], options: list[str]) -> dict:
    return {"instruction": text, "instruction_attributes": attributes, "instruction_options": options}


PRODUCTS = [
    product(
        "B0BLUEMUG1",
        "Blue Stoneware Mug",
        {"Color": ["Blue", "Red/White"], "Size": ["Small", "Large"]},
        full_description="For tea, or for pencils.",
        small_description=["Dishwasher safe", "Holds 12 ounces"],
        pricing="$10.00$20.00",
    ),
    product(
        "B0TEAPOT01",
        "Teapot",
        {"Theme": ["Buy Now", "< Prev", "Twin"], "Finish": ["Twin", "Next >", "", "[A] B"]},
        query="teapot",
        product_category="Antiques",
    ),
    *(product(f"B0PLAIN{number:03}", f"Plain Mug {number}", {}) for number in range(22)),
]
INSTRUCTIONS = {
    "B0BLUEMUG1": wish("I want a blue mug that is dishwasher safe.", ["dishwasher safe"], ["blue", "large"]),
    "B0TEAPOT01": wish("a teapot", ["teapot"], ["twin"]),
    **{f"B0PLAIN{number:03}": wish(f"i need plain mug {number}", ["plain"], []) for number in range(22)},
}


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    files = {
        "items": PRODUCTS,
        "attributes": {entry["asin"]: {"attributes": []} for entry in PRODUCTS},
        "human": {asin: [instruction] for asin, instruction in INSTRUCTIONS.items()},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    build(folder / "catalogue", *(folder / f"{name}.json" for name in files))
    return folder / "catalogue"


@pytest.fixture(scope="session")
def shop(shop_folder: Path) -> Iterator[Catalogue]:
    with closing(Catalogue(shop_folder)) as opened:
        yield opened


@pytest.fixture(scope="session")
def goal_of(shop: Catalogue) -> Callable[[str], int]:
    """The number of a product's goal."""
    return {shop.goal(number).asin: number for number in range(shop.goals)}.__getitem__
