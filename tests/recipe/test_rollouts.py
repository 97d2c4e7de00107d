"""Drawn modes, tags on agent-lightning's own server, and rollouts made ready for training."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.hooks import RolloutHooks
from agentlightning.schemas import RolloutCreate, RolloutState
from agentlightning.server.app import create_app
from agentlightning.server.store import _rollouts
from agentlightning.verl.agl_rollout_manager import CompletedRollout
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader  # verl's

from empo2.recipe.config import Algorithm, Settings, load_settings
from empo2.recipe.errors import Empo2Error, GatewayError, NoUsableRollouts
from empo2.recipe.evaluation.panels import Panel
from empo2.recipe.evaluation.player import MEMORY_OFF, MEMORY_ON, Player, planned_episodes
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.protocol import Mode, RolloutTag, scope_of
from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported
from empo2.recipe.trainer.advantages import compared_scores
from empo2.recipe.trainer.manager import TASK, Empo2RolloutManager, draw_modes, draw_tags
from empo2.recipe.trainer.play import PlayingTrainer, TaskDataset
from empo2.recipe.trainer.shown_rollouts import RunRecords
from empo2.recipe.trainer.step_results import DroppedRollout, RolloutResult, StepResults
from empo2.recipe.trainer.tracking import step_line, training_metrics, validation_metrics
from empo2.recipe.trainer.verl_config import build_verl_config

from .model_server import MODEL, serving
from .rollout_events import refused, request, rollout_of, two_turns

KEY = "secret"
PAPER = load_settings("gpu")
NO_MEMORY, ON_POLICY, OFF_POLICY = Mode.of(memory=False), Mode.of(memory=True), Mode.of(memory=True, off_policy=True)


def algorithm(**changes: Any) -> Algorithm:
    """The paper's settings, with what the test changes."""
    return PAPER.algorithm.model_copy(update=changes)


def modes_of(algorithm: Algorithm, step: int, groups: int) -> list[Mode]:
    return list(itertools.islice(draw_modes(algorithm, step), groups))


def test_frequencies_of_the_modes() -> None:
    """p = 0.25 and q = 2/3, in 20,000 groups: within five standard deviations; one draw for each, or for the step."""
    steps = [modes_of(algorithm(mode_per="group"), step, 20) for step in range(1000)]
    found = Counter(mode.name for modes in steps for mode in modes)
    p, q = 0.25, 0.6667
    expected = {"no memory": 1 - p, "memory, on-policy": p * (1 - q), "memory, off-policy": p * q}
    assert found.keys() == expected.keys()
    for mode, share in expected.items():
        assert found[mode] / 20_000 == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / 20_000))
    assert sum(len({mode.name for mode in modes}) > 1 for modes in steps) > 900
    for step in range(200):
        assert len({mode.name for mode in modes_of(algorithm(mode_per="step"), step, 16)}) == 1


def test_draws_hang_on_seed_and_step_alone() -> None:
    def modes(seed: int, steps: Iterable[int]) -> list[list[Mode]]:
        return [modes_of(algorithm(seed=seed), step, 4) for step in steps]

    assert modes(5, range(1, 200)) == modes(5, reversed(range(1, 200)))[::-1] != modes(6, range(1, 200))


def test_scopes_never_mix_and_are_unambiguous() -> None:
    """The authors' code knows variation ids below 5 only, and one memory per id for all tasks."""
    tasks = [{"task": task, "variation": v, "seed": 1} for task in ("find-animal", "find-plant") for v in range(12)]
    scopes = [scope_of(task, ["task", "variation"]) for task in tasks]
    assert len(set(scopes)) == 24
    assert scope_of({**tasks[0], "seed": 2}, ["task", "variation"]) == scopes[0]
    assert [len({scope_of(task, fields) for task in tasks}) for fields in (["task"], [])] == [2, 1]
    pairs = [("x", "y z"), ("x y", "z"), ('x", "b": "y', "z"), ("1", "2"), (1, 2), (None, "None"), ("", "")]
    assert len({scope_of({"a": a, "b": b}, ["a", "b"]) for a, b in pairs}) == len(pairs)


