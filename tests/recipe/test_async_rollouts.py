"""Rollouts that outlive the step in which they were issued: the gate before the policy, and the manager's part."""

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agentlightning.server.store import _rollouts

from empo2.recipe.config import load_settings
from empo2.recipe.errors import NoUsableRollouts
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.protocol import Mode, StepProgress
from empo2.recipe.trainer.manager import Empo2RolloutManager, why_none_plays

from .harness import AGENT_KEY, CHAT, KEY, ROOMS, GatewayUnderTest, running_gateway, until
from .model_server import MODEL

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

NO_MEMORY, OFF_POLICY = Mode.of(memory=False), Mode.of(memory=True, off_policy=True)
_A_WHILE = 0.3  # seconds, in which a call that does not wait is answered


async def pause(gateway: GatewayUnderTest, timeout: float = 10) -> tuple[int, int]:
    answer = (await gateway.client.post("/empo2/pause", json={"timeout": timeout})).raise_for_status().json()
    return answer["at_pause"], answer["under_way"]


async def resume(gateway: GatewayUnderTest) -> None:
    (await gateway.client.post("/empo2/resume")).raise_for_status()


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


async def test_a_pause_waits_for_the_calls_under_way(tmp_path: Path) -> None:
    """Also for those that are not trained, if the policy answers them."""
    async with running_gateway(tmp_path, "gateway.trained_calls=[{model: policy}]") as gateway:
        rollout = await gateway.create()

        def call(model: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(gateway.call(rollout, {**ROOMS[0], "model": model}))

        gateway.model.delay = lambda path, body: 3.0
        before = [call("policy"), call("judge")]
        await until(lambda: len(gateway.model.requests(CHAT)) == 2)
        assert await pause(gateway, timeout=0.01) == (2, 2)
        assert await pause(gateway) == (2, 0)
        later = call("judge")
        done, _ = await asyncio.wait([later], timeout=_A_WHILE)
        assert not done
        await resume(gateway)
        assert [(await each).status_code for each in (*before, later)] == [200] * 3


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


def test_the_trainer_asks_until_all_calls_are_answered() -> None:
    answers = [{"at_pause": 3, "under_way": 2}, {"at_pause": 2, "under_way": 1}, {"at_pause": 1, "under_way": 0}]
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answers.pop(0)))
    assert GatewayClient("http://gateway", KEY, transport).pause() == 3
    assert answers == []


async def test_a_call_that_comes_while_the_policy_is_trained_waits_for_its_new_weights(
    gateway: GatewayUnderTest,
) -> None:
    """On a GPU vLLM sleeps then, and what an agent has left behind would end it as it wakes (vLLM's issue 44395)."""
    with manager(gateway, step=1, pauses=False) as made:
        playing = asyncio.create_task(asyncio.to_thread(made.play, [{"name": "a"}], is_train=False))
        await until(lambda: len(_rollouts) > 0)
        for rollout in list(_rollouts):
            await gateway.patch(rollout, "running")
            await gateway.call(rollout, ROOMS[0])
            await gateway.finish(rollout)
        await playing
        late = asyncio.create_task(gateway.call(await gateway.create("no-memory"), ROOMS[0]))
        done, _ = await asyncio.wait([late], timeout=_A_WHILE)
        assert not done
        await asyncio.to_thread(made.register_model, [gateway.model.url.removeprefix("http://").removesuffix("/v1")])
        assert (await late).status_code == 200


@contextmanager
def manager(gateway: GatewayUnderTest, *, step: int, pauses: bool = True) -> Iterator[Empo2RolloutManager]:
    url = str(gateway.client.base_url)
    with closing(GatewayClient(url, KEY)) as client:
        made = Empo2RolloutManager(
            agl_base_url=url,
            agl_key=KEY,
            model=MODEL,
            step=step,
            version=step - 1,
            pauses=pauses,
            train_rollout_n=2,
            settings=load_settings("cpu", ["memory.scope=all-tasks"]),
            gateway=client,
            poll_interval_seconds=0.1,
        )
        with made.client:
            yield made


