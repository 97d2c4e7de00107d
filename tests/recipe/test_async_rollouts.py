"""Rollouts that outlive the step in which they were issued: the gate before the policy, and the manager's part."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from agentlightning.server.store import _rollouts

from empo2.recipe.config import load_settings
from empo2.recipe.protocol import Mode, StepProgress
from empo2.recipe.trainer.gateway_client import GatewayClient
from empo2.recipe.trainer.manager import Empo2RolloutManager, draw_modes, why_none_plays
from empo2.recipe.trainer.step_results import RolloutResult, staleness

from .harness import AGENT_KEY, CHAT, KEY, ROOMS, GatewayUnderTest, running_gateway, until
from .model_server import MODEL

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

TASK = {"name": ["a task"]}
NO_MEMORY, OFF_POLICY = Mode.of(memory=False), Mode.of(memory=True, off_policy=True)
_A_WHILE = 0.3  # seconds, in which a call that does not wait is answered


async def pause(gateway: GatewayUnderTest, timeout: float = 10) -> tuple[int, int]:
    answer = (await gateway.client.post("/empo2/pause", json={"timeout": timeout})).raise_for_status().json()
    return answer["at_pause"], answer["under_way"]


async def resume(gateway: GatewayUnderTest) -> None:
    (await gateway.client.post("/empo2/resume")).raise_for_status()


# The gate


async def test_calls_wait_behind_a_closed_gate(gateway: GatewayUnderTest) -> None:
    """Tagged and untagged ones alike; agent-lightning's own pause would answer them with status 429."""
    await gateway.store_tips(ROOMS, "alpha")
    rollouts = [await gateway.create("memory"), await gateway.create("no-memory"), await gateway.create(None)]
    assert await pause(gateway) == (0, 0)
    before = len(gateway.model.seen)
    calls = [asyncio.create_task(gateway.call(rollout, ROOMS[0])) for rollout in rollouts]
    done, _ = await asyncio.wait(calls, timeout=_A_WHILE)
    assert not done and len(gateway.model.seen) == before
    await resume(gateway)
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3
    assert ["alpha" in seen.prompt for seen in gateway.model.requests()[-3:]].count(True) == 1


async def test_a_pause_waits_for_the_calls_under_way(gateway: GatewayUnderTest) -> None:
    gateway.model.delay = lambda path, body: 1.0
    call = asyncio.create_task(gateway.call(await gateway.create(), ROOMS[0]))
    await until(lambda: gateway.model.requests())
    assert await pause(gateway, timeout=0.01) == (1, 1)
    assert await pause(gateway) == (1, 0)
    assert (await call).status_code == 200


async def test_the_memory_does_not_change_while_the_weights_do(gateway: GatewayUnderTest) -> None:
    """What ends meanwhile is reflected on, and credited, by the next weights; the drain does not wait for it."""
    await gateway.store_tips(ROOMS, "alpha")
    rollout = await gateway.create("memory")
    await gateway.play(rollout, ROOMS)
    await pause(gateway)
    gateway.tip = "beta"
    await gateway.finish(rollout, 50.0)
    metrics = await gateway.drain(timeout=60)  # longer than the test may take
    assert (metrics["empo2/calls"], metrics["empo2/tips_written"]) == (3, 0)
    assert [text for _, text, _ in (await gateway.snapshot())[0]] == ["alpha"]
    await resume(gateway)
    metrics = await gateway.drain()
    assert (metrics["empo2/tips_written"], metrics["empo2/reflections_failed"]) == (1, 0)
    assert [text for _, text, _ in (await gateway.snapshot())[0]] == ["alpha", "beta"]


async def test_calls_that_are_not_trained_wait_if_the_policy_answers_them(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, "gateway.trained_calls=[{model: policy}]") as gateway:
        rollout = await gateway.create()
        gateway.model.delay = lambda path, body: 0.5
        first = asyncio.create_task(gateway.call(rollout, {**ROOMS[0], "model": "judge"}))
        await until(lambda: gateway.model.requests(CHAT))
        assert await pause(gateway) == (1, 0)
        second = asyncio.create_task(gateway.call(rollout, {**ROOMS[0], "model": "judge"}))
        done, _ = await asyncio.wait([second], timeout=_A_WHILE)
        assert first.done() and not done
        await resume(gateway)
        assert (await second).status_code == 200


