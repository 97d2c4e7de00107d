"""What a run says on its screen of tips that no longer teach: against the metrics of real runs, and by numbers."""

import json
from pathlib import Path

import pytest

from empo2.recipe.trainer.symptoms import STEPS, Symptoms, drifts, idle

RUNS = Path(__file__).parents[2] / "experiments/learning"


def told_of(run: str) -> list[str]:
    symptoms = Symptoms()
    return [line for row in (RUNS / f"{run}.jsonl").read_text().splitlines() for line in symptoms.seen(json.loads(row))]


@pytest.mark.parametrize("run", ["paper-5", "paper-6"])
def test_a_real_run_in_the_papers_form_says_what_it_suffers_from(run: str) -> None:
    """Its gap rose 0.1, 0.2, 0.4, 0.5 nats by quarters, and its weights ended at 16 % without tips."""
    (line,) = told_of(run)
    assert "what tips teach does not reach the weights" in line and "algorithm.form=internalise" in line


@pytest.mark.parametrize("run", ["empo2-1", "empo2-3", "empo2-5", "held-5", "dev-paired-4e-5-0", "bonus-1"])
def test_real_runs_that_learn_from_tips_or_have_none_say_nothing(run: str) -> None:
    assert told_of(run) == []


def test_states_that_are_taken_for_one_are_told_at_once_and_once() -> None:
    symptoms, metrics = Symptoms(), {**step(), "empo2/states_alike": 1.0}
    (line,) = symptoms.seen(metrics)
    assert "memory.embedder cannot tell some states apart" in line
    assert symptoms.seen(metrics) == Symptoms().seen(step()) == []


def step(gap: float = 0.0, masked: float = 0.0, idle: float = 0.0, tips: float = 0.0, alone: float = 0.0):
    return {
        "training/success_rate": (tips + alone) / 2,
        "training/memory_success_rate": tips,
        "training/success_rate_without_memory": alone,
        "empo2/groups_without_gradient": idle,
        "empo2/off_policy/old_kl": gap,
        "empo2/off_policy/masked": masked,
    }


def test_both_must_rise() -> None:
    first, then = [step(0.2, 0.01)] * 10, [step(0.4, 0.03)] * 10
    assert "from 0.20 to 0.40 nats" in drifts(first + then) and "from 1.0 to 3.0 % masked" in drifts(first + then)
    assert not drifts(then + first)
    assert not drifts(first + [step(0.4, 0.01)] * 10) and not drifts(first + [step(0.2, 0.03)] * 10)
    assert not drifts([step(0.01, 0.0)] * 10 + [step(0.05, 0.005)] * 10)  # too little to mean anything
    without = {key: value for key, value in step().items() if "off_policy" not in key}
    assert not drifts(first + [without] * 8 + then[:2])  # two steps with off-policy rows tell nothing
    assert drifts(first + [without] * 7 + then[:3])
    distilled = {key: value for key, value in step(0.9).items() if "masked" not in key}  # such rows have no mask
    assert not drifts([distilled] * STEPS)


def test_groups_without_gradient_matter_where_tips_decide() -> None:
    assert "70 % of the groups" in (line := idle([step(idle=0.7, tips=0.9, alone=0.1)] * STEPS))
    assert "in 90 % and those without in 10 %" in line and "algorithm.baseline=paired" in line
    assert not idle([step(idle=0.6, tips=0.9, alone=0.1)] * STEPS)
    assert not idle([step(idle=0.9, tips=1.0, alone=0.9)] * STEPS)  # learned: nothing is left to compare
    assert not idle([step(idle=0.9, tips=0.0, alone=0.0)] * STEPS)  # nothing is found: not a matter of tips


def test_a_sign_is_told_once_after_enough_steps() -> None:
    symptoms, bad = Symptoms(), step(idle=0.9, tips=1.0)
    assert not any(symptoms.seen(bad) for _ in range(STEPS - 1))
    assert symptoms.seen({"val/return": 1.0}) == []  # no step of training
    assert len(symptoms.seen(bad)) == 1
    assert not any(symptoms.seen(bad) for _ in range(3 * STEPS))
