"""How old the weights were that sampled a rollout when it is trained on, where rollouts outlive a step."""

from collections.abc import Mapping

import numpy as np

from empo2.recipe.trainer.step_results import RolloutResult


def staleness(results: Mapping[str, RolloutResult], version: int) -> dict[str, float]:
    """Return metrics of the trained rollouts' staleness: updates between the first weights that sampled one and these.

    - ``empo2/staleness_mean``, ``empo2/staleness_max``: over the rollouts;
    - ``empo2/rollouts_of_several_versions``: those whose turns were sampled by more than one.

    Args:
        results: by rollout id.
        version: of the weights that are about to be updated (updates before them).
    """
    sampled = [result.versions for result in results.values() if result.versions]
    ages = [version - versions[0] for versions in sampled] or [0]
    return {
        "empo2/staleness_mean": float(np.mean(ages)),
        "empo2/staleness_max": float(max(ages)),
        "empo2/rollouts_of_several_versions": float(sum(len(versions) > 1 for versions in sampled)),
    }
