"""How often scopes recur, against numbers by hand; and what is said of a run in which they do not."""

import pytest

from empo2.recipe.config import load_settings
from empo2.recipe.scopes import recurrence_warning, share_with_tips


@pytest.mark.parametrize(
    ("scopes", "tasks_per_step", "steps", "share"),
    [
        (["a"] * 10, 2, 5, 4 / 5),  # all share: from the second step on
        (list("abcd"), 2, 2, 0.0),  # an epoch of new ones
        (list("abcd"), 2, 6, 2 / 3),  # one epoch of three is new
        (list("abcde"), 4, 1, 0.0),
        (list("aabb"), 4, 3, 2 / 3),
        (list("ab"), 3, 4, 0.0),  # no whole step
    ],
)
def test_share_of_tasks_whose_scope_was_played_before(
    scopes: list[str], tasks_per_step: int, steps: int, share: float
) -> None:
    assert share_with_tips(scopes, tasks_per_step, steps) == pytest.approx(share)


def test_in_any_order_of_the_tasks() -> None:
    """Two scopes of three tasks, one in a step: 6 draws of an epoch; the first of each scope finds nothing."""
    for seed in range(20):
        assert share_with_tips(list("aaabbb"), 1, 6, seed) == pytest.approx(4 / 6)


def test_warning() -> None:
    settings = ["algorithm.tasks_per_step=2", "algorithm.updates_per_step=1"]
    questions = [str(number) for number in range(41)]
    by_question = load_settings("cpu", [*settings, "tasks.source=my:load", "memory.scope=[question]"])
    warning = recurrence_warning(questions, by_question, 6)
    assert warning.startswith(
        "memory.scope=['question']: only 0% of the memory rollouts can find tips of earlier steps, since 41 "
    )
    assert recurrence_warning(questions, by_question, 1) == ""  # a trial of one step
    assert recurrence_warning(questions[:2], by_question, 6) == ""
    assert recurrence_warning(["{}"] * 41, by_question, 6) == ""
    for change in ("algorithm.name=grpo", "algorithm.memory_probability=0", "memory.from=runs/x"):
        other = load_settings("cpu", [*settings, "tasks.source=my:load", "memory.scope=[question]", change])
        assert recurrence_warning(questions, other, 6) == ""
