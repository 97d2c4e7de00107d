"""Memory rollouts can finish: each tip once, within a budget, however long the episode."""

import random
from itertools import pairwise
from pathlib import Path

import pytest

from empo2.recipe.config import load_settings, warnings_of
from empo2.recipe.errors import ConfigError

from .harness import STORES, GatewayUnderTest, fill_memory, running_gateway, turns
from .model_server import tokenizer

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

DEFAULT = load_settings("gpu")
BUDGET = DEFAULT.memory.episode_tokens
# Every tip is found for every state.
LENGTHS = ("max_prompt_tokens", "max_episode_tokens", "max_context_tokens")
AS_ON_A_GPU = [f"memory.episode_tokens={BUDGET}", "memory.min_similarity=-1", "reflection.max_words=100"]
AS_ON_A_GPU += [f"model.{name}={getattr(DEFAULT.model, name)}" for name in LENGTHS]
TASK = "Your task is to find a living thing. First focus on the thing, then move it to the red box in the kitchen."
ROOMS = ("kitchen", "hallway", "workshop", "greenhouse", "living room", "outside")
THINGS = ("a table", "a glass cup (containing nothing)", "a bee hive", "a stove (turned off)", "a red box")


def observation(generator: random.Random) -> str:
    room = generator.choice(ROOMS)
    if generator.random() < 0.75:
        return f"You move to the {room}."
    things = ", ".join(generator.sample(THINGS, 3))
    return f"This room is called the {room}. In it, you see: the agent, {things}. A door to the hallway is open."


def tip(number: int) -> str:
    generator = random.Random(number)
    words = f"Player {number} began well".split()
    while len(words) < 100:
        words += f"and went to the {generator.choice(ROOMS)} with {generator.choice(THINGS)}".split()
    return " ".join(words[:100])


def length(text: str) -> int:
    return len(tokenizer()(text, add_special_tokens=False)["input_ids"])


async def play(gateway: GatewayUnderTest, rollout: str, steps: int) -> list[list[int]]:
    generator, prompts = random.Random(steps), []
    messages = [{"role": "user", "content": f"{TASK}\n\n{observation(generator)}"}]
    for _ in range(steps):
        answer = await gateway.call(rollout, {"messages": messages, "max_tokens": 32})
        assert answer.status_code == 200, answer.text
        prompts.append(gateway.last().prompt_ids)
        reply = answer.json()["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": reply}]
        messages = [*messages, {"role": "user", "content": observation(generator)}]
    return prompts


@pytest.mark.slow
async def test_an_episode_with_ten_tips_of_100_words_fits_the_default_profile(tmp_path: Path):
    steps = 120
    tips = [tip(number) for number in range(40)]
    fill_memory(tmp_path / "memory.sqlite", tips)
    async with running_gateway(tmp_path, *AS_ON_A_GPU) as gateway:
        gateway.model.context = DEFAULT.model.max_context_tokens
        gateway.model.reply = lambda body: "move living thing to red box"
        plain = await play(gateway, await gateway.create("no-memory"), steps)
        rollout = await gateway.create("memory", "off-policy")
        prompts = await play(gateway, rollout, steps)
        calls = await gateway.calls(rollout)
        gateway.model.reply = gateway.reply
        metrics = await gateway.ended(rollout)
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    assert len(prompts[0]) <= DEFAULT.model.max_prompt_tokens
    assert len(prompts[-1]) + 32 - len(prompts[0]) <= DEFAULT.model.max_episode_tokens
    assert [call["tip_free_prompt_token_ids"] for call in calls] == plain
    # The ten best at once, then as many others as fit; none twice.
    assert len(calls[0]["tip_ids"]) == 10
    ids = [tip_id for call in calls for tip_id in call["tip_ids"]]
    assert sorted(ids, reverse=True)[:10] == calls[0]["tip_ids"] == list(range(40, 30, -1))
    assert len(set(ids)) == len(ids) < 20
    text = tokenizer().decode(prompts[-1])
    assert [text.count(f"- {each}\n") for each in tips] == [0] * (40 - len(ids)) + [1] * len(ids)
    shown = len(prompts[-1]) - len(plain[-1])
    assert BUDGET - 200 < shown <= BUDGET
    assert metrics["empo2/tips_per_episode"] == len(ids)
    assert metrics["empo2/tip_tokens_per_episode"] == pytest.approx(shown, abs=5)
    assert metrics["empo2/context_ended"] == 0


