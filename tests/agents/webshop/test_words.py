"""Search terms, by hand from UAX #29 and from what Lucene's English analysis does with its words."""

import pytest

from empo2.agents.webshop.words import STOP_WORDS, stem, terms


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # Between letters, an apostrophe, a dot and a colon join (WB6, 7); between digits a comma and a dot (WB11, 12).
        ("don't don\u2019t", ["don't", "don\u2019t"]),
        ("material:solid", ["material:solid"]),
        ("1,000 9.5 3.5mm", ["1,000", "9.5", "3.5mm"]),
        ("a1,b2 ab..cd x.1", ["a1", "b2", "ab", "cd", "x", "1"]),
        # An underscore joins letters and digits (WB13a, WB13b); alone it is no word.
        ("mug_2 __ _x", ["mug_2", "_x"]),
        ("wi-fi 24/7 50% 7'' (2)", ["wi", "fi", "24", "7", "50", "7", "2"]),
        # Marks belong to the letter before them (WB4).
        ("cafe\u0301 CAFÉ", ["cafe\u0301", "café"]),
        # Pictograms, with skin tones, joiners, flags and keycaps; also those that were there before emoji.
        ("mug🎁 🎁🎁", ["mug", "🎁", "🎁", "🎁"]),
        ("👍🏽 👩\u200d👩\u200d👧 🇩🇪🇫🇷", ["👍🏽", "👩\u200d👩\u200d👧", "🇩🇪", "🇫🇷"]),
        ("1\ufe0f\u20e3 Brand® ™ ☺ ★ ✔", ["1\ufe0f\u20e3", "brand", "®", "™", "☺", "★", "✔"]),
        ("🇩 … • “ ” | + = $ € § ☆ ✓", []),
        # One word for each ideograph and each hiragana, one for a run of katakana, hangul or Thai.
        ("漢字ひらカタカナ", ["漢", "字", "ひ", "ら", "カタカナ"]),
        ("안녕하세요 สวัสดี", ["안녕하세요", "สวัสดี"]),
        # Possessives go before stop words and stems.
        ("men's MEN\u2019S men\uff07s mens'", ["men", "men", "men", "men"]),
        ("it's the's IS's s", ["s"]),
        ("IT IS not A mug", ["mug"]),
        (" \t\n\x00", []),
    ],
)
def test_terms(text: str, found: list[str]):
    assert terms(text) == found


def test_the_stop_words_are_lucenes_33():
    assert (len(STOP_WORDS), terms(" ".join(STOP_WORDS))) == (33, [])
    assert terms("i from you all") == ["i", "from", "you", "all"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        # of Porter (1980)
        *(("caresses", "caress"), ("ponies", "poni"), ("cats", "cat"), ("feed", "feed"), ("agreed", "agre")),
        *(("plastered", "plaster"), ("motoring", "motor"), ("conflated", "conflat"), ("sized", "size")),
        *(("hopping", "hop"), ("falling", "fall"), ("hissing", "hiss"), ("filing", "file"), ("happy", "happi")),
        *(("sky", "sky"), ("relational", "relat"), ("vietnamization", "vietnam"), ("hopefulness", "hope")),
        *(("electrical", "electr"), ("adjustable", "adjust"), ("replacement", "replac"), ("adoption", "adopt")),
        *(("rate", "rate"), ("controlling", "control"), ("rolling", "roll")),
        # where Porter's program departs from his paper; computed by NLTK's PorterStemmer with MARTIN_EXTENSIONS
        *(("possibly", "possibl"), ("incredibly", "incred"), ("assemblies", "assembl"), ("bubbly", "bubbl")),
        *(("technology", "technolog"), ("ecologies", "ecolog"), ("biology", "biologi"), ("trekking", "trek")),
        *(("as", "as"), ("xs", "xs"), ("oy", "oy"), ("revved", "rev"), ("trekkings", "trek")),
        # where Snowball's newer English stemmer gives "generous", "skis", "early"
        *(("generously", "gener"), ("skis", "ski"), ("early", "earli")),
    ],
)
def test_stems(word: str, expected: str):
    assert stem(word) == expected
