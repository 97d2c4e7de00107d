"""The pages and the actions of WebShop, over a small shop of known products."""

from collections.abc import Callable

import pytest

from empo2.agents.text_game.game import State
from empo2.agents.webshop.catalogue import Catalogue
from empo2.agents.webshop.environment import NOT_POSSIBLE, Environment, suggested_searches

MUG, TEAPOT = "B0BLUEMUG1", "B0TEAPOT01"
TO_THE_MUG = ["search[blue stoneware]", "click[b0bluemug1]"]


@pytest.fixture
def visit(shop: Catalogue, goal_of: Callable[[str], int]) -> Callable[..., list[State]]:
    def play(wanted: str, *actions: str, max_steps: int = 15) -> list[State]:
        environment = Environment(shop)
        return [environment.reset(goal_of(wanted), max_steps), *map(environment.step, actions)]

    return play


def page(state: State) -> list[str]:
    parts = state.observation.split(" [SEP] ")
    return parts[parts.index("Instruction:") + 2 :]


def clicks(state: State) -> set[str]:
    return {action.removeprefix("click[").removesuffix("]") for action in state.valid_actions}


def test_the_search_page(shop, goal_of):
    environment = Environment(shop)
    state = environment.reset(goal_of(MUG), 15)
    instruction = shop.goal(goal_of(MUG)).instruction
    assert instruction.startswith("I want a blue mug that is dishwasher safe, and price lower than ")
    assert environment.task_description == instruction
    assert state.observation == f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search"
    assert (state.score, state.done) == (0, False)
    with pytest.raises(KeyError, match="24"):
        environment.reset(24, 15)


def test_hits_come_ten_a_page(visit):
    _, first, second, third, again = visit(MUG, "search[Mug]", *["click[Next >]"] * 2, "click[< Prev]")
    assert page(first)[:3] == ["Back to Search", "Page 1 (Total results: 23)", "Next >"]
    assert page(second)[:4] == ["Back to Search", "Page 2 (Total results: 23)", "< Prev", "Next >"]
    assert page(third)[:3] == ["Back to Search", "Page 3 (Total results: 23)", "< Prev"]
    assert again == second
    shown = [*page(first)[3:], *page(second)[4:], *page(third)[3:]]
    asins, titles, prices = shown[::3], shown[1::3], shown[2::3]
    assert sorted(asins) == sorted([MUG, *(f"B0PLAIN{number:03}" for number in range(22))])
    seven = asins.index("B0PLAIN007")
    assert (titles[seven], prices[seven], prices[asins.index(MUG)]) == ("Plain Mug 7", "$12.99", "$10.0 to $20.0")
    assert clicks(first) == {"back to search", "next >", *(asin.lower() for asin in asins[:10])}
    assert clicks(third) == {"back to search", "< prev", *(asin.lower() for asin in asins[20:])}


def test_a_page_that_does_not_exist_cannot_be_reached(visit):
    states = visit(MUG, "search[mug]", "click[< prev]", "click[next >]", "click[next >]", "click[next >]")
    assert [state.observation == NOT_POSSIBLE for state in states] == [False, False, True, False, False, True]
    _, nothing, beyond = visit(MUG, "search[zeppelin]", "click[next >]")
    assert page(nothing) == ["Back to Search", "Page 1 (Total results: 0)"]
    assert clicks(nothing) == {"back to search"}
    assert beyond.observation == NOT_POSSIBLE


