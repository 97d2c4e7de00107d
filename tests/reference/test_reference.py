"""The project against the reference: from the events of random episodes to the loss of an update and its gradient."""

import math
from typing import Any

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import numpy as np
import pytest
import torch
from agentlightning.schemas import RolloutState
from hypothesis import event, given, settings
from hypothesis import strategies as st
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding

from empo2.recipe.baselines.gigpo.advantage import turn_advantages
from empo2.recipe.config import load_settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.protocol import TOP_TOKENS, Mode
from empo2.recipe.trainer.advantages import rollout_advantages, worth_imitating
from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.rows import add_by_turn, distill, set_advantages
from empo2.recipe.trainer.step_results import StepResults
from empo2.recipe.trainer.updates import planned_batch

from ..recipe.rollout_events import adapted, recorded, refused, request, rollout_of
from ..recipe.test_objective import actor_config
from .reference import Ask, Episode, Rules, imitated, kept, prompt, term, tokens, visits

PROMPT = 12
# Divided by the smallest range, 0.5, the largest is a float still.
RETURNS = (0.0, 1.0, 0.5, 0.3, 0.9999999999999999, 0.504, -1.0, 1e300, -1e300, 8e307, math.nan, None)


@st.composite
def asks(draw: st.DrawFn) -> tuple[Ask, ...]:
    """Of an agent that sends its chat, of helpers that have their own (1 to 3), and such that are a state alone (0)."""
    made, begun = [], 1000
    for _ in range(draw(st.integers(1, 6))):
        times = draw(st.sampled_from((1, 1, 1, 2, 3)))
        sizes = [draw(st.integers(0 if times == 1 else 1, 3)) for _ in range(times)]
        replies = tuple(tuple(range(begun + 10 * i, begun + 10 * i + size)) for i, size in enumerate(sizes))
        begun += 10 * times
        chat, length = draw(st.integers(0, 3)), draw(st.sampled_from((1, 1, 2, 5, 13)))
        log_probs = draw(st.sampled_from((-0.5, -1.0, -3.0, -0.1, -0.0, None, math.nan, -9999.0)))
        made.append(Ask(chat, draw(st.integers(0, 2)), length, replies, -1, log_probs, draw(st.booleans())))
    for number, ask in enumerate(made):  # what a chat goes on from is seen in it; else the reply to what was sent last
        used = draw(st.integers(0, len(ask.replies) - 1)) if goes_on(made, number) else len(ask.replies) - 1
        made[number] = Ask(**{**ask.__dict__, "used": used})
    return tuple(made)


def goes_on(made: Any, number: int) -> bool:
    return made[number].chat and any(e.chat == made[number].chat and any(e.replies) for e in made[number + 1 :])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Episode], Rules, dict[int, int]]:
    episodes = []
    for group in range(draw(st.integers(1, 2))):
        memory, off_policy, paired = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
        for number in range(draw(st.integers(2, 4))):
            tips = memory and not (paired and number % 2 == 0)
            played = draw(asks()), draw(st.sampled_from(RETURNS))
            episodes.append(Episode(group, tips, tips and off_policy, *played))
    low, high = draw(st.sampled_from(((0.0, 1.0), (-1.0, 1.0), (0.5, 1.0))))
    one_of = {
        "coefficient": (0.01, 0.3, 0.0), "tolerance": (0.005, 0.0), "by_std": (True, True, False),
        "discount": (None, 0.95, 1.0), "failed_return": (None, 0.0), "room": (6, 60), "delta": (0.0067, 0.0),
        "kl": (0.0, 0.1), "kl_with_tips": (False, True), "distillation": (None, 0.7), "reverse": (False, True),
        "imitates": (False, True), "holds": (False, True),
    }  # fmt: skip
    chosen: Any = {name: draw(st.sampled_from(values)) for name, values in one_of.items()}
    chosen["imitates"] &= not chosen["reverse"]
    rules = Rules(success=high, failure=low, longest_prompt=PROMPT, low=0.2, high=0.3, dual=10.0, **chosen)
    return episodes, rules, draw(st.dictionaries(st.integers(0, 2), st.integers(1, 3)))


def number_of(token: int, name: str, low: float, high: float) -> float:
    """What the policy makes of a token, drawn anew for each name."""
    return float(np.float32(np.random.default_rng([token, *name.encode()]).uniform(low, high)))


def tops_of(token: int, name: str) -> list[float]:
    return np.log(np.random.default_rng([token, *name.encode()]).dirichlet(np.ones(4))[:3]).round(5).tolist()


def events_of(episode: Episode, before: dict[int, int]) -> list[Any]:
    """A request is sent again before it is answered, or, where the chat shows which reply was used, after."""
    made = []
    for number, (ask, n) in enumerate(zip(episode.asks, visits(episode.asks, before), strict=True)):
        sent, free = (list(prompt(episode.asks, number, tips)) for tips in (episode.memory, False))
        in_turn = bool(goes_on(episode.asks, number) and ask.state)
        for i, reply in enumerate(ask.replies):
            begun = number + (0.2 * i if in_turn else 0.01 * i)
            ended = begun + 0.1 if in_turn else number + 0.5 + 0.01 * i
            log_probs = None if ask.log_probs is None else [ask.log_probs] * len(reply)
            tops = {
                "top_tokens": [[t, t + 2000, t + 4000] for t in reply],
                "top_log_probs": [tops_of(t, "p") for t in reply],
            }
            known = {"tip_free_prompt_token_ids": free} if ask.tip_free else {}
            made.append(request(sent, reply, log_probs, ended=ended, seconds=ended - begun))
            own = {"observation": f"state {ask.state}", "visits": n or 1, "intrinsic_reward": 1 / (n or 1)}
            made.append(recorded(sent, **own, **known, **tops))
    return [*made, refused(400)]


