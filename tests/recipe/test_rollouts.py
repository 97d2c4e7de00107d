"""Drawn modes, tags on agent-lightning's own server, and rollouts made ready for training."""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from agentlightning.client import AgentLightningSyncClient
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import RolloutCreate, RolloutState
from agentlightning.server.app import create_app
from agentlightning.server.store import _events, _rollouts
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout, Triplet

from empo2.recipe.config import Algorithm, load_settings
from empo2.recipe.errors import ConfigError, NoUsableRollouts
from empo2.recipe.launcher.tasks import scope_of
from empo2.recipe.trainer.manager import (
    CALL_EVENT,
    MEMORY,
    NO_MEMORY,
    OFF_POLICY,
    ON_POLICY,
    Empo2RolloutManager,
    Mode,
    draw_modes,
    prepare_for_training,
)

KEY = "secret"
PAPER = load_settings("gpu").algorithm


def algorithm(**changes: Any) -> Algorithm:
    """The paper's settings, with what the test changes."""
    return PAPER.model_copy(update=changes)


# Modes


def frequencies(drawn: list[Mode]) -> dict[Mode, float]:
    return {mode: count / len(drawn) for mode, count in Counter(drawn).items()}


def test_frequencies_of_the_modes() -> None:
    """p = 0.25 and q = 2/3, in 20,000 steps: within five standard deviations."""
    drawn = [draw_modes(algorithm(), step, groups=1)[0] for step in range(20_000)]
    found = frequencies(drawn)
    p, q = 0.25, 0.6667
    expected = {
        Mode(NO_MEMORY, ON_POLICY): 1 - p,
        Mode(MEMORY, ON_POLICY): p * (1 - q),
        Mode(MEMORY, OFF_POLICY): p * q,
    }
    assert found.keys() == expected.keys()
    for mode, share in expected.items():
        assert found[mode] == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 20_000))


def test_draws_hang_on_seed_and_step_alone() -> None:
    steps = range(1, 200)
    first = [draw_modes(algorithm(seed=5), step, groups=4) for step in steps]
    again = [draw_modes(algorithm(seed=5), step, groups=4) for step in reversed(steps)]
    assert first == again[::-1]
    assert first != [draw_modes(algorithm(seed=6), step, groups=4) for step in steps]
    assert len(frequencies([modes[0] for modes in first])) == 3


def test_one_draw_for_the_step() -> None:
    for step in range(200):
        modes = draw_modes(algorithm(mode_per="step"), step, groups=16)
        assert len(modes) == 16
        assert len(set(modes)) == 1


def test_one_draw_for_each_group() -> None:
    steps = [draw_modes(algorithm(mode_per="group"), step, groups=16) for step in range(1000)]
    assert {len(modes) for modes in steps} == {16}
    found = frequencies([mode for modes in steps for mode in modes])
    assert found[Mode(NO_MEMORY, ON_POLICY)] == pytest.approx(0.75, abs=0.02)
    assert found[Mode(MEMORY, OFF_POLICY)] == pytest.approx(0.25 * 0.6667, abs=0.02)
    assert sum(len(set(modes)) > 1 for modes in steps) > 900


@pytest.mark.parametrize(
    ("p", "q", "only"),
    [
        (0.0, 0.0, Mode(NO_MEMORY, ON_POLICY)),
        (0.0, 1.0, Mode(NO_MEMORY, ON_POLICY)),
        (1.0, 0.0, Mode(MEMORY, ON_POLICY)),
        (1.0, 1.0, Mode(MEMORY, OFF_POLICY)),
    ],
)
def test_certain_draws(p: float, q: float, only: Mode) -> None:
    certain = algorithm(memory_probability=p, off_policy_probability=q, mode_per="group")
    assert {mode for step in range(300) for mode in draw_modes(certain, step, groups=4)} == {only}


def test_grpo_draws_nothing() -> None:
    grpo = algorithm(name="grpo", memory_probability=1.0, off_policy_probability=1.0)
    assert draw_modes(grpo, 1, groups=3) == [Mode(NO_MEMORY, ON_POLICY)] * 3


# Scopes


def test_scopes_never_mix() -> None:
    """The authors' code knows variation ids below 5 only, and one memory per id for all tasks."""
    tasks = [{"task": task, "variation": v, "seed": 1} for task in ("find-animal", "find-plant") for v in range(12)]
    scopes = [scope_of(task, ["task", "variation"]) for task in tasks]
    assert len(set(scopes)) == 24
    assert scope_of({**tasks[0], "seed": 2}, ["task", "variation"]) == scopes[0]
    assert len({scope_of(task, ["task"]) for task in tasks}) == 2
    assert len({scope_of(task, []) for task in tasks}) == 1


