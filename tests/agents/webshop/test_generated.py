"""The project's own shop: the original's file formats, goals that can be reached, and a cache that is built once."""

import json
import logging
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from empo2.agents.webshop.catalogue import Catalogue
from empo2.agents.webshop.generated import DEPARTMENTS, own_catalogue, write
from empo2.agents.webshop.goals import Goal, human_goals, synthetic_goals
from empo2.agents.webshop.products import Product, read_products
from empo2.agents.webshop.reward import OptionMatching, reward

OWN = "from empo2.agents.webshop.generated import own_catalogue; print(own_catalogue(30))"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return write(tmp_path_factory.mktemp("files"), 200)


@pytest.fixture(scope="module")
def products(files) -> list[Product]:
    return list(read_products(*files[:2]))


def test_odd_forms_of_the_original_occur(files):
    items = json.loads(files[0].read_text())
    forms = Counter(item["pricing"].count("$") for item in items)
    assert forms.keys() == {0, 1, 2}
    assert {type(item["small_description"]) for item in items} == {list, str}
    assert any(None in item["customization_options"].values() for item in items)
    assert any(not item["name"].isascii() for item in items)


def test_every_record_is_a_product(files, products, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(list(read_products(*files[:2]))) == 200
        assert len(list(human_goals(products, files[2]))) == 600
    assert caplog.text == ""
    assert {product.category for product in products} == {*DEPARTMENTS}


def test_every_option_can_be_clicked(products):
    buttons = {"back to search", "< prev", "description", "features", "reviews", "buy now"}
    for product in products:
        values = [value for values in product.options.values() for value in values]
        assert len({*values, *buttons}) == len(values) + len(buttons)


def bought(product: Product, goal: Goal, option_matching: OptionMatching = "original") -> float:
    """The reward for this product, with those of the goal's options that it has."""
    chosen = {name: value for name, values in product.options.items() for value in values if value in goal.options}
    return reward(product, chosen, goal, option_matching).value


def test_every_goal_is_reached_by_its_product(files, products):
    by_asin = {product.asin: product for product in products}
    assert {bought(by_asin[goal.asin], goal) for goal in human_goals(products, files[2])} == {1.0}
    synthetic = list(synthetic_goals(products, files[1]))
    assert {bought(by_asin[goal.asin], goal, "values") for goal in synthetic} == {1.0}
    # In the original's way, a scent with a colour in it, sand or mint, is bought as that and asked for as it is.
    missed = [{*goal.options} for goal in synthetic if bought(by_asin[goal.asin], goal) < 1]
    assert 0 < len(missed) < len(synthetic) / 10
    assert all(options & {"sandalwood", "peppermint"} for options in missed)


def test_files_follow_from_number_and_seed(tmp_path, files):
    for name, seed in ("same", 0), ("other", 1):
        (tmp_path / name).mkdir()
        write(tmp_path / name, 200, seed)
    for file in files:
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "other" / file.name).read_bytes() != file.read_bytes()


def test_of_many_products_some_have_instructions_and_none_are_refused(tmp_path):
    items, attributes, human = write(tmp_path, 5_000)
    assert len(json.loads(items.read_text())) == len(json.loads(attributes.read_text())) == 5_000
    assert sum(map(len, json.loads(human.read_text()).values())) == 7_500  # three for each second product
    with pytest.raises(ValueError, match="products 0 must be at least 1"):
        write(tmp_path, 0)


def test_the_own_catalogue_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = own_catalogue(30)
    built = folder.stat().st_mtime_ns
    assert (own_catalogue(30), folder.stat().st_mtime_ns) == (folder, built)
    assert folder.parent == tmp_path / "empo2"
    with closing(Catalogue(folder)) as catalogue:
        assert (catalogue.products, catalogue.goals) == (30, 90)


def test_several_processes_may_ask_for_the_own_catalogue_at_once(tmp_path):
    command = [sys.executable, "-c", OWN]
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    started = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate(timeout=200)[0].strip() for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    Catalogue(Path(*folders)).close()
