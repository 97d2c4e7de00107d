"""The critic: its losses and values by hand, the ranking of samples, the gateway that asks for them, whole commands."""

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from empo2.recipe.baselines.retrospex import reranking
from empo2.recipe.baselines.retrospex.command import critic as train_critic
from empo2.recipe.baselines.retrospex.command import judgements_table
from empo2.recipe.baselines.retrospex.critic import FACTS, Critic, load_critic, outputs
from empo2.recipe.baselines.retrospex.reranking import probability, ranking_scores, weight
from empo2.recipe.baselines.retrospex.training import Transitions, expectile_loss, train, transitions_of
from empo2.recipe.cli.verbs import run
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.evaluation.episode_results import Result
from empo2.recipe.evaluation.turns import Episode, Turn, read_turns, turns_keeper

from . import model_server
from .harness import GatewayUnderTest, Words, running_gateway
from .model_server import MODEL, Body, ModelServer
from .test_evaluation import toy_panel

SETTINGS = load_settings("cpu")
OF_SETTINGS = {name: getattr(SETTINGS.memory, name) for name in FACTS}


# Implicit Q-learning, by hand


def test_expectile_loss_by_hand() -> None:
    """0.7 * 2² and 0.3 * 1², halved; at 0.5 it is half the mean square."""
    import torch

    differences = torch.tensor([2.0, -1.0])
    assert float(expectile_loss(differences, 0.7)) == pytest.approx((0.7 * 4 + 0.3 * 1) / 2)
    assert float(expectile_loss(differences, 0.5)) == pytest.approx((4 + 1) / 2 / 2)


# One task; states A and B; "on" leads from A to B and from B to a reward of 1, "off" ends the episode without one.
TASK, A, B, ON, OFF = range(5)
CHAIN = Transitions(
    keys=np.eye(5, dtype=np.float32),
    tasks=np.zeros(6, int),
    states=np.array([A, B, A, B, A, A]),
    actions=np.array([ON, ON, ON, OFF, OFF, OFF]),
    rewards=np.array([0, 1, 0, 0, 0, 0], np.float32),
    last=np.array([False, True, False, True, True, True]),
)


def test_values_of_a_chain_converge_to_those_by_hand() -> None:
    """Each action is as frequent as the other, and "off" is worth 0.

    The expectile of 0 and x is the v with (1 - τ) v = τ (x - v), so v = τ x. Q(B, on) = 1, V(B) = τ,
    Q(A, on) = 0.99 V(B) = 0.99 τ, V(A) = 0.99 τ².
    """
    expectile = 0.7
    q, advantages = train(CHAIN, range(2500), seed=0, expectile=expectile, discount=0.99).judge(CHAIN)
    on_a, on_b = 0.99 * expectile, 1.0
    assert q == pytest.approx([on_a, on_b, on_a, 0, 0, 0], abs=0.02)
    v_a, v_b = 0.99 * expectile**2, expectile
    assert q - advantages == pytest.approx([v_a, v_b, v_a, v_b, v_a, v_a], abs=0.02)


def test_transitions_by_hand() -> None:
    episodes = [
        Episode(50.0, [Turn("t", "x", "go"), Turn("t", "y", "go"), Turn("t", "x", "take")]),
        Episode(-100.0, [Turn("u", "y", "go")]),
    ]
    given: list[str] = []

    def embed(texts: Any) -> np.ndarray:
        given.extend(texts)
        return np.arange(len(texts), dtype=np.float32)[:, None]

    data = transitions_of(episodes, 100.0, embed)
    assert len(given) == len(set(given)) == 6
    read = [[given[row] for row in rows] for rows in (data.tasks, data.states, data.actions)]
    assert read == [["t", "t", "t", "u"], ["x", "y", "x", "y"], ["go", "go", "take", "go"]]
    assert data.rewards.tolist() == [0, 0, 0.5, -1]
    assert data.last.tolist() == [False, False, True, True]
    assert data.situations(np.array([3])).tolist() == [[given.index("u"), given.index("y")]]


def test_outputs_of_two_networks_by_hand() -> None:
    """relu(1 * 1 - 1 * 2 + 3) * 2 + 1 = 5 and relu(-1 - 2 + 3) * 2 + 0 = 0; torch computes the same."""
    import torch

    weights = {
        "in": np.array([[[1.0], [-1.0]], [[-1.0], [-1.0]]]),
        "in_bias": np.array([[[3.0]], [[3.0]]]),
        "out": np.array([[[2.0]], [[2.0]]]),
        "out_bias": np.array([[1.0], [0.0]]),
    }
    inputs = np.array([[1.0, 2.0]])
    assert outputs(weights, inputs).tolist() == [[5.0], [0.0]]
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    assert outputs(tensors, torch.from_numpy(inputs)).tolist() == [[5.0], [0.0]]


