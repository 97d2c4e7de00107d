"""Tips as text: clean them, and extract one clean sentence from the reply to a reflection."""
# ruff: noqa: RUF001 (quotes, dashes, full stops and signs of other languages are meant)

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

# Twice an English word with its space; limits text without spaces, which max_words cannot.
_CHARACTERS_PER_WORD = 12

_THOUGHT = re.compile(r"(?s)\A.*</think>|<think>.*")
_HALF_WORD = re.compile(r"\s\S*[^\s.!?。！？]\Z")  # a reply's last word, unless it ends a sentence
_MARKUP = re.compile(r"```\w*|`|(?<![\w*_])[*_]{1,3}(?=[\w\"'“‘(])|(?<=[^\s*_])[*_]{1,3}(?![\w*_])")
_QUOTES = {'"': '"', "'": "'", "“": "”", "„": "“", "‘": "’", "«": "»", "「": "」", "『": "』"}
_BULLET = r"(?:[-+*•·▪◦‣–—>#|=~_]+|\(?\d{1,2}[.)])(?=\s)"
_CLOSING = r"[\"'”’»」』)\]}）】]"

# Where a sentence may end. The lookbehinds keep the search linear in a long run of marks, and a list with its heading.
_END = re.compile(
    rf"[。！？｡।॥؟۔።។။]+{_CLOSING}*|(?<![.!?…])[.!?…]+{_CLOSING}*(?=\s|\Z)|(?<![:：\n])\n(?=\n|{_BULLET})"
)
# A full stop that ends no sentence: initials, "e.g.", and the number of a list's item.
_ABBREVIATION = re.compile(
    r"(?:\A|[^\w.])(?:[^\W\d_](?:\.[^\W\d_])*|mr|mrs|ms|dr|prof|st|vs|cf|etc|approx|fig)\.\Z|(?:\A|:\s)\(?\d{1,2}\.\Z",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    rf"""\s+ | {_BULLET}
    | (?:sure(?:\ thing)? | of\ course | certainly | absolutely | ok(?:ay)? | al(?:l\ )?right | great | got\ it
        | understood | no\ problem | thanks | thank\ you | hello | hi)\ *(?:[,.!:;…]+ | \n)
    | i(?:['’]d|\ would)\ be\ (?:happy|glad)\ to\b [^\n.:!?]{{0,120}} [.:!]
    | (?:i\ can|i\ will|i['’]ll|let\ me)\ (?:help|assist|write|provide|summarize|summarise)\b [^\n.:!?]{{0,120}} [.:!]
    | (?:here|below)(?:['’]s|\ is|\ are)\b [^\n.:!?]{{0,120}} [:：]\ *(?:\n | \Z)
    | (?:here|below)(?:['’]s|\ is|\ are)\b [^\n.:!?]{{0,60}} \b(?:note|tip|hint|summary|sentence|advice|what)\b
      [^\n.:!?]{{0,60}} [:：.!]
    | (?:(?:the|a|my|one|next|final|key|short|brief|quick|single|one-sentence)\ ){{0,3}}
      (?:note|tip|hint|advice|lesson|takeaway|summary|reflection|answer|response|assistant)s?
      (?:\ (?:for|to|from)\ [^\n.:!?]{{1,60}}?)? (?:\ (?:is|would\ be))? (?:\ \#?\d{{1,2}})?
      \ *(?:[:：] | \ [-–—]\ | \n)
    """,
    re.IGNORECASE | re.VERBOSE,
)

