"""Goals out of instructions in the original's format, their order and their split."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from empo2.agents.webshop.goals import human_goals, shuffled, split, synthetic_goals
from empo2.agents.webshop.products import Product

from .shops import GOAL, PRODUCT, write


def product(asin: str = "B1", price: float = 979.0, **changes: object) -> Product:
    """Of 979 dollars, at which 980 and 990 alone are left to draw from: the cap is 990."""
    return replace(PRODUCT, asin=asin, price=price, **changes)


@pytest.fixture
def instructions(tmp_path: Path):
    def write_all(content: Mapping[str, object]) -> Path:
        return write(tmp_path, [], content, {})[1]

    return write_all


def asked(text: object = "Find me a lamp", attributes: object = ("soft",), options: object = ("red", "small")) -> dict:
    return {"instruction": text, "instruction_attributes": attributes, "instruction_options": options}


def test_human_goals_are_instructions_with_the_cap_in_the_order_of_the_products(instructions):
    lamp = asked("..Find me a lamp...", ["soft", "warm"], ["red", "large"])
    file = instructions({"B1": [lamp, asked("two")], "B2": [asked("Find me a scarf.")]})
    scarf, goal, two = human_goals([product("B2", price=980.0), product("B1")], file)
    assert (scarf.instruction, scarf.price_cap) == ("Find me a scarf", 1_000_000.0)  # without two caps to draw from
    assert two.instruction == "two, and price lower than 990.00 dollars"
    text = "Find me a lamp, and price lower than 990.00 dollars"
    wanted = replace(GOAL, attributes=("soft", "warm"), options=("red", "large"))
    assert goal == replace(wanted, instruction=text, price_cap=990.0)


def test_what_makes_no_human_goal_is_left_out_and_counted(instructions, caplog):
    odd = [asked(attributes=[]), asked(attributes=None), {"instruction": "dress"}, asked(None), None, "dress"]
    file = instructions({"B1": odd, "B2": [asked("ok")], "B3": None, "B4": "x", "B5": [asked(), asked()]})
    goals = list(human_goals([product("B1"), product("B2"), product("B3"), product("B4")], file))
    assert [goal.asin for goal in goals] == ["B2"]
    [line] = caplog.messages
    reasons = "3 without attributes, 3 without a text, 2 of products that are not in the catalogue"
    assert line.endswith(f"instructions left out: {reasons}")


def test_options_are_values_and_have_names_where_they_are_a_mapping(instructions):
    forms = [["red", None, "s"], {"color": "red", "fit": None, "size": "s"}, None, {}]
    goals = human_goals([product()], instructions({"B1": [asked(options=options) for options in forms]}))
    found = [(goal.options, goal.option_names) for goal in goals]
    assert found == [(("red", "s"), ()), (("red", "s"), ("color", "size")), ((), ()), ((), ())]


def test_the_cap_is_the_larger_of_two_of_the_four_nearest_above_the_price(instructions):
    for price, caps in {9.99: {20, 30, 40}, 10.0: {30, 40, 50}, 969.0: {980, 990}, 979.0: {990}}.items():
        goals = list(human_goals([product(price=price)], instructions({"B1": [asked()] * 100})))
        assert {goal.price_cap for goal in goals} == caps, price
        assert all(goal.instruction.endswith(f", and price lower than {goal.price_cap:.2f} dollars") for goal in goals)


def test_the_caps_are_drawn_evenly_and_anew_for_each_instruction_alone(instructions):
    """Of the six pairs of 20, 30, 40 and 50, 30 is the larger in one, 40 in two and 50 in three."""
    file = instructions({"B1": [asked()] * 600})
    goals = list(human_goals([product(price=12.99)], file))
    counts = Counter(goal.price_cap for goal in goals)
    assert (counts[30], counts[40], counts[50]) == pytest.approx((100, 200, 300), abs=40)
    assert list(human_goals([product("B0"), product(price=12.99)], file)) == goals


def test_synthetic_goals_are_all_combinations_of_options(instructions):
    goals = list(synthetic_goals([product()], instructions({"B1": asked("Find me a soft lamp")})))
    assert [goal.options for goal in goals] == [*itertools.product(("red", "blue"), ("small", "large"))]
    text = "Find me a soft lamp with color: blue, and size: small, and price lower than 990.00 dollars"
    wanted = replace(GOAL, attributes=("soft",), options=("blue", "small"), option_names=("color", "size"))
    assert goals[2] == replace(wanted, instruction=text, price_cap=990.0)


def test_what_makes_no_synthetic_goal_is_left_out(instructions, caplog):
    entries = {"B1": asked(None), "B2": asked(attributes=[]), "B3": {"attributes": ["soft"]}, "B4": asked(7)}
    products = [product(f"B{number}") for number in range(1, 7)]
    products += [product("B7", options={"size": (), "color": ("x",)}), product("B8", price=980.0, options={})]
    (goal,) = synthetic_goals(products, instructions({**entries, "B6": None, "B7": asked(), "B8": asked("A scarf.")}))
    assert (goal.asin, goal.instruction) == ("B8", "A scarf.")
    [line] = caplog.messages
    assert line.endswith("instructions left out: 1 without attributes, 1 without a text")


def test_the_order_is_the_originals():
    order = list(range(6910))
    random.Random(233).shuffle(order)
    assert shuffled(range(6910)) == order


@pytest.mark.parametrize(
    ("goals", "test", "validation"), [(12_087, 500, 1500), (3000, 500, 1500), (2998, 499, 1499), (6, 1, 3), (0, 0, 0)]
)
def test_the_split_and_that_of_verl_agent_which_trains_on_all_that_is_not_tested(goals, test, validation):
    ours = {"test": range(test), "validation": range(test, validation), "train": range(validation, goals)}
    theirs = {"test": range(test), "validation": range(test, test), "train": range(test, goals)}
    assert (split(goals), split(goals, "verl-agent")) == (ours, theirs)