def test_scopes_are_unambiguous() -> None:
    fields = ["a", "b"]
    pairs = [("x", "y z"), ("x y", "z"), ('x", "b": "y', "z"), ("1", "2"), (1, 2), (None, "None"), ("", "")]
    assert len({scope_of({"a": a, "b": b}, fields) for a, b in pairs}) == len(pairs)


def test_scope_of_a_field_that_tasks_lack() -> None:
    with pytest.raises(
        ConfigError, match=r"memory\.scope=\['task', 'level'\].*no field 'level'.*\['task', 'variation'\]"
    ):
        scope_of({"variation": 1, "task": "find-animal"}, ["task", "level"])


# Rollouts


def triplet(prompt: list[int], reply: list[int], log_probs: list[float] | None) -> Triplet:
    return Triplet(prompt={"token_ids": prompt}, response={"token_ids": reply, "log_probs": log_probs})


def call(prompt: list[int], **data: Any) -> dict[str, Any]:
    return {"event_type": CALL_EVENT, "data": {"prompt_token_ids": prompt, **data}}


def completed(
    update: str | None = OFF_POLICY, *, events: list[dict[str, Any]] | None = None, **changes: Any
) -> CompletedRollout:
    """An episode of two turns, whose tips are the tokens 900 to 999, tagged unless ``update`` is None."""
    if events is None:
        events = [
            call([1, 900, 2], tip_free_prompt_token_ids=[1, 2], intrinsic_reward=1.0),
            call([1, 900, 2, 10, 11, 901, 3], tip_free_prompt_token_ids=[1, 2, 10, 11, 3], intrinsic_reward=0.25),
        ]
    values: dict[str, Any] = {
        "rollout_id": "r",
        "data_id": "g",
        "step": 1,
        "sample_idx_in_step": 0,
        "enqueue_time": 0.0,
        "final_reward": 50.0,
        "rollout_state": RolloutState.SUCCEEDED,
        "triplets": [
            triplet([1, 900, 2], [10, 11], [-0.1, -0.2]),
            triplet([1, 900, 2, 10, 11, 901, 3], [12], [-0.3]),
        ],
        "events": events,
        "metadata": {} if update is None else {"empo2": {"rollout_mode": MEMORY, "update_mode": update, "scope": "s"}},
    }
    return CompletedRollout(**values | changes)


def test_off_policy_rollout_gets_its_tip_free_prompts_and_nothing_else() -> None:
    rollout = completed()
    before = rollout.model_dump()
    trained, _, left_out = prepare_for_training(rollout)
    assert left_out == 0
    assert trained.triplets is not None
    assert [t.prompt for t in trained.triplets] == [{"token_ids": [1, 2]}, {"token_ids": [1, 2, 10, 11, 3]}]
    after = trained.model_dump()
    for old, new in zip(before["triplets"], after["triplets"], strict=True):
        assert {**new, "prompt": None} == {**old, "prompt": None}  # vLLM's log-probs above all
    assert {**after, "triplets": None} == {**before, "triplets": None}
    assert rollout.model_dump() == before


@pytest.mark.parametrize("update", [ON_POLICY, None])
def test_on_policy_rollout_keeps_its_prompts(update: str | None) -> None:
    rollout = completed(update)
    trained, intrinsic, left_out = prepare_for_training(rollout)
    assert trained.triplets == rollout.triplets
    assert (intrinsic, left_out) == (1.25, 0)


def test_turn_without_tip_free_prompt_is_left_out() -> None:
    """Never trained with its tips; its visit counts all the same."""
    events = [
        call([1, 900, 2], intrinsic_reward=0.5),
        call([1, 900, 2, 10, 11, 901, 3], tip_free_prompt_token_ids=[1, 2, 10, 11, 3], intrinsic_reward=0.25),
    ]
    trained, intrinsic, left_out = prepare_for_training(completed(events=events))
    assert trained.triplets is not None
    assert [t.prompt["token_ids"] for t in trained.triplets] == [[1, 2, 10, 11, 3]]
    assert (intrinsic, left_out) == (0.75, 1)


def test_turn_without_event_is_left_out() -> None:
    trained, intrinsic, left_out = prepare_for_training(completed(events=[]))
    assert trained.triplets == []
    assert (intrinsic, left_out) == (0.0, 2)


def test_event_of_another_prompt_is_not_taken() -> None:
    events = [call([1, 900, 3], tip_free_prompt_token_ids=[7], intrinsic_reward=1.0)]
    assert prepare_for_training(completed(events=events))[1:] == (0.0, 2)