def completed(
    mode: Mode | None = OFF_POLICY, name: str = "r", events: list[dict[str, Any]] | None = None, **changes: Any
) -> CompletedRollout:
    return rollout_of(name, two_turns() if events is None else events, mode, **changes)


def train(*played: CompletedRollout, **of_step: Any) -> tuple[StepResults, list[CompletedRollout]]:
    """Use the rollouts beside two good ones of their group."""
    results = StepResults(**of_step)
    beside = [completed(name=f"beside {number}") for number in range(2)]
    usable = results.usable([*played, *beside], is_train=True)
    return results, [rollout for rollout in usable if not rollout.rollout_id.startswith("beside")]


def test_intrinsic_reward_reaches_the_score() -> None:
    """The authors' code computes it and reads other scores. What is reported is the environment's, never clamped."""
    for mode, reward in ((None, -100.0), (ON_POLICY, 1e6), (OFF_POLICY, 50.0)):
        results, (trained,) = train(completed(mode, final_reward=reward))
        result = results.kept["r"]
        assert trained.final_reward == result.return_ == reward
        assert (result.intrinsic, result.mode) == (1.25, mode or NO_MEMORY)
    other = RolloutResult(group="g", mode=OFF_POLICY, return_=10.0)
    scaled = algorithm(return_scale=0.01, intrinsic_coefficient=0.01)  # 2 of -100..100
    assert compared_scores([result, other], scaled) == pytest.approx([0.01 * (50 + 2 * 1.25), 0.1])


def failed(message: str | None, *calls: Any) -> dict[str, Any]:
    """With what agent-lightning's LocalReconciler says of its end."""
    return {"rollout_state": RolloutState.FAILED, "final_reward": None, "error_message": message, "events": [*calls]}


_ANSWERED = request([1], [2])
_EXITED = "subprocess exited with code 1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"events": []}, "no_model_call"),
        ({"final_reward": None}, "no_reward"),
        ({"final_reward": math.nan}, "no_reward"),
        ({"events": [request([1, 900, 2], [10, 11], None)]}, "no_log_probs"),
        ({"events": [request([1, 900, 2], [10, 11], [-0.1])]}, "no_log_probs"),
        ({"events": two_turns()[::2]}, "no_tip_free_prompt"),
        (failed(_EXITED, _ANSWERED) | {"final_reward": 80.0}, "failed_by_agent"),  # its own exception
        (failed(_EXITED, _ANSWERED, refused(400)), "failed_by_agent"),  # the context is outgrown
        (failed(_EXITED, _ANSWERED, refused(503)), "failed_by_system"),
        (failed(_EXITED, _ANSWERED, refused(None)), "failed_by_system"),
        (failed(_EXITED, _ANSWERED, refused(503), _ANSWERED), "failed_by_agent"),  # asked again
        (failed(_EXITED), "failed_by_system"),  # before the model has said anything
        (failed("subprocess exited with code -9", _ANSWERED), "failed_by_system"),  # killed
        (failed("subprocess exited with code 137", _ANSWERED), "failed_by_system"),  # a command that was killed
        (failed("subprocess exited with code 255", _ANSWERED), "failed_by_agent"),
        (failed("local subprocess timed out", _ANSWERED), "failed_by_system"),
        (failed(None, _ANSWERED), "failed_by_system"),
    ],
)
def test_unusable_rollouts_are_counted(changes: dict[str, Any], reason: str) -> None:
    """An agent that fails can be given a return."""
    by_agent = reason == "failed_by_agent"
    mode = OFF_POLICY if reason == "no_tip_free_prompt" else ON_POLICY
    ended: dict[str, Any] = {"error_message": "boom", **changes}
    results, usable = train(completed(mode, **ended))
    assert (usable, results.reasons) == ([], {reason: 1})
    assert results.dropped["r"].error == (ended["error_message"] or "")
    assert results.kept.keys() == {"beside 0", "beside 1"}
    results, usable = train(completed(mode, **ended), failed_rollout_return=-100.0)
    assert [rollout.final_reward for rollout in usable] == [-100.0] * by_agent
    assert results.reasons == ({} if by_agent else {reason: 1})


