"""GiGPO's advantages of turns against numbers by hand and in plain numpy, and their way onto agent-lightning's rows."""

from collections import defaultdict
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet
from agentlightning.verl.rollout_adapter import RolloutAdapter
from verl import DataProto

from empo2.recipe.config import load_settings
from empo2.recipe.messages import anchor_of
from empo2.recipe.protocol import CALL_EVENT, Mode
from empo2.recipe.trainer.advantages import rollout_advantages
from empo2.recipe.trainer.gigpo import (
    add_step_advantages,
    cluster_metrics,
    clusters,
    rows_of_turns,
    set_turn_ids,
    sharing_warning,
    step_advantages,
    step_returns,
)
from empo2.recipe.trainer.rows import drop_overlong, set_scores
from empo2.recipe.trainer.scores import training_scores
from empo2.recipe.trainer.step_results import RolloutResult, Turn, prepare_for_training

PROMPT, RESPONSE = 12, 16
WITHOUT, ON, OFF = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)
GIGPO = load_settings("gpu", ["algorithm.advantage=gigpo", "algorithm.return_tolerance=0"]).algorithm


def algorithm(**changes: Any) -> Any:
    return GIGPO.model_copy(update={"return_scale": 1.0, "intrinsic_coefficient": 0.0, **changes})


def result(
    return_: float, anchors: str, *, group: str = "g", mode: Mode = WITHOUT, rewards: list[float] | None = None
) -> RolloutResult:
    """One row whose turns began in these states, a letter each; "_" is a state without anchor."""
    turns = [Turn(number, anchor.strip("_"), 1) for number, anchor in enumerate(anchors)]
    return RolloutResult(group, mode, return_, turn_rewards=rewards or [0.0] * len(anchors), rows=[turns])


def by_hand(results: dict[str, RolloutResult], *, by_std: bool) -> dict[str, list[float]]:
    """R_t = 0.95^(T-1-t) R; within equal anchors of a group (R_t - mean) / (std + 1e-6), or without std."""
    found = defaultdict(list)
    for name, rollout in results.items():
        turns = rollout.rows[0]
        for turn in turns:
            value = 0.95 ** (len(turns) - 1 - turn.number) * rollout.return_
            found[rollout.group, turn.anchor].append((name, turn.number, value))
    made = {name: [0.0] * len(rollout.rows[0]) for name, rollout in results.items()}
    for cluster in found.values():
        values = np.array([value for *_, value in cluster])
        for name, number, value in cluster:
            if len(cluster) > 1:
                made[name][number] = (value - values.mean()) / (values.std(ddof=1) + 1e-6 if by_std else 1)
    return made


def made(results: dict[str, RolloutResult], **changes: Any) -> dict[str, list[float]]:
    steps = step_advantages(results, algorithm(**changes))
    return {name: [turns[number] for number in sorted(turns)] for name, turns in steps.items()}


@pytest.mark.parametrize("by_std", [True, False])
def test_two_rollouts_of_three_turns(by_std: bool) -> None:
    """Both begin in a; the first comes through b and c, the second through c and d.

    R_t: 9.025, 9.5, 10 and 1.805, 1.9, 2. Of a: ±3.61; of c: 10 and 1.9, ±4.05; with std ±1/√2; b and d are alone.
    """
    results = {"x": result(10, "abc"), "y": result(2, "acd")}
    a, c = (0.70711, 0.70711) if by_std else (3.61, 4.05)
    want = {"x": [a, 0, c], "y": [-a, -c, 0]}
    found = made(results, normalize_by_std=by_std)
    for name, values in want.items():
        assert found[name] == pytest.approx(values, rel=1e-4)
        assert found[name] == pytest.approx(by_hand(results, by_std=by_std)[name], rel=1e-9)


@pytest.mark.parametrize("by_std", [True, False])
def test_against_numpy_whatever_the_order(by_std: bool) -> None:
    generator = np.random.default_rng(0)
    results = {
        f"{group}{i}": result(float(generator.normal()), "".join(generator.choice(list("abcd"), 6)), group=group)
        for group in "gh"
        for i in range(5)
    }
    want = by_hand(results, by_std=by_std)
    for order in (results, dict(reversed(results.items()))):
        found = made(order, normalize_by_std=by_std)
        for name in results:
            assert found[name] == pytest.approx(want[name], rel=1e-6, abs=1e-9)


