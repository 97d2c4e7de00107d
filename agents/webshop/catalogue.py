"""Products, their search index and the goals of a shop, in one folder that any number of processes share."""

import fcntl
import json
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import batched, count
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from .goals import Goal, human_goals, shuffled, synthetic_goals
from .products import Product, read_products
from .search import SearchIndex, write_index

FORMAT = 2
_BATCH = 1_000
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value NOT NULL);
CREATE TABLE products (place INTEGER PRIMARY KEY, asin TEXT NOT NULL, product TEXT NOT NULL);  -- place from 0
CREATE TABLE goals (place INTEGER PRIMARY KEY, goal TEXT NOT NULL);  -- before the shuffle, from 0
CREATE TABLE shuffle (number INTEGER PRIMARY KEY, place INTEGER NOT NULL);  -- the goal's number, from 0
"""


class CatalogueError(ValueError):
    """A folder is not a catalogue or cannot be read; the message names it and the fix."""


def build(folder: Path, items: Path, attributes: Path, human: Path | None = None) -> None:
    """Build a catalogue from files in the original's formats. `folder` appears complete or not at all.

    The products are streamed: RAM holds their attributes and distinct words, then some 20 bytes for each word of each
    product, then the goals' order. Builds of the same folder wait for each other by `<folder>.lock`.

    Args:
        folder: must not exist.
        items: the products, such as items_shuffle.json.
        attributes: the products' attributes, such as items_ins_v2.json.
        human: people's instructions, such as items_human_ins.json; None makes synthetic goals of the products.

    Raises:
        FileExistsError: `folder` exists.
        ValueError: a file does not have the expected format, or holds no product or no goal.
    """
    folder = folder.absolute()
    building = folder.with_name(f"{folder.name}.building")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            raise FileExistsError(f"{folder} exists already: remove it, or name another folder for the catalogue")
        shutil.rmtree(building, ignore_errors=True)  # of a build that was killed
        building.mkdir()
        try:
            _fill(building, items, attributes, human)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)


class Catalogue:
    """A catalogue made by `build`, read-only. Use it in the thread that opened it.

    Index and products are mapped into memory, not loaded, so all processes of a machine share the pages.

    Attributes:
        products: number of products.
        goals: number of goals.

    Raises:
        CatalogueError: there is no catalogue, or it is truncated or of another format.
    """

    def __init__(self, folder: Path) -> None:
        remedy = "build it with `python -m empo2.agents.webshop build`"
        file = folder / "catalogue.sqlite"
        if not file.is_file():
            raise CatalogueError(f"{folder} is no WebShop catalogue (it has no {file.name}): {remedy}")
        try:
            self._db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            self._db.execute(f"PRAGMA mmap_size = {1 << 40}")
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
            index = _open_index(self._db, folder / "index", meta) if meta["format"] == FORMAT else None
        except (sqlite3.Error, OSError, KeyError, ValueError) as error:
            raise CatalogueError(f"{folder} is damaged ({error}): remove it and {remedy}") from error
        if index is None:
            raise CatalogueError(
                f"{folder} is a WebShop catalogue of format {meta['format']}, not {FORMAT}: remove it and {remedy}"
            )
        self.products: int = meta["products"]
        self.goals: int = meta["goals"]
        self._index = index

    def search(self, words: str) -> list[str]:
        """Return the asins of at most 50 products, best first; none for a text without a word. Never raises."""
        places = self._index.search(words.encode(errors="replace").decode())
        return [self._one("SELECT asin FROM products WHERE place = ?", place) for place in places]

    def product(self, asin: str) -> Product:
        """Return a product. Raises KeyError for an asin that is not in the catalogue."""
        return Product.from_json(self._one("SELECT product FROM products WHERE asin = ?", asin))

    def goal(self, number: int) -> Goal:
        """Return a goal. Raises KeyError for a number that is not in 0 ... goals - 1."""
        return Goal.from_json(self._one("SELECT goal FROM shuffle JOIN goals USING (place) WHERE number = ?", number))

    def close(self) -> None:
        self._db.close()

    def _one(self, query: str, key: str | int) -> str:
        row = self._db.execute(query, (key,)).fetchone()
        if row is None:
            raise KeyError(f"{key!r} is not in this catalogue")
        return row[0]


def _fill(folder: Path, items: Path, attributes: Path, human: Path | None) -> None:
    with closing(sqlite3.connect(folder / "catalogue.sqlite")) as db, _progress() as progress:
        db.execute("PRAGMA journal_mode = OFF")
        db.executescript(_TABLES)
        products = progress.track(read_products(items, attributes), description="products")
        (folder / "index").mkdir()
        product_count = write_index(db, folder / "index", _stored(db, products))
        if not product_count:
            raise ValueError(f"{items} has no product")
        db.execute("CREATE UNIQUE INDEX products_by_asin ON products (asin)")
        in_order = db.execute("SELECT product FROM products ORDER BY place")
        stored = (Product.from_json(text) for (text,) in in_order)
        goals = human_goals(stored, human) if human else synthetic_goals(stored, attributes)
        texts = (goal.as_json() for goal in progress.track(goals, description="goals"))
        goal_count = db.executemany("INSERT INTO goals VALUES (?, ?)", enumerate(texts)).rowcount
        if not goal_count:
            raise ValueError(f"{human or attributes} has no goal with a product of {items}")
        db.executemany("INSERT INTO shuffle VALUES (?, ?)", enumerate(shuffled(range(goal_count))))
        meta = {
            "format": FORMAT,
            "sources": json.dumps([file.name for file in (items, attributes, human) if file]),
            "products": product_count,
            "goals": goal_count,
            "index": json.dumps({file.name: file.stat().st_size for file in (folder / "index").iterdir()}),
        }
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.commit()


def _stored(db: sqlite3.Connection, products: Iterable[Product]) -> Iterator[str]:
    """Store the products in their table; yield the texts by which they are found."""
    places = count()
    for batch in batched(products, _BATCH):
        rows = [(place, product.asin, product.as_json()) for product, place in zip(batch, places, strict=False)]
        db.executemany("INSERT INTO products VALUES (?, ?, ?)", rows)
        yield from map(_searched_text, batch)


def _open_index(db: sqlite3.Connection, folder: Path, meta: dict[str, Any]) -> SearchIndex:
    """Open the index. Raises ValueError if a file does not have the size that was written."""
    for name, size in json.loads(meta["index"]).items():
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"index/{name} has {found:,} bytes, not {size:,}")
    return SearchIndex(db, folder, meta["products"])


def _searched_text(product: Product) -> str:
    """Join title, description, first bullet point and options, as in the original; BM25 ignores the order of words."""
    options = (text for name, values in product.options.items() for text in (name, *values))
    return " ".join([product.title, product.description, *product.bullet_points[:1], *options])


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), TextColumn("{task.completed:,.0f}"), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)
