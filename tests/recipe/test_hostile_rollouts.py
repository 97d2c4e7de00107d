"""Whatever a call, an event or a reward of a rollout holds, at worst that rollout is dropped and counted."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agentlightning.schemas import RolloutState
from agentlightning.server.app import create_app
from agentlightning.server.store import _events, _rollouts

from empo2.recipe.config import load_settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.protocol import CALL_EVENT, Mode
from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported
from empo2.recipe.trainer.manager import Empo2RolloutManager
from empo2.recipe.trainer.rollout_calls import calls_of
from empo2.recipe.trainer.shown_rollouts import RunRecords, call_rows
from empo2.recipe.trainer.step_results import StepResults
from empo2.recipe.trainer.tracking import training_metrics

from .model_server import serving
from .rollout_events import Event, adapted, recorded, refused, request, rollout_of

KEY, VOCABULARY = "secret", 1000
ON_POLICY = Mode.of(memory=True)
IMAGE = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
TEXTS = [
    "9" * 4301,
    "-" + "1" * 5000,
    "[" * 3000,
    '{"a":' * 3000,
    json.dumps(IMAGE),
    json.dumps([{"type": "image_url", "image_url": {"url": 7}}]),
    "[null]",
    "[[[]]]",
    "1e999",
    "NaN",
    "\ufeff{}",
    "\x00\x1b[2J\x9b31m",
    "\u202e\u2028",
    '"' * 3000,
    "null",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_refused", [False, True])
def test_ordinary_text_is_text(text: str, is_refused: bool) -> None:
    """agent-lightning reads a text that looks like JSON, for images: here it is trained as the tokens that it is."""
    messages = [{"role": "user", "content": text}]
    call = refused(400, messages=messages) if is_refused else request([1], [2], messages=messages)
    results = StepResults(vocabulary=VOCABULARY)
    played = [rollout_of(name, [call, request([1, 2, 3], [4])]) for name in "ab"]
    usable = results.usable(played, is_train=True)
    assert [len(each.triplets or []) for each in usable] == [1 if is_refused else 2] * 2
    assert len(adapted(usable, 8, 8)[0]) == 2
    assert [row["dropped"] for row in call_rows(played, results, 1, "training", {}, Path("none"))] == [None] * 4


def events() -> Iterator[tuple[str, list[Event]]]:
    def call(**changes: Any) -> list[Event]:
        return [request([1], [2], **changes)]

    yield "no data", [{"event_type": "model_request", "timestamp": 1.0, "data": {}}]
    for value in (None, [], "text", 7, {"messages": "text"}, {"messages": ["text"]}, {"messages": {"role": "user"}}):
        yield f"request {value}", call(request=value)
    for value in (None, [], "text", 7, {"choices": [7]}, {"choices": 7}, {"choices": {}}, {"choices": [[]]}):
        yield f"response {value}", call(response=value)
    for ids in ([10**6], [-1], [1.5], ["1"], [None], [[1]], [True], "12", 7, {"1": 2}, [2**70]):
        answer = {"prompt_token_ids": [1], "choices": [{"token_ids": ids}]}
        yield f"reply {ids}", call(response=answer)
        yield f"prompt {ids}", call(response={**answer, "prompt_token_ids": ids, "choices": [{"token_ids": [2]}]})
    for name, value in (("latency_ms", "soon"), ("latency_ms", 1e999), ("server", 7), ("server", {"version": "x"})):
        yield f"{name} {value}", call(**{name: value})
    for name, value in (("finish_reason", ["stop"]), ("http_status", "fine")):
        yield f"{name} {value}", call(**{name: value})
    for data in ({}, {"prompt_token_ids": "text"}, {"prompt_token_ids": [None]}, {"prompt_token_ids": 7}):
        yield f"call event {data}", [*call(), {"event_type": CALL_EVENT, "timestamp": 1.0, "data": data}]
    for name, value in (("intrinsic_reward", 1e999), ("intrinsic_reward", "much"), ("tip_ids", "text"), ("visits", [])):
        yield f"call event {name} {value}", [*call(), recorded([1], **{name: value})]
    yield "tip-free prompt", [*call(), recorded([1], tip_free_prompt_token_ids=[10**6])]


@pytest.mark.parametrize(("what", "posted"), [*events()], ids=[what[:60] for what, _ in events()])
def test_an_event_of_another_form_costs_its_rollout_alone(what: str, posted: list[Event]) -> None:
    results = StepResults(vocabulary=VOCABULARY)
    good = [rollout_of(name, [request([1], [2])], ON_POLICY) for name in "ab"]
    bad = rollout_of("bad", posted, ON_POLICY)
    usable = results.usable([*good, bad], is_train=True)
    assert [each.rollout_id for each in usable] == ["a", "b"]
    assert results.dropped["bad"].reason in ("unreadable", "no_model_call", "no_log_probs")
    assert training_metrics(results, 1.0)["empo2/rollouts_dropped"] == 1
    rows = call_rows([*good, bad], results, 1, "training", {}, Path("none"))
    assert {row["rollout"] for row in rows} == {"a", "b", "bad"}
    validated = StepResults(vocabulary=VOCABULARY)
    assert validated.usable([rollout_of("c", [request([1], [2])]), bad], is_train=False)


def test_why_a_rollout_is_unreadable_is_told() -> None:
    results = StepResults(vocabulary=VOCABULARY)
    good = [rollout_of(name, [request([1], [2])]) for name in "ab"]
    results.usable([*good, rollout_of("bad", [request([1], [5000])])], is_train=True)
    assert results.dropped["bad"].reason == "unreadable"
    assert (
        "ValueError: it has a token that the model's vocabulary of 1000 does not have" in results.dropped["bad"].error
    )


@pytest.mark.parametrize("reward", [float("inf"), float("-inf"), float("nan")])
def test_a_reward_that_no_mean_can_hold_costs_its_rollout_alone(reward: float) -> None:
    results = StepResults()
    played = [rollout_of(name, [request([1], [2])]) for name in "ab"]
    played.append(rollout_of("bad", [request([1], [2])], final_reward=reward))
    assert len(results.usable(played, is_train=True)) == 2 and results.dropped["bad"].reason == "no_reward"


def test_calls_with_images_are_left_out_and_counted() -> None:
    """Their prompts hold tokens of images, which a row of text cannot train."""
    chat = [{"role": "user", "content": IMAGE}]
    mixed = [request([1], [2]), request([1, 2, 3], [4], messages=chat)]
    results = StepResults()
    played = [rollout_of(name, mixed) for name in "ab"] + [rollout_of("c", [request([5], [6], messages=chat)])]
    usable = results.usable(played, is_train=True)
    assert [[turn.response["token_ids"] for turn in each.triplets or []] for each in usable] == [[[2]], [[2]]]
    assert results.reasons == {"images": 1}
    metrics = training_metrics(results, 1.0)
    assert metrics["empo2/image_calls"] == 3
    assert len(adapted(usable, 8, 8)[0]) == 2  # agent-lightning's adapter refuses rows with images


def test_agents_metrics_are_few_and_short() -> None:
    posted = {"event_type": "reward", "timestamp": 1.0}
    metrics = {f"{number}\x1b[2J" + "x" * 5000: number for number in range(5000)} | {"inf": 1e999}
    results = StepResults()
    calls = [request([1], [2]), {**posted, "data": {"value": 1.0, "metrics": metrics}}]
    results.usable([rollout_of(name, calls) for name in "ab"], is_train=True)
    told = results.kept["a"].agent_metrics
    assert len(told) == 100 and all(len(name) <= 300 and name.isprintable() for name in told)


class OfItsOwnServer(GatewayClient):
    """agent-lightning's server has no list of statuses, and no gate."""

    def statuses(self) -> dict[str, Any]:
        return {}

    def hold(self) -> None:
        pass