def test_revisits_count_each() -> None:
    """a, b, a: both visits of a are in its cluster. R: 0.9025, 0.95, 1; of a without std: -0.04875, +0.04875."""
    assert made({"x": result(1, "aba")}, normalize_by_std=False)["x"] == pytest.approx([-0.04875, 0, 0.04875])


def test_same_state_of_another_task_is_another_state() -> None:
    results = {"x": result(1, "a", group="g"), "y": result(5, "a", group="h")}
    assert made(results) == {"x": [0.0], "y": [0.0]}


def test_states_without_anchor_are_alone() -> None:
    assert made({"x": result(1, "__"), "y": result(5, "__")}) == {"x": [0.0, 0.0], "y": [0.0, 0.0]}


def test_intrinsic_reward_is_a_reward_of_its_turn() -> None:
    """R_2 = 50 + 2·¼ = 50.5; R_1 = 0.95·50.5 + 2·1; R_0 = 0.95·R_1 + 2·½; in a solved group the return alone."""
    of_three = result(50, "abc", rewards=[0.5, 1.0, 0.25])
    chosen = algorithm(intrinsic_coefficient=0.01, return_scale=0.01)  # 2 of -100..100
    assert step_returns(of_three, chosen, solved=False) == pytest.approx([0.4847625, 0.49975, 0.505])
    assert step_returns(of_three, chosen, solved=True) == pytest.approx([0.45125, 0.475, 0.5])


def test_nearly_equal_turns_have_no_advantage() -> None:
    results = {"x": result(10.0, "a"), "y": result(10.4, "a"), "z": result(7.0, "b"), "w": result(9.0, "b")}
    found = made(results, return_tolerance=0.0025)
    assert (found["x"], found["y"]) == ([0.0], [0.0])
    assert found["w"][0] > 0.7


def test_off_policy_turns_are_measured_against_turns_without_tips() -> None:
    results = {
        "u": result(0, "a"),
        "v": result(2, "a"),
        "s": result(10, "ab", mode=OFF),
        "t": result(10, "ab", mode=OFF),
    }
    found = made(results, normalize_by_std=False)
    assert (found["u"], found["v"]) == ([-1.0], [1.0])
    assert found["s"] == found["t"] == pytest.approx([9.5 - 1, 0])
    on_policy = made(results | {name: result(10, "ab", mode=ON) for name in "st"}, normalize_by_std=False)
    assert on_policy["s"] == [0.0, 0.0]


def test_metrics_and_warning() -> None:
    """Clusters {x0, y0}, {x1}, {x2}, {y1}: five turns in four clusters, two of five share."""
    found = cluster_metrics(clusters({"x": result(1, "abc"), "y": result(2, "ad")}))
    assert found == {"gigpo/cluster_size_mean": 1.25, "gigpo/shared_turns": 0.4}
    assert sharing_warning(found) == ""
    assert "only 19% of the turns" in sharing_warning({"gigpo/shared_turns": 0.19})


def test_anchor_is_the_newest_observation() -> None:
    chat = [{"role": "system", "content": "rules"}, {"role": "user", "content": " a  dark\n room "}]
    assert anchor_of(chat) == "a dark room"
    assert anchor_of([*chat, {"role": "assistant", "content": "go"}, {"role": "tool", "content": "lit"}]) == "lit"
    assert anchor_of(chat[:1]) == ""


# Rows