def test_call_repeated_with_the_same_prompt_counts_once() -> None:
    """agent-lightning keeps the last of requests with equal prompts: one row, one visit's reward."""
    events = [
        call([1, 900, 2], tip_free_prompt_token_ids=[1, 2], intrinsic_reward=1.0),
        call([1, 900, 2], tip_free_prompt_token_ids=[1, 2], intrinsic_reward=0.5),
    ]
    rollout = completed(events=events, triplets=[triplet([1, 900, 2], [10], [-0.1])])
    assert prepare_for_training(rollout)[1:] == (0.5, 0)


def manager(**changes: Any) -> Empo2RolloutManager:
    made = Empo2RolloutManager(agl_base_url="http://127.0.0.1:9", agl_key=KEY, model="m", step=7, train_rollout_n=2)
    made.begin(algorithm(return_scale=1.0, **changes), ["task", "variation"], drain_seconds=5)
    return made


def test_intrinsic_reward_reaches_the_return() -> None:
    """The authors' code computes it and then reads other scores."""
    made = manager()
    trained = made._usable(completed(), is_train=True)
    assert trained is not None
    assert trained.final_reward == 50 + 1.25
    assert made.outcomes.returns == {"r": 50.0}  # what is reported is the environment's own
    assert made.outcomes.intrinsic == {"r": 1.25}
    assert made.outcomes.modes == {"r": Mode(MEMORY, OFF_POLICY)}


def test_coefficient_and_scale() -> None:
    made = manager(intrinsic_coefficient=2.0)
    made._algorithm = made._algorithm.model_copy(update={"return_scale": 0.01})
    trained = made._usable(completed(), is_train=True)
    assert trained is not None
    assert trained.final_reward == pytest.approx(0.01 * (50 + 2 * 1.25))
    made._algorithm = made._algorithm.model_copy(update={"intrinsic_coefficient": 0.0})
    trained = made._usable(completed(), is_train=True)
    assert trained is not None
    assert trained.final_reward == pytest.approx(0.5)


@pytest.mark.parametrize("reward", [-100.0, 0.0, 100.0, 1e6])
def test_rewards_are_never_clamped(reward: float) -> None:
    trained = manager()._usable(completed(ON_POLICY, events=[], final_reward=reward), is_train=True)
    assert trained is not None
    assert trained.final_reward == reward


def test_untagged_rollout_is_on_policy_without_memory() -> None:
    made = manager()
    assert made._usable(completed(None, events=[]), is_train=True) is not None
    assert made.outcomes.modes == {"r": Mode(NO_MEMORY, ON_POLICY)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_state": RolloutState.FAILED}, "failed"),
        ({"rollout_state": RolloutState.FAILED, "final_reward": 80.0}, "failed"),
        ({"triplets": []}, "no_model_call"),
        ({"triplets": None}, "no_model_call"),
        ({"final_reward": None}, "no_reward"),
        ({"final_reward": math.nan}, "no_reward"),
        ({"final_reward": -math.inf}, "no_reward"),
        ({"triplets": [triplet([1, 900, 2], [10, 11], None)]}, "no_log_probs"),
        ({"triplets": [triplet([1, 900, 2], [10, 11], [-0.1])]}, "no_log_probs"),
        (
            {"triplets": [triplet([1, 900, 2], [10], [-0.1]), triplet([1, 900, 2, 10, 11, 901, 3], [12], None)]},
            "no_log_probs",
        ),
        ({"events": []}, "no_tip_free_prompt"),
    ],
)
def test_unusable_rollouts_are_counted(changes: dict[str, Any], reason: str) -> None:
    made = manager()
    assert made._usable(completed(**changes, error_message="boom"), is_train=True) is None
    assert made.outcomes.dropped == {reason: 1}
    assert made.outcomes.errors == ["boom"]
    assert not made.outcomes.returns and not made.outcomes.modes and not made.outcomes.intrinsic


def test_validation_wants_a_reward_and_no_log_probs() -> None:
    made = manager()
    rollout = completed(None, triplets=[triplet([1], [10], None)], events=[])
    assert made._usable(rollout, is_train=False) is rollout
    assert made.outcomes.returns == {"r": 50.0}
    assert made._usable(completed(None, final_reward=None), is_train=False) is None


def test_rollout_alone_in_its_group_is_dropped() -> None:
    """verl would take its raw score for its advantage."""
    made = manager()
    rollouts = [completed(rollout_id=name, data_id=name[0]) for name in ("g1", "h1", "h2")]
    usable = [kept for rollout in rollouts if (kept := made._usable(rollout, is_train=True)) is not None]
    kept = made._without_lonely(usable)
    assert [rollout.rollout_id for rollout in kept] == ["h1", "h2"]
    assert made.outcomes.dropped == {"alone_in_group": 1}
    assert made.outcomes.returns.keys() == made.outcomes.modes.keys() == made.outcomes.intrinsic.keys() == {"h1", "h2"}


