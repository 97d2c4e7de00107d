"""``empo2 demo``: train the small model, and show the run: a picture, sentences, two tips and an episode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from empo2.memory.browse import StoredTip, episode_steps, stored_tips
from empo2.memory.file import reading
from empo2.recipe.config import lay_over, load_settings, read_layer
from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.tables import picture
from empo2.recipe.run_folder import MEMORY_FILE, Row, read_metrics

ALONE, WITH_NOTES = "val/train/success_rate", "val/train/memory_success_rate"
ELSEWHERE = "val/success_rate"  # of the tasks that are not trained, without notes
PICTURE = "story.png"
_BLUE, _GREEN = "#0072B2", "#009E73"
_WORLD = Path(__file__).parents[1] / "agents/houses"


class Point(NamedTuple):
    """Success rates on the training tasks after `step` steps, 0 to 1; `elsewhere`: on other tasks, without notes."""

    step: int
    alone: float
    with_notes: float
    elsewhere: float | None = None


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Single settings, such as run.steps=20.")
    ] = None,
    directory: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the run's folder is made.")] = Path("runs"),
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Tell the story of a finished run again.")] = None,
) -> None:
    """Train the small model on two houses that it has never seen, and show what its notes are worth.

    Some ten minutes on two cores, without a GPU: EMPO² with vLLM, verl and the gateway, as on a big machine.
    """
    from rich.console import Console

    from empo2.recipe.launcher.launch import launch

    if run is None:
        layer = lay_over(read_layer(_WORLD / "demo.yaml"), {"run": {"directory": str(directory)}})
        settings = load_settings("cpu", overrides or (), file=_WORLD / "coin.yaml", layer=layer)
        run = launch(settings, "demo", Console())
    print(tell(run))


def tell(run: Path) -> str:
    """Draw `story.png` in the run's folder, and return the story as text.

    Raises:
        Empo2Error: the run has no validation with memory on its training tasks.
    """
    points = read_points(read_metrics(run))
    with reading(run / MEMORY_FILE) as db:
        tips = chosen_tips(stored_tips(db, order="best"))
        steps = episode_steps(db, tips[0]) if tips else []
    parts = [f"tip (after a {'success' if tip.success else 'failure'})  {tip.text}" for tip in tips]
    if steps:
        parts += ["", "the episode of the first tip, each move once"]
        parts += [f"  {' '.join(state.split())}\n    > {action}" for state, action in steps]
    parts += ["", *sentences(points), f"picture  {draw(points, run / PICTURE)}"]
    return "\n".join(parts)


def read_points(rows: Sequence[Row]) -> list[Point]:
    """Return the validations without and with notes.

    At the first no note has been written: the same policy is measured twice, so both rates are the mean.

    Raises:
        Empo2Error: there are fewer than two.
    """
    points = [Point(int(r["step"]), r[ALONE], r[WITH_NOTES], r.get(ELSEWHERE)) for r in rows if WITH_NOTES in r]
    if len(points) < 2:
        raise Empo2Error("the run has not been validated twice with memory; set run.validate_with_memory=true")
    before = (points[0].alone + points[0].with_notes) / 2
    return [points[0]._replace(alone=before, with_notes=before), *points[1:]]


def sentences(points: Sequence[Point]) -> list[str]:
    """Return three sentences made of the numbers, and one about tasks that it never played, if there are any."""
    first, last = points[0], points[-1]
    widest = max(points[1:], key=lambda point: point.with_notes - point.alone)
    gap, end = widest.with_notes - widest.alone, last.with_notes - last.alone
    moved = "so part of what the notes say is in the weights now" if end < gap else "so it has not closed yet"
    if end < 0:
        moved = "so the weights do without notes now, and read them worse"
    return [
        f"Before training, without notes, the task succeeds in {100 * first.alone:.0f} % of the episodes.",
        f"With the notes that it has written by step {widest.step}, it succeeds in {100 * widest.with_notes:.0f} %; "
        f"without them, at the same step, in {100 * widest.alone:.0f} %.",
        f"After {last.step} steps it succeeds without notes in {100 * last.alone:.0f} %: "
        f"{_change(first.alone, last.alone)}. "
        f"Notes add {100 * gap:+.0f} points at step {widest.step} and {100 * end:+.0f} points at the end"
        + (f", {moved}." if gap > 0 else "."),
        *([] if first.elsewhere is None or last.elsewhere is None else [_elsewhere(first.elsewhere, last.elsewhere)]),
    ]


def _elsewhere(before: float, after: float) -> str:
    why = "what it has learned are the ways through its own houses, which lead nowhere in another one"
    if after > before:
        why = "some of what it has learned in its own houses holds in another one"
    rates = f"it succeeds in {100 * after:.0f} %, before training in {100 * before:.0f} %"
    return f"In a house that it never played {rates}: {why}."


def chosen_tips(best_first: Sequence[StoredTip]) -> list[StoredTip]:
    """Return the first tip of the best score, and the worst tip of a failure.

    Of a later tip with the same text the memory has only the moves that are new.
    """
    if not best_first:
        return []
    best = min(best_first, key=lambda tip: (-tip.score, tip.id))
    failures = [tip for tip in best_first if not tip.success]
    return [best, *[tip for tip in failures[-1:] if tip != best]]


def draw(points: Sequence[Point], target: Path) -> Path:
    """Draw success without and with notes over the steps."""
    steps = [point.step for point in points]
    alone, noted = ([100 * rate for rate in rates] for rates in zip(*(point[1:3] for point in points), strict=True))
    with picture(target, size=(7, 4)) as (_, ((axes,),)):
        axes.fill_between(steps, alone, noted, color=_GREEN, alpha=0.12)
        axes.plot(steps, noted, color=_GREEN, marker="o", label="with its own notes")
        axes.plot(steps, alone, color=_BLUE, marker="o", linewidth=2.5, label="without notes")
        axes.set(xlabel="training step", ylabel="successful episodes, %", ylim=(-3, 103))
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="upper left", fontsize="medium")
    return target


def _change(before: float, after: float) -> str:
    if after == before:
        return "no change"
    return f"{abs(100 * (after - before)):.0f} points {'more' if after > before else 'less'} than before"
