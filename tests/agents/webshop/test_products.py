"""Products out of files in the original's format, with all that is odd in such files."""

import json
import random
from pathlib import Path

import pytest

from empo2.agents.webshop.products import Product, read_products

RECORD = {
    "asin": "B07Å数0001",
    "name": "Blümchen Women's Cotton Dress 花",
    "query": " Women's Dresses ",
    "category": "fashion",
    "product_category": "Clothing › Women › Dresses",
    "full_description": "A soft dress.",
    "small_description": ["Machine washable", "Made of cotton"],
    "pricing": "$12.99",
    "customization_options": {
        "Color": [{"value": " Red/Weiß ", "image": "x.jpg"}, {"value": "Blue"}],
        "Size": [{"value": "X-Large"}],
    },
    "images": ["x.jpg"],
    "total_reviews": 3,
    "rating": 4.5,
}
PRODUCT = Product(
    asin="B07Å数0001",
    title="Blümchen Women's Cotton Dress 花",
    query="women's dresses",
    category="fashion",
    product_category="Clothing › Women › Dresses",
    description="A soft dress.",
    bullet_points=("Machine washable", "Made of cotton"),
    prices=(12.99,),
    price=12.99,
    options={"color": ("red | weiß", "blue"), "size": ("x-large",)},
    attributes=("machine washable", "long sleeve"),
)
ATTRIBUTES = {RECORD["asin"]: {"attributes": ["machine washable", "long sleeve"], "instruction": None}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    items, attributes = tmp_path / "items.json", tmp_path / "attributes.json"
    items.write_text(json.dumps([RECORD]))
    attributes.write_text(json.dumps(ATTRIBUTES))
    return items, attributes


@pytest.fixture
def read(files):
    def read_all(*records: object, attributes: object = ATTRIBUTES) -> list[Product]:
        files[0].write_text(json.dumps(records))
        files[1].write_text(json.dumps(attributes))
        return list(read_products(*files))

    return read_all


def without(key: str) -> dict:
    return {name: value for name, value in RECORD.items() if name != key}


def numbered(*numbers: int, **changes: object) -> list[dict]:
    return [{**RECORD, "asin": f"B{number}", **changes} for number in numbers]


def test_a_record_as_the_original_reads_it(read):
    assert read(RECORD) == [PRODUCT]


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("$12.99", (12.99,), "$12.99"),
        ("$10.00$20.00", (10.0, 20.0), "$10.0 to $20.0"),
        ("$1,299.00", (1299.0,), "$1299.0"),
        ("from $5 to $7.50, was $9", (5.0, 7.5), "$5.0 to $7.5"),
        ("$0.00", (0.0,), "$0.0"),
        ("", (100.0,), "$100.0"),
        (None, (100.0,), "$100.0"),
        ("12.99", (100.0,), "$100.0"),
        ("Currently unavailable", (100.0,), "$100.0"),
        ("$", (100.0,), "$100.0"),
        ("$10.00$", (100.0,), "$100.0"),
        ("$1.2.3", (100.0,), "$100.0"),
        ("$" + "9" * 400, (100.0,), "$100.0"),  # as a number: infinity
        (12.99, (100.0,), "$100.0"),
        (["$12.99"], (100.0,), "$100.0"),
    ],
)
def test_prices(read, pricing: object, prices: tuple, tag: str):
    [product] = read({**RECORD, "pricing": pricing})
    assert (product.prices, product.price_tag) == (prices, tag)
    assert min(prices) <= product.price <= max(prices)


def test_the_price_in_a_range_is_drawn_by_the_asin(read):
    records = numbered(*range(200), pricing="$20.00$10.00")
    products = read(*records)
    assert products == read(*records)
    assert products[7].price == random.Random("B7").uniform(20, 10)
    assert all(10 <= product.price <= 20 for product in products)
    assert sum(product.price for product in products) / 200 == pytest.approx(15, abs=1)  # of uniform draws: sd 0.2


def test_what_cannot_be_a_product_is_left_out_and_counted(read, caplog):
    odd = [without("asin"), {**RECORD, "asin": 7}, {**RECORD, "asin": ""}, {**RECORD, "asin": "nan"}, None, "B1", []]
    odd += [{**RECORD, "asin": "B1234567890"}, *numbered(1), without("name"), {**RECORD, "asin": "B2", "name": None}]
    products = read(*numbered(4), *numbered(1), {**RECORD, "asin": "B123456789"}, *odd, *numbered(3))
    assert [product.asin for product in products] == ["B4", "B1", "B123456789", "B3"]
    [line] = caplog.messages
    assert line.endswith(
        "items.json: products left out: 7 without an asin, 1 with an asin of more than 10 characters, 1 repeated, "
        "2 without a name"
    )


def test_a_product_may_lack_all_but_asin_and_name(read):
    [product] = read({"asin": "B1", "name": "Mug"})
    assert (product.price, product.price_tag, product.bullet_points) == (100.0, "$100.0", ())
    assert (product.query, product.description, product.options, product.attributes) == ("", "", {}, ())


@pytest.mark.parametrize(
    ("key", "value", "field", "is_read_as"),
    [
        *((key, value, key, "") for key in ("query", "category", "product_category") for value in (None, 7)),
        *(("full_description", value, "description", "") for value in (None, 7)),
        ("small_description", "One text", "bullet_points", ("One text",)),
        *(("small_description", value, "bullet_points", ()) for value in ([], None, {"a": "b"})),
        ("small_description", ["One", None, 2, "Two"], "bullet_points", ("One", "Two")),
        *(("customization_options", value, "options", {}) for value in (None, {}, "red")),
        *(("customization_options", {"Color": value}, "options", {}) for value in (None, "red")),
        ("customization_options", {"Color": []}, "options", {"color": ()}),
        (
            *("customization_options", {"Color": [{"image": "x.jpg"}, {"value": None}, None, {"value": "Red"}]}),
            *("options", {"color": ("red",)}),
        ),
        ("customization_options", {"Size": [{"value": "7/8"}]}, "options", {"size": ("7 | 8",)}),
        (
            *("customization_options", {"Color": [{"value": "Red"}], "COLOR": [{"value": "Blue"}]}),
            *("options", {"color": ("blue",)}),
        ),
    ],
)
def test_what_becomes_of_odd_values(read, key: str, value: object, field: str, is_read_as: object):
    [product] = read({**RECORD, key: value})
    assert getattr(product, field) == is_read_as


def test_attributes(read):
    for entry in ({"attributes": None}, {}, None, []):
        assert read(RECORD, attributes={RECORD["asin"]: entry})[0].attributes == ()
