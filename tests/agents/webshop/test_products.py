"""Products out of files in the original's format, with all that is odd in such files."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from empo2.agents.webshop.products import Product, read_products

from .shops import item, write

RECORD = item(
    "B07Å数0001",
    "Blümchen Women's Cotton Dress 花",
    {"Color": [" Red/Weiß ", "Blue"], "Size": ["X-Large"]},
    query=" Women's Dresses ",
    full_description="A soft dress.",
    small_description=["Machine washable", "Made of cotton"],
)
ATTRIBUTES = {RECORD["asin"]: {"attributes": ["machine washable", "long sleeve"], "instruction": None}}


@pytest.fixture
def read(tmp_path: Path):
    def read_all(*records: object, attributes: Mapping[str, object] = ATTRIBUTES) -> list[Product]:
        return list(read_products(*write(tmp_path, records, attributes, {})[:2]))

    return read_all


def numbered(*numbers: int, **changes: object) -> list[dict]:
    return [{**RECORD, "asin": f"B{number}", **changes} for number in numbers]


def test_a_record_as_the_original_reads_it(read):
    assert read(RECORD) == [
        Product(
            asin="B07Å数0001",
            title="Blümchen Women's Cotton Dress 花",
            query="women's dresses",
            category="garden",
            product_category="Home & Kitchen › Dining › Cups",
            description="A soft dress.",
            bullet_points=("Machine washable", "Made of cotton"),
            prices=(12.99,),
            price=12.99,
            options={"color": ("red | weiß", "blue"), "size": ("x-large",)},
            attributes=("machine washable", "long sleeve"),
        )
    ]


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("$12.99", (12.99,), "$12.99"),
        ("$10.00$20.00", (10.0, 20.0), "$10.0 to $20.0"),
        ("$1,299.00", (1299.0,), "$1299.0"),
        ("from $5 to $7.50, was $9", (5.0, 7.5), "$5.0 to $7.5"),
        ("$0.00", (0.0,), "$0.0"),
        # the last one is infinity as a number
        *((odd, (100.0,), "$100.0") for odd in (None, "12.99", "$", "$10.00$", "$1.2.3", 12.99, "$" + "9" * 400)),
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
    assert all(10 <= product.price <= 20 for product in products)
    assert sum(product.price for product in products) / 200 == pytest.approx(15, abs=1)  # of uniform draws: sd 0.2


def test_what_cannot_be_a_product_is_left_out_and_counted(read, caplog):
    odd = [{"name": "Mug"}, *({**RECORD, "asin": asin} for asin in (7, "", "nan")), None, "B1", []]
    odd += [{**RECORD, "asin": "B1234567890"}, *numbered(1), {"asin": "B5"}, *numbered(2, name=None)]
    products = read(*numbered(4), *numbered(1), {**RECORD, "asin": "B123456789"}, *odd, *numbered(3))
    assert [product.asin for product in products] == ["B4", "B1", "B123456789", "B3"]
    [line] = caplog.messages
    reasons = "7 without an asin, 1 with an asin of more than 10 characters, 1 repeated, 2 without a name"
    assert line.endswith(f"items.json: products left out: {reasons}")


def test_a_product_may_lack_all_but_asin_and_name(read):
    [product] = read({"asin": "B1", "name": "Mug"})
    assert (product.price, product.price_tag, product.bullet_points) == (100.0, "$100.0", ())
    assert (product.query, product.description, product.options, product.attributes) == ("", "", {}, ())
    for entry in ({"attributes": None}, {}, None, []):
        assert read(RECORD, attributes={RECORD["asin"]: entry})[0].attributes == ()


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
        ("customization_options", {"A": [{}, {"value": None}, None, {"value": "R"}]}, "options", {"a": ("r",)}),
        ("customization_options", {"Size": [{"value": "7/8"}]}, "options", {"size": ("7 | 8",)}),
        ("customization_options", {"A": [{"value": "R"}], "a": [{"value": "B"}]}, "options", {"a": ("b",)}),
    ],
)
def test_what_becomes_of_odd_values(read, key: str, value: object, field: str, is_read_as: object):
    [product] = read({**RECORD, key: value})
    assert getattr(product, field) == is_read_as