def test_a_rollout_left_alone_by_overlong_ones_is_not_overlong() -> None:
    """Three of the four rollouts of a group have a prompt that is too long; the fourth is alone. None is in a mean."""
    long = [rollout_of(f"long {number}", [request([1] * 7, [2])], final_reward=float(number)) for number in range(3)]
    fourth = rollout_of("fourth", [request([1] * 6, [2])], final_reward=40.0)
    others = [rollout_of(f"other {i}", [request([1], [2])], data_id="h", final_reward=60.0 + 20 * i) for i in (0, 1)]
    results = StepResults(max_prompt_tokens=6)
    usable = results.usable([*long, fourth, *others], is_train=True)
    assert [rollout.rollout_id for rollout in usable] == ["other 0", "other 1"]
    metrics = training_metrics(results, 100)
    assert (metrics["empo2/overlong_rows"], metrics["empo2/rollouts_dropped"]) == (3, 4)
    assert (metrics["empo2/dropped/overlong"], metrics["empo2/dropped/alone_in_group"]) == (3, 1)
    assert (metrics["training/return"], metrics["training/return_std"]) == (70, 10)
    split_and_cut = {"empo2/unmerged_rollouts": 0, "empo2/cut_rows": 0, "empo2/reply_tokens_lost": 0}
    assert step_line(7, metrics | split_and_cut, rollouts=2, rows=2) == (
        "step 7: training on 2 rollouts in 2 rows; dropped 3 overlong, 1 alone in group; WARNING: 3 rows dropped "
        "(raise model.max_prompt_tokens)"
    )


def test_rows_that_are_too_long_are_left_out_alone() -> None:
    """The second of three chats; the replies of the others stay, and its tokens are counted as lost."""
    chats = [request([1], [2]), request([3] * 9, [4, 5]), request([6], [7])]
    results, (trained,) = train(completed(None, events=chats), max_prompt_tokens=8)
    assert [triplet.response["token_ids"] for triplet in trained.triplets or []] == [[2], [7]]
    assert (results.left_out["overlong_rows"], results.kept["r"].reply_tokens) == (1, 4)


def lost(reason: str = "failed_by_system", mode: Mode = NO_MEMORY, panel: str = "") -> DroppedRollout:
    return DroppedRollout(reason, "", panel, mode)


def test_validation_with_memory_and_on_panels() -> None:
    """Means of each panel and kind by hand; the training tasks are in no mean but their own."""

    def result(panel: str, mode: Mode, value: float) -> RolloutResult:
        return RolloutResult("g", mode, value, panel=panel, agent_metrics={"turns": value})

    kept = {
        "a": result("train", NO_MEMORY, 100.0),
        "b": result("train", ON_POLICY, 100.0),
        "c": result("unseen", NO_MEMORY, 20.0),
        "d": result("unseen", NO_MEMORY, 40.0),
        "e": result("unseen", ON_POLICY, 100.0),
        "f": result("far", NO_MEMORY, 0.0),
        "g": result("far", ON_POLICY, 100.0),
    }
    dropped = {"h": lost("no_reward", ON_POLICY, "unseen"), "i": lost("no_reward", NO_MEMORY, "train")}
    metrics = validation_metrics(
        [StepResults(kept=kept), StepResults(dropped=dropped)], algorithm(failure_return=-100, success_return=100)
    )
    parts = ("return", "success_rate", "memory_return", "memory_success_rate", "memory_gap", "memory_success_gap")
    means = {
        "val": (20, 0, 100 / 3, 2 / 3, 100 / 3 - 20, 2 / 3),
        "val/train": (0, 0.5, 100, 1, 100, 0.5),
        "val/unseen": (30, 0, 0, 0.5, -30, 0.5),
        "val/far": (0, 0, 100, 1, 100, 1),
    }
    expected = {f"{name}/{part}": each for name, of in means.items() for part, each in zip(parts, of, strict=True)}
    expected |= {"val/return_without_failures": 20, "val/agent/turns": 20}
    expected |= {"val/dropped/no_reward": 2, "val/rollouts_dropped": 2, "val/n_rollouts": 9}
    assert metrics == {name: pytest.approx(value) for name, value in expected.items()}
    worst = validation_metrics([StepResults(dropped={"c": lost(), "d": lost()})], algorithm(failure_return=-7))
    counts = {"val/n_rollouts": 2, "val/rollouts_dropped": 2, "val/dropped/failed_by_system": 2}
    assert worst == {"val/return": -7, "val/success_rate": 0, **counts}