def episode(name: str, return_: float, turns: list[tuple[str, int]], mode: Mode | None, *, split: bool) -> Any:
    """Turns of (state, tokens of the reply). With ``split`` a prompt is its turn alone, so that each has a row."""
    context: list[int] = []
    triplets, events = [], []
    for number, (state, size) in enumerate(turns):
        tips = [900] if mode and mode.memory and number == 0 else []
        free = ([] if split else context) + [ord(state)]
        sent, reply = tips + free, [10 * number + i for i in range(size)]
        context = free + reply
        response = {"token_ids": reply, "log_probs": [-0.5] * size}
        triplets.append(Triplet(prompt={"token_ids": sent}, response=response))
        if mode:
            call = {"prompt_token_ids": sent, "tip_free_prompt_token_ids": free, "anchor": state}
            events.append({"event_type": CALL_EVENT, "data": call})
        else:
            data = {
                "request": {"messages": [{"role": "user", "content": state}]},
                "response": {"choices": [{"prompt_token_ids": sent}]},
            }
            events.append({"event_type": "model_request", "data": data})
    metadata = {"empo2": {**mode.model_dump(), "scope": "s"}} if mode else {}
    common: dict[str, Any] = {"step": 1, "sample_idx_in_step": 0, "enqueue_time": 0.0, "final_reward": return_}
    return CompletedRollout(
        rollout_id=name, data_id=name[0], triplets=triplets, events=events, metadata=metadata, **common
    )


EPISODES: dict[str, tuple[float, list[tuple[str, int]]]] = {
    "g1": (10.0, [("a", 2), ("b", 1), ("c", 3)]),
    "g2": (2.0, [("a", 1), ("c", 2), ("d", 2)]),
}


def trained(mode: Mode | None, *, split: bool, response: int = RESPONSE, **changes: Any) -> tuple[DataProto, Any]:
    chosen = algorithm(normalize_by_std=False, **changes)
    played = [episode(name, *EPISODES[name], mode, split=split) for name in EPISODES]
    adapter = RolloutAdapter(
        max_prompt_length=PROMPT,
        max_response_length=response,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    batch, _ = adapter.get_train_data_batch([prepare_for_training(rollout)[0] for rollout in played])
    results = {
        rollout.rollout_id: RolloutResult(
            rollout.data_id,
            mode or WITHOUT,
            rollout.final_reward,
            turn_rewards=[0.0] * len(rollout.triplets),
            rows=rows_of_turns(rollout),
        )
        for rollout in played
    }
    set_turn_ids(batch, results)
    batch = drop_overlong(batch)
    set_scores(batch, results, training_scores(results, chosen), rollout_advantages(results, chosen))
    add_step_advantages(batch, step_advantages(results, chosen), chosen.gigpo_weight)
    return batch, results


def token_advantages(batch: DataProto) -> dict[str, list[float]]:
    """Of the sampled tokens of each rollout, in their order, over all of its rows."""
    found = defaultdict(list)
    for row, name in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        advantages, mask = batch.batch["given_advantages"][row], batch.batch["response_mask"][row].bool()
        found[name] += advantages[mask].tolist()
        assert not advantages[~mask].any()
    return dict(found)


# Of the rollouts: ±4. Of the turns in a: ±3.61, in c: ±4.05 (see above), elsewhere 0.
EXPECTED = {"g1": [7.61] * 2 + [4.0] + [8.05] * 3, "g2": [-7.61] + [-8.05] * 2 + [-4.0] * 2}


@pytest.mark.parametrize("mode", [None, WITHOUT, OFF])
@pytest.mark.parametrize("split", [False, True])
def test_merged_rows_equal_unmerged_rows(mode: Mode | None, split: bool) -> None:
    """Token by token; untagged rollouts of plain GRPO, and off-policy rollouts whose tips were taken out."""
    batch, results = trained(mode, split=split)
    assert len(batch) == (6 if split else 2)
    assert [len(row) for row in results["g1"].rows] == ([1, 1, 1] if split else [3])
    found = token_advantages(batch)
    assert found == {name: pytest.approx(values) for name, values in EXPECTED.items()}
    assert "turn_id" not in batch.batch


def test_weight_of_the_turns() -> None:
    batch, _ = trained(WITHOUT, split=False, gigpo_weight=0.5)
    assert token_advantages(batch)["g1"] == pytest.approx([5.805] * 2 + [4.0] + [6.025] * 3)


def test_tokens_beyond_the_end_of_a_row() -> None:
    """Four positions: of g1 the replies in a and b with what stands between them, of g2 those in a and c."""
    batch, _ = trained(WITHOUT, split=False, response=4)
    assert token_advantages(batch) == {
        "g1": pytest.approx([7.61] * 2 + [4.0]),
        "g2": pytest.approx([-7.61] + [-8.05] * 2),
    }