async def test_a_round_of_looks_at_rollouts_is_one_list(gateway: GatewayUnderTest) -> None:
    """Their status is as each by itself; one that has ended comes whole, and one that is gone is not found."""
    rollouts = [await gateway.create("no-memory") for _ in range(3)]
    await gateway.patch(rollouts[2], "succeeded")
    asked: list[int] = []
    with manager(gateway, step=0) as looking:
        statuses = looking._gateway.statuses
        looking._gateway.statuses = lambda: asked.append(1) or statuses()  # pyright: ignore[reportAttributeAccessIssue]

        def look() -> list[Any]:
            return [looking._get_rollout(rollout) for rollout in rollouts]

        for count in (1, 2):
            seen = await asyncio.to_thread(look)
            assert [each.status for each in seen] == [_rollouts[rollout].status for rollout in rollouts]
            assert seen[2] == _rollouts[rollouts[2]] and len(asked) == count
        await gateway.client.delete(f"/api/rollouts/{rollouts[0]}")
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await asyncio.to_thread(look)


async def test_a_run_says_once_that_no_agent_plays_and_goes_on_waiting(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("empo2.recipe.trainer.manager._NONE_PLAYS_SECONDS", 0.5)
    said: list[str] = []

    def notes() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if "note" in line]

    await resume(gateway)
    with manager(gateway, step=1, pauses=False) as made:
        play = asyncio.to_thread(made.play, [{"name": "a"}, {"name": "b"}], is_train=False)
        playing = asyncio.create_task(play)
        await until(lambda: said.extend(notes()) or said)
        await asyncio.sleep(_A_WHILE)
        assert not playing.done() and not notes()
        for rollout in list(_rollouts):
            await gateway.patch(rollout, "running")
            await gateway.call(rollout, ROOMS[0])
            await gateway.finish(rollout)
        await playing
    waiting = "empo2: note: no agent has called the model for 0.5 s, 2 of 2 rollouts wait for a controller: "
    assert said == [waiting + "none asks the gateway for them; start `empo2 controller --gateway URL`"]


async def test_why_no_agent_plays(gateway: GatewayUnderTest, tmp_path: Path) -> None:
    """No controller, one with a wrong key, one that starts none, and says why in its log, or of a rollout."""

    async def why(log: Path | None = None) -> str:
        progress = StepProgress.model_validate((await gateway.state())["progress"])
        return why_none_plays(progress, log).partition("1 of 1 rollouts wait for a controller: ")[2]

    async def asks(key: str) -> None:
        await gateway.client.get("/api/rollouts?state_in=queuing", headers={"Authorization": f"Bearer {key}"})

    (rollout,) = (await gateway.client.post("/api/rollouts", json=[{"input": {}, "metadata": {}}])).json()
    await asks("wrong")
    assert await why() == "the gateway refuses its key; its EMPO2_KEY must be the gateway's"
    await asks(AGENT_KEY)
    assert await why() == "it starts none; see its log"
    log = tmp_path / "controller.log"
    log.write_text('x\nTraceback (most recent call last):\n  File "a.py", line 1, in b\nOSError: no more processes\n')
    assert await why(log) == "OSError: no more processes"
    failed = {"status": {"error_message": "ErrImagePull: gone"}}
    await gateway.client.patch(f"/api/rollouts/{rollout['rollout_id']}", json=failed)
    assert await why() == "ErrImagePull: gone"
    for progress in (StepProgress(rollouts=2, ended=1), StepProgress(rollouts=2, calls=1)):
        assert why_none_plays(progress, None) == ""
    idle = why_none_plays(StepProgress(rollouts=2, controllers="ask"), None)
    assert idle.endswith("agents that were started are silent; see its log")