def test_judgements_by_hand() -> None:
    episodes = [
        Episode(100.0, [Turn("", "", "")] * 2),
        Episode(99.0, [Turn("", "", "")] * 3),
        Episode(0.0, [Turn("", "", "")]),
    ]
    q, advantages = np.array([1.0, 0.5, 0.2, 0.0, 0.1, 0.1]), np.array([0.5, 0.1, -0.2, 0.0, -0.1, -0.1])
    table = judgements_table(episodes, 100.0, q, advantages)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [["successes", "failures"], ["1", "2"], ["2", "4"], ["0.750", "0.100"], ["0.300", "-0.100"]]


# Ranking, by hand


def test_scores_by_hand() -> None:
    """p̂ = 1, 0.75, 0 and Q̂ = 0, 1, 0.5, so 0.6 p̂ + 0.4 Q̂ = 0.6, 0.85, 0.2; equal ones are scaled to the middle."""
    found = ranking_scores(np.array([0.5, 0.4, 0.1]), np.array([-2.0, 2.0, 0.0]), 0.6)
    assert found == pytest.approx([0.6, 0.85, 0.2])
    assert ranking_scores(np.array([0.3, 0.3]), np.array([1.0, 2.0]), 0.5).tolist() == [0.25, 0.75]
    assert [weight(SETTINGS.critic, step) for step in (0, 1, 17, 400)] == [1, 0.97, 0.6, 0.6]  # 0.97^17 = 0.5959
    assert weight(SETTINGS.critic, 16) == pytest.approx(0.6143, abs=1e-4)


def test_probability_is_normalized_by_length() -> None:
    """The geometric mean of the tokens' probabilities: of 1/2 and 1/8 it is 1/4."""
    halves = [np.log(0.5), np.log(0.125)]
    chat = {"logprobs": {"content": [{"token": "x", "logprob": value} for value in halves]}}
    assert probability(chat) == pytest.approx(0.25)
    assert probability({"logprobs": {"tokens": ["x", "y"], "token_logprobs": halves}}) == pytest.approx(0.25)


# Episodes that are kept


def test_turns_are_read_from_events_and_bounded(tmp_path: Path) -> None:
    settings = load_settings("cpu", ["memory.state=regex:You are.*", "memory.state_characters=12"])
    chat = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Find the coin and take it. You are at A."},
        {"role": "assistant", "content": "go"},
        {"role": "user", "content": "Nothing. You are in the cellar."},
    ]

    def event(reply: str, **data: Any) -> Body:
        answer = {"choices": [{"message": {"content": reply}}]}
        return {"event_type": "model_request", "data": {"status": "ok", "response": answer, **data}}

    events = [
        event("go", request={"messages": chat[:2]}),
        event("lost", request={"messages": chat}, status="error"),
        event("take the coin at once", request={"messages": chat}),
        {"event_type": "reward", "data": {"value": 1}},
    ]
    keep = turns_keeper(tmp_path, settings)
    keep(Result("memory off", 2, 1, 0.0), events[:1])  # played again after the command was interrupted
    keep(Result("memory off", 2, 1, 1.0), events)
    (episode,) = read_turns(tmp_path)
    assert episode.return_ == 1.0
    task = "Find the coi"
    assert episode.turns == [Turn(task, "You are at A", "go"), Turn(task, "You are in t", "take the coi")]


# The gateway, before a scripted server that gives several choices


def preferring(words: Words, text: str) -> Critic:
    """A critic whose Q is the cosine of the action with this text, if it is above 0."""
    inputs = np.concatenate([np.zeros(2 * words.dimension), words.embed([text])[0]])[:, None]
    parts = {"in": inputs, "in_bias": np.zeros((1, 1)), "out": np.ones((1, 1)), "out_bias": np.zeros(1)}
    return Critic(OF_SETTINGS, {name: np.stack([part, part]) for name, part in parts.items()})


SAMPLES = {"go east": -0.9, "go north": -0.1, "take lamp": -0.5}  # each with its log-prob per token


def choices_of(body: Body, samples: dict[str, float]) -> Body:
    """As vLLM answers a request for several samples."""
    answer: Body = {}
    choices = []
    for number, (text, log_prob) in enumerate(samples.items()):
        answer = model_server._completion(body, [1, 2, 3], text, 16, chat=True)
        (choice,) = answer["choices"]
        listed = [{**token, "logprob": log_prob} for token in choice["logprobs"]["content"]]
        log_probs = {"content": listed} if body.get("logprobs") else None
        choices.append({**choice, "index": number, "logprobs": log_probs})
    return {**answer, "choices": choices}