def rollout(number: int, episode: Episode, before: dict[int, int]) -> Any:
    mode = Mode.of(memory=episode.memory, off_policy=episode.off_policy)
    state = RolloutState.FAILED if episode.return_ is None else RolloutState.SUCCEEDED
    ended: Any = {"final_reward": episode.return_, "rollout_state": state, "sample_idx_in_step": number}
    failed = {"error_message": "subprocess exited with code 1"} if episode.return_ is None else {}
    return rollout_of(str(number), events_of(episode, before), mode, data_id=f"g{episode.group}", **ended, **failed)


BASE = load_settings("gpu").algorithm


@settings(max_examples=300, derandomize=True)
@given(steps())
def test_a_step_is_what_the_reference_makes_of_it(step: tuple[list[Episode], Rules, dict[int, int]]) -> None:
    check(step)


def check(step: tuple[list[Episode], Rules, dict[int, int]]) -> None:
    episodes, rules, before = step
    left, want = dict(kept(episodes, rules)), list(tokens(episodes, rules, before))
    loss_name = ("reverse-distillation" if rules.reverse else "distillation") if rules.distillation else "ratio"
    algorithm = BASE.model_copy(update=dict(
        success_return=rules.success, failure_return=rules.failure, return_scale=None, off_policy_loss=loss_name,
        intrinsic_coefficient=rules.coefficient, return_tolerance=rules.tolerance, normalize_by_std=rules.by_std,
        gigpo_discount=rules.discount or 0.0,
    ))  # fmt: skip
    results = StepResults(PROMPT, rules.failed_return)
    played = [rollout(number, episode, before) for number, episode in enumerate(episodes)]
    try:
        usable = results.usable(played, is_train=True)
    except NoUsableRollouts:
        usable = []
    assert [each.rollout_id for each in usable] == [str(number) for number in left]
    event(f"{len(left)} rollouts")
    if not usable:
        return
    chosen = worth_imitating(results.kept, algorithm)
    assert chosen == set(map(str, imitated(episodes, rules)))
    if rules.holds and rules.distillation:
        usable = results.hold_untaught(usable, chosen)
    with np.errstate(over="ignore"):  # agent-lightning's own metric, the mean of the rewards
        batch, _ = adapted(usable, PROMPT, rules.room)
    set_advantages(batch, results.kept, rollout_advantages(results.kept, algorithm))
    if rules.discount is not None:
        add_by_turn(batch, results, turn_advantages(results, algorithm)[0])
    if rules.distillation:
        distill(batch, chosen, results, imitate=rules.imitates)
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["ref_log_prob"] = batch.batch["responses"].float().apply_(lambda t: number_of(int(t), "ref", -7, 0))
    batch.meta_info = {"temperature": 1.0, "global_token_num": []}
    planned, _ = planned_batch(batch, updates=1, ranks=1, micro_batch=1)

    leaves, students, places = [], [], {}
    for row, name in enumerate(planned.non_tensor_batch["rollout_id_list"].tolist()):
        attention = planned.batch["attention_mask"][row].bool()
        ids, begin = planned.batch["input_ids"][row][attention].tolist(), int(attention[:PROMPT].sum())
        leaves.append(torch.tensor([number_of(token, "new", -7, 0) for token in [*ids[1:], 0]], requires_grad=True))
        students.append(torch.tensor([tops_of(token, "q") + [0.0] * (TOP_TOKENS - 3) for token in [*ids[1:], 0]]))
        for place in planned.batch["response_mask"][row].nonzero()[:, 0].tolist():
            places[int(name), tuple(ids[: begin + place]), ids[begin + place]] = row, begin + place - 1
    assert places.keys() == {(token.number, token.context, token.id) for token in want}
    assert len(places) == len(want) == int(planned.batch["response_mask"].sum())

    offsets = torch.tensor([0, *np.cumsum([len(leaf) for leaf in leaves])])
    output = {"log_probs": torch.cat(leaves), "student_log_probs": torch.cat(students)}
    data = left_right_2_no_padding(planned.to_tensordict())
    tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=1, global_batch_size=1)
    loss, metrics = hybrid_loss(
        actor_config(use_kl_loss=rules.kl > 0, kl_loss_coef=rules.kl, kl_loss_type="low_var_kl"),
        {name: torch.nested.nested_tensor_from_jagged(each, offsets) for name, each in output.items()},
        data,
        mask_threshold=0.0 if rules.distillation else rules.delta,
        distillation=rules.distillation or 0.0,
        reverse=rules.reverse,
        kl_with_tips=rules.kl_with_tips,
    )
    loss.backward()
    total, size = 0.0, 1e-6 + max(float(abs(token.weight * token.advantage)) for token in want)
    for token in want:
        new, ref = (np.longdouble(number_of(token.id, name, -7, 0)) for name in ("new", "ref"))
        tops = [*zip(tops_of(token.id, "p"), tops_of(token.id, "q"), strict=True)]
        here, below, above = (float(term(token, new + step, ref, tops, rules)) for step in (0, -1e-6, 1e-6))
        total += here
        row, place = places[token.number, token.context, token.id]
        assert float(leaves[row].grad[place]) == pytest.approx((above - below) / 2e-6, rel=1e-3, abs=1e-3 * size)
    assert loss.item() == pytest.approx(total, rel=1e-4, abs=1e-3 * size)
    assert all(math.isfinite(each.aggregate()) for name, each in metrics.items() if name != "masked_at")
