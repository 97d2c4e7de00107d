"""The catalogue: what is found, in which order, and what becomes of builds and folders that are not whole."""

import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.webshop import generated
from empo2.agents.webshop.catalogue import Catalogue, CatalogueError, build
from empo2.agents.webshop.goals import human_goals, shuffled, synthetic_goals
from empo2.agents.webshop.products import read_products

from .shops import item, wish, write


def files_of(folder: Path, *items: dict[str, Any]) -> list[Path]:
    asked = wish("i want it sturdy", ["sturdy"])
    attributes = {item["asin"]: {"attributes": ["sturdy"], **asked} for item in items}
    return write(folder, items, attributes, {item["asin"]: [asked] for item in items})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return generated.write(tmp_path_factory.mktemp("files"), 60)


@pytest.fixture(scope="module")
def built(files: tuple[Path, Path, Path]) -> Iterator[Catalogue]:
    build(folder := files[0].parent / "shop", *files)
    with closing(Catalogue(folder)) as catalogue:
        yield catalogue


def test_title_description_first_bullet_and_options_are_searched(tmp_path):
    items = [
        item("TITLE", "A kettle"),
        item("ABOUT", "x", full_description="boils like a kettle"),
        item("BULLET", "x", small_description=["the kettle of all", "with a saucer"]),
        item("NAME", "x", customization_options={"kettle": [{"value": "left", "image": None}]}),
        item("VALUE", "x", customization_options={"size": [{"value": "Kettle", "image": None}]}),
        item("NONE", "x", query="kettle", category="kettle"),
    ]
    build(tmp_path / "shop", *files_of(tmp_path, *items))
    with closing(Catalogue(tmp_path / "shop")) as catalogue:
        assert {*catalogue.search("kettle")} == {"TITLE", "ABOUT", "BULLET", "NAME", "VALUE"}
        assert catalogue.search("saucer") == []


@pytest.mark.parametrize(
    "words",
    [
        *('"', "(", "mug AND", "title:mug", "+mug -mug", "mug~2^3", "[a TO b]", "*", "\\", "🪙", "\0", "", " "),
        *("\ud800", "x" * 10_000, " ".join(f"mug{number}" for number in range(2_000))),
    ],
)
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


def test_of_two_builds_at_once_one_builds(tmp_path, files):
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(build, tmp_path / "shop", *files) for _ in range(2)]
    (refused,) = filter(None, [each.exception() for each in builds])
    assert isinstance(refused, FileExistsError) and "shop exists already: remove it" in str(refused)
    assert {file.name for file in tmp_path.iterdir()} == {"shop", "shop.lock"}
    Catalogue(tmp_path / "shop").close()


def test_a_build_that_was_killed_or_fails_leaves_nothing_and_the_next_one_works(tmp_path, files):
    items, attributes, human = files
    (tmp_path / "shop.building").mkdir()
    (tmp_path / "shop.building/catalogue.sqlite").write_text("half a catalogue")
    cut = tmp_path / "cut.json"
    cut.write_bytes(human.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut\.json is damaged"):
        build(tmp_path / "shop", items, attributes, cut)
    assert {file.name for file in tmp_path.iterdir()} == {"cut.json", "shop.lock"}
    build(tmp_path / "shop", *files)
    Catalogue(tmp_path / "shop").close()


def test_files_without_products_or_goals_are_named(tmp_path):
    items, attributes, human = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"items\.json has no product"):
        build(tmp_path / "shop", items, attributes, human)
    files_of(tmp_path, item("A", "mug"))
    human.write_text("{}")
    with pytest.raises(ValueError, match=r"human\.json has no goal with a product of .*items\.json"):
        build(tmp_path / "shop", items, attributes, human)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (("catalogue.sqlite", 10_000), "is damaged .*: remove it and build it with `python -m"),
        (("catalogue.sqlite", 0), "is damaged .*no such table: meta"),
        (("catalogue.sqlite", None), r"is no WebShop catalogue \(it has no catalogue.sqlite"),
        (("index/weights.npy", 100), r"is damaged \(index/weights\.npy has 100 bytes, not [\d,]+\)"),
        (("index/places.npy", None), "is damaged .*No such file"),
        ("UPDATE meta SET value = 0 WHERE key = 'format'", "is a WebShop catalogue of format 0, not 2: remove it and"),
    ],
)
def test_a_folder_that_is_not_whole_gets_one_line(tmp_path, files, damage, says):
    build(tmp_path / "shop", *files)
    match damage:
        case file, None:
            (tmp_path / "shop" / file).unlink()
        case file, size:
            os.truncate(tmp_path / "shop" / file, size)
        case change:
            with closing(sqlite3.connect(tmp_path / "shop/catalogue.sqlite")) as db, db:
                db.execute(change)
    with pytest.raises(CatalogueError, match=says) as error:
        Catalogue(tmp_path / "shop")
    assert str(tmp_path / "shop") in str(error.value) and "\n" not in str(error.value)
