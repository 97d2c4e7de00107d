"""The pages and the actions of WebShop, over a small shop of known products."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from empo2.agents.text_game.game import State
from empo2.agents.webshop.catalogue import Catalogue
from empo2.agents.webshop.environment import NOT_POSSIBLE, Environment, suggested_searches

MUG, TEAPOT = "B0BLUEMUG1", "B0TEAPOT01"
TO_THE_MUG = ["search[blue stoneware]", "click[b0bluemug1]"]
TO_THE_TEAPOT = ["search[teapot]", "click[b0teapot01]"]


@pytest.fixture
def visit(shop: Catalogue, goal_of: Callable[[str], int]) -> Callable[..., list[State]]:
    """The states of a customer who wants one product and takes some actions."""

    def play(wanted: str, *actions: str, max_steps: int = 15) -> list[State]:
        environment = Environment(shop)
        return [environment.reset(goal_of(wanted), max_steps), *map(environment.step, actions)]

    return play


@pytest.fixture
def instruction(shop: Catalogue, goal_of: Callable[[str], int]) -> str:
    return shop.goal(goal_of(MUG)).instruction


def page(state: State) -> list[str]:
    """What a page shows below the instruction."""
    parts = state.observation.split(" [SEP] ")
    return parts[parts.index("Instruction:") + 2 :]


def clicks(state: State) -> set[str]:
    return {action.removeprefix("click[").removesuffix("]") for action in state.valid_actions}


def test_the_search_page(visit, shop, goal_of, instruction):
    (state,) = visit(MUG)
    assert state.observation == f"WebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search"
    assert instruction.startswith("I want a blue mug that is dishwasher safe, and price lower than ")
    assert (state.score, state.done) == (0, False)
    environment = Environment(shop)
    environment.reset(goal_of(MUG), 15)
    assert environment.task_description == instruction
    with pytest.raises(KeyError, match="24"):
        environment.reset(24, 15)


def test_hits_come_ten_a_page(visit, instruction):
    _, first, second, third, again = visit(MUG, "search[Mug]", *["click[Next >]"] * 2, "click[< Prev]")
    assert first.observation.startswith(
        f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] Page 1 (Total results: 23) [SEP] Next > [SEP] "
    )
    assert page(second)[:4] == ["Back to Search", "Page 2 (Total results: 23)", "< Prev", "Next >"]
    assert page(third)[:3] == ["Back to Search", "Page 3 (Total results: 23)", "< Prev"]
    assert again == second
    shown = [*page(first)[3:], *page(second)[4:], *page(third)[3:]]
    asins, titles, prices = shown[::3], shown[1::3], shown[2::3]
    assert sorted(asins) == sorted([MUG, *(f"B0PLAIN{number:03}" for number in range(22))])
    assert titles[asins.index("B0PLAIN007")] == "Plain Mug 7"
    assert prices[asins.index(MUG)] == "$10.0 to $20.0"
    assert prices[asins.index("B0PLAIN007")] == "$12.99"
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


@pytest.mark.parametrize(
    ("asin", "button", "texts"),
    [
        (MUG, "description", ["For tea, or for pencils."]),
        (MUG, "features", ["Dishwasher safe", "Holds 12 ounces"]),
        (MUG, "reviews", ["No reviews found"]),
        (TEAPOT, "description", []),
        (TEAPOT, "features", []),
    ],
)
def test_the_pages_below_a_product(visit, asin, button, texts):
    actions = ["search[stoneware teapot]", f"click[{asin}]", f"click[{button}]", "click[< prev]"]
    *_, item, details, back = visit(asin, *actions)
    assert page(details) == ["Back to Search", "< Prev", *texts]
    assert clicks(details) == {"back to search", "< prev"}
    assert back == item


def test_back_from_a_product_leads_to_its_page_of_hits_and_forgets_its_options(visit):
    asin = page(visit(MUG, "search[mug]", "click[next >]")[-1])[4]
    *_, hits, _, back = visit(MUG, "search[mug]", "click[next >]", f"click[{asin}]", "click[< prev]")
    assert back == hits
    again = [*TO_THE_MUG, "click[blue]", "click[large]", "click[< prev]", "click[b0bluemug1]", "click[buy now]"]
    assert visit(MUG, *again)[-1].score == 50


PAGES = [["search[mug]"], TO_THE_MUG, [*TO_THE_MUG, "click[features]"]]


@pytest.mark.parametrize("path", [[], *PAGES])
def test_a_search_is_possible_on_every_page_and_forgets_product_and_options(visit, path):
    states = visit(MUG, *path, "search[teapot]", "click[blue]", "click[buy now]")
    assert page(states[-3])[1:3] == ["Page 1 (Total results: 1)", TEAPOT]
    assert [state.observation for state in states[-2:]] == [NOT_POSSIBLE] * 2


@pytest.mark.parametrize("path", PAGES)
def test_back_to_search_begins_anew(visit, path):
    states = visit(MUG, *path, "click[Back to Search]", "click[buy now]")
    assert states[-2] == states[0]
    assert states[-1].observation == NOT_POSSIBLE


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


def test_a_score_is_exact(visit):
    bought = visit(TEAPOT, *TO_THE_TEAPOT, "click[buy now]")[-1]
    assert bought.score == 100 * (2 / 3)
    assert visit(MUG, *TO_THE_TEAPOT, "click[buy now]")[-1].score == 0  # the wrong product
    assert bought.observation == "Bought [SEP] Teapot [SEP] Score: 66.6667 of 100"


def test_a_button_goes_before_an_option_of_its_name(visit):
    *_, item = visit(TEAPOT, *TO_THE_TEAPOT)
    assert page(item)[2:9] == ["theme", "buy now", "< prev", "twin", "finish", "twin", "next >"]
    assert clicks(item) == {
        *("back to search", "< prev", "twin", "next >", "[a] b"),
        *("description", "features", "reviews", "buy now"),
    }
    assert page(visit(TEAPOT, *TO_THE_TEAPOT, "click[< prev]")[-1])[1] == "Page 1 (Total results: 1)"


def test_a_value_of_two_options_is_the_later_ones(visit):
    # Were "twin" the theme's, the finish that follows would leave it chosen: 100.
    chosen = ["click[twin]", "click[[A] B]", "click[buy now]"]
    assert visit(TEAPOT, *TO_THE_TEAPOT, *chosen)[-1].score == 100 * (2 / 3)
    assert visit(TEAPOT, *TO_THE_TEAPOT, *reversed(chosen[:2]), "click[buy now]")[-1].score == 100


@pytest.mark.parametrize(
    "action",
    [
        *("", "buy now", "click", "click[]", "search[]", "click[search]", "Click[buy now]", "SEARCH[mug]"),
        *("search mug", "click[b0bluemug1]", "click[green]", "click[buy now] please", "I click[buy now]"),
        *("click[ buy now ]", "think[blue]", "click[buy now", "höre 数", "click[next >]", "search[\n"),
    ],
)
def test_what_is_not_possible_changes_nothing_and_says_so(visit, action):
    *_, item, refused, after = visit(MUG, *TO_THE_MUG, action, "click[blue]")
    assert refused.observation == NOT_POSSIBLE
    assert (refused.score, refused.done, refused.valid_actions) == (0, False, item.valid_actions)
    assert after == item  # the same page, on which the color is not marked


@pytest.mark.parametrize("action", [" search[teapot]\n", "search[TEAPOT]", "search[teapot [!]]"])
def test_blanks_around_an_action_case_and_brackets_in_it_do_not_matter(visit, action):
    assert visit(MUG, action)[-1] == visit(MUG, "search[teapot]")[-1]


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
    words = "i want a blue mug that is dishwasher safe"
    whole, *spans = suggested_searches(goal)
    assert whole == words
    assert len(set(spans)) == 3
    assert all(f" {span} " in f" {words} " and span.count(" ") == 2 for span in spans)
    (start,) = visit(MUG)
    assert start.valid_actions == tuple(sorted(f"search[{each}]" for each in (whole, *spans)))
    assert suggested_searches(shop.goal(goal_of(TEAPOT))) == ("a teapot",)  # too short for spans


ACTIONS = st.one_of(
    st.integers(min_value=0, max_value=99),  # one of the valid actions
    st.sampled_from(["search[mug]", "search[teapot]", "click[buy now]", "click[next >]", "click[< prev]"]),
    st.text(),
    st.text().map("search[{}]".format),
    st.text().map("click[{}]".format),
)


@settings(max_examples=200)
@given(actions=st.lists(ACTIONS, max_size=20), number=st.integers(min_value=0, max_value=23))
def test_no_actions_raise_or_leave_the_range_and_equal_ones_give_equal_states(shop, actions, number):
    def play() -> list[State]:
        environment = Environment(shop)
        states = [environment.reset(number, 15)]
        for action in actions:
            if states[-1].done:
                break
            valid = states[-1].valid_actions
            states.append(environment.step(valid[action % len(valid)] if isinstance(action, int) else action))
        return states

    states = play()
    assert all(0 <= state.score <= 100 for state in states)
    assert all(state.valid_actions == tuple(sorted(set(state.valid_actions))) for state in states)
    assert play() == states
