"""Events that keep of each call what is new are read as they were, and grow with the episode's length."""

import json
import random
from typing import Any

from empo2.recipe.gateway.continued import Continuations
from empo2.recipe.protocol import CALL_EVENT, MODEL_EVENT, whole_events

Body = dict[str, Any]


def asked(messages: list[Body], prompt: Any, reply: Any, **more: Any) -> tuple[Body, Body]:
    answer = {"prompt_token_ids": prompt, "choices": [{"token_ids": reply}]}
    return {"model": "m", "messages": messages, **more}, {"id": "x", **answer, "usage": None}


def recorded(calls: list[tuple[Body, Body]], tip_free: dict[int, list[int] | None]) -> tuple[list[Body], list[Body]]:
    """The events of calls as they were before, and as they are held; of some the tip-free prompt is another one."""
    chats, before, held = Continuations(), [], []
    for number, (request, response) in enumerate(calls):
        kept, coded = json.dumps([request, response]), chats.code_call(request, response)
        assert kept == json.dumps([request, response])  # neither is changed
        before.append({"event_type": MODEL_EVENT, "data": {"request": request, "response": response}})
        held.append({"event_type": MODEL_EVENT, "data": dict(zip(("request", "response"), coded, strict=True))})
        own, prompt = {"tip_ids": [number]}, response["prompt_token_ids"]
        free = tip_free.get(number, prompt)
        known = {} if free is None else {"tip_free_prompt_token_ids": free}
        before.append({"event_type": CALL_EVENT, "data": {"prompt_token_ids": prompt, **known, **own}})
        other = {} if number not in tip_free else {"tip_free_prompt_token_ids": free}
        if free is not None and other:
            other = {"tip_free_prompt_token_ids": chats.code_tip_free(number, free, response)}
        held.append({"event_type": CALL_EVENT, "data": {"call": number, **own, **other}})
    return before, held


def test_random_chats_come_back_as_they_were() -> None:
    """Chats that go on, turn back, take turns, are sent again and drift; answers of odd servers, too."""
    generator = random.Random(0)
    for _ in range(200):
        chats: list[tuple[list[Body], list[int]]] = [([{"role": "system", "content": "s"}], [1, 2])]
        calls: list[tuple[Body, Body]] = []
        tip_free: dict[int, list[int] | None] = {}
        for number in range(generator.randrange(1, 12)):
            messages, ids = generator.choice(chats[-3:])
            cut = generator.choice([0, 0, 0, 1])
            messages = [*messages[: len(messages) - cut], {"role": "user", "content": str(generator.randrange(3))}]
            ids = [*ids[: len(ids) - cut], *generator.choices(range(5), k=3)]
            reply = generator.choices(range(5), k=generator.randrange(3))
            sent = {"prompt_token_ids": ids} if generator.random() < 0.3 else {}
            odd = generator.choice([None] * 12 + [[], [None], "text", [2**40], [0.5]])
            calls.append(asked(messages, ids if odd is None else odd, reply, **sent))
            if generator.random() < 0.4 and odd is None:
                tip_free[number] = generator.choice([None, ids[1:], [9, *ids]])
            chats.append(([*messages, {"role": "assistant", "content": str(reply)}], [*ids, *reply]))
        before, held = recorded(calls, tip_free)
        read = whole_events(json.loads(json.dumps(held)))
        assert read == before and json.dumps(read) == json.dumps(before)  # the order of fields, too


def test_an_episode_grows_with_its_length() -> None:
    """Twice the turns are twice the bytes, of two chats that take turns and their tip-free prompts."""

    def size(turns: int) -> int:
        chats: list[tuple[list[Body], list[int]]] = [([], []), ([{"role": "system"}], [7])]
        calls: list[tuple[Body, Body]] = []
        free: dict[int, list[int] | None] = {}
        for number in range(turns):
            messages, ids = chats[number % 2]
            messages = [*messages, {"role": "user", "content": "seen " * 20}]
            ids, reply = [*ids, *range(1000, 1040)], [*range(10)]
            calls.append(asked(messages, ids, reply))
            free[number] = ids[1:]
            chats[number % 2] = [*messages, {"role": "assistant", "content": "go"}], [*ids, *reply]
        return len(json.dumps(recorded(calls, free)[1]))

    assert size(160) < 2.05 * size(80)