def test_the_product_page(visit):
    *_, item = visit(MUG, *TO_THE_MUG)
    assert page(item) == [
        *("Back to Search", "< Prev", "color", "blue", "red | white", "size", "small", "large", "Blue Stoneware Mug"),
        *("Price: $10.0 to $20.0", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"),
    ]
    assert clicks(item) == {
        *("back to search", "< prev", "blue", "red | white", "small", "large"),
        *("description", "features", "reviews", "buy now"),
    }


def test_the_pages_below_a_product(visit):
    below = {"description": ["For tea, or for pencils."], "features": ["Dishwasher safe", "Holds 12 ounces"]}
    for button, texts in (below | {"reviews": ["No reviews found"]}).items():
        *_, item, details, back = visit(MUG, *TO_THE_MUG, f"click[{button}]", "click[< prev]")
        assert page(details) == ["Back to Search", "< Prev", *texts]
        assert (clicks(details), back) == ({"back to search", "< prev"}, item)


def test_back_from_a_product_leads_to_its_page_of_hits_and_forgets_its_options(visit):
    asin = page(visit(MUG, "search[mug]", "click[next >]")[-1])[4]
    *_, hits, _, back = visit(MUG, "search[mug]", "click[next >]", f"click[{asin}]", "click[< prev]")
    assert back == hits
    again = [*TO_THE_MUG, "click[blue]", "click[large]", "click[< prev]", "click[b0bluemug1]", "click[buy now]"]
    assert visit(MUG, *again)[-1].score == 50


@pytest.mark.parametrize("path", [["search[mug]"], TO_THE_MUG, [*TO_THE_MUG, "click[features]"]])
def test_another_search_and_back_to_search_are_possible_on_every_page_and_forget_product_and_options(visit, path):
    states = visit(MUG, *path, "search[teapot]", "click[blue]", "click[buy now]")
    assert page(states[-3])[1:3] == ["Page 1 (Total results: 1)", TEAPOT]
    assert [state.observation for state in states[-2:]] == [NOT_POSSIBLE] * 2
    start, *_, again, refused = visit(MUG, *path, "click[Back to Search]", "click[buy now]")
    assert (again, refused.observation) == (start, NOT_POSSIBLE)


@pytest.mark.parametrize(
    ("options", "score"),
    [
        ([], 50),  # attribute and price of four
        (["blue"], 75),
        (["blue", "large", "features", "< prev"], 100),
        (["blue", "red | white", "large"], 75),  # the last choice of an option counts
        (["small", "large", "red | white", "blue"], 100),
    ],
)
def test_buying_scores_what_was_chosen(visit, options, score):
    *before, bought = visit(MUG, *TO_THE_MUG, *(f"click[{value}]" for value in options), "click[buy now]")
    assert (bought.score, bought.done, bought.valid_actions) == (score, True, ())
    assert {(state.score, state.done) for state in before} == {(0, False)}
    wrong = visit(TEAPOT, *TO_THE_MUG, "click[buy now]")[-1]
    assert wrong.observation == "Bought [SEP] Blue Stoneware Mug [SEP] Score: 0 of 100"


@pytest.mark.parametrize(
    "action",
    [
        *("", "buy now", "click[]", "search[]", "Click[buy now]", "search mug", "click[b0bluemug1]", "click[green]"),
        *("I click[buy now]", "click[ buy now ]", "think[blue]", "click[buy now", "höre 数", "search[\n"),
    ],
)
def test_what_is_not_possible_changes_nothing_and_says_so(visit, action):
    *_, item, refused, after = visit(MUG, *TO_THE_MUG, action, "click[blue]")
    assert refused.observation == NOT_POSSIBLE
    assert (refused.score, refused.done, refused.valid_actions) == (0, False, item.valid_actions)
    assert after == item  # the same page, on which the color is not marked


def test_blanks_around_an_action_case_and_brackets_in_it_do_not_matter(visit):
    states = [visit(MUG, f"{action}\n")[-1] for action in ("search[teapot]", " search[TEAPOT]", "search[teapot [!]]")]
    assert states[0].observation != NOT_POSSIBLE and states == [states[0]] * 3


def test_exactly_max_steps_actions_go_through_and_the_last_may_buy(visit):
    states = visit(MUG, *TO_THE_MUG, "nonsense", max_steps=3)
    assert [state.done for state in states] == [False, False, False, True]
    assert states[-1].score == 0
    assert visit(MUG, *TO_THE_MUG, "click[buy now]", max_steps=3)[-1].score == 50
    with pytest.raises(RuntimeError, match="the episode is over"):
        visit(MUG, *TO_THE_MUG, "click[blue]", max_steps=2)
    with pytest.raises(RuntimeError, match="the episode is over"):
        visit(MUG, *TO_THE_MUG, "click[buy now]", "search[mug]")


def test_searches_are_offered_that_the_instruction_suggests(shop, goal_of, visit):
    goal = shop.goal(goal_of(MUG))
    whole, *spans = suggested_searches(goal)
    assert (whole, len(set(spans))) == ("i want a blue mug that is dishwasher safe", 3)
    assert all(f" {span} " in f" {whole} " and span.count(" ") == 2 for span in spans)
    (start,) = visit(MUG)
    assert start.valid_actions == tuple(sorted(f"search[{each}]" for each in (whole, *spans)))
    assert suggested_searches(shop.goal(goal_of(TEAPOT))) == ("a teapot",)  # too short for spans