def several(body: Body) -> Body:
    return choices_of(body, dict(list(SAMPLES.items())[: body.get("n") or 1]))


@pytest.fixture
async def ranked(
    tmp_path: Path, quiet: None, empty_stores: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GatewayUnderTest]:
    """In step 0 only the probability counts (0⁰ = 1), afterwards only the critic, which likes the lamp."""
    words, file = Words(), tmp_path / "critic.npz"
    preferring(words, "take lamp").save(file)
    monkeypatch.setattr(reranking, "SentenceEmbedder", lambda *args, **options: words)
    settings = [f"critic.path={file}", "critic.samples=3", "critic.decay=0.0", "critic.least_weight=0.0"]
    async with running_gateway(tmp_path, *settings, words=words, model=ModelServer(answer=several)) as gateway:
        yield gateway


async def ask(gateway: GatewayUnderTest, rollout: str, mode: str = "val", **more: Any) -> httpx.Response:
    body = {"model": "any", "messages": [{"role": "user", "content": "a dark room"}], "max_tokens": 8, **more}
    return await gateway.client.post(
        f"/proxy/rollout/{rollout}/attempt/0/mode/{mode}/openai/v1/chat/completions", json=body
    )


def content(answer: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in answer.raise_for_status().json()["choices"]]


async def test_the_best_sample_is_the_answer_and_the_trace(ranked: GatewayUnderTest) -> None:
    rollout = await ranked.create(None)
    assert content(await ask(ranked, rollout)) == ["go north"]
    answer = await ask(ranked, rollout)
    assert content(answer) == ["take lamp"]
    with_log_probs = (await ask(ranked, await ranked.create(None), logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert with_log_probs["logprobs"]["content"][0]["logprob"] == -0.1  # the agent has asked for them
    assert ranked.model.requests().pop().body["top_logprobs"] == 2
    sent = ranked.model.requests()[-2].body
    assert (sent["n"], sent["logprobs"], sent["temperature"]) == (3, True, 0.4)
    (choice,) = answer.json()["choices"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    ids = model_server.tokenizer()("take lamp")["input_ids"]
    recorded = [event["response"] for event in await ranked.events(rollout, "model_request")]
    assert recorded[1] == answer.json()
    assert recorded[1]["choices"][0]["token_ids"] == [*ids, model_server.tokenizer().eos_token_id]
    assert recorded[1]["prompt_token_ids"] == [1, 2, 3]
    metrics = await ranked.drain()
    assert {name: metrics[f"empo2/critic/{name}"] for name in ("calls", "changed")} == {"calls": 3, "changed": 1}


async def test_steps_are_counted_by_rollout_and_after_errors_too(ranked: GatewayUnderTest) -> None:
    first, second = await ranked.create(None), await ranked.create(None)
    ranked.model.fault = lambda path, body: 400
    refused = await ask(ranked, first)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "a fault of the test")
    ranked.model.fault = lambda path, body: None
    assert [content(await ask(ranked, rollout)) for rollout in (first, first, second)] == [
        ["go north"],
        ["take lamp"],
        ["go north"],
    ]


async def test_training_calls_and_calls_for_several_samples_are_not_ranked(ranked: GatewayUnderTest) -> None:
    for mode in (None, "no-memory", "memory"):
        rollout = await ranked.create(mode)
        for _ in range(2):
            assert content(await ask(ranked, rollout, mode="train")) == ["go east"]
            assert "n" not in ranked.last().body
    rollout = await ranked.create(None)
    assert content(await ask(ranked, rollout, n=2)) == ["go east", "go north"]
    assert "empo2/critic/calls" not in await ranked.drain()


@pytest.mark.parametrize("missing", ["embedding", "log-probs"])
async def test_without_values_the_first_sample_is_the_answer(ranked: GatewayUnderTest, missing: str) -> None:
    if missing == "embedding":
        ranked.words.failure = RuntimeError("no more memory")
    else:
        ranked.model.answer = lambda body: several({**body, "logprobs": None})
    assert content(await ask(ranked, await ranked.create(None))) == ["go east"]
    metrics = await ranked.drain()
    assert (metrics["empo2/critic/calls"], metrics["empo2/critic/failures"]) == (1, 1)


# What is refused


def test_what_is_no_critic_of_these_settings(tmp_path: Path) -> None:
    file = tmp_path / "critic.npz"

    def said() -> str:
        with pytest.raises(ConfigError, match=r"^critic\.path='.*critic\.npz': ") as caught:
            load_critic(str(file), SETTINGS.memory)
        return str(caught.value).split("critic.npz': ", 1)[1]

    assert said() == "No such file or directory; empo2 critic makes one"
    file.write_text("hello")
    assert said() == "is no critic; empo2 critic makes one"
    with file.open("wb") as stream:
        np.savez(stream, weights=np.ones(3))
    assert said() == "is no critic; empo2 critic makes one"
    Critic(OF_SETTINGS | {"state": "end"}, preferring(Words(), "x").weights).save(file)
    assert said() == "was trained with memory.state='end'; this is 'beginning'"


def test_where_critics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.path='c': ranks samples.*model\.val_temperature=0"):
        load_settings("cpu", ["critic.path=c", "model.val_temperature=0.0"])
    with pytest.raises(ConfigError, match=r"--memory both: critic\.path='c\.npz' needs --memory off"):
        reranking.facts(load_settings("cpu", ["critic.path=c.npz"]), "both")


def test_a_critic_is_read_as_it_was_written(tmp_path: Path) -> None:
    words, file = Words(), tmp_path / "critic.npz"
    preferring(words, "lamp").save(file)
    task, state, lamp, door = words.embed(["task", "state", "lamp", "door"])
    values = load_critic(str(file), SETTINGS.memory).values(task, state, [door, lamp])
    assert values == pytest.approx([max(0.0, float(door @ lamp)), 1.0])


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--profile", "cpu", "--config", "agents/houses/coin.yaml"],
        ["adapt", "m", "--server", "http://127.0.0.1:9/v1", "--profile", "cpu", "--panel", "coin-medium"],
    ],
    ids=["train", "adapt"],
)
def test_training_and_adapting_refuse_a_critic(arguments: list[str]) -> None:
    code, said = run([*arguments, "critic.path=c.npz"])
    assert code == 2
    assert said.startswith("empo2: error: critic.path='c.npz': is for empo2 eval")
    assert "set it to null" in said