def test_validation_with_memory_is_told_from_the_policy_alone() -> None:
    """Both are kept, if they have a reward; agent-lightning's own validation metrics are made of what is returned."""
    alone = completed(None, "a", [request([1], [10], None)], input={"panel": "unseen"})  # no log-probs are needed
    with_memory = completed(ON_POLICY, "b", input={"panel": "unseen"}, final_reward=80.0)
    failed = completed(ON_POLICY, "c", input={"panel": None}, final_reward=None)
    results = StepResults()
    (returned,) = results.usable([alone, with_memory, failed], is_train=False)
    assert returned.rollout_id == "a" and [turn.response["token_ids"] for turn in returned.triplets or []] == [[10]]
    kept = {name: (result.mode.memory, result.panel, result.return_) for name, result in results.kept.items()}
    assert kept == {"a": (False, "unseen", 50.0), "b": (True, "unseen", 80.0)}
    assert results.dropped == {"c": lost("no_reward", ON_POLICY)}


def reporting(name: str, *reported: Any, **changes: Any) -> CompletedRollout:
    """A rollout whose reward events hold these ``metrics``."""
    rewards = [{"event_type": "reward", "data": {"value": 50.0, "metrics": metrics}} for metrics in reported]
    return completed(None, name, [*two_turns(), *rewards], **changes)


def test_numbers_that_agents_report_are_averaged() -> None:
    """Over the usable rollouts that report them, each by its last reward event."""
    rollouts = [
        reporting("a", {"corrected": 9, "tool_errors": 9}, {"corrected": 0.25, "tool_errors": 2}),
        reporting("b", {"corrected": 0.5}),
        reporting("c", {"corrected": 1.0, "tool_errors": 5}),
        reporting("dropped", {"corrected": 100.0, "lost": 1.0}, final_reward=None),
        reporting("no number", {"corrected": "1", "ok": True, "x": None, "y": math.nan, "z": -math.inf, "n": 10**400}),
        reporting("no mapping", [1.0]),
        reporting("nothing"),
    ]
    results = StepResults()
    results.usable(rollouts, is_train=True)
    assert results.reasons == {"no_reward": 1}
    metrics = training_metrics(results, 100) | validation_metrics([results], algorithm())
    assert {name: value for name, value in metrics.items() if "/agent/" in name} == {
        f"{phase}/agent/{name}": pytest.approx(mean)
        for phase in ("training", "val")
        for name, mean in (("corrected", (0.25 + 0.5 + 1.0) / 3), ("tool_errors", 3.5))
    }


def test_nothing_usable_says_why() -> None:
    failed_one = completed(name="a", rollout_state=RolloutState.FAILED, error_message="no java")
    with pytest.raises(NoUsableRollouts, match=r"none of 2 rollouts.*1 failed by system, 1 no reward.*no java"):
        StepResults().usable([failed_one, completed(final_reward=None)], is_train=True)
    with pytest.raises(NoUsableRollouts, match=r"2 overlong .*its prompt exceeds model\.max_prompt_tokens=1;"):
        StepResults(1).usable([completed(name="a"), completed()], is_train=True)