# Marks of chat templates: ChatML and its kin, with ASCII or full-width signs; Llama 2 and Mistral; Gemma.
_TEMPLATE_MARK = (
    r"[<＜][|｜][^\s<>＜＞|｜]{1,40}[|｜][>＞]|<</?SYS>>|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)
_TEMPLATE_ENDS = ">＞]"
_TEMPLATE_CHARACTERS = 44  # of the longest mark


def shown_tip(text: str, special_tokens: Sequence[str], max_words: int) -> str:
    """Return a stored tip, which may come from another model's run or from an import, clean and at most so long."""
    return _cut(clean_tip(text[: 2 * _CHARACTERS_PER_WORD * max_words], special_tokens), max_words)


def clean_tip(text: str, special_tokens: Sequence[str]) -> str:
    """Return one line without any special token of the model and without the marks of known chat templates.

    Such a token could end the turn that shows the tip. Some models read the marks of their template as plain text, so
    that their tokenizer does not list them.
    """
    mark, ends, longest = _marks(tuple(special_tokens))
    kept: list[str] = []
    for character in _one_line(text):
        if character != " " or kept[-1:] != [" "]:
            kept.append(character)
        # The space that replaces a mark may complete another one, which is found at its own last character.
        if character in ends and (found := mark.search("".join(kept[-longest:]))):
            del kept[-len(found[0]) :]
            if kept[-1:] != [" "]:
                kept.append(" ")
    return "".join(kept).strip()


@cache  # a model may have hundreds, and every tip that is shown is cleaned
def _marks(special_tokens: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    """Return a pattern of what a tip must not end with, the characters that end such a mark, and the longest length."""
    tokens = {_one_line(token) for token in special_tokens} - {""}
    pattern = "|".join([*map(re.escape, tokens), f"(?i:{_TEMPLATE_MARK})"])
    ends = frozenset(token[-1] for token in tokens) | frozenset(_TEMPLATE_ENDS)
    return re.compile(rf"(?:{pattern})\Z"), ends, max([_TEMPLATE_CHARACTERS, *map(len, tokens)])


def _one_line(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def tip_of(reply: str, special_tokens: Sequence[str], max_words: int, truncated: bool = False) -> str:
    """Return the first real sentence of a reply, clean as by `clean_tip`; empty if there is none.

    A reasoning model's thoughts, preambles ("Sure!", "Here is the note:"), labels ("Tip:"), bullets, markdown emphasis
    and quotes around the whole are removed. A text without a sentence end is used whole. A sentence longer than
    `max_words` words, or 12 characters for each of them, is cut after a whole word, without an ellipsis; only a
    first word that exceeds the limit by itself is cut inside.

    Args:
        reply: the model's unchanged text.
        truncated: True if the reply met its token limit (`finish_reason` is "length") and may end within a word.
    """
    if truncated:
        reply = _HALF_WORD.sub("", reply)
    before, tip = None, _THOUGHT.sub("", reply)
    while tip != before:  # quotes may hold a label, a label emphasis; after the first round the text is short
        before, tip = tip, _cut(clean_tip(_first_sentence(tip, special_tokens), special_tokens), max_words)
    return tip


def _first_sentence(text: str, special_tokens: Sequence[str]) -> str:
    text = _MARKUP.sub("", _unquoted(text.strip()))
    for token in special_tokens:
        text = text.replace(token, "\n\n")
    text = re.sub(r"\n{2,}", "\n\n", "\n".join(line.strip() for line in text.splitlines()))
    start = 0
    while start < len(text):
        while preamble := _PREAMBLE.match(text, start):
            start = preamble.end()
        end = _sentence_end(text, start)
        if any(map(str.isalnum, text[start:end])):
            return text[start:end]
        start = end
    return ""


def _unquoted(text: str) -> str:
    """Remove quotes around the whole text, or an opening quote that is never closed."""
    if (closing := _QUOTES.get(text[:1])) is None:
        return text
    inside = text[1:]
    if (end := re.search(rf"(?<!\w){closing}|{closing}(?!\w)", inside)) is None:
        return inside
    after = inside[end.end() :]
    return inside[: end.start()] + after if after in ("", ".", "!", "?", "。") else text


def _sentence_end(text: str, start: int) -> int:
    for match in _END.finditer(text, start):
        mark, after = match[0], text[match.end() : match.end() + 2].strip()[:1]
        if after.islower() and mark not in {".", "!", "?", "\n"}:
            continue  # the sentence goes on after a quotation or "..."
        if mark == "." and _ABBREVIATION.search(text[max(start, match.start() - 12) : match.start() + 1]):
            continue
        return match.end()
    return len(text)


def _cut(text: str, max_words: int) -> str:
    limit = _CHARACTERS_PER_WORD * max_words
    cut = " ".join(text.split()[:max_words])
    if len(cut) > limit:
        cut = cut[: limit + 1].rpartition(" ")[0] or cut[:limit]
    return text if cut == text else cut.rstrip(" ,;:-–—([{\"'“‘«")


def refusal(tip: str, prompts: Iterable[str]) -> Literal["empty", "repetition", "copy"] | None:
    """Return the reason to discard a tip; None to keep it.

    - empty: there is no letter and no digit.
    - repetition: more than half of its word pairs are repeats (distinct-2 of Li et al. 2016 below 0.5), as in a phrase
      of any length said three times. A sentence of 100 ordinary words stays above 0.75; one that names a thing twice,
      or a phrase said twice, passes.
    - copy: more than half of its runs of four words occur in one of `prompts`; for a shorter tip, the whole tip does. A
      real answer shares a run or two with the question ("from completing the task"); a weak model repeats it whole.

    Args:
        prompts: the instructions to the model: the question, and the system message if there is one.
    """
    words = _words(tip)
    if not words:
        return "empty"
    pairs = _ngrams(words, 2)
    if 2 * len(set(pairs)) < len(pairs):
        return "repetition"
    runs = _ngrams(words, 4)
    for prompt in prompts:
        known = set(_ngrams(_words(prompt), min(4, len(words))))
        if 2 * sum(run in known for run in runs) > len(runs):
            return "copy"
    return None


def _words(text: str) -> list[str]:
    """Return the words in lower case; of a run too long for one (no spaces, or noise) all pieces of four characters."""
    words = []
    for run in re.findall(r"[^\W_]+", text.lower()):
        words += [run] if len(run) <= 20 else [run[index : index + 4] for index in range(len(run) - 3)]
    return words


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    n = min(n, len(words))
    return list(zip(*(words[index:] for index in range(n)), strict=False))
