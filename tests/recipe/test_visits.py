"""How often a rollout visits a state: a request does so once, however often it is sent. And what the trainer pays."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from .harness import CHAT, GatewayUnderTest, is_reflection, trained, turns, until

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")


async def visits(gateway: GatewayUnderTest, rollout: str) -> tuple[list[Any], float]:
    """n of each call, and Σ 1/n of the turns."""
    calls = await gateway.calls(rollout)
    _, _, _, results = await trained(gateway, rollout)
    return [call.get("visits") for call in calls], results.kept[rollout].intrinsic


async def test_a_client_that_gave_up_waiting_has_visited_once(gateway: GatewayUnderTest):
    """Two more requests are sent and answered while the first hangs. Then the chat goes to a den, and back."""
    faults: Iterator[Any] = iter(["hang"])
    gateway.model.fault = lambda path, body: next(faults, None) if path == CHAT else None
    rollout = await gateway.create("no-memory")
    hall, den, back = turns("a hall", "a den", "a hall")
    first = asyncio.create_task(gateway.call(rollout, hall))
    await until(lambda: gateway.model.requests())
    await gateway.play(rollout, [hall, hall, den, back])
    await gateway.finish(rollout)
    assert await visits(gateway, rollout) == ([1, 1, 1, 2], 1 + 1 + 1 / 2)
    first.cancel()
    await gateway.drain()
    other = await gateway.create("no-memory")
    await gateway.play(other, [hall])
    assert [call["visits"] for call in await gateway.calls(other)] == [3]


@pytest.mark.parametrize(
    ("bodies", "found", "earned"),
    [
        # The reply was lost on its way: the same request comes again, and the chat goes on from one of the two replies.
        ([0, 0, 1, 2], [1, 2, 1, 2], 1 + 1 + 1 / 2),
        ([0, 0, 0, 1, 2], [1, 2, 3, 1, 2], 1 + 1 + 1 / 2),
        ([0, 1, 1, 2], [1, 1, 2, 2], 1 + 1 + 1 / 2),
        ([0, 1, 0, 1, 2], [1, 1, 2, 2, 3], 1 + 1 + 1 / 2 + 1 / 2 + 1 / 3),  # a new game, whose first prompt is the same
    ],
)
async def test_a_reply_that_was_lost_is_not_paid(gateway: GatewayUnderTest, bodies: Any, found: Any, earned: float):
    rollout, chat = await gateway.create("no-memory"), turns("a hall", "a den", "a hall")
    await gateway.play(rollout, [chat[number] for number in bodies])
    await gateway.finish(rollout)
    assert await visits(gateway, rollout) == (found, pytest.approx(earned))


async def test_an_agent_that_sends_its_state_alone_visits_it_each_time(gateway: GatewayUnderTest):
    rollout = await gateway.create("no-memory")
    await gateway.play(rollout, [turns(state)[0] for state in ("a hall", "a hall", "a den", "a hall")])
    await gateway.finish(rollout)
    assert await visits(gateway, rollout) == ([1, 2, 1, 3], pytest.approx(1 + 1 / 2 + 1 + 1 / 3))


async def test_an_empty_reply_is_no_visit(gateway: GatewayUnderTest):
    replies: Iterator[Any] = iter([{"content": "", "sampled": []}])
    gateway.model.reply = lambda body: "a tip" if is_reflection(body) else next(replies, "go 0")
    rollout, (hall, den) = await gateway.create("no-memory"), turns("a hall", "a den")
    await gateway.play(rollout, [hall, hall, den])
    await gateway.finish(rollout)
    assert await visits(gateway, rollout) == ([None, 1, 1], 2.0)
