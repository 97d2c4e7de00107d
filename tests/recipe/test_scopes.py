"""How often scopes recur, against numbers by hand; and what is said of a run in which they do not."""

import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.scopes import recurrence_warning, share_with_tips


@pytest.mark.parametrize(
    ("scopes", "tasks_per_step", "steps", "share"),
    [
        ("aaaaaaaaaa", 2, 5, 4 / 5),  # all share: from the second step on
        ("abcd", 2, 2, 0.0),  # an epoch of new ones
        ("abcd", 2, 6, 2 / 3),  # one epoch of three is new
        ("aaabbb", 1, 6, 4 / 6),  # the first of each scope finds nothing
        ("ab", 3, 4, 0.0),  # no whole step
    ],
)
def test_share_of_tasks_whose_scope_was_played_before(scopes: str, tasks_per_step: int, steps: int, share: float):
    for seed in range(20):  # of the orders
        assert share_with_tips([*scopes], tasks_per_step, steps, seed) == pytest.approx(share)


def test_warning() -> None:
    def said(scopes: list[str], steps: int, *changes: str) -> str:
        own = ["algorithm.tasks_per_step=2", "algorithm.updates_per_step=1", "tasks.source=my:load"]
        return recurrence_warning(scopes, load_settings("cpu", [*own, "memory.scope=[question]", *changes]), steps)

    questions = [str(number) for number in range(41)]
    begin = "memory.scope=['question']: only 0% of the memory rollouts can find tips of earlier steps, since 41 "
    assert said(questions, 6).startswith(begin)
    assert said(questions, 1) == ""  # a trial of one step
    assert said(questions[:2], 6) == said(["{}"] * 41, 6) == ""
    for change in ("algorithm.name=grpo", "algorithm.memory_probability=0", "memory.from=runs/x"):
        assert said(questions, 6, change) == ""
