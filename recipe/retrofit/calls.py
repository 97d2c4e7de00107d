"""Show the calls of an episode, a line each, and what training makes of them."""

import textwrap
from collections.abc import Iterator, Sequence

from empo2.recipe.messages import is_compaction, newest_turn, spoken
from empo2.recipe.printed import one_line
from empo2.recipe.retrofit.recorder import Call
from empo2.recipe.retrofit.rows import Told

_WIDTH = 100
_LAYOUT = "{:>3}  {:<11} {:<14} {:>4}  {:<4} {:>5} {:>8}  "
_HEADINGS = ("#", "API", "model", "row", "tips", "tools", "messages")
_NAMES = {"chat/completions": "chat", "completions": "completion"}


def call_lines(calls: Sequence[Call], told: Sequence[Told], searched: str) -> Iterator[str]:
    """Yield a table of at most 100 columns: of each call the API, the model that it names, its training row or why it
    has none, whether tips can be shown, how many tools and messages it has, and the system message's beginning.

    Under a call that opens a row, or that is not trained, a line says why.

    Args:
        searched: ``memory.searched``.
    """
    yield f"{_LAYOUT.format(*_HEADINGS)}system message, or the first"
    with_tools, done = False, set[int]()  # rows that have the tips of a search before the episode
    for number, (call, of_call) in enumerate(zip(calls, told, strict=True), 1):
        # What stands beside the main chat is known from the first call with tools on.
        passes = bool(of_call.row) or (of_call.beside and not with_tools)
        takes_tips = passes and of_call.row not in done and _takes_tips(call, searched, with_tools=with_tools)
        if searched == "first-turn" and takes_tips and of_call.row:
            done.add(of_call.row)
        with_tools = with_tools or bool(call.body.get("tools"))
        yield _line(number, call, of_call, takes_tips=takes_tips).rstrip()
        if of_call.why:
            opens = f"row {of_call.row}: " if of_call.row else ""
            yield from (f"     {line}" for line in textwrap.wrap(one_line(opens + of_call.why), _WIDTH - 5))
    if any(call.streamed for call in calls):
        yield "     * streamed"


def _takes_tips(call: Call, searched: str, *, with_tools: bool) -> bool:
    if (messages := call.body.get("messages")) is None:
        return True
    turn = newest_turn(messages)
    if turn is None or is_compaction(call.body, with_tools=with_tools):
        return False
    return searched != "user-turns" or messages[turn]["role"] != "tool"


def _line(number: int, call: Call, told: Told, *, takes_tips: bool) -> str:
    api = _NAMES.get(call.asked, call.asked)[:10] + "*" * call.streamed
    row = str(told.row) if told.row else "side" if told.beside else "-"
    model = one_line(str(call.body.get("model") or "-"))[:14]
    sizes = [len(call.body.get(name) or []) or "-" for name in ("tools", "messages")]
    begin = _LAYOUT.format(number, api, model, row, "yes" if takes_tips else "no", *sizes)
    return begin + _beginning(call, _WIDTH - len(begin))


def _beginning(call: Call, width: int) -> str:
    """Return the beginning of a system message, or else of the first message with its role, or of a prompt."""
    first = (call.body.get("messages") or [{"role": "prompt", "content": call.body.get("prompt") or ""}])[0]
    text = one_line(spoken(first))
    text = text if first["role"] == "system" or not text else f"{first['role']}: {text}"
    return text if len(text) <= width else f"{text[: width - 1]}…"
