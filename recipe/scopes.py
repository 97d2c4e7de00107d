"""How often the memory scopes of the tasks recur in a run: a tip is found only where its scope is played again."""

from collections.abc import Sequence

import numpy as np

from empo2.recipe.config import Settings


def share_with_tips(scopes: Sequence[str], tasks_per_step: int, steps: int, seed: int = 0) -> float:
    """Return the share of the played tasks whose scope was played in an earlier step.

    Args:
        scopes: of the training tasks, which each epoch plays in a new order; an incomplete step is left out.
        steps: of the run.
        seed: of the orders.
    """
    generator, known, found = np.random.default_rng(seed), set[str](), 0
    steps_per_epoch = len(scopes) // tasks_per_step
    if not steps_per_epoch or not steps:
        return 0.0
    order = np.arange(0)
    for step in range(steps):
        place = step % steps_per_epoch * tasks_per_step
        if place == 0:
            order = generator.permutation(len(scopes))
        played = [scopes[int(task)] for task in order[place : place + tasks_per_step]]
        found += sum(scope in known for scope in played)
        known.update(played)
    return found / (steps * tasks_per_step)


def recurrence_warning(scopes: Sequence[str], settings: Settings, steps: int) -> str:
    """Return one line if fewer than half of the memory rollouts can find tips of earlier steps; "" otherwise.

    Nothing is said of a single step, of a run without memory rollouts, and of one that begins with another's memory.
    """
    algorithm, memory = settings.algorithm, settings.memory
    if algorithm.name == "grpo" or not algorithm.memory_probability or memory.from_ is not None or steps < 2:
        return ""
    share = share_with_tips(scopes, algorithm.tasks_per_step, steps, algorithm.seed)
    if share >= 0.5:
        return ""
    why = f"{len(set(scopes))} scopes seldom come twice in {steps} steps of {algorithm.tasks_per_step} tasks"
    few = f"only {share:.0%} of the memory rollouts can find tips of earlier steps, since {why}"
    return f"memory.scope={memory.scope}: {few}; give fields whose values recur, or all-tasks"
