"""GiGPO's advantages of turns against numbers by hand, and their way onto agent-lightning's rows."""

from collections import defaultdict
from typing import Any, NamedTuple

from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

# isort: split
import pytest

from empo2.recipe.baselines.gigpo.advantage import step_returns, turn_advantages, warning
from empo2.recipe.config import load_settings
from empo2.recipe.protocol import Mode
from empo2.recipe.trainer.advantages import rollout_advantages
from empo2.recipe.trainer.rows import add_by_turn, set_advantages
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import adapted, recorded, request, rollout_of

WITHOUT, ON, OFF = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)
GIGPO = load_settings("gpu", ["algorithm.advantage=gigpo", "algorithm.return_tolerance=0"]).algorithm
FROM_0 = {"return_scale": 1.0, "intrinsic_coefficient": 0.0, "failure_return": 0.0}
SCIENCEWORLD = {"failure_return": -100.0, "success_return": 100.0, "return_scale": None}


def algorithm(**changes: Any) -> Any:
    return GIGPO.model_copy(update={**FROM_0, **changes})


class Played(NamedTuple):
    """An episode: its return, and state, tokens of the reply and 1/n of each turn."""

    return_: float
    turns: list[tuple[str, int, float]]
    mode: Mode | None = WITHOUT
    group: str = "g"

    def rollout(self, name: str, *, split: bool = False) -> Any:
        """As agent-lightning has it. With ``split`` a prompt is its turn alone, so that each turn has a row."""
        context: list[int] = []
        events = []
        for number, (state, size, reward) in enumerate(self.turns):
            tips = [900] if self.mode and self.mode.memory and number == 0 else []
            free = ([] if split else context) + [300 + number]
            sent, reply = tips + free, [10 * number + i for i in range(size)]
            context = free + reply
            chat = [{"role": "system", "content": "rules"}, {"role": "user", "content": state}]
            events.append(request(sent, reply, messages=chat))
            if self.mode:
                own = {"tip_free_prompt_token_ids": free, "observation": state, "intrinsic_reward": reward}
                events.append(recorded(sent, **own))
        return rollout_of(name, events, self.mode, data_id=self.group, final_reward=self.return_)


def played(return_: float, states: str, *, group: str = "g", mode: Mode = WITHOUT) -> Played:
    """An episode whose turns began in these states, a letter each; "_" is a call without messages."""
    return Played(return_, [(state.strip("_"), 1, 0.0) for state in states], mode, group)


def made(episodes: dict[str, Played], **changes: Any) -> dict[str, list[float]]:
    results = StepResults()
    for name, episode in episodes.items():
        results.train(episode.rollout(name))
    advantages, _ = turn_advantages(results, algorithm(**changes))
    return {name: [advantages[name, t] for t in range(len(episode.turns))] for name, episode in episodes.items()}


@pytest.mark.parametrize(("by_std", "a", "c"), [(True, 0.70711, 0.70711), (False, 3.61, 4.05)])
def test_two_rollouts_of_three_turns(by_std: bool, a: float, c: float) -> None:
    """Both begin in a; the first comes through b and c, the second through c and d.

    R_t: 9.025, 9.5, 10 and 1.805, 1.9, 2. Of a: ±3.61; of c: 10 and 1.9, ±4.05; with std ±1/√2; b and d are alone.
    """
    found = made({"x": played(10, "abc"), "y": played(2, "acd")}, normalize_by_std=by_std)
    assert found == {"x": pytest.approx([a, 0, c], rel=1e-4), "y": pytest.approx([-a, -c, 0], rel=1e-4)}


def test_which_turns_are_compared() -> None:
    """a, b, a: both visits of a are in its cluster. R: 0.9025, 0.95, 1; of a without std: -0.04875, +0.04875."""
    assert made({"x": played(1, "aba")}, normalize_by_std=False)["x"] == pytest.approx([-0.04875, 0, 0.04875])
    assert made({"x": played(1, "a", group="g"), "y": played(5, "a", group="h")}) == {"x": [0.0], "y": [0.0]}
    assert made({"x": played(1, "__"), "y": played(5, "__")}) == {"x": [0.0, 0.0], "y": [0.0, 0.0]}
    episodes = {"x": played(10.0, "a"), "y": played(10.4, "a"), "z": played(7.0, "b"), "w": played(9.0, "b")}
    found = made(episodes, return_tolerance=0.005)
    assert found["x"] == found["y"] == [0.0] and found["w"][0] > 0.7