def evaluated(folder: Path, **memory: Any) -> Path:
    folder.mkdir()
    facts = {"kind": "eval", "memory": SETTINGS.memory.model_dump() | memory, "algorithm": {"success_return": 1.0}}
    (folder / "evaluation.json").write_text(json.dumps(facts))
    return folder


def test_what_a_critic_cannot_learn_from(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    empty, few, other = (evaluated(tmp_path / name) for name in ("empty", "few", "other"))
    different = evaluated(tmp_path / "different", state="end")
    for folder in (few, different):
        line = {"part": "memory off", "index": 0, "sample": 0, "return": 1.0, "turns": [Turn("t", "s", "a")]}
        (folder / "turns.jsonl").write_text(json.dumps(line))
    for folders, message in (
        ([tmp_path / "run"], "run: holds no results of empo2 eval"),
        ([empty], r"empty: has no turns\.jsonl; it is written by empo2 eval with --keep-turns"),
        ([few], "few: 1 episodes; a fifth is held out"),
        ([few, different], r"different: has memory\.state='end', .*few has 'beginning'"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_critic(folders, output=other / "critic.npz")


# Whole commands: the model says any of four doors, of which one has the lamp


def test_train_a_critic_and_be_ranked_by_it(tmp_path: Path, empo2: Any, capfd: pytest.CaptureFixture[str]) -> None:
    panel = toy_panel(tmp_path, {"door": 3})
    door = itertools.cycle("2341")

    def doors(body: Body) -> Body:
        """The doors in turn; of several samples each is another one, and all are equally likely."""
        return choices_of(body, {next(door): -0.5 for _ in range(body.get("n") or 1)})

    played = evaluated(tmp_path / "played")
    for sample in range(10):
        turns = [Turn("Say a number.", "you see nothing", f"{said}") for said in range(1 + sample % 4)]
        episode = {"part": "memory off", "index": 0, "sample": sample, "return": float(sample % 4 == 3), "turns": turns}
        with (played / "turns.jsonl").open("a") as file:
            file.write(json.dumps(episode) + "\n")
    assert run(["critic", "played", "--output", "critic.npz", "--updates", "100"]) == (0, "")
    assert "successes" in capfd.readouterr().out
    with ModelServer(answer=doors).serve() as model:
        command = ["eval", MODEL, "--server", model.url, "--panel", str(panel), "--samples", "2", "--keep-turns"]
        ranked, _ = empo2(*command, "--output", "ranked", "critic.path=critic.npz", "critic.decay=0.1")
    assert len((tmp_path / "ranked" / "turns.jsonl").read_text().splitlines()) == 2
    assert "critic  ranked the samples of 6 calls" in ranked
    assert "FAILED" not in ranked
    facts = json.loads((tmp_path / "ranked" / "evaluation.json").read_text())["critic"]
    assert (facts["samples"], facts["decay"], facts["path"]) == (4, 0.1, str(tmp_path / "critic.npz"))
