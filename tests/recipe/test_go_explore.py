"""Go-Explore: the archive by hand, starts that a gateway gives, and agents that return to a state."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from empo2.recipe.baselines.go_explore.starts import Archive, Cell

from .harness import GatewayUnderTest, assistant, running_gateway, user


def test_an_archive_by_hand() -> None:
    """Turns in the hall, the den and the hall again; then an episode from the den; then a shorter way to the attic."""
    archive = Archive()
    archive.note([], ["hall", "den", "hall"], ["east", "west", "take coin"])
    assert archive.cells == {"hall": Cell([], 2), "den": Cell(["east"], 1)}
    archive.note(["east"], ["Your task: the coin. den", "cellar", "attic"], ["east", "down", "up", "jump"])
    assert archive.cells == {
        "hall": Cell([], 2),
        "den": Cell(["east"], 1),
        "cellar": Cell(["east", "down"], 1),
        "attic": Cell(["east", "down", "up"], 1),
    }
    archive.note([], ["hall", "attic"], ["up", "jump"])
    assert (archive.cells["attic"], archive.cells["hall"].visits) == (Cell(["up"], 2), 3)
    archive.note([], ["hall", "tower"], [])  # an agent that lost count: no action leads to the tower
    assert "tower" not in archive.cells


def test_the_beginning_is_among_the_states_that_the_policy_chooses_from() -> None:
    """It is the most visited one, and the only one that holds the task; eleven of the others are listed."""
    archive = Archive({f"s{number}": Cell([], 50 - number) for number in range(40)})
    assert archive.listed() == ["s0", *(f"s{number}" for number in range(29, 40))]


def test_rare_states_are_drawn_more_often() -> None:
    """Weights 1/√1, 1/√4 and 1/√9: of 11/6, 6/11, 3/11 and 2/11."""
    archive = Archive({name: Cell([name], visits) for name, visits in (("a", 0), ("b", 3), ("c", 8))})
    generator = np.random.default_rng(0)
    drawn = Counter(archive.by_count(generator).prefix[0] for _ in range(11_000))
    assert all(abs(drawn[name] - 1000 * share) < 200 for name, share in (("a", 6), ("b", 3), ("c", 2)))


TASK = {"level": "easy", "seed": 3}
CONFIG = {"local": {"agent_class": "a:B", "env_map": {"HOUSE_LEVEL": "input.level"}}}


async def created(gateway: GatewayUnderTest, count: int = 1, *, is_train: bool = True, **task: Any) -> list[dict]:
    body = [{"input": TASK | task, "is_train": is_train, "config": CONFIG, "metadata": {}} for _ in range(count)]
    return (await gateway.client.post("/api/rollouts", json=body)).raise_for_status().json()


async def play(gateway: GatewayUnderTest, rollout: str, states: list[str], actions: Any) -> None:
    await gateway.patch(rollout, "running")
    messages: list[Any] = []
    for state in states:
        messages = [*messages, user(state)]
        (await gateway.call(rollout, {"model": "m", "messages": messages})).raise_for_status()
        messages = [*messages, assistant("go")]
    event = {"event_type": "reward", "data": {"value": 0.0, "actions": actions}}
    (await gateway.client.post(f"/api/rollouts/{rollout}/attempt/0/events", json=event)).raise_for_status()
    await gateway.patch(rollout, "succeeded")


async def test_a_group_starts_where_the_policy_says(tmp_path: Path, empty_stores: None) -> None:
    async with running_gateway(tmp_path, "tasks.starts=by-policy") as gateway:
        first, validation = (await created(gateway))[0], (await created(gateway, is_train=False))[0]
        assert first["input"] == TASK | {"prefix": ""}
        variables = {"HOUSE_LEVEL": "input.level", "EPISODE_PREFIX": "input.prefix"}
        assert first["config"]["local"]["env_map"] == variables
        hall = f"Find the coin. {'A hall. ' * 100}"  # the task is said whole
        await play(gateway, first["rollout_id"], [hall, "den", "attic"], ["east", "", "up"])
        await play(gateway, validation["rollout_id"], ["hall", "secret"], ["down", "up"])  # leaves nothing
        answers = iter(["State 3.", "none of them", "77"])
        gateway.model.reply = lambda body: next(answers) if "promising" in str(body["messages"]) else "go"
        group = await created(gateway, 3)
        asked = gateway.last().prompt
        assert [each["input"]["prefix"] for each in group] == ['["east", ""]'] * 3  # a step was lost on the way
        await play(gateway, group[0]["rollout_id"], ["Find it. attic", "roof"], ["east", "", "up", "wait"])
        drawn = {(await created(gateway))[0]["input"]["prefix"] for _ in range(2)}  # by count, as it names none
        assert drawn <= {"", '["east"]', '["east", ""]', '["east", "", "up"]'}
        assert (await created(gateway, seed=4))[0]["input"]["prefix"] == ""  # another task
        assert (await created(gateway, is_train=False))[0]["input"]["prefix"] == ""
        gateway.model.fault = lambda path, body: 500
        await created(gateway)
        metrics = await gateway.drain()
    assert f"1. (seen 1 times) {hall.strip()}\n2. (seen 1 times) den\n3. (seen 1 times) attic\n\nFrom which" in asked
    assert (metrics["empo2/go_explore/states"], metrics["empo2/go_explore/failures"]) == (4, 1)
    assert metrics["empo2/go_explore/returns"] >= 3


async def test_agents_that_report_no_actions_start_at_the_beginning(tmp_path: Path, empty_stores: None) -> None:
    async with running_gateway(tmp_path, "tasks.starts=by-count") as gateway:
        await play(gateway, (await created(gateway))[0]["rollout_id"], ["hall", "den"], "east")
        assert [each["input"]["prefix"] for each in await created(gateway, 4)] == [""] * 4