async def test_a_group_that_outlives_its_step(gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups are issued, two of them end: the third goes on in the next step, as the same group in its mode.

    Two of its turns were sampled by the weights before the first update, one after it.
    """
    modes = {1: [OFF_POLICY, NO_MEMORY, OFF_POLICY], 2: [NO_MEMORY]}
    monkeypatch.setattr("empo2.recipe.trainer.manager.draw_modes", lambda _, step: iter(modes[step]))
    await gateway.store_tips(ROOMS, "alpha", scope="{}")
    with manager(gateway, step=1) as first, manager(gateway, step=2) as later:
        await _two_steps(gateway, first, later)


async def _two_steps(gateway: GatewayUnderTest, first: Empo2RolloutManager, later: Empo2RolloutManager) -> None:
    def plays(manager: Empo2RolloutManager, tasks: list[str], carried: list[Any], groups: int) -> asyncio.Task[Any]:
        options: Any = {"is_train": True, "groups": groups, "carried_over": carried}
        return asyncio.create_task(asyncio.to_thread(manager.play, [{"task": task} for task in tasks], **options))

    async def wait_at_the_gate(body: Any) -> list[asyncio.Task[Any]]:
        """Calls of the slow rollouts, which wait rather than being answered that there is no server."""
        calls = [asyncio.create_task(gateway.call(rollout, body)) for rollout in slow]
        done, _ = await asyncio.wait(calls, timeout=_A_WHILE)
        assert not done
        return calls

    known = set(_rollouts)
    await asyncio.to_thread(first.register_model, [gateway.model.url])
    ending = plays(first, ["slow", "fast", "fast"], [], 2)
    await until(lambda: len(_rollouts) == len(known) + 6)
    slow, fast = [*_rollouts][-6:-4], [*_rollouts][-4:]
    for rollout in (*slow, *fast):
        await gateway.patch(rollout, "running")
    for rollout in slow:
        assert (await gateway.call(rollout, ROOMS[0])).status_code == 200
    for number, rollout in enumerate(fast):
        await gateway.play(rollout, ROOMS)
        await gateway.finish(rollout, float(number))
    usable, carried = await ending, first.carried_over
    assert [rollout.rollout_id for rollout in usable] == fast
    assert [rollout.rollout_id for rollout in carried] == slow
    assert first.results.dropped == {}

    second = await wait_at_the_gate(ROOMS[1])  # the weights change
    await resume(gateway)  # as where a validation was played in between
    await asyncio.to_thread(later.delete_model)
    await asyncio.gather(*second)  # they were let through: the servers are deleted after that
    third = await wait_at_the_gate(ROOMS[2])
    await asyncio.to_thread(later.register_model, [gateway.model.url])
    assert [answer.status_code for answer in await asyncio.gather(*second, *third)] == [200] * 4
    ending = plays(later, ["new"], carried, 1)
    for number, rollout in enumerate(slow):
        await gateway.finish(rollout, float(number))
    usable, carried = await ending, later.carried_over
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
    (new,) = {_rollouts[rollout.rollout_id].metadata.empo2["rollout_mode"] for rollout in carried}  # pyright: ignore
    assert (len(carried), new) == (2, "no-memory")

    await asyncio.to_thread(later.drop_carried_over)
    assert not {rollout.rollout_id for rollout in carried} & set(_rollouts)
    assert (await gateway.call(carried[0].rollout_id, ROOMS[0])).status_code == 404


def test_rollouts_of_an_attempt_that_is_given_up_are_deleted() -> None:
    """A gateway that was only slow, or is new but got some of them, would play them before the next attempt's."""
    manager: Any = object.__new__(Empo2RolloutManager)
    deleted: list[str] = []
    manager._created, carried = [SimpleNamespace(rollout_id=name) for name in "ab"], [SimpleNamespace(rollout_id="c")]
    manager._gateway, manager._delete_rollout = SimpleNamespace(check=lambda _: None), deleted.append
    with pytest.raises(NoUsableRollouts), manager._told_of_a_new_gateway(carried):
        raise httpx.ReadTimeout("slow")
    assert (deleted, manager.played, manager.carried_over) == (["a", "b", "c"], [], [])
