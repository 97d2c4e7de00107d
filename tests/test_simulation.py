"""The simulation: its toy is what it says, its seeds are apart, and its main orderings hold."""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import simulation
import torch
from simulation import SUITES, Outcome, Trainer, run
from simulation_world import DOORS, Houses, Played, one_hot, play, reader, remember

pytestmark = pytest.mark.slow

DEEP = simulation.DEPTHS["deep"]
FORMS = SUITES["forms"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def played(houses: Houses, noted: bool, players: int, seed: int = 0) -> Played:
    net, shape = reader(len(houses.right)), (*houses.right.shape[:2], players)
    start = torch.zeros(shape, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    return play(net, net, houses, torch.full(shape, noted), start, False, generator)


def test_the_start_finds_coins_by_chance_and_with_a_note_mostly() -> None:
    houses = Houses(4, 50, 3, torch.Generator().manual_seed(0))
    net = reader(4)
    assert float(houses.solved(net, noted=False).mean()) == pytest.approx(1 / 27, rel=0.05)
    houses.good = one_hot(houses.right)
    exact = houses.solved(net, noted=True)
    assert 0.7 < exact.mean() < 0.85  # of doors 0.9 + 0.1 / 3 are right
    assert float(played(houses, True, 40).success.float().mean()) == pytest.approx(float(exact.mean()), abs=0.02)


def test_an_episode_is_a_walk_and_its_novelty_a_count() -> None:
    """Every door by hand: a wrong one costs two moves, and each room's 1/n counts all that came before."""
    houses = Houses(3, 2, 4, torch.Generator().manual_seed(1))
    them, visits = played(houses, False, 5), {}
    events: list[tuple[int, int, int, int, tuple[int, int] | int]] = []  # seed, house, time, player, room
    for s, h, k in np.ndindex(3, 2, 5):
        at, moves = 0, 4
        for time in range(4):
            active = bool(moves > 0 and at < 4)
            assert bool(them.mask[s, h, k, time]) == active
            if not active:
                continue
            assert int(them.at[s, h, k, time]) == at
            events.append((s, h, 2 * time, k, at))
            door, right = int(them.doors[s, h, k, time]), int(houses.right[s, h, at])
            if door == right:
                at, moves = at + 1, moves - 1
            else:
                events.append((s, h, 2 * time + 1, k, (at, door)))
                moves -= 2
        assert bool(them.success[s, h, k]) == (at == 4)
        if at == 4:
            events.append((s, h, 9, k, 4))
    earned = np.zeros((3, 2, 5))
    for s, h, _, k, room in sorted(events, key=lambda event: event[:4]):
        visits[s, h, room] = visits.get((s, h, room), 0) + 1
        earned[s, h, k] += 1 / visits[s, h, room]
    np.testing.assert_allclose(them.intrinsic.numpy(), earned, rtol=1e-5)


def test_the_memory_holds_what_true_notes_tell() -> None:
    houses = Houses(3, 4, 4, torch.Generator().manual_seed(2))
    them = played(houses, False, 6)
    remember(houses, them, 0.0, torch.Generator())
    good, dead = np.zeros((3, 4, 4, DOORS)), np.zeros((3, 4, 4, DOORS))
    for s, h, k in np.ndindex(3, 4, 6):
        steps = zip(them.at[s, h, k].tolist(), them.doors[s, h, k].tolist(), them.mask[s, h, k].tolist(), strict=True)
        wrong = [(at, door) for at, door, mask in steps if mask and door != int(houses.right[s, h, at])]
        reached = 4 if them.success[s, h, k] else wrong[-1][0]
        for at in range(reached):
            good[s, h, at, int(houses.right[s, h, at])] = 1
        if not them.success[s, h, k]:
            dead[s, h, wrong[-1][0], wrong[-1][1]] = 1
    np.testing.assert_array_equal(houses.good.numpy(), good)
    np.testing.assert_array_equal(houses.dead.numpy(), dead)
    assert not (dead * one_hot(houses.right).numpy()).any()


def test_a_false_note_names_any_door_and_of_doors_that_all_lead_nowhere_the_newest_note_counts() -> None:
    houses = Houses(50, 4, 4, torch.Generator().manual_seed(2))
    remember(houses, played(houses, False, 6), 1.0, torch.Generator().manual_seed(3))
    told = houses.dead.sum(-1)
    of_right = houses.dead.gather(3, houses.right.unsqueeze(-1)).sum() / told.sum()
    assert 0.25 < of_right < 0.42 and told.max() == 2


def test_a_seed_learns_from_its_own_episodes_alone() -> None:
    """GRPO moves the weights of exactly those seeds that found a coin in a group that did not all find it."""
    trainer = Trainer(FORMS["grpo"], 0.01, 3, 12)
    before = [tensor.detach().clone() for tensor in trainer.net.tensors]
    trainer.step(0)
    moved = torch.stack([(old != new).flatten(1).any(1) for old, new in zip(before, trainer.net.tensors, strict=True)])
    assert moved.any(0).tolist() == trainer.houses.found.any(1).tolist()
    assert 0 < moved.any(0).sum() < 12


@cache
def outcome(form: str, rate: float = 0.01) -> Outcome:
    return run(FORMS[form], rate, DEEP, 12)


def test_chance_finds_nothing_and_notes_find_everything_in_the_deep_world() -> None:
    assert outcome("grpo").found.mean() < 0.2 and outcome("grpo").alone.mean() < 0.2
    assert outcome("paper").found.mean() > 0.8 and outcome("internalise").found.mean() == 1


def test_what_is_distilled_in_pairs_reaches_the_weights_and_the_papers_form_drifts() -> None:
    paper, internalise = outcome("paper"), outcome("internalise")
    assert internalise.alone.mean() > 0.9 and internalise.alone.mean() > paper.alone.mean() + 0.3
    assert paper.gap[3] > 1.2 * paper.gap[0] and paper.masked[3] > paper.masked[0]
    assert internalise.gap[3] < 0.2 * internalise.gap[0]
    assert paper.idle > 0.7


def test_a_start_that_plays_with_notes_and_is_fine_tuned_is_as_good() -> None:
    """The rival that needs no reinforcement; without notes it has nothing to learn from."""
    assert outcome("start plays with notes, fine-tuned").alone.mean() > 0.9
    assert outcome("start plays, fine-tuned").alone.mean() < 0.2


def test_an_undivided_novelty_does_not_drown_what_is_distilled() -> None:
    normalized, plain = (
        run(SUITES["intrinsic"][f"internalise, {how}"], 0.01, DEEP, 12) for how in ("normalized", "plain")
    )
    assert np.nanmean(plain.half) < 0.95 * np.nanmean(normalized.half)


@pytest.mark.parametrize("suite", SUITES)
def test_every_arm_runs(suite: str) -> None:
    for arm in SUITES[suite].values():
        few = arm.changed(episodes=3 * arm.settings["rollouts_per_task"])
        ended = run(few, 0.01, simulation.DEPTHS["shallow"], 3)
        assert np.isfinite(ended.alone).all() and ended.alone.shape == (3,)


def test_the_command_prints_a_table_and_keeps_the_numbers(tmp_path: Path, monkeypatch, capsys) -> None:
    output = tmp_path / "out.jsonl"
    options = [
        "--suite",
        "forms",
        "--world",
        "shallow",
        "--arm",
        "start, not*",
        "--seeds",
        "3",
        "--output",
        str(output),
    ]
    monkeypatch.setattr(sys, "argv", ["simulation.py", *options, "--output", str(output)])
    simulation.main()
    assert "a toy" in (said := capsys.readouterr().out) and "start, not trained" in said
    assert output.read_text().count("\n") == 1


def test_replay_teaches_more_of_what_was_found_with_the_budget_of_the_real_runs() -> None:
    without, replayed = (
        run(SUITES["replay"][f"internalise, 3 epochs, replay {count} a task"], 0.01, DEEP, 24) for count in (0, 2)
    )
    assert replayed.found.mean() == pytest.approx(without.found.mean(), abs=0.05)
    assert replayed.alone.mean() > without.alone.mean() + 0.05
    assert replayed.gap[3] < without.gap[3]


def test_a_policy_that_is_held_where_nothing_is_taught_goes_on_exploring_and_learns_more() -> None:
    """Also at three times the rate at which three epochs unlearn to read notes."""
    replay, arms = "internalise, 3 epochs, replay 2 a task, q 0.8", SUITES["replay"]
    let_go, held = (run(arms[name], 0.03, DEEP, 24) for name in (replay, "and holding, q 0.8"))
    assert held.found.mean() > let_go.found.mean() + 0.3
    assert held.alone.mean() > let_go.alone.mean() + 0.3