def test_nothing_usable_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made = manager()
    played = [completed(rollout_state=RolloutState.FAILED, error_message="no java"), completed(final_reward=None)]
    monkeypatch.setattr(AglRolloutManager, "enqueue_and_wait_until_completed", lambda self, data, is_train: played)
    drained = httpx.MockTransport(lambda request: httpx.Response(200, json={"empo2/calls": 3}))
    made.client = AgentLightningSyncClient(base_url="http://gateway", transport=drained)
    with pytest.raises(NoUsableRollouts, match=r"none of 2 rollouts.*1 failed, 1 no reward.*no java"):
        made.enqueue_and_wait_until_completed({}, is_train=True)
    assert made.gateway_metrics == {"empo2/calls": 3}


# Tags, on agent-lightning's own server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """agent-lightning's app as a real server: the manager's client is a synchronous one."""
    proxy = {"model_name": "m", "include_log_probs": True, "train": {"temperature": 1.0}, "val": {"temperature": 0.4}}
    app = create_app({"key": KEY, "default_proxy": proxy})
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


@pytest.fixture
def store() -> Iterator[dict[str, Any]]:
    _rollouts.clear()
    yield _rollouts
    _rollouts.clear()
    _events.clear()


class Hooks(RolloutHooks):
    """A user's hooks, which add to input and metadata."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        self.seen.append(dict(request.input))
        return request.model_copy(update={"input": {**request.input, "from": "hook"}, "metadata": {"mine": 1}})


TASKS = {"task": ["find-animal", "find-plant", "find-animal"], "variation": [0, 5, 1]}


def create(
    server: str, *, is_train: bool = True, hooks: Any = None, step: int = 7, **changes: Any
) -> Empo2RolloutManager:
    made = Empo2RolloutManager(agl_base_url=server, agl_key=KEY, model="m", step=step, train_rollout_n=4, hooks=hooks)
    made.begin(algorithm(**changes), ["task", "variation"], drain_seconds=5)
    with made.client:
        made._create_rollouts(TASKS, is_train=is_train)
    return made


@pytest.mark.parametrize("step", range(1, 6))
def test_tags_reach_the_server(server: str, store: dict[str, Any], step: int) -> None:
    drawing = {"mode_per": "group", "memory_probability": 0.5}
    create(server, step=step, **drawing)
    modes = draw_modes(algorithm(**drawing), step, groups=3)
    rollouts = list(store.values())
    assert len(rollouts) == 12
    for number, rollout in enumerate(rollouts):
        group = number // 4  # one tag for all rollouts that are compared with each other
        task = {"task": TASKS["task"][group], "variation": TASKS["variation"][group]}
        assert rollout.metadata.empo2 == {
            "rollout_mode": modes[group].rollout,
            "update_mode": modes[group].update,
            "scope": scope_of(task, ["task", "variation"]),
        }
        assert rollout.input == task  # the agent sees nothing of it


def test_users_hooks_are_still_called(server: str, store: dict[str, Any]) -> None:
    hooks = Hooks()
    made = create(server, hooks=hooks)
    assert len(hooks.seen) == 12
    assert all(set(seen) == {"task", "variation"} for seen in hooks.seen)
    for rollout in store.values():
        assert rollout.input["from"] == "hook"
        assert rollout.metadata.mine == 1
        assert set(rollout.metadata.empo2) == {"rollout_mode", "update_mode", "scope"}
    assert made._hooks is hooks


@pytest.mark.parametrize(("is_train", "name"), [(False, "empo2"), (True, "grpo")])
def test_validation_and_grpo_are_not_tagged(server: str, store: dict[str, Any], is_train: bool, name: str) -> None:
    create(server, is_train=is_train, name=name, memory_probability=1.0)
    assert len(store) == (12 if is_train else 3)
    assert not any(hasattr(rollout.metadata, "empo2") for rollout in store.values())


def test_task_without_scope_field_creates_nothing(server: str, store: dict[str, Any]) -> None:
    hooks = Hooks()
    made = Empo2RolloutManager(agl_base_url=server, agl_key=KEY, model="m", step=1, hooks=hooks)
    made.begin(algorithm(), ["level"], drain_seconds=5)
    with made.client, pytest.raises(ConfigError, match="level"):
        made._create_rollouts(TASKS, is_train=True)
    assert not store
    assert made._hooks is hooks
