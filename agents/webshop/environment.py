"""WebShop's pages and actions over a catalogue: the text mode of Yao et al. (2022), arXiv 2207.01206.

docs/webshop.md lists the differences from the original engine.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..text_game.game import FULL_SCORE, State
from .catalogue import Catalogue
from .goals import Goal
from .products import Product
from .reward import OptionMatching, reward

HITS = 10  # on a page, in the original
ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
PRICE_CLAUSE = ", and price lower than "
NOT_POSSIBLE = "Nothing was done: that is no action of this page."

# Searches offered in the choice form, besides the whole instruction: number of word spans, and their lengths.
SPANS, SPAN_WORDS = 3, 3


@dataclass(frozen=True)
class Page:
    """A page: its text, and a function for each lower-cased clickable text that returns the page behind it.

    score: 0..100 on the page after buying, else None.
    """

    texts: Sequence[str]
    clicks: Mapping[str, Callable[[], "Page"]]
    searches: tuple[str, ...] = ()
    score: float | None = None

    def state(self, last: bool) -> State:
        actions = [*(f"search[{words}]" for words in self.searches), *(f"click[{text}]" for text in self.clicks)]
        observation = " [SEP] ".join(text.strip() for text in self.texts if text)
        return State(observation, self.score or 0.0, last or self.score is not None, tuple(sorted(actions)))


class Environment:
    """WebShop, for any number of episodes in sequence. Equal goals and actions give equal trajectories.

    The score is the original's reward times 100, and 0 until something is bought. `hits` is the number of products on a
    page; `reward` explains `option_matching`.
    """

    def __init__(self, catalogue: Catalogue, hits: int = HITS, option_matching: OptionMatching = "original") -> None:
        self._catalogue, self._hits_per_page = catalogue, hits
        self._option_matching: OptionMatching = option_matching
        self._steps_left = 0
        self.task_description = ""

    def reset(self, goal_index: int, max_steps: int) -> State:
        """Begin an episode; `task_description` is then the instruction. Raises KeyError for an unknown goal."""
        self._goal = self._catalogue.goal(goal_index)
        self.task_description = self._goal.instruction
        self._steps_left = max_steps
        self._page = self._start()
        return self._page.state(last=False)

    def step(self, action: str) -> State:
        """Take one action, `search[words]` or `click[text]`; an impossible action changes nothing and says so.

        Raises RuntimeError when the episode has used its `max_steps` actions, or something was bought.
        """
        if self._steps_left == 0 or self._page.score is not None:
            raise RuntimeError("the episode is over: reset() begins another")
        self._steps_left -= 1
        page = self._after(action)
        self._page = page or self._page
        state = self._page.state(last=self._steps_left == 0)
        return state if page else replace(state, observation=NOT_POSSIBLE)

    def _after(self, action: str) -> Page | None:
        parts = ACTION.fullmatch(action.strip())
        if not parts:
            return None
        argument = parts[2].lower()
        if parts[1] == "search":
            return self._results(self._catalogue.search(argument), 1)
        return self._page.clicks[argument]() if argument in self._page.clicks else None

    def _start(self) -> Page:
        return Page(["WebShop", *self._instruction(), "Search"], {}, suggested_searches(self._goal))

    def _results(self, hits: Sequence[str], number: int) -> Page:
        before, end = (number - 1) * self._hits_per_page, number * self._hits_per_page
        texts = [*self._instruction(), "Back to Search", f"Page {number} (Total results: {len(hits)})"]
        clicks = {"back to search": self._start}
        if before:
            texts.append("< Prev")
            clicks["< prev"] = partial(self._results, hits, number - 1)
        if end < len(hits):
            texts.append("Next >")
            clicks["next >"] = partial(self._results, hits, number + 1)
        for product in map(self._catalogue.product, hits[before:end]):
            texts += [product.asin, product.title, product.price_tag]
            clicks[product.asin.lower()] = partial(self._item, product, {}, partial(self._results, hits, number))
        return Page(texts, clicks)

    def _item(self, product: Product, chosen: Mapping[str, str], results: Callable[[], Page]) -> Page:
        texts = [*self._instruction(), "Back to Search", "< Prev"]
        clicks = {}
        for name, values in product.options.items():
            texts += [name, *values]
            # A value of two options belongs to the later one.
            clicks |= {
                value: partial(self._item, product, {**chosen, name: value}, results) for value in values if value
            }
        texts += [product.title, f"Price: {product.price_tag}", "Rating: N.A."]
        texts += ["Description", "Features", "Reviews", "Buy Now"]
        details = partial(self._details, partial(self._item, product, chosen, results))
        # After the options: an option with the name of a button cannot be chosen.
        clicks |= {
            "back to search": self._start,
            "< prev": results,
            "description": partial(details, [product.description]),
            "features": partial(details, product.bullet_points),
            "reviews": partial(details, ["No reviews found"]),
            "buy now": partial(self._bought, product, chosen),
        }
        return Page(texts, clicks)

    def _details(self, item: Callable[[], Page], texts: Sequence[str]) -> Page:
        clicks = {"back to search": self._start, "< prev": item}
        return Page([*self._instruction(), "Back to Search", "< Prev", *texts], clicks)

    def _bought(self, product: Product, chosen: Mapping[str, str]) -> Page:
        score = FULL_SCORE * reward(product, chosen, self._goal, self._option_matching).value
        return Page(["Bought", product.title, f"Score: {score:g} of {FULL_SCORE}"], {}, score=score)

    def _instruction(self) -> tuple[str, str]:
        return "Instruction:", self._goal.instruction


def suggested_searches(goal: Goal) -> tuple[str, ...]:
    """Return the instruction without its price, and some spans of its words; deterministic for each instruction."""
    words = goal.instruction.partition(PRICE_CLAUSE)[0].lower().split()
    starts = range(len(words) - SPAN_WORDS + 1)
    drawn = random.Random(goal.instruction).sample(starts, min(SPANS, len(starts)))
    spans = [words, *(words[start : start + SPAN_WORDS] for start in drawn)]
    return tuple({" ".join(span): None for span in spans if span})
