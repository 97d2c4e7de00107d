"""The shop's products, read from the original's data files (princeton-nlp/WebShop)."""

import json
import logging
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from .json_stream import read_json

NO_PRICE = 100.0  # dollars, of a product whose price is not given
ASIN_LENGTH = 10

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """What a catalogue stores: as a list of its fields in order, without their names."""

    def as_json(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, map(_frozen, json.loads(text)), strict=False)))  # older ones have one more value


@dataclass(frozen=True, slots=True)
class Product(Record):
    """One product.

    asin: its id, 1 to 10 characters.
    query: the search that found it when the data were collected, lower-cased.
    product_category: its path, "Clothing › Women › Dresses".
    prices: in dollars, one or the two ends of a range, as shown.
    price: in dollars; drawn from a range, always the same for an asin.
    options: names and their values, lower-cased: {"color": ("red", "blue | white")}.
    attributes: such as "machine washable"; not shown, but rewarded.
    """

    asin: str
    title: str
    query: str
    category: str
    product_category: str
    description: str
    bullet_points: tuple[str, ...]
    prices: tuple[float, ...]
    price: float
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)


def read_products(items: Path, attributes: Path) -> Iterator[Product]:
    """Yield the products of `items_shuffle.json` in the order of the file, with attributes of `items_ins_v2.json`.

    Items are streamed; the attributes, some 300 bytes per product, are held. A log line counts what was left out:
    products without an asin (none, no text, "" or "nan") or with one of more than 10 characters, repeated ones after
    the first, and those without a name. Any other field that is missing or of the wrong type is empty; an unreadable
    price counts as none, which is 100 dollars. The original ends with an error where an asin, a name or any other key
    is missing, and draws prices of ranges anew each time.

    Raises ValueError, naming the file, if one is missing, damaged, or of the wrong kind.
    """
    known = {
        asin: tuple(map(sys.intern, texts(entry.get("attributes"))))
        for asin, entry in read_json(attributes, "object")
        if isinstance(entry, dict)
    }
    seen: set[str] = set()
    left_out: Counter[str] = Counter()
    for record in read_json(items, "array"):
        if fault := _fault(record, seen):
            left_out[fault] += 1
            continue
        asin = record["asin"]
        seen.add(asin)
        prices = _prices(record.get("pricing"))
        yield Product(
            asin=asin,
            title=record["name"],
            query=_text(record.get("query")).lower().strip(),
            category=_text(record.get("category")),
            product_category=_text(record.get("product_category")),
            description=_text(record.get("full_description")),
            bullet_points=texts(record.get("small_description")),
            prices=prices,
            price=random.Random(asin).uniform(*prices) if len(prices) == 2 else prices[0],
            options=_options(record.get("customization_options")),
            attributes=known.get(asin, ()),
        )
    log_left_out(items, "products", left_out)


def texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a list; a text alone is a list of one; anything else is empty."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def log_left_out(file: Path, what: str, left_out: Counter[str]) -> None:
    if left_out:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        log.warning("%s: %s left out: %s", file, what, reasons)


def _frozen(value: Any) -> Any:
    """Return what JSON made a list of as the tuple that it was."""
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _fault(record: Any, seen: set[str]) -> str | None:
    """Return the reason to leave a record out; None if it is a product."""
    asin = record.get("asin") if isinstance(record, dict) else None
    if not isinstance(asin, str) or asin in ("", "nan"):
        return "without an asin"
    if len(asin) > ASIN_LENGTH:
        return f"with an asin of more than {ASIN_LENGTH} characters"
    if asin in seen:
        return "repeated"
    return None if isinstance(record.get("name"), str) else "without a name"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _prices(pricing: Any) -> tuple[float, ...]:
    """Return the first two numbers after a "$": "$12.99", "$10.00$20.00" or "$1,299.00"."""
    parts = _text(pricing).split("$")[1:3]
    try:
        prices = tuple(float(re.sub(r"[^\d.]", "", part)) for part in parts)
    except ValueError:
        return (NO_PRICE,)
    return prices if prices and all(map(math.isfinite, prices)) else (NO_PRICE,)


def _options(customization: Any) -> dict[str, tuple[str, ...]]:
    """Return names and values of {name: [{"value": ...}, ...]}; a name without a list is not an option."""
    if not isinstance(customization, dict):
        return {}
    return {
        name.lower(): tuple(
            value.strip().replace("/", " | ").lower()
            for value in texts([content.get("value") for content in contents if isinstance(content, dict)])
        )
        for name, contents in customization.items()
        if isinstance(contents, list)
    }
