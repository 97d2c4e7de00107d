"""``empo2 show``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from empo2.memory import MemoryFileError
from empo2.memory.browse import stored_tips
from empo2.memory.file import reading
from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.tables import table_of
from empo2.recipe.messages import Message, spoken, text_of
from empo2.recipe.printed import printable
from empo2.recipe.rollout_log import CallRow, LoggedRollout, read_calls, read_dropped, read_rollouts
from empo2.recipe.run_folder import EPISODES_FILE, MEMORY_FILE, ROLLOUTS, read_lines
from empo2.recipe.tip_block import blocks_in

EXAMPLES = """Examples: empo2 show runs/demo, empo2 show runs/demo --dropped, empo2 show runs/demo 3f2a9c1e."""

_PREFIX = 8  # characters of an id in the list
_LISTED_STEPS = 10
_INDENT = "    "
_STYLES = {"read": "", "trained": "green", "masked": "red strike"}


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.")],
    rollout: Annotated[
        str | None, typer.Argument(metavar="ROLLOUT", help="The beginning of a rollout's id; without it, a list.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="List the rollouts of one step.")] = None,
    dropped: Annotated[bool, typer.Option("--dropped", help="List those that were dropped.")] = False,
) -> None:
    """Read an episode of a run: its turns, tips, reward and mode, what was trained, and why it was dropped.

    Without ROLLOUT, list those of the last ten steps, and count why rollouts of the steps that are kept were dropped.
    """
    folder = run / ROLLOUTS
    console = Console(highlight=False, markup=False, emoji=False)
    found = read_rollouts(folder, rollout or "", step, last=None if rollout else _LISTED_STEPS)
    if rollout is not None:
        if not found:
            raise Empo2Error(f"{run}: no rollout {rollout!r} is kept; `empo2 show {run}` lists the last ones")
        if len({each.id for each in found}) > 1:
            ids = ", ".join(each.id[: len(rollout) + _PREFIX] for each in found[:3])
            raise Empo2Error(f"{run}: {len(found)} rollouts begin with {rollout!r}, such as {ids}; give more of the id")
        print_episode(console, run, found[-1], read_calls(folder, found[-1].id))
        return
    causes = read_dropped(folder, step)
    console.print(rollouts_table([each for each in found if each.dropped or not dropped]))
    for cause in causes:
        console.print(printable(f"dropped  {cause.told(run)}"), soft_wrap=True)


def rollouts_table(rollouts: Sequence[LoggedRollout]) -> Table:
    """Return a table with a row for each rollout, whose id is cut."""
    headings = ("step", "rollout", "mode", "return", "advantage", "turns", "tips", "dropped")
    table = table_of(*headings, text=["rollout", "mode", "dropped"])
    for each in rollouts:
        table.add_row(
            str(each.step),
            each.id[:_PREFIX],
            each.mode if each.phase == "training" else f"val, {each.mode}",
            "" if each.return_ is None else f"{each.return_:.4g}",
            "" if each.advantage is None else f"{each.advantage:+.2f}",
            str(each.turns),
            str(each.tips),
            (each.dropped or "").replace("_", " "),
        )
    return table


def print_episode(console: Console, run: Path, rollout: LoggedRollout, rows: Sequence[CallRow]) -> None:
    """Print a rollout's episode: what became of it, its turns, and where there is one its trained row."""
    calls = [row for row in rows if row["call"] is not None]
    for line in _facts(run, rollout, rows[0], calls):
        console.print(line, soft_wrap=True)
    reply = ""
    for number, call in enumerate(calls, 1):
        console.print()
        console.print(_heading(number, call), soft_wrap=True)
        for message in call["messages"]:
            if message.get("role") != "assistant" or spoken(message) != reply:
                console.print(_said(message), soft_wrap=True)
        if call["reply"] is not None:
            reply = spoken(call["reply"])
            console.print(_said(call["reply"]), soft_wrap=True)
        if call["problem"]:
            console.print(Text(f"  no reply: {printable(call['problem'])}", style="red"), soft_wrap=True)
    if rows[0]["output"] is not None:
        console.print(Text(f"\nthe agent ended with\n{_indented(rows[0]['output'])}", style="red"), soft_wrap=True)
    for record in read_lines(run / EPISODES_FILE):
        if record.get("rollout") == rollout.id:
            console.print(_trained_row(record), soft_wrap=True)


def _facts(run: Path, rollout: LoggedRollout, played: CallRow, calls: Sequence[CallRow]) -> Iterator[Text]:
    yield Text(f"rollout   {rollout.id}, step {rollout.step}, {rollout.phase}, {rollout.mode}", style="bold")
    yield Text(f"task      {printable(json.dumps(played['task'], ensure_ascii=False))}")
    return_ = "none reported" if rollout.return_ is None else f"{rollout.return_:.4g}"
    earned = sum(call["intrinsic"] for call in calls)
    yield Text(f"return    {return_}" + (f", intrinsic {earned:.3g}" if earned else ""))
    if rollout.advantage is not None:
        yield Text(f"advantage {rollout.advantage:+.3g}")
    if rollout.dropped:
        said = rollout.dropped.replace("_", " ") + (f": {printable(why)}" if (why := played["error"]) else "")
        yield Text(f"dropped   {said}", style="red")
    seconds = (played["ended"] or 0.0) - (played["started"] or played["ended"] or 0.0)
    tips = sum(len(call["tips"]) for call in calls)
    yield Text(f"played    {rollout.turns} turns in {seconds:.1f} s, {tips} tips shown")
    if (tip := _tip_of(run, rollout.id)) is not None:
        yield Text(f"tip       written from it: {printable(tip)}", style="yellow")


def _tip_of(run: Path, rollout_id: str) -> str | None:
    """Return the tip that was written from an episode; None if there is none, or no memory."""
    try:
        with reading(run / MEMORY_FILE) as db:
            return next((tip.text for tip in stored_tips(db, order="newest") if tip.episode == rollout_id), None)
    except MemoryFileError:
        return None


def _heading(number: int, call: Mapping[str, Any]) -> Text:
    parts = [f"{call['prompt_tokens']} + {len(call['response_ids'])} tokens", f"{call['seconds']:.1f} s"]
    if call["tip_ids"]:
        parts.append(f"tips {', '.join(map(str, call['tip_ids']))}")
    if any(call["masked"] or ()):
        parts.append(f"{sum(call['masked'])} masked")
    if call["visits"] is not None:
        parts.append(f"visits {call['visits']}")
    if call["finish_reason"] == "length":
        parts.append("the reply met its limit")
    if call["anew"]:
        parts.append("a chat written anew")
    return Text(f"turn {number}  {'  '.join(parts)}", style="bold")


def _said(message: Message) -> Text:
    """Return a message with its role; tips in it stand out."""
    role = message.get("role") or ""
    body = spoken(message) if role == "assistant" else text_of(message.get("content"))
    text = Text(f"  {printable(role)}\n{_indented(body)}", style="cyan" if role == "assistant" else "")
    for tips in blocks_in(body):
        text.highlight_words([_indented(tips).strip()], "yellow")
    return text


def _trained_row(record: Mapping[str, Any]) -> Text:
    counts = {kind: sum(span[2] for span in record["spans"] if span[0] == kind) for kind in _STYLES}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    text = Text(f"\nas it was trained, tokens: {told}; masked ones are in [[ ]]\n", style="bold")
    for kind, span, _ in record["spans"]:
        said = printable(span)
        text.append(f"[[{said}]]" if kind == "masked" else said, f"not bold {_STYLES[kind]}".strip())
    return text


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in printable(text).splitlines())
