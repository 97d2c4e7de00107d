"""Goals out of instructions in the original's format, their order and their split."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from empo2.agents.webshop.goals import Goal, human_goals, shuffled, split, synthetic_goals
from empo2.agents.webshop.products import Product


def product(asin: str = "B1", price: float = 979.0, **changes: object) -> Product:
    """Of 979 dollars, at which 980 and 990 alone are left to draw from: the cap is 990."""
    defaults = {
        "asin": asin,
        "title": f"Dress {asin}",
        "query": "dresses",
        "category": "fashion",
        "product_category": "Clothing › Dresses",
        "description": "",
        "bullet_points": (),
        "prices": (price,),
        "price": price,
        "options": {"size": ("s", "m"), "color": ("red", "blue | white")},
        "attributes": ("soft",),
    }
    return Product(**{**defaults, **changes})


@pytest.fixture
def instructions(tmp_path: Path):
    def write(content: object) -> Path:
        file = tmp_path / "instructions.json"
        file.write_text(json.dumps(content))
        return file

    return write


def asked(text: object = "Find me a dress", attributes: object = ("soft",), options: object = ("red", "s")) -> dict:
    return {"instruction": text, "instruction_attributes": attributes, "instruction_options": options}


def test_a_human_goal_is_its_instruction_with_the_cap(instructions):
    file = instructions({"B1": [asked("..Find me a dress...", ["soft", "warm"], ["red", "s"])]})
    [goal] = human_goals([product()], file)
    assert goal == Goal(
        asin="B1",
        query="dresses",
        name="Dress B1",
        product_category="Clothing › Dresses",
        instruction="Find me a dress, and price lower than 990.00 dollars",
        attributes=("soft", "warm"),
        options=("red", "s"),
        option_names=(),
        price_cap=990.0,
    )


def test_human_goals_come_in_the_order_of_the_products(instructions):
    file = instructions({"B1": [asked("one"), asked("two")], "B2": [asked("three")]})
    goals = human_goals([product("B2"), product("B1")], file)
    assert [goal.instruction.partition(",")[0] for goal in goals] == ["three", "one", "two"]


def test_what_makes_no_human_goal_is_left_out_and_counted(instructions, caplog):
    odd = [asked(attributes=[]), asked(attributes=None), {"instruction": "dress"}, asked(None), None, "dress"]
    file = instructions({"B1": odd, "B2": [asked("ok")], "B3": None, "B4": "x", "B5": [asked(), asked()]})
    goals = list(human_goals([product("B1"), product("B2"), product("B3"), product("B4")], file))
    assert [goal.asin for goal in goals] == ["B2"]
    [line] = caplog.messages
    assert line.endswith(
        "instructions left out: 3 without attributes, 3 without a text, 2 of products that are not in the catalogue"
    )


@pytest.mark.parametrize(
    ("options", "values", "names"),
    [
        (["red", None, "s"], ("red", "s"), ()),
        ({"color": "red", "fit": None, "size": "s"}, ("red", "s"), ("color", "size")),
        ([], (), ()),
        (None, (), ()),
        ({}, (), ()),
    ],
)
def test_options_are_values_and_have_names_where_they_are_a_mapping(instructions, options, values, names):
    [goal] = human_goals([product()], instructions({"B1": [asked(options=options)]}))
    assert (goal.options, goal.option_names) == (values, names)


@pytest.mark.parametrize(
    ("price", "caps"),
    [
        (0.0, {20, 30, 40}),
        (9.99, {20, 30, 40}),
        (10.0, {30, 40, 50}),  # the cap lies above the price
        (955.0, {970, 980, 990}),
        (969.0, {980, 990}),
        (979.0, {990}),
    ],
)
def test_the_cap_is_the_larger_of_two_of_the_four_nearest(instructions, price: float, caps: set):
    goals = list(human_goals([product(price=price)], instructions({"B1": [asked()] * 100})))
    assert {goal.price_cap for goal in goals} == caps
    assert all(goal.instruction.endswith(f", and price lower than {goal.price_cap:.2f} dollars") for goal in goals)


def test_the_caps_are_drawn_evenly_and_anew_for_each_instruction_alone(instructions):
    """Of the six pairs of 20, 30, 40 and 50, 30 is the larger in one, 40 in two and 50 in three."""
    file = instructions({"B1": [asked()] * 600})
    goals = list(human_goals([product(price=12.99)], file))
    counts = Counter(goal.price_cap for goal in goals)
    assert (counts[30], counts[40], counts[50]) == pytest.approx((100, 200, 300), abs=40)
    assert list(human_goals([product("B0"), product(price=12.99)], file)) == goals


def test_without_two_caps_to_draw_from_there_is_none(instructions):
    [goal] = human_goals([product(price=980.0)], instructions({"B1": [asked("Find me a dress.")]}))
    assert (goal.instruction, goal.price_cap) == ("Find me a dress", 1_000_000.0)


def test_synthetic_goals_are_all_combinations_of_options(instructions):
    goals = list(synthetic_goals([product()], instructions({"B1": asked("Find me a soft dress")})))
    assert [goal.options for goal in goals] == [(color, size) for color in ("red", "blue | white") for size in "sm"]
    assert {goal.option_names for goal in goals} == {("color", "size")}
    assert goals[2].instruction == (
        "Find me a soft dress with color: blue | white, and size: s, and price lower than 990.00 dollars"
    )
    assert (goals[2].asin, goals[2].name, goals[2].attributes) == ("B1", "Dress B1", ("soft",))


def test_a_product_without_options_has_one_synthetic_goal(instructions):
    file = instructions({"B2": asked("Find me a scarf.", ["soft"])})
    (goal,) = synthetic_goals([product("B1"), product("B2", price=980.0, options={})], file)
    assert (goal.asin, goal.instruction) == ("B2", "Find me a scarf.")


def test_what_makes_no_synthetic_goal_is_left_out(instructions, caplog):
    entries = {
        "B1": asked(None),
        "B2": asked(attributes=[]),
        "B3": {"attributes": ["soft"]},
        "B4": None,
        "B5": asked(7),
    }
    products = [product(f"B{number}") for number in range(1, 7)] + [
        product("B7", options={"size": (), "color": ("x",)})
    ]
    assert list(synthetic_goals(products, instructions({**entries, "B7": asked()}))) == []
    [line] = caplog.messages
    assert line.endswith("instructions left out: 1 without attributes, 1 without a text")


def test_the_order_is_the_originals():
    state = random.getstate()
    try:
        random.seed(233)
        order = list(range(6910))
        random.shuffle(order)
    finally:
        random.setstate(state)
    assert shuffled(range(6910)) == order
    assert shuffled(f"goal {index}" for index in range(6910)) == [f"goal {index}" for index in order]


@pytest.mark.parametrize(
    ("goals", "test", "validation"),
    [(12_087, 500, 1500), (3000, 500, 1500), (2998, 499, 1499), (600, 100, 300), (6, 1, 3), (2, 0, 1), (0, 0, 0)],
)
def test_the_split_and_that_of_verl_agent_which_trains_on_all_that_is_not_tested(
    goals: int, test: int, validation: int
):
    ours = {"test": range(test), "validation": range(test, validation), "train": range(validation, goals)}
    theirs = {"test": range(test), "validation": range(test, test), "train": range(test, goals)}
    assert (split(goals), split(goals, "verl-agent")) == (ours, theirs)