def gateway(answer: Any, status: int = 200) -> GatewayClient:
    return GatewayClient("http://gw/", KEY, httpx.MockTransport(lambda request: httpx.Response(status, json=answer)))


STATE = {"model": "m", "memory_size": 0, "episodes": 0, "reflections": 0}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "EMPO2_ADMIN_KEY is wrong: give the gateway at http://gw and its trainer"),
        (403, "EMPO2_ADMIN_KEY is an agent's key"),
        (200, "http://gw is not an EMPO² gateway; start `empo2 gateway`"),
        (404, "http://gw is not an EMPO² gateway; start `empo2 gateway`"),
        (409, "cannot restore the memory: another embedder"),
    ],
)
def test_what_refuses_is_named(status: int, said: str) -> None:
    client = gateway({"detail": "another embedder"}, status)
    with pytest.raises((Empo2Error, GatewayError), match=said):
        client.restore(Path("memory.sqlite")) if status == 409 else client.check({})


def test_a_page_is_no_gateway() -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, html="<p>Hello"))
    with pytest.raises(Empo2Error, match="http://gw is not an EMPO² gateway"):
        GatewayClient("http://gw/", KEY, page).check({})


def test_handshake_compares_model_temperatures_and_returns() -> None:
    sampled = {"temperature": 1.0, "val_temperature": 0.4}
    returns = {"success_return": 100.0, "failure_return": 0.0}
    served = {f"model.{name}": value for name, value in sampled.items()} | {"model.path": "m"}
    served |= {f"algorithm.{name}": value for name, value in returns.items()}
    client = gateway(STATE | sampled | returns)
    client.check(served)
    gateway(STATE).check({**served, "model.temperature": 0.7})  # a gateway that does not say
    for setting, value in served.items():
        client.check({setting: None})  # a configuration that does not say
        wanted = "n" if value == "m" else 7.0
        with pytest.raises(Empo2Error, match=f"http://gw serves {setting}={value!r}, the trainer wants {wanted!r}"):
            client.check({setting: wanted})