def test_the_trainer_asks_until_all_calls_are_answered() -> None:
    answers = [{"at_pause": 3, "under_way": 2}, {"at_pause": 2, "under_way": 1}, {"at_pause": 1, "under_way": 0}]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers.pop(0)))
    assert GatewayClient("http://gateway", KEY, transport).pause() == 3
    assert answers == []


# The manager


DRAWING = [f"algorithm.{each}" for each in ("mode_per=group", "memory_probability=0.5", "off_policy_probability=1.0")]


@contextmanager
def manager(gateway: GatewayUnderTest, seed: int, *, step: int) -> Iterator[Empo2RolloutManager]:
    url = str(gateway.client.base_url)
    with closing(GatewayClient(url, KEY)) as client:
        made = Empo2RolloutManager(
            agl_base_url=url,
            agl_key=KEY,
            model=MODEL,
            step=step,
            version=step - 1,
            pauses=True,
            group_size=2,
            settings=load_settings("cpu", ["memory.scope=all-tasks", *DRAWING, f"algorithm.seed={seed}"]),
            gateway=client,
            poll_interval_seconds=0.1,
        )
        with made.client:
            yield made


async def test_a_run_says_why_no_agent_plays_and_goes_on_waiting(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The trainer waits for two rollouts; the controllers are: none, one with a wrong key, one that starts none."""
    monkeypatch.setattr("empo2.recipe.trainer.manager._NONE_PLAYS_SECONDS", 0.5)
    waiting = "empo2: note: no agent has called the model for 0.5 s, 2 of 2 rollouts wait for a controller: "
    said: list[str] = []

    def notes() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if "note" in line]

    async def told() -> str:
        said.clear()
        await until(lambda: said.extend(notes()) or said)
        return said[0].removeprefix(waiting)

    async def asks(key: str) -> None:
        await gateway.client.get("/api/rollouts?state_in=queuing", headers={"Authorization": f"Bearer {key}"})

    async def played(log: Path | None = None) -> str:
        await resume(gateway)
        with manager(gateway, 0, step=1) as made:
            made._controller_log = log
            playing = asyncio.create_task(asyncio.to_thread(made.enqueue_and_wait_until_completed, TASK, is_train=True))
            answer = await told()
            await asyncio.sleep(_A_WHILE)
            assert not playing.done() and not notes()  # it is said once
            for rollout in list(_rollouts):
                await gateway.patch(rollout, "running")
                await gateway.call(rollout, ROOMS[0])
                await gateway.finish(rollout)
            await playing
            return answer

    assert await played() == "none asks the gateway for them; start `empo2 controller --gateway URL`"
    await asks("wrong")
    assert await played() == "the gateway refuses its key; its EMPO2_KEY must be the gateway's"
    await asks(AGENT_KEY)
    assert await played() == "it starts none; see its log"
    log = tmp_path / "controller.log"
    log.write_text('x\nTraceback (most recent call last):\n  File "a.py", line 1, in b\nOSError: no more processes\n')
    assert await played(log) == "OSError: no more processes"


async def test_agents_that_play_or_have_failed_need_no_explanation(gateway: GatewayUnderTest) -> None:
    assert why_none_plays(StepProgress(rollouts=2, ended=1), None) == ""
    assert why_none_plays(StepProgress(rollouts=2, calls=1), None) == ""
    rollout = await gateway.create()
    await gateway.client.patch(f"/api/rollouts/{rollout}", json={"status": {"error_message": "ErrImagePull: gone"}})
    state = (await gateway.client.get("/empo2/state")).json()["progress"]
    said = why_none_plays(StepProgress.model_validate(state), None)
    assert said.endswith("0 of 1 rollouts wait for a controller: ErrImagePull: gone")


async def test_a_group_that_outlives_its_step(gateway: GatewayUnderTest) -> None:
    """Three groups are issued, two of them end: the third goes on in the next step, as the same group in its mode.

    Two of its turns were sampled by the weights before the first update, one after it.
    """
    drawing = load_settings("cpu", DRAWING).algorithm

    def modes(seed: int, step: int, groups: int) -> list[Mode]:
        return list(islice(draw_modes(drawing.model_copy(update={"seed": seed}), step), groups))

    seed = next(
        seed
        for seed in range(100)
        if modes(seed, 1, 3) == [OFF_POLICY, NO_MEMORY, OFF_POLICY] and modes(seed, 2, 1) == [NO_MEMORY]
    )
    await gateway.store_tips(ROOMS, "alpha", scope="{}")
    with manager(gateway, seed, step=1) as first, manager(gateway, seed, step=2) as later:
        await _two_steps(gateway, first, later)


async def _two_steps(gateway: GatewayUnderTest, first: Empo2RolloutManager, later: Empo2RolloutManager) -> None:
    known = set(_rollouts)
    await asyncio.to_thread(first.register_model, [gateway.model.url])
    ending = asyncio.create_task(
        asyncio.to_thread(
            first.enqueue_and_wait_until_group_completed,
            {"task": ["slow", "fast", "fast"]},
            [],
            is_train=True,
            target_finished_group_num=2,
        )
    )
    await until(lambda: len(_rollouts) == len(known) + 6)
    slow, fast = [*_rollouts][-6:-4], [*_rollouts][-4:]
    for rollout in (*slow, *fast):
        await gateway.patch(rollout, "running")
    for rollout in slow:
        assert (await gateway.call(rollout, ROOMS[0])).status_code == 200
    for number, rollout in enumerate(fast):
        await gateway.play(rollout, ROOMS)
        await gateway.finish(rollout, float(number))
    usable, carried = await ending
    assert [rollout.rollout_id for rollout in usable] == fast
    assert [rollout.rollout_id for rollout in carried] == slow
    assert first.results.dropped == {}
    assert staleness(first.results.kept, 0)["empo2/staleness_max"] == 0

    second = [asyncio.create_task(gateway.call(rollout, ROOMS[1])) for rollout in slow]
    done, _ = await asyncio.wait(second, timeout=_A_WHILE)
    assert not done  # the weights change
    await resume(gateway)  # as where a validation was played in between
    await asyncio.to_thread(later.delete_model)
    await asyncio.gather(*second)  # they were let through: the servers are deleted after that
    third = [asyncio.create_task(gateway.call(rollout, ROOMS[2])) for rollout in slow]
    done, _ = await asyncio.wait(third, timeout=_A_WHILE)
    assert not done  # rather than answered that there is no server
    await asyncio.to_thread(later.register_model, [gateway.model.url])
    assert [answer.status_code for answer in await asyncio.gather(*second, *third)] == [200] * 4
    ending = asyncio.create_task(
        asyncio.to_thread(
            later.enqueue_and_wait_until_group_completed,
            {"task": ["new"]},
            carried,
            is_train=True,
            target_finished_group_num=1,
        )
    )
    for number, rollout in enumerate(slow):
        await gateway.finish(rollout, float(number))
    usable, carried = await ending
    assert [rollout.rollout_id for rollout in usable] == slow
    kept = later.results.kept
    assert [(kept[rollout].mode, kept[rollout].versions) for rollout in slow] == [(OFF_POLICY, [0, 1])] * 2
    assert len({kept[rollout].group for rollout in slow}) == 1
    plain = [gateway.model.prompt_ids(body, CHAT) for body in ROOMS]
    for rollout in usable:
        triplets = rollout.triplets or []
        assert [triplet.metadata["server"]["version"] for triplet in triplets] == [0, 0, 1]
        assert [triplet.prompt["token_ids"] for triplet in triplets] == plain  # free of the tips that were shown
        assert len(kept[rollout.rollout_id].tips) == 1
        for triplet in triplets:
            length = len(triplet.response["token_ids"])
            assert triplet.response["log_probs"] == pytest.approx([-0.5 - i / 100 for i in range(length)])
    assert staleness(kept, 1) == {
        "empo2/staleness_mean": 1,
        "empo2/staleness_max": 1,
        "empo2/rollouts_of_several_versions": 2,
    }
    (new,) = {_rollouts[rollout.rollout_id].metadata.empo2["rollout_mode"] for rollout in carried}  # pyright: ignore
    assert (len(carried), new) == (2, "no-memory")

    await asyncio.to_thread(later.drop_carried_over)
    assert not {rollout.rollout_id for rollout in carried} & set(_rollouts)
    assert (await gateway.call(carried[0].rollout_id, ROOMS[0])).status_code == 404


def test_staleness_counts_from_the_first_weights_that_sampled_a_rollout() -> None:
    def result(*versions: int) -> RolloutResult:
        return RolloutResult("g", NO_MEMORY, 0.0, versions=versions)

    results: dict[str, Any] = {"a": result(7), "b": result(5, 6, 7), "c": result(6, 7), "d": result(4)}
    assert staleness(results, 7) == {
        "empo2/staleness_mean": (0 + 2 + 1 + 3) / 4,
        "empo2/staleness_max": 3,
        "empo2/rollouts_of_several_versions": 2,
    }
