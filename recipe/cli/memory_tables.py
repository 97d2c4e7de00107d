"""Format what ``empo2 memory`` prints, for 80 columns and more."""

import json
import time
from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from empo2.memory.browse import Play, ScopeCounts, StoredTip
from empo2.recipe.evaluation.tables import table_of
from empo2.recipe.printed import printable

_PADDING = (0, 1, 0, 0)  # two blanks between columns
_CAPTION = "Q: learned value. shown: episodes that the tip was shown in."
_SCOPES = 20  # rows of the table of scopes


def scope_text(scope: str) -> str:
    """Return a scope as ``--scope`` takes it, ``task=find-animal,variation=3``; unchanged if not a JSON object."""
    fields = scope_fields(scope)
    return ",".join(f"{name}={value}" for name, value in fields.items()) if fields else scope


def scope_fields(text: str) -> dict[str, str]:
    """Return the fields of a JSON object as texts; an empty dict for any other text."""
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    items = fields.items() if isinstance(fields, dict) else ()
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in items}


def tips_table(tips: Sequence[StoredTip], cosines: Sequence[float] | None = None) -> Table:
    """Return a table with one row per tip, in the given order.

    Args:
        cosines: similarity of each tip to a query, [len(tips)]; None without a query.
    """
    scopes = {tip.scope for tip in tips}
    title = _clean(scope_text(*scopes)) if len(scopes) == 1 else None
    last = "tip" if len(scopes) == 1 else "scope, tip"  # a column for the scopes would leave the tips too little room
    headings = [*([] if cosines is None else ["cosine"]), "score", "success", "Q", "shown", "age", last]
    table = table_of(*headings, text=[last], title=title, caption=_CAPTION, leading=1, padding=_PADDING)
    for row, tip in enumerate(tips):
        table.add_row(
            *([] if cosines is None else [f"{cosines[row]:.2f}"]),
            f"{tip.score:.4g}",
            {None: "", True: "yes", False: "no"}[tip.success],
            f"{tip.value:.2f}",
            str(tip.shown),
            _age(tip.created),
            _clean(tip.text) if len(scopes) == 1 else Text("\n").join([_short(tip.scope), _clean(tip.text)]),
        )
    return table


def scopes_table(counts: Sequence[ScopeCounts]) -> Table:
    """Return a table with a row per scope, most tips first, and a row of totals; ``return`` is the mean over plays."""
    headings = ("scope", "tips", "entries", "states", "plays", "hit rate", "return")
    table = table_of(*headings, text=["scope"], padding=_PADDING)
    largest = sorted(counts, key=lambda count: -count.tips)[:_SCOPES]
    rows = [(_clean(scope_text(scope)), numbers) for scope, *numbers in largest]
    if len(counts) > 1:
        name = "all" if len(largest) == len(counts) else f"all {len(counts):,}; {len(largest)} are listed"
        numbers = zip(*(count[1:] for count in counts), strict=True)
        rows.append((Text(name, "bold"), [sum(column) for column in numbers]))
    for name, (tips, entries, states, plays, searches, hits, score) in rows:
        rate, mean = f"{hits / searches:.0%}" if searches else "", f"{score / plays:.2f}" if plays else ""
        table.add_row(name, *(f"{count:,}" for count in (tips, entries, states, plays)), rate, mean)
    return table


def returns_table(plays: Sequence[Play]) -> Table:
    """Return a table of the plays' returns, separately for plays in which tips were found and plays without."""
    headings = ("plays", "number", "mean return", "median", "least", "most", "success")
    table = table_of(*headings, text=["plays"], padding=_PADDING)
    for name, found in (("tips found", True), ("none found", False)):
        if group := [play for play in plays if bool(play.hits) == found]:
            scores = [play.score for play in group]
            known = [play.success for play in group if play.success is not None]
            figures = (f"{figure:.2f}" for figure in (np.mean(scores), np.median(scores), min(scores), max(scores)))
            table.add_row(name, str(len(group)), *figures, f"{np.mean(known):.0%}" if known else "")
    return table


def _clean(text: str) -> Text:
    """Return text in one line, without control characters."""
    return Text(" ".join(printable(text).split()))


def _short(scope: str) -> Text:
    text = _clean(" ".join(scope_fields(scope).values()) or scope)
    text.stylize("dim")
    return text


def _age(created: float) -> str:
    """Return the age of a Unix time, in the largest unit that fits."""
    seconds = max(0.0, time.time() - created)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