def test_a_late_failure_is_as_bad_as_an_early_one() -> None:
    """At -100..100 the returns -100 · 0.95³ and -100 · 0.95²⁹ of a shared first state would be -0.707 and +0.707."""
    episodes = {"early": played(-100, "abcd"), "late": played(-100, "a" + "_" * 29)}
    for limits in (SCIENCEWORLD, SCIENCEWORLD | {"return_scale": 0.01}):
        assert made(episodes, **limits) == {"early": [0.0] * 4, "late": [0.0] * 30}
    late_success = {"early": played(100, "abcd"), "late": played(100, "a" + "_" * 29)}
    assert made(late_success, **SCIENCEWORLD)["early"][0] == pytest.approx(0.70711, rel=1e-4)


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.0, 100.0), (-100.0, 100.0)])
def test_affine_changes_of_the_returns_change_nothing(least: float, most: float) -> None:
    """R_1 = 0.75 + 0.01/4 = 0.7525, R_0 = 0.95·0.7525 + 0.01/2, in shares of the range."""
    chosen = algorithm(failure_return=least, success_return=most, return_scale=None, intrinsic_coefficient=0.01)
    assert step_returns(least + 0.75 * (most - least), [0.5, 0.25], chosen) == pytest.approx([0.719875, 0.7525])


def test_intrinsic_reward_is_a_reward_of_its_turn() -> None:
    """R_2 = 150 + 2·¼ = 150.5, over a failure of -100; R_1 = 0.95·150.5 + 2·1; R_0 = 0.95·R_1 + 2·½."""
    chosen = algorithm(**SCIENCEWORLD | {"intrinsic_coefficient": 0.01, "return_scale": 0.01})  # 2 of -100..100
    assert step_returns(50, [0.5, 1.0, 0.25], chosen) == pytest.approx([1.3872625, 1.44975, 1.505])
    new, known = (Played(100, [("a", 1, reward)]) for reward in (1.0, 0.5))
    changes = SCIENCEWORLD | {"intrinsic_coefficient": 0.01}
    assert made({"x": new, "y": known}, **changes) == {"x": [0.0], "y": [0.0]}  # in a solved group the return alone
    assert made({"x": new._replace(return_=99.0), "y": known._replace(return_=99.0)}, **changes)["x"][0] > 0.7


def test_novelty_that_is_added_as_it_is_does_not_weigh_as_much_as_a_success() -> None:
    """Equal returns, 1/n of 1 and 0: ±0.707 as a part of the score, ±0.005 beside it; with a success both add up."""
    new, known = (Played(0, [("a", 1, reward)]) for reward in (1.0, 0.0))
    changes = {"intrinsic_coefficient": 0.01, "success_return": 100.0, "return_scale": 0.01}
    assert made({"x": new, "y": known}, **changes)["x"] == pytest.approx([0.70711], rel=1e-3)
    plain = {**changes, "intrinsic_advantage": "plain"}
    assert made({"x": new, "y": known}, **plain)["x"] == pytest.approx([0.005])
    both = made({"x": new._replace(return_=100.0), "y": known}, **plain)
    assert (both["x"], both["y"]) == (pytest.approx([0.71211], rel=1e-4), pytest.approx([-0.71211], rel=1e-4))


def test_a_group_is_solved_for_the_turns_that_are_compared() -> None:
    """All without tips failed, both with tips solved it, in 2 turns and in 8: of their last turns, 1/n is left out.

    With 1/n of 1 and 1/8, times 0.01 of a range of 1, they would have ±0.707.
    """
    chosen = {"intrinsic_coefficient": 0.01, "return_tolerance": 0.0, "success_return": 1.0}
    episodes = {name: Played(0.0, [("hall", 1, 1.0)], WITHOUT) for name in "uv"}
    episodes["s"] = Played(1.0, [("hall", 1, 1.0), ("door", 1, 1.0)], ON)
    episodes["t"] = Played(
        1.0, [("hall", 1, 1.0)] + [(f"room {i}", 1, 1.0) for i in range(6)] + [("door", 1, 1 / 8)], ON
    )
    for mode in (ON, WITHOUT):  # and as a group of its own
        found = made(
            {name: each._replace(mode=mode if name in "st" else WITHOUT) for name, each in episodes.items()}
            if mode is ON
            else {name: episodes[name]._replace(mode=mode) for name in "st"},
            **chosen,
        )
        assert (found["s"][-1], found["t"][-1]) == (0.0, 0.0)
        assert (found["s"][0], found["t"][0]) == pytest.approx((0.70711, -0.70711), rel=1e-4)  # earlier is better


