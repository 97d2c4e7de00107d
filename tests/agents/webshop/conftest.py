"""A shop of 24 products: 22 plain mugs, a blue one, and a teapot. Each has one instruction."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from empo2.agents.webshop.catalogue import Catalogue, build

from .shops import item, wish, write

PRODUCTS = [
    item(
        "B0BLUEMUG1",
        "Blue Stoneware Mug",
        {"Color": ["Blue", "Red/White"], "Size": ["Small", "Large"]},
        full_description="For tea, or for pencils.",
        small_description=["Dishwasher safe", "Holds 12 ounces"],
        pricing="$10.00$20.00",
    ),
    item("B0TEAPOT01", "Teapot", {"Finish": ["Twin", "", "Plain"]}, query="teapot", product_category="Antiques"),
    *(item(f"B0PLAIN{number:03}", f"Plain Mug {number}") for number in range(22)),
]
INSTRUCTIONS = {
    "B0BLUEMUG1": wish("I want a blue mug that is dishwasher safe.", ["dishwasher safe"], ["blue", "large"]),
    "B0TEAPOT01": wish("a teapot", ["teapot"], ["twin"]),
    **{f"B0PLAIN{number:03}": wish(f"i need plain mug {number}", ["plain"]) for number in range(22)},
}


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    attributes = {entry["asin"]: {"attributes": []} for entry in PRODUCTS}
    human = {asin: [instruction] for asin, instruction in INSTRUCTIONS.items()}
    build(folder / "catalogue", *write(folder, PRODUCTS, attributes, human))
    return folder / "catalogue"


@pytest.fixture(scope="session")
def shop(shop_folder: Path) -> Iterator[Catalogue]:
    with closing(Catalogue(shop_folder)) as opened:
        yield opened


@pytest.fixture(scope="session")
def goal_of(shop: Catalogue) -> Callable[[str], int]:
    return {shop.goal(number).asin: number for number in range(shop.goals)}.__getitem__