@pytest.fixture
def manager() -> Iterator[Empo2RolloutManager]:
    _rollouts.clear()
    proxy = {"model_name": "m", "include_log_probs": True, "train": {"temperature": 1.0}, "val": {"temperature": 0.4}}
    with serving(create_app({"key": KEY, "default_proxy": proxy})) as url:
        made = Empo2RolloutManager(
            agl_base_url=url,
            agl_key=KEY,
            model="m",
            step=1,
            train_rollout_n=3,
            settings=load_settings("cpu", ["algorithm.name=grpo"]),
            gateway=OfItsOwnServer(url, KEY),
            vocabulary=VOCABULARY,
            poll_interval_seconds=0.1,
        )
        with made.client:
            yield made
    _rollouts.clear()
    _events.clear()


def ended(made: Empo2RolloutManager, posted: list[list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    create = made._create_rollouts

    def create_and_play(data: Any, *, is_train: bool) -> Any:
        enqueued = create(data, is_train=is_train)
        for each, events in zip(enqueued, posted, strict=True):
            for state in (RolloutState.RUNNING, RolloutState.SUCCEEDED):
                made.client.patch(f"/api/rollouts/{each.rollout_id}", json={"status": {"state": state}})
            for event in events:
                route = f"{made.client.base_url}/api/rollouts/{each.rollout_id}/attempt/0/events"
                headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
                httpx.post(route, content=json.dumps(event), headers=headers)
        return enqueued

    monkeypatch.setattr(made, "_create_rollouts", create_and_play)
    monkeypatch.setattr(made._gateway, "drain", lambda timeout: {})


def test_what_agent_lightning_itself_cannot_read_is_dropped(
    manager: Empo2RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward of 400 digits is no float; events nested 300 deep, or NaN, cannot be sent by its server: HTTP 500."""

    def reward(value: Any) -> dict[str, Any]:
        return {"event_type": "reward", "data": {"value": value}}

    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    good = [{"event_type": "model_request", "data": request([1], [2])["data"]}, reward(1)]
    bad = [[reward(10**400)], [{"event_type": "x", "data": {"deep": deep}}], [reward(float("nan"))]]
    posted = [good] * 3 + bad
    ended(manager, posted, monkeypatch)
    played = manager.play([{"task": "a"}, {"task": "b"}], is_train=True)
    assert len(played) == 3 and len(manager.played) == 6
    assert manager.results.reasons["unreadable"] >= 2 and len(manager.results.dropped) == 3


def test_a_gateway_that_was_started_again_has_the_step_played_anew(
    manager: Empo2RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of a rollout: none is dropped, and the trainer's attempts at a step take it from there."""
    waited: list[dict[str, Any]] = []
    monkeypatch.setattr(manager._gateway, "check", waited.append)
    create = manager._create_rollouts

    def create_and_forget(data: Any, *, is_train: bool) -> Any:
        enqueued = create(data, is_train=is_train)
        _rollouts.clear()
        return enqueued

    monkeypatch.setattr(manager, "_create_rollouts", create_and_forget)
    with pytest.raises(NoUsableRollouts, match="the gateway has ended and was started again"):
        manager.play([{"task": "a"}], is_train=True)
    ended(manager, [[]] * 3, monkeypatch)
    monkeypatch.setattr(manager, "_get_events", lambda *_, **__: (_ for _ in ()).throw(httpx.ConnectError("gone")))
    with pytest.raises(NoUsableRollouts, match="the gateway has ended"):
        manager.play([{"task": "a"}], is_train=True)
    assert waited == [{}, {}] and not manager.results.dropped


def test_a_gateway_that_ends_while_it_writes_tips_leaves_nothing_half_read(
    manager: Empo2RolloutManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended(manager, [[{"event_type": "model_request", "data": request([1], [2])["data"]}]] * 3, monkeypatch)
    monkeypatch.setattr(manager._gateway, "check", lambda wanted: None)
    monkeypatch.setattr(manager._gateway, "drain", lambda timeout: (_ for _ in ()).throw(httpx.ReadError("gone")))
    with pytest.raises(NoUsableRollouts, match="the gateway has ended"):
        manager.play([{"task": "a"}], is_train=True)
    RunRecords(str(tmp_path), load_settings().run, None).note_rollouts(manager, 1, "training", {})


def test_reading_takes_no_longer_than_before() -> None:
    """30 turns of 8,000 tokens in all, as an episode of the paper's: some milliseconds."""
    chat = [request(range(1, 250 * turn), range(500, 750)) for turn in range(1, 31)]
    begin = time.process_time()
    assert len(calls_of(chat, VOCABULARY * 10)) == 30
    assert time.process_time() - begin < 1