def test_a_request_that_is_sent_again_is_one_turn() -> None:
    """The last turn was asked three times at once: R_0 is 0.95 · 0.5, not 0.95³ · 0.5, so of 0 and 0.475 the half."""
    again = played(0.5, "ab").rollout("x")
    asked, known = again.events[2], again.events[3]
    late = [{**asked, "timestamp": 1.0 + i / 10} for i in (1, 2)]
    again.events[2:] = [asked, known, late[0], known, late[1], known]
    results = StepResults()
    for rollout in (again, played(0.0, "a").rollout("y")):
        results.train(rollout)
    advantages, _ = turn_advantages(results, algorithm(normalize_by_std=False))
    assert advantages["x", 0] == pytest.approx(0.475 / 2) and advantages["x", 3] == 0.0
    assert results.kept["x"].rows == [[0, 3]] and results.left_out["repeated_calls"] == 2


def test_off_policy_turns_are_measured_against_turns_without_tips() -> None:
    episodes = {"u": played(0, "a"), "v": played(2, "a")}
    found = made(episodes | {name: played(10, "ab", mode=OFF) for name in "st"}, normalize_by_std=False)
    assert found == {"u": [-1.0], "v": [1.0], "s": pytest.approx([9.5 - 1, 0]), "t": pytest.approx([9.5 - 1, 0])}
    found = made(episodes | {name: played(10, "ab", mode=ON) for name in "st"}, normalize_by_std=False)
    assert found["s"] == [0.0, 0.0]


@pytest.mark.parametrize("mode", [None, OFF])
@pytest.mark.parametrize(("split", "room", "sizes"), [(True, 16, (6, 5)), (False, 4, (3, 3))])
def test_the_advantage_of_each_token(mode: Mode | None, split: bool, room: int, sizes: tuple[int, int]) -> None:
    """Of rollouts ±4, and of turns in a ±3.61, in c ±4.05, as above: of unmerged rows, and of merged ones that are cut.

    In four positions g1 has the replies in a and b with what stands between them, and g2 those in a and c.
    """
    episodes = {
        "g1": Played(10.0, [(" a  dark\n room ", 2, 0), ("b", 1, 0), ("c", 3, 0)], mode),
        "g2": Played(2.0, [("a dark room", 1, 0), ("c", 2, 0), ("d", 2, 0)], mode),
    }
    want = {"g1": [7.61] * 2 + [4.0] + [8.05] * 3, "g2": [-7.61] + [-8.05] * 2 + [-4.0] * 2}
    chosen, results = algorithm(normalize_by_std=False), StepResults()
    rollouts = [episode.rollout(name, split=split) for name, episode in episodes.items()]
    batch, _ = adapted([results.train(rollout) for rollout in rollouts], 12, room)
    set_advantages(batch, results.kept, rollout_advantages(results.kept, chosen))
    advantages, metrics = turn_advantages(results, chosen)
    add_by_turn(batch, results, advantages)
    assert len(batch) == (6 if split else 2)
    found = defaultdict(list)
    for row, name in enumerate(batch.non_tensor_batch["rollout_id_list"].tolist()):
        advantages, mask = batch.batch["advantages"][row], batch.batch["response_mask"][row].bool()
        found[name] += advantages[mask].tolist()
        assert not advantages[~mask].any()
    assert found == {name: pytest.approx(want[name][:size]) for name, size in zip(found, sizes, strict=True)}
    # Clusters {g1's a, g2's}, {b}, {g1's c, g2's}, {d}: six turns in four, four of them share.
    assert metrics == {"gigpo/cluster_size_mean": 1.5, "gigpo/shared_turns": pytest.approx(4 / 6)}
    assert warning(metrics) == ""
