"""The catalogue: what is found, in which order, and what becomes of builds and folders that are not whole."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from empo2.agents.webshop import generated
from empo2.agents.webshop.catalogue import Catalogue, CatalogueError, build
from empo2.agents.webshop.goals import human_goals, shuffled, synthetic_goals
from empo2.agents.webshop.products import read_products

from .shops import item, wish, write

BUILD = (
    "import sys; from pathlib import Path; from empo2.agents.webshop.catalogue import build; "
    "build(*map(Path, sys.argv[1:]))"
)


def files_of(folder: Path, *items: dict[str, Any]) -> list[Path]:
    """Data files of these products, with one instruction each."""
    asked = wish("i want it sturdy", ["sturdy"])
    attributes = {item["asin"]: {"attributes": ["sturdy"], **asked} for item in items}
    return write(folder, items, attributes, {item["asin"]: [asked] for item in items})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Callable[..., Catalogue]]:
    opened = []

    def make(*items: dict[str, Any]) -> Catalogue:
        build(tmp_path / "shop", *files_of(tmp_path, *items))
        opened.append(Catalogue(tmp_path / "shop"))
        return opened[0]

    yield make
    for catalogue in opened:
        catalogue.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return generated.write(tmp_path_factory.mktemp("files"), 60)


@pytest.fixture(scope="module")
def folder(files: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(folder := tmp_path_factory.mktemp("built") / "shop", *files)
    return folder


@pytest.fixture(scope="module")
def built(folder: Path) -> Iterator[Catalogue]:
    with closing(Catalogue(folder)) as catalogue:
        yield catalogue


def test_title_description_first_bullet_and_options_are_searched(shop):
    catalogue = shop(
        item("TITLE", "A kettle"),
        item("ABOUT", "x", full_description="boils like a kettle"),
        item("BULLET", "x", small_description=["the kettle of all", "with a saucer"]),
        item("NAME", "x", customization_options={"kettle": [{"value": "left", "image": None}]}),
        item("VALUE", "x", customization_options={"size": [{"value": "Kettle", "image": None}]}),
        item("NONE", "x", query="kettle", category="kettle"),
    )
    assert {*catalogue.search("kettle")} == {"TITLE", "ABOUT", "BULLET", "NAME", "VALUE"}
    assert catalogue.search("saucer") == []


def test_words_are_found_in_any_form_and_more_and_rarer_ones_come_first(shop):
    titles = {
        "A": "blue plate",
        "B": "blue mug",
        "C": "blue bowl",
        "D": "red mug",
        "E": "Running Shoe",
        "F": "CAFÉ set",
    }
    catalogue = shop(*(item(asin, title) for asin, title in titles.items()))
    for words in ("shoes", "RUN"):
        assert catalogue.search(words) == ["E"]
    assert catalogue.search("café") == ["F"]
    assert catalogue.search("the and of to") == []
    assert catalogue.search("blue mug") == ["B", "D", "A", "C"]  # mug is in two, blue in three
    assert catalogue.search("plate plate plate mug")[0] == "A"


def test_at_most_50_are_found_and_ties_stand_in_the_order_of_the_catalogue(shop):
    asins = [f"A{number * 37 % 120}" for number in range(120)]
    assert shop(*(item(asin, "plain mug") for asin in asins)).search("mug") == asins[:50]


ODD_WORDS = [
    *('"', "(", "mug AND", "title:mug", "+mug -mug", "mug~2^3", "[a TO b]", "*", "\\", "🪙", "\0", "", " "),
    *("\ud800", "x" * 10_000, " ".join(f"mug{number}" for number in range(2_000))),
]


@given(st.text() | st.sampled_from(ODD_WORDS))
def test_no_text_is_an_error_and_what_is_found_is_in_the_catalogue(built, words):
    for asin in built.search(words):
        assert built.product(asin).asin == asin


def test_products_and_goals_are_those_of_the_files(built, files):
    items, attributes, human = files
    products = list(read_products(items, attributes))
    goals = shuffled(human_goals(products, human))
    assert [built.product(product.asin) for product in products] == products
    assert [built.goal(number) for number in range(built.goals)] == goals
    assert (built.products, len(goals)) == (60, 180)


def test_without_human_instructions_goals_are_synthetic(tmp_path, files):
    items, attributes, _ = files
    build(tmp_path / "shop", items, attributes)
    goals = shuffled(synthetic_goals(list(read_products(items, attributes)), attributes))
    with closing(Catalogue(tmp_path / "shop")) as catalogue:
        assert [catalogue.goal(number) for number in range(catalogue.goals)] == goals


def test_an_unknown_product_or_goal_is_named(built):
    for ask, unknown in ((built.product, "' OR 1 --"), (built.goal, -1), (built.goal, 180)):
        with pytest.raises(KeyError, match=f"{unknown}.* is not in this catalogue"):
            ask(unknown)


def test_an_existing_folder_is_left_alone(tmp_path, files):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/mine").touch()
    with pytest.raises(FileExistsError, match="shop exists already: remove it"):
        build(tmp_path / "shop", *files)
    assert [file.name for file in (tmp_path / "shop").iterdir()] == ["mine"]


def test_of_two_builds_at_once_one_builds(tmp_path, files):
    def attempt(_: int) -> type[BaseException] | None:
        try:
            build(tmp_path / "shop", *files)
        except FileExistsError as error:
            return type(error)

    with ThreadPoolExecutor(2) as pool:
        assert {*pool.map(attempt, range(2))} == {None, FileExistsError}
    assert {file.name for file in tmp_path.iterdir()} == {"shop", "shop.lock"}
    Catalogue(tmp_path / "shop").close()


def test_a_build_that_fails_leaves_nothing_and_the_next_one_works(tmp_path, files):
    items, attributes, human = files
    cut = tmp_path / "cut.json"
    cut.write_bytes(human.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut\.json is damaged"):
        build(tmp_path / "shop", items, attributes, cut)
    assert {file.name for file in tmp_path.iterdir()} == {"cut.json", "shop.lock"}
    build(tmp_path / "shop", *files)
    Catalogue(tmp_path / "shop").close()


def test_a_build_that_is_killed_does_not_disturb_the_next_one(tmp_path, files):
    items, attributes, human = files
    os.mkfifo(tmp_path / "items")  # never written to: the build waits for ever
    arguments = [str(path) for path in (tmp_path / "shop", tmp_path / "items", attributes, human)]
    with subprocess.Popen([sys.executable, "-c", BUILD, *arguments]) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "shop.building/catalogue.sqlite").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "shop.building").exists()
    build(tmp_path / "shop", items, attributes, human)
    assert {file.name for file in tmp_path.iterdir()} == {"items", "shop", "shop.lock"}
    Catalogue(tmp_path / "shop").close()


def test_files_without_products_or_goals_are_named(tmp_path):
    items, attributes, human = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"items\.json has no product"):
        build(tmp_path / "shop", items, attributes, human)
    files_of(tmp_path, item("A", "mug"))
    human.write_text("{}")
    with pytest.raises(ValueError, match=r"human\.json has no goal with a product of .*items\.json"):
        build(tmp_path / "shop", items, attributes, human)


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def set_format(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "catalogue.sqlite")) as db:
        db.execute("UPDATE meta SET value = 0 WHERE key = 'format'")
        db.commit()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut("catalogue.sqlite"), "is damaged .*: remove it and build it with `python -m empo2.agents.webshop build`"),
        (lambda folder: os.truncate(folder / "catalogue.sqlite", 0), "is damaged .*no such table: meta"),
        (lambda folder: (folder / "catalogue.sqlite").write_text("no database" * 100), "is damaged .*not a database"),
        (
            lambda folder: (folder / "catalogue.sqlite").unlink(),
            r"is no WebShop catalogue \(it has no catalogue.sqlite",
        ),
        (cut("index/weights.npy"), r"is damaged \(index/weights\.npy has [\d,]+ bytes, not [\d,]+\)"),
        (lambda folder: (folder / "index/places.npy").unlink(), "is damaged .*No such file"),
        (shutil.rmtree, "shop is no WebShop catalogue"),
        (set_format, "is a WebShop catalogue of format 0, not 2: remove it and build it"),
    ],
)
def test_a_folder_that_is_not_whole_gets_one_line(tmp_path, files, damage, says):
    build(tmp_path / "shop", *files)
    damage(tmp_path / "shop")
    with pytest.raises(CatalogueError, match=says) as error:
        Catalogue(tmp_path / "shop")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "shop") in str(error.value)