async def test_tips_fill_the_budget_and_no_more(tmp_path: Path):
    """Tips of 40, 400, 30 and 20 words, the best first: what does not fit makes room for what does."""
    texts = [" ".join([f"{name}"] * words) for name, words in (("low", 20), ("mid", 30), ("long", 400), ("top", 40))]
    fill_memory(tmp_path / "memory.sqlite", texts)
    heading = length("Notes from earlier episodes of this task (each may be wrong):\n") + 1
    needed = heading + length(f"- {texts[3]}\n") + length(f"- {texts[1]}\n")
    for budget, expected in ((needed, [4, 2]), (needed - 1, [4, 1]), (heading, [])):
        options = ("memory.min_similarity=-1", f"memory.episode_tokens={budget}", "reflection.max_words=400")
        async with running_gateway(tmp_path, *options) as gateway:
            rollout = await gateway.create("memory", "off-policy")
            await gateway.play(rollout, turns("a room"))
            (call,) = await gateway.events(rollout, "empo2_call")
            assert call["tip_ids"] == expected
            assert len(call["prompt_token_ids"]) - len(call["tip_free_prompt_token_ids"]) <= budget
            assert (await gateway.drain())["empo2/memory_failures"] == 0
        for store in STORES:
            store.clear()


async def test_episodes_that_ended_by_their_context_are_counted(gateway: GatewayUnderTest):
    """Of four: one is refused at its end, one goes on with a shorter chat, one is refused for another reason."""
    gateway.model.context = 120
    (short,), (long,), (odd,) = (turns(content, max_tokens=8) for content in ("a room", "a room " * 200, 3))
    for bodies in ([short, long], [long, short], [short, odd], [short]):
        rollout = await gateway.create("no-memory")
        for body in bodies:
            await gateway.call(rollout, body)
        await gateway.patch(rollout, "failed")
    assert (await gateway.drain())["empo2/context_ended"] == 1 / 4
    assert (await gateway.drain())["empo2/context_ended"] == 0


def test_a_budget_that_leaves_the_agent_no_room_is_refused():
    prompt, episode = ["memory.episode_tokens=4500"], ["memory.episode_tokens=4000", "model.max_episode_tokens=4000"]
    for overrides, key in ((prompt, "max_prompt_tokens=4500"), (episode, "max_episode_tokens=4000")):
        with pytest.raises(ConfigError, match=rf"{overrides[0]}: must be below model\.{key}"):
            load_settings("gpu", overrides)
        load_settings("gpu", [*overrides, "algorithm.name=grpo"])  # has no tips


def test_what_may_not_fit_is_warned_of():
    for override, words in (
        ("memory.episode_tokens=3000", "more than half of model.max_prompt_tokens=4500"),
        ("memory.top_k=20", "may not hold memory.top_k=20 tips of reflection.max_tokens=160"),
        ("tasks.args.max_steps=200", "may outgrow model.max_episode_tokens=8192"),
    ):
        (warning,) = warnings_of(load_settings("gpu", [override]))
        assert override in warning and words in warning
        assert not [*warnings_of(load_settings("gpu", [override, "algorithm.name=grpo"]))]


def test_rows_of_different_lengths_are_warned_of_and_the_profiles_are_not():
    (warning,) = warnings_of(load_settings("gpu", ["hardware.micro_batch=2", "algorithm.name=grpo"]))
    assert warning.startswith("hardware.micro_batch=2: rows of different lengths get a dense mask")
    assert not any([*warnings_of(load_settings(profile))] for profile in ("gpu", "gpu-1", "gpu-24", "cpu"))
