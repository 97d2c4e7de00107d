"""Cut texts into search terms as Lucene's English analysis does, which made the original's index.

Its steps, in order: the words of Unicode's text segmentation (UAX #29), remove possessives, lower case, drop stop
words, Porter's stems.
"""

import re

import regex
import Stemmer

STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
    """.split()  # noqa: SIM905 (as a list it takes a page)
)

# From one word boundary to the next. UAX #29 does not segment scripts such as Thai; Lucene keeps their runs whole.
_SEGMENT = regex.compile(r"(?V1w)\b(?:\p{LB=SA}+|\S.*?)\b", regex.DOTALL)
# A segment is a word if it has a letter, a digit, a pictogram, a flag (two indicators) or a keycap. The characters
# listed, such as a black star, were pictograms in the Unicode of Lucene's tables (14) but no longer are.
_WORD = regex.compile(
    r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Numeric}\p{WB=Katakana}\p{Script=Han}\p{Script=Hiragana}\p{LB=SA}"
    r"\p{Extended_Pictographic}\u2388\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767"
    r"\U0001F000-\U0001F0FF\U0001F300-\U0001F53D\U0001F546-\U0001F6FF]|\p{RI}{2}|[#*]\uFE0F?\u20E3"
)
_POSSESSIVE = re.compile("['\u2019\uff07][sS]$")
_VOWEL_CONSONANT = re.compile("(?:[aeiou]|(?<=[^aeiou])y)(?:[^aeiouy]|(?<=[aeiou])y)")  # Porter's measure is above 0
_DOUBLE = re.compile(r"([chjkqvwx])\1$")  # suffixes that Snowball keeps

_stem = Stemmer.Stemmer("porter").stemWord


def segments(text: str) -> list[str]:
    """Return the text's words and signs in order, without blanks between them."""
    return _SEGMENT.findall(text)


def term(segment: str) -> str | None:
    """Return the search term of a segment; None for a sign or a stop word."""
    if not _WORD.search(segment):
        return None
    word = _POSSESSIVE.sub("", segment).lower()
    return None if word in STOP_WORDS else stem(word)


def terms(text: str) -> list[str]:
    """Return the terms of a text in order, repeats included."""
    return [found for segment in segments(text) if (found := term(segment)) is not None]


def stem(word: str) -> str:
    """Return the stem of a lower-cased word by Porter's own program, which Lucene uses.

    It departs from Snowball's "porter" in four rules: words of one or two letters stay, any double consonant before
    "ed" and "ing" becomes single ("trekking"), and after a syllable "bli" becomes "ble" and "logi" becomes "log".
    """
    if len(word) < 3:
        return word
    found = _stem(word)
    if _DOUBLE.search(found) and word.removesuffix("s").removeprefix(found) in ("ed", "ing"):
        return found[:-1]
    if found.endswith("bli") and _VOWEL_CONSONANT.search(found[:-3]):
        return _stem(found[:-1] + "e")
    if found.endswith("logi") and _VOWEL_CONSONANT.search(found[:-4]):
        return found[:-1]
    return found
