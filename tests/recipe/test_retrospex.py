"""Retrospex: the critic's losses and values by hand, its reading of kept rollouts, and the gateway that asks it."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from empo2.recipe.baselines.retrospex.reranking import READS, Reranking, network, probability, scores, smaller
from empo2.recipe.baselines.retrospex.train import (
    Transitions,
    episodes_of,
    expectile_loss,
    main,
    train,
    transitions_of,
)
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.run_directory import write_settings
from empo2.recipe.rollout_log import write_rollouts

from . import model_server
from .harness import GatewayUnderTest, Words, assistant, running_gateway, user
from .model_server import Body, ModelServer

SETTINGS = load_settings("cpu")


def test_expectile_loss_by_hand() -> None:
    """0.7 · 2² and 0.3 · 1², halved; at 0.5 it is half the mean square."""
    differences = torch.tensor([2.0, -1.0])
    assert float(expectile_loss(differences, 0.7)) == pytest.approx((0.7 * 4 + 0.3 * 1) / 2)
    assert float(expectile_loss(differences, 0.5)) == pytest.approx((4 + 1) / 2 / 2)


@pytest.mark.slow
def test_values_of_a_chain_converge_to_those_by_hand() -> None:
    """States A and B: "on" leads from A to B and from B to a reward of 1, "off" ends the episode without one.

    Each action is as frequent as the other. The expectile of 0 and x is the v with 0.3 v = 0.7 (x - v), so v = 0.7 x:
    Q(B, on) = 1, V(B) = 0.7, Q(A, on) = 0.99 · 0.7, V(A) = 0.7 · Q(A, on).
    """
    task, a, b, on, off = torch.eye(5)
    data = Transitions(
        torch.stack([torch.cat([task, state]) for state in (a, b, a, b, a, a)]),
        torch.stack([on, on, on, off, off, off]),
        torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        torch.tensor([False, True, False, True, True, True]),
    )
    twins, v = train(data, 2500, seed=0)
    with torch.no_grad():
        q = smaller(twins, torch.cat([data.situations, data.actions], dim=1)).tolist()
        of_states = v(data.situations)[:2, 0].tolist()
    assert q == pytest.approx([0.693, 1, 0.693, 0, 0, 0], abs=0.02)
    assert of_states == pytest.approx([0.4851, 0.7], abs=0.02)


@pytest.mark.parametrize(("spread", "rewards"), [(False, [0, 0, 0.5, -1]), (True, [1 / 6, 1 / 6, 1 / 6, -1])])
def test_transitions_by_hand(spread: bool, rewards: list[float]) -> None:
    episodes = [(0.5, [("t", "x", "go"), ("t", "y", "go"), ("t", "x", "take")]), (-1.0, [("u", "y", "go")])]
    given: list[str] = []

    def embed(texts: Any) -> np.ndarray:
        given.extend(texts)
        return np.arange(len(texts), dtype=np.float32)[:, None]

    data = transitions_of(episodes, embed, spread=spread)
    assert len(given) == len(set(given)) == 6
    assert [[given[int(row)] for row in pair] for pair in data.situations] == [[*"tx"], [*"ty"], [*"tx"], [*"uy"]]
    assert [given[int(row)] for row in data.actions] == ["go", "go", "take", "go"]
    assert data.rewards.tolist() == pytest.approx(rewards)
    assert data.last.tolist() == [False, False, True, True]


def test_scores_by_hand() -> None:
    """p̂ = 1, 0.75, 0 and Q̂ = 0, 1, 0.5: 0.6 p̂ + 0.4 Q̂ = 0.6, 0.85, 0.2. λ_t = 0.97^t, 0.6 from step 17 on."""
    critic, found = SETTINGS.critic, (np.array([0.5, 0.4, 0.1]), np.array([-2.0, 2.0, 0.0]))
    assert scores(critic, 17, *found) == pytest.approx([0.6, 0.85, 0.2])  # 0.97^17 = 0.5959
    assert scores(critic, 0, *found) == pytest.approx([1, 0.75, 0])
    assert scores(critic, 16, *found)[0] == pytest.approx(0.6143, abs=1e-4)
    assert scores(critic, 17, np.array([0.3, 0.3]), np.array([1.0, 2.0])) == pytest.approx([0.3, 0.7])
    tokens = [{"logprob": value} for value in np.log([1 / 2, 1 / 8])]
    assert probability({"logprobs": {"content": tokens}}) == pytest.approx(1 / 4)  # the geometric mean


def kept(run: Path) -> None:
    """A rollout without tips, one with, one that was dropped, and one of a validation."""
    same = {"group": "g", "step": 1, "return": 50.0, "call": 0, "dropped": None, "mode": "no memory"}

    def row(rollout: str, content: str, reply: str, **more: Any) -> Body:
        said = {"messages": [user(content)], "reply": assistant(reply)}
        return {**same, "rollout": rollout, "phase": "training", **said, **more}

    write_settings(load_settings("cpu", ["tasks.args.max_steps=3"]), run)
    rows = [
        row("a", "Find the lamp.", "look"),
        row("a", "a hall", "go east", call=1),
        row("b", "Find it.", "look", mode="memory, on-policy"),
        row("c", "Find it.", "look", dropped="no_reward"),
    ]
    write_rollouts(run / "rollouts", rows, "all")
    write_rollouts(run / "rollouts", [row("d", "Find it.", "look", phase="validation")], "all")


def test_a_critic_of_kept_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    turns = [("Find the lamp.", "Find the lamp.", "look"), ("Find the lamp.", "a hall", "go east")]
    assert episodes_of(tmp_path, SETTINGS) == [(0.5, turns)]
    monkeypatch.setattr(sys, "argv", ["train", str(tmp_path), "--output", str(tmp_path / "c.pt"), "--updates", "3"])
    main()
    assert sorted(torch.load(tmp_path / "c.pt", weights_only=True)["reads"]) == sorted(READS)
    (tmp_path / "c.pt").unlink()
    write_settings(load_settings("cpu", ["agent.env.API_KEY=a-secret"]), tmp_path)
    with pytest.raises(SystemExit, match=r"^error: agent.env.API_KEY=.* without its secrets; give the value"):
        main()
    sys.argv.append("agent.env.API_KEY=a-secret")
    main()
    assert (tmp_path / "c.pt").is_file()
    sys.argv[1] = str(tmp_path / "none")
    with pytest.raises(SystemExit, match=r"^error: --config .*none/config.yaml: No such file"):
        main()


SAMPLES = {"go east": -0.9, "go north": -0.1, "take lamp": -0.5}  # each with its log-prob per token


def several(body: Body) -> Body:
    """As vLLM answers a request for several samples."""
    answer: Body = {}
    choices = []
    for number, (text, log_prob) in enumerate(list(SAMPLES.items())[: body.get("n") or 1]):
        answer = model_server._completion(body, [1, 2, 3], text, 16, chat=True)
        (choice,) = answer["choices"]
        listed = [{**token, "logprob": log_prob} for token in choice["logprobs"]["content"]]
        choices.append({**choice, "index": number, "logprobs": {"content": listed}})
    return {**answer, "choices": choices}


def preferring(words: Words, text: str, file: Path) -> None:
    """A critic whose Q is the cosine of the action with this text, if it is above 0."""
    twins = torch.nn.ModuleList([network(3 * words.dimension) for _ in range(2)])
    for weight in twins.parameters():
        torch.nn.init.zeros_(weight)
    for each in twins:
        each[0].weight.data[0, 2 * words.dimension :] = torch.from_numpy(words.embed([text])[0])  # type: ignore
        each[2].weight.data[0, 0] = 1.0  # type: ignore
    reads = {name: getattr(SETTINGS.memory, name) for name in READS}
    torch.save({"reads": reads, "q": twins.state_dict()}, file)


@pytest.fixture
async def ranked(tmp_path: Path, empty_stores: None) -> AsyncIterator[GatewayUnderTest]:
    """In step 0 only the probability counts (0⁰ = 1), afterwards only the critic, which likes the lamp."""
    words, file = Words(), tmp_path / "critic.pt"
    preferring(words, "take lamp", file)
    settings = [f"critic.path={file}", "critic.samples=3", "critic.decay=0.0", "critic.least_weight=0.0"]
    async with running_gateway(tmp_path, *settings, words=words, model=ModelServer(answer=several)) as gateway:
        yield gateway


async def ask(gateway: GatewayUnderTest, rollout: str, mode: str = "val", **more: Any) -> httpx.Response:
    body = {"model": "any", "messages": [user("a dark room")], "max_tokens": 8, **more}
    return await gateway.client.post(f"{gateway.address(rollout, mode)}/chat/completions", json=body)


def content(answer: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in answer.raise_for_status().json()["choices"]]


async def test_the_best_sample_is_the_answer_and_what_is_recorded(ranked: GatewayUnderTest) -> None:
    rollout, other = await ranked.create(None), await ranked.create(None)
    assert [content(await ask(ranked, each)) for each in (rollout, rollout, other)] == [
        ["go north"],
        ["take lamp"],
        ["go north"],
    ]
    sent = ranked.model.requests()[1].body
    assert (sent["n"], sent["logprobs"], sent["temperature"]) == (3, True, 0.4)
    recorded = [event["response"]["choices"] for event in await ranked.events(rollout, "model_request")]
    ids = model_server.tokenizer()("take lamp")["input_ids"]
    assert [len(choices) for choices in recorded] == [1, 1]
    assert recorded[1][0]["token_ids"] == [*ids, model_server.tokenizer().eos_token_id]
    assert recorded[1][0]["index"] == 0
    metrics = await ranked.drain()
    assert {name: metrics[f"empo2/critic/{name}"] for name in ("calls", "changed")} == {"calls": 3, "changed": 1}


async def test_calls_that_are_not_ranked(ranked: GatewayUnderTest) -> None:
    for mode in (None, "no-memory", "memory"):
        rollout = await ranked.create(mode)
        for _ in range(2):
            assert content(await ask(ranked, rollout, mode="train")) == ["go east"]
    assert content(await ask(ranked, await ranked.create(None), n=2)) == ["go east", "go north"]
    assert "empo2/critic/calls" not in await ranked.drain()


async def test_without_values_the_first_sample_is_the_answer(ranked: GatewayUnderTest) -> None:
    ranked.words.failure = RuntimeError("no more memory")
    assert content(await ask(ranked, await ranked.create(None))) == ["go east"]
    metrics = await ranked.drain()
    assert (metrics["empo2/critic/calls"], metrics["empo2/critic/failures"]) == (1, 1)


def test_what_is_no_critic_of_these_settings(tmp_path: Path) -> None:
    def said(*changes: str) -> str:
        services: Any = SimpleNamespace(settings=load_settings("cpu", [f"critic.path={tmp_path}/c.pt", *changes]))
        with pytest.raises(ConfigError, match=r"^critic\.path='.*c\.pt': ") as caught:
            Reranking(services)
        return str(caught.value).split("c.pt': ", 1)[1]

    assert said().startswith("is no critic of recipe/baselines/retrospex/train.py ([Errno 2]")
    (tmp_path / "c.pt").write_text("hello")
    assert said().startswith("is no critic of")
    preferring(Words(), "lamp", tmp_path / "c.pt")
    assert said("memory.state=end") == "was trained with memory.state='beginning'; this is 'end'"


def test_samples_that_would_be_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.val_temperature=0: the 4 samples of critic.path would be alike"):
        load_settings("cpu", ["critic.path=critic.pt", "model.val_temperature=0"])
