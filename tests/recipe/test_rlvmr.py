"""RLVMR's rewards and advantages of tagged turns against numbers by hand, and their way onto the rows."""

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import pytest

from empo2.recipe.baselines.rlvmr.advantage import step_rewards, turn_advantages, warning
from empo2.recipe.config import load_settings
from empo2.recipe.protocol import Mode
from empo2.recipe.trainer.advantages import rollout_advantages
from empo2.recipe.trainer.rows import add_by_turn, set_advantages
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import adapted, recorded, request, rollout_of

RLVMR = load_settings("gpu", ["algorithm.advantage=rlvmr", "algorithm.intrinsic_coefficient=0"]).algorithm
NO_ACTION = "No known action matches that input."


def said(tag: str, action: str) -> str:
    return f"<{tag}> I think so. </{tag}> <action>{action}</action>"


def test_rewards_by_hand() -> None:
    """Each turn with what it is worth, if the episode fails; in a success only the plans are worth 1 more."""
    turns = [
        (said("reflection", "look"), False, "reflection", 1),  # nothing was taken before
        (said("planning", "open door"), False, "planning", 0),
        (said("explore", "go east"), True, "explore", 1),
        (said("reflection", "go  east".replace("  ", " ")), True, "reflection", 0),  # the same again
        (said("reflection", "go west"), False, "reflection", 1),
        (said("reflection", "take cup"), False, "reflection", 0),  # nothing went wrong
        (said("explore", "go east"), False, "explore", 0),  # as before, though that was refused
        (said("monitor", "wait"), False, "monitor", 0),
        ("<explore>somewhere</explore> go up", False, "", 0),
        (said("reflection", "go down"), False, "reflection", 1),  # the turn before had no action
        ("<action>jump</action>", False, "", 0),
        ("<planning> never closed <action>jump</action>", False, "", 0),
        (said("explore", "jump"), False, "explore", 1),
    ]
    replies, refused, tags, rewards = zip(*turns, strict=True)
    assert step_rewards(replies, refused, success=False) == list(zip(tags, map(float, rewards), strict=True))
    of_success = step_rewards(replies, refused, success=True)
    assert [reward for _, reward in of_success] == [reward or float(tag == "planning") for *_, tag, reward in turns]


def test_the_advantage_of_each_token() -> None:
    """Rollout x succeeds and y fails: ±1/√2 of the rollouts. Plans are worth 1 and 0: ±1/√2 more.

    Explorations are worth 1 (x), and 1 and 0 (y, which says "go east" twice): 1/3 above the mean of 2/3, or 2/3 below,
    over a deviation of 1/√3: 0.57735 and -1.15470. Reflections: x's follows a refusal and is alone. A turn without a
    tag has its rollout's advantage.
    """
    episodes = {
        "x": (100.0, [("planning", "look"), ("explore", "go east"), ("reflection", "go west")]),
        "y": (0.0, [("planning", "look"), ("explore", "go east"), ("explore", "go east"), ("", "")]),
    }
    results, rollouts = StepResults(), []
    for name, (return_, turns) in episodes.items():
        context: list[int] = []
        events = []
        for number, (tag, action) in enumerate(turns):
            prompt, reply = [*context, 300 + number], [10 * number, 10 * number + 1]
            context = prompt + reply
            text = said(tag, action) if tag else "go"
            events.append(request(prompt, reply, text=text))
            events.append(recorded(prompt, observation=NO_ACTION if number == 2 else "a room"))
        rollouts.append(results.train(rollout_of(name, events, Mode.of(memory=False), final_reward=return_)))
    batch, _ = adapted(rollouts, 4, 16)
    set_advantages(batch, results.kept, rollout_advantages(results.kept, RLVMR))
    advantages, metrics = turn_advantages(results, RLVMR)
    add_by_turn(batch, results, advantages)
    half = 0.70711
    want = {"x": [2 * half, half + 0.57735, half], "y": [-2 * half, -half + 0.57735, -half - 1.15470, -half]}
    for row, name in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        trained = batch.batch["advantages"][row][batch.batch["response_mask"][row].bool()].tolist()
        assert trained == pytest.approx([each for each in want[name] for _ in range(2)], rel=1e-4)
    assert metrics["rlvmr/planning"] == metrics["rlvmr/monitor"] + 2 / 7 and metrics["rlvmr/explore"] == 3 / 7
    assert metrics["rlvmr/reward"] == pytest.approx(4 / 6)  # a plan, two explorations, a reflection of six
    assert warning(metrics) == ""
    assert "only 10% of the turns have a tag" in warning(
        {f"rlvmr/{tag}": 0.0 for tag in ("planning", "explore")} | {"rlvmr/monitor": 0.0, "rlvmr/reflection": 0.1}
    )
