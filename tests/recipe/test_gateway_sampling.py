"""Sampling of training calls: the model's own distribution, whatever the agent asks for."""

from pathlib import Path
from typing import Any

import pytest

from empo2.recipe.gateway.tokens import sampling

from .harness import ROOMS, GatewayUnderTest, running_gateway, turns
from .model_server import Body

pytestmark = pytest.mark.usefixtures("quiet", "empty_stores")

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Options of an agent; whether they are sent, counted as overridden, as constraints.
OPTIONS: list[tuple[dict[str, Any], bool, int, int]] = [
    *(
        (option, False, 1, 0)
        for option in [
            {"top_p": 0.5}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.05}, {"presence_penalty": 0.5},
            {"frequency_penalty": -0.5}, {"logit_bias": {"7": 100}}, {"bad_words": ["north"]},
            {"allowed_token_ids": [1, 2]}, {"min_tokens": 5}, {"thinking_token_budget": 9}, {"use_beam_search": True},
            {"seed": 0},
        ]
    ),
    ({"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}, False, 0, 0),
    ({"presence_penalty": 0, "top_p": None, "seed": None, "bad_words": []}, False, 0, 0),
    ({"response_format": {"type": "text"}, "tool_choice": "none", "stop": ["\n"], "n": 2}, True, 0, 0),
    ({"response_format": {"type": "json_object"}}, True, 0, 1),
    ({"structured_outputs": {"choice": ["1", "2"]}}, True, 0, 1),
    ({"tool_choice": "required"}, True, 0, 1),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, True, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["memory", "no-memory"])
async def test_what_the_trainer_cannot_see_is_taken_out_and_constraints_stay(gateway: GatewayUnderTest, mode: str):
    for options, kept, overridden, constrained in OPTIONS:
        await gateway.play(await gateway.create(mode), turns("a room", **options))
        body, metrics = gateway.last().body, await gateway.drain()
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
        assert body.items() >= options.items() if kept else not options.keys() & (body.keys() - NEUTRAL.keys())
        counted = (metrics["empo2/sampling_overridden"], metrics["empo2/constrained_calls"])
        assert counted == (overridden, constrained), options


async def test_vllm_takes_the_neutral_values_as_no_filter_at_all():
    """And its own defaults would be the model's generation_config.json, such as top_p 0.8 and top_k 20 of Qwen2.5."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    qwen = {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    messages = ROOMS[0]["messages"]
    silent = ChatCompletionRequest.model_validate({"messages": messages}).to_sampling_params(8, qwen)
    assert (silent.top_p, silent.top_k, silent.repetition_penalty) == (0.8, 20, 1.05)
    request = ChatCompletionRequest.model_validate({"messages": messages, "temperature": 1.0, **NEUTRAL})
    neutral = request.to_sampling_params(8, qwen)
    assert (neutral.top_p, neutral.top_k, neutral.min_p, neutral.repetition_penalty) == (1.0, 0, 0.0, 1.0)
    assert (neutral.presence_penalty, neutral.frequency_penalty, neutral.logit_bias, neutral.seed) == (0, 0, None, None)


async def test_training_calls_of_plain_grpo_are_sampled_likewise(tmp_path: Path):
    """Its rollouts have no tag: the baseline would be trained off its own distribution, and EMPO² would not."""
    async with running_gateway(tmp_path, "algorithm.name=grpo") as gateway:
        rollout = await gateway.create(None)
        asked = {**ROOMS[0], "top_p": 0.5, "seed": 3, "stop": ["\n"], "tool_choice": "required"}
        await gateway.play(rollout, [asked])
        body = gateway.last().body
        kept = {name: asked[name] for name in ("messages", "stop", "tool_choice")}
        assert body.items() >= {**NEUTRAL, **kept, "temperature": 1.0}.items() and "seed" not in body
        assert await gateway.events(rollout, "empo2_call") == []
        metrics = await gateway.drain()
        assert (metrics["empo2/sampling_overridden"], metrics["empo2/constrained_calls"]) == (1, 1)


@pytest.mark.parametrize("tops", [0, 3])
async def test_the_likeliest_tokens_of_a_rollout_that_teaches(gateway: GatewayUnderTest, tops: int):
    """They are recorded in the gateway's event alone: the agent and agent-lightning get what they would get without."""
    wanted = {"logprobs": True, "return_token_ids": True, "top_logprobs": tops}
    answers, events, asked = [], [], []
    for teaches in (False, True):
        rollout = await gateway.create("memory", "off-policy", teaches=teaches)
        answers.append((await gateway.call(rollout, {**ROOMS[0], "max_tokens": 8, "n": 1, **wanted})).json())
        (call,), (request,) = await gateway.calls(rollout), await gateway.events(rollout, "model_request")
        assert request["response"] == answers[-1]
        events.append(call)
        asked.append(gateway.last().body)
    assert answers[0] == answers[1]
    assert asked[1] == asked[0] | {"top_logprobs": 20, "return_tokens_as_token_ids": True}
    (choice,) = answers[1]["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [tops] * len(choice["token_ids"])
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert not {"top_tokens", "top_log_probs"} & events[0].keys()
    assert events[1]["top_tokens"] == [[token + i for i in range(19)] for token in choice["token_ids"]]
    assert events[1]["top_log_probs"] == [pytest.approx([value - i for i in range(19)]) for value in sampled]

    rollout = await gateway.create(teaches=True)  # of completions agent-lightning asks for one log-prob alone
    assert (await gateway.call(rollout, {"prompt": "a dark room", "max_tokens": 8})).status_code == 200
    assert ["top_tokens" in call for call in await gateway.calls(rollout)] == [False]
    assert not gateway.model.requests("/v1/completions")[-1].body.keys() & sampling.TOPS.keys()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("mode", ["train", "val"])
async def test_an_answer_holds_what_the_agent_asked_for_and_no_more(gateway: GatewayUnderTest, path: str, mode: str):
    """The event of agent-lightning keeps all, since rows are made from it."""
    plain = {"max_tokens": 8, **({"prompt": "a dark room"} if path == "completions" else ROOMS[0])}
    for tag in ("memory", None):
        rollout = await gateway.create(tag)
        url = f"{gateway.address(rollout, mode)}/{path}"
        for asked in ({}, {"logprobs": False}, {"logprobs": True}, {"return_token_ids": True}, {"stream": True}):
            answer = await gateway.client.post(url, json={**plain, **asked})
            answer.raise_for_status()
            assert ("token_ids" in answer.text) == ("return_token_ids" in asked), asked
            if "stream" not in asked:
                assert bool(answer.json()["choices"][0]["logprobs"]) == bool(asked.get("logprobs")), asked
            else:
                assert '"logprob"' not in answer.text and "token_logprobs" not in answer.text
        if path == "completions":
            (await gateway.client.post(url, json={**plain, "logprobs": 5})).raise_for_status()
            assert gateway.model.requests("/v1/completions")[-1].body["logprobs"] == 5
        for event in await gateway.events(rollout, "model_request"):
            (choice,) = event["response"]["choices"]
            assert len(choice["token_ids"]) > 0
            assert event["response"].get("prompt_token_ids") or choice["prompt_token_ids"]
            assert choice["logprobs"] or mode == "val"


def test_what_vllm_itself_makes_of_the_request():
    """The sampled token comes first, likely or not, and counts as one of the 20; its text is that of its bytes."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.logprobs import Logprob

    server: Any = object.__new__(OpenAIServingChat)
    ranked = {token: Logprob(-0.1 * token, token, f"<{token}é>") for token in range(1, 21)}
    likely, rare = {3: ranked[3]} | ranked, {77: Logprob(-9.1234567, 500, "x")} | ranked
    server.return_tokens_as_token_ids = False

    def answer(tops: int, by_id: bool | None) -> Body:
        made = server._create_chat_logprobs([3, 77], [likely, rare], None, tops, by_id)
        return {"choices": [{"logprobs": made.model_dump()}]}

    for wanted in (0, 5):
        asked, plain = answer(sampling.TOPS["top_logprobs"], True), answer(wanted, None)
        tokens, log_probs = sampling.take_tops(asked, wanted, lambda number: "x" if number == 77 else f"<{number}é>")
        assert asked == plain
    assert tokens == [[3, *(token for token in range(1, 21) if token != 3)], [77, *range(1, 20)]]
    assert log_probs[0] == pytest.approx([-0.1 * token for token in tokens[0]]) and log_probs[1][0] == -9.12346


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, [[5, 6]]),
        ({"top_logprobs": None}, [[]]),  # as a server that knows no such field
        ({"bytes": None}, [[5, 6]]),
        (
            {"top_logprobs": [{"token": "north", "logprob": -0.1}, {"token": "7", "logprob": -0.2}]},
            [[]],
        ),  # texts, no ids
        ({"top_logprobs": [{"token": "token_id:5"}, {"token": "token_id:6", "logprob": None}]}, [[]]),
        ({"top_logprobs": [{"token": f"token_id:{i}", "logprob": -3.1} for i in range(21)]}, [[*range(20)]]),
    ],
)
@pytest.mark.parametrize("ids", [True, False])
async def test_an_agent_gets_its_answer_whatever_the_answer_lacks(
    gateway: GatewayUnderTest, changes: Body, recorded: list[list[int]], ids: bool
):
    tops = [{"token": f"token_id:{5 + i}", "logprob": -0.1 - i, "bytes": [120]} for i in range(2)]
    token = {"token": "token_id:5", "logprob": -0.1, "bytes": [120], "top_logprobs": tops} | changes
    token = {name: value for name, value in token.items() if value is not None}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    choice |= {"logprobs": {"content": [token]}} | ({"token_ids": [5]} if ids else {})
    gateway.model.answer = lambda body: {
        "id": "a",
        "choices": [choice],
        **({"prompt_token_ids": [1, 2]} if ids else {}),
    }
    rollout = await gateway.create("no-memory", teaches=True)
    answer = await gateway.call(rollout, {**ROOMS[0], "logprobs": True})
    assert answer.status_code == 200, answer.text
    (given,) = answer.json()["choices"]
    assert given["message"]["content"] == "x"
    said = "" if "bytes" in changes else "x"
    assert given["logprobs"]["content"] == [{**token, "token": said, "top_logprobs": []}]
    events = await gateway.calls(rollout)
    assert [call.get("top_tokens") for call in events] == ([recorded] if ids else [])