def test_a_gateway_that_loads_is_silent_and_is_waited_for() -> None:
    failures: list[type[httpx.TransportError]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if failures:
            raise failures.pop()("no answer", request=request)
        return httpx.Response(200, json=STATE)

    client = GatewayClient("http://gw/", KEY, httpx.MockTransport(answer))
    for failure, answers in ((httpx.ReadTimeout, False), (httpx.ConnectError, True)):
        failures.append(failure)
        assert client.answers() == answers
        failures += [failure, failure]
        assert client.check({}).model == "m" and client.answers()


class Hooks(RolloutHooks):
    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        own = {"saw": sorted(request.input), "from": "hook"}
        return request.model_copy(update={"input": {**request.input, **own}, "metadata": {"mine": 1}})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    proxy = {"model_name": "m", "include_log_probs": True, "train": {"temperature": 1.0}, "val": {"temperature": 0.4}}
    with serving(create_app({"key": KEY, "default_proxy": proxy})) as url:
        yield url
    _rollouts.clear()


TASKS = [{"task": task, "variation": v} for task, v in (("find-animal", 0), ("find-plant", 5), ("find-animal", 1))]


def settings(with_memory: bool = False, **changes: Any) -> Settings:
    run = PAPER.run.model_copy(update={"validate_with_memory": with_memory})
    return PAPER.model_copy(update={"algorithm": algorithm(**changes), "run": run})


def create(server: str, chosen: Settings, *, is_train: bool = True, **options: Any) -> list[Any]:
    """The rollouts as the server has them."""
    made = Empo2RolloutManager(
        agl_base_url=server,
        agl_key=KEY,
        model="m",
        step=7,
        train_rollout_n=4,
        settings=chosen,
        gateway=GatewayClient(server, KEY),
        **options,
    )
    _rollouts.clear()
    with made.client:
        made._create_rollouts({TASK: TASKS}, is_train=is_train)
    return [*_rollouts.values()]


def tag_of(mode: Mode, task: Any, **more: Any) -> dict[str, Any]:
    scope = scope_of(task, ["task", "variation"])
    return {**mode.model_dump(), "scope": scope, "read_only": False, "teaches": False, "step": 7} | more


def test_tags_reach_the_server(server: str) -> None:
    """One tag for all rollouts that are compared with each other; the agent sees nothing of it."""
    drawing = {"mode_per": "group", "memory_probability": 0.5}
    rollouts = create(server, settings(**drawing))
    modes = modes_of(algorithm(**drawing), 7, 3)
    assert len({mode.name for mode in modes}) > 1
    assert [rollout.input for rollout in rollouts] == [task for task in TASKS for _ in range(4)]
    tags = [tag_of(mode, task) for mode, task in zip(modes, TASKS, strict=True) for _ in range(4)]
    assert [rollout.metadata.empo2 for rollout in rollouts] == tags
    paired = create(server, settings(baseline="paired", memory_probability=1.0))
    assert [len({rollout.metadata.empo2["pair"] for rollout in paired[:size]}) for size in (4, 12)] == [1, 3]


@pytest.mark.parametrize(("loss", "asked"), [("ratio", False), ("distillation", True), ("imitation", False)])
def test_the_likeliest_tokens_are_asked_for_where_they_teach(loss: str, asked: bool, server: str) -> None:
    always = settings(memory_probability=1.0, off_policy_probability=1.0, off_policy_loss=loss)
    assert {rollout.metadata.empo2["teaches"] for rollout in create(server, always)} == {asked}


@pytest.mark.parametrize("size", [4, 5])
def test_half_of_a_paired_group_sees_tips(size: int) -> None:
    """Every second rollout of a memory group, so that neither half starts before the other; other groups stay whole."""
    paired = algorithm(baseline="paired", mode_per="group", memory_probability=0.5)
    tags = list(itertools.islice(draw_tags(paired, 3, size), 200 * size))
    pairs = set()
    for mode, group in zip(modes_of(paired, 3, 200), itertools.batched(tags, size), strict=True):
        if mode.memory:
            assert [drawn for drawn, _ in group] == [mode if number % 2 else NO_MEMORY for number in range(size)]
            (pair,) = {pair for _, pair in group}
            pairs.add(pair)
        else:
            assert [*group] == [(NO_MEMORY, None)] * size
    assert len(pairs) == sum(mode.memory for mode in modes_of(paired, 3, 200)) > 70 and None not in pairs


def test_users_hooks_are_still_called(server: str) -> None:
    """Before the tag is made, of the task as it was."""
    rollouts = create(server, settings(memory_probability=0.0), hooks=Hooks())
    for rollout, task in zip(rollouts, [task for task in TASKS for _ in range(4)], strict=True):
        assert rollout.input == {**task, "saw": ["task", "variation"], "from": "hook"} and rollout.metadata.mine == 1
        assert rollout.metadata.empo2 == tag_of(NO_MEMORY, task)


def test_each_validation_task_is_played_without_and_with_memory(server: str) -> None:
    rollouts = create(server, settings(with_memory=True, memory_probability=0.0), is_train=False)
    assert [rollout.input["variation"] for rollout in rollouts] == [0, 0, 5, 5, 1, 1]
    assert not any(hasattr(rollout.metadata, "empo2") for rollout in rollouts[::2])
    for rollout in rollouts[1::2]:
        assert rollout.metadata.empo2 == tag_of(ON_POLICY, rollout.input, read_only=True)
    for name, is_train, count in (("empo2", False, 3), ("grpo", False, 3), ("grpo", True, 12)):
        rollouts = create(server, settings(name == "grpo", name=name, memory_probability=1.0), is_train=is_train)
        assert len(rollouts) == count and not any(hasattr(rollout.metadata, "empo2") for rollout in rollouts)


@pytest.mark.parametrize("is_train", [True, False])
def test_a_task_reaches_its_agent_as_it_is(server: str, is_train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that the first one lacks, types that differ, a field `index`: no table of tasks could hold these."""
    from verl import DataProto
    from verl.utils.dataset.rl_dataset import collate_fn

    tasks = [
        {"n": 1, "index": 7},
        {"n": 1.5, "words": [1, "x"], "hint": {"a": 1}},
        {"n": "two", "hint": {"b": None}, "extra_info": {"index": 3}},
        {"extra_info": None},
    ]
    loader = StatefulDataLoader(TaskDataset(tasks), batch_size=4, collate_fn=collate_fn)
    batch = DataProto.from_single_dict(next(iter(loader)))
    nothing: Any = SimpleNamespace(resume=list, hold=list, drain=lambda seconds: {})
    connection: dict[str, Any] = {"agl_base_url": server, "agl_key": KEY, "model": "m"}
    asked = {"settings": settings(name="grpo"), "gateway": nothing, "train_rollout_n": 2, "step": 1, "hooks": Hooks()}
    made = Empo2RolloutManager(**connection, **asked)
    monkeypatch.setattr(made, "enqueue_and_wait_until_completed", lambda *a, **b: made._create_rollouts(*a, **b) and [])
    trainer: Any = object.__new__(PlayingTrainer)
    limits = {"trace_aggregator": {"trajectory_max_prompt_length": 9}}
    trainer.config = OmegaConf.create({"agentlightning": limits, "actor_rollout_ref": {"model": {"path": MODEL}}})
    trainer.settings, trainer.gateway, trainer.is_async, trainer.global_steps = asked["settings"], nothing, False, 1
    trainer.records, trainer._carry_over_rollouts = RunRecords(None, trainer.settings.run, None), []
    trainer.llm_server_manager = SimpleNamespace(get_replicas=list, get_addresses=list)
    trainer._make_rollout_manager = lambda make: made
    _rollouts.clear()
    with made.client, pytest.raises(NoUsableRollouts):
        trainer.play(batch.repeat(1), is_train=is_train)
    wanted = [tasks[0], tasks[1] | {"index": 0}, tasks[2] | {"index": 3}, tasks[3] | {"index": 0}]
    played = [task | {"saw": sorted(task), "from": "hook"} for task in wanted for _ in range(2 if is_train else 1)]
    found = [rollout.input for rollout in _rollouts.values()]
    assert found == played and type(found[0]["n"]) is int


def test_an_evaluation_asks_for_the_rollouts_of_a_validation(server: str, tmp_path: Path) -> None:
    agent = ["agent.class=toy_agent:ToyAgent", "agent.env={TOY_DOOR: input.variation}", "agent.time_limit=123"]
    others = ["memory.scope=[task, variation]", "run.validate_with_memory=true", "tasks.source=toy_agent:none"]
    chosen = load_settings("cpu", [*agent, *others])
    made = build_verl_config(chosen, model_path="m", run_directory=tmp_path, gateway_url="", gateway_key="")
    config = made.agentlightning
    local = {"local_agent_class": config.local.agent_class, "local_env_map": dict(config.local.env_map)}
    options = {**local, "rollout_timeout_seconds": config.rollout_timeout_seconds}

    def told(rollouts: Iterable[Any]) -> list[str]:
        kept = []
        for each in rollouts:
            tag = RolloutTag.read(each.metadata)
            kept.append([each.input, each.is_train, each.config, tag and tag.model_dump(exclude={"step"})])
        return sorted(map(str, kept))

    validated = told(create(server, chosen, is_train=False, **options))
    assert len(validated) == 6 and all("toy_agent:ToyAgent" in each and "123" in each for each in validated)
    _rollouts.clear()
    with httpx.Client(base_url=server, headers={"Authorization": f"Bearer {KEY}"}) as client:
        for episode in planned_episodes(Panel("p", "", (), {}, tuple(TASKS)), [MEMORY_OFF, MEMORY_ON], samples=1):
            Player(client, chosen, lambda: None)._create(episode)
    assert told(_rollouts.values()) == validated
