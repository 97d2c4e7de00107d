"""A model server that answers as vLLM 0.20 does where this project depends on it; a script stands for the model.

Prompts are rendered by a real chat template and a real tokenizer, for ``/tokenize`` as for the two completion routes.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from jinja2 import TemplateError
from starlette.requests import ClientDisconnect

from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.retrofit.recorder import serving

__all__ = ["serving"]

Body = dict[str, Any]
MODEL = str(resolve_model(SMOLLM2))
_POLL_SECONDS = 0.05
_JSON = {"content-type": "application/json"}


@cache
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(MODEL)


def normal(messages: list[Body]) -> list[Body]:
    """What vLLM makes of a chat before its template sees it (``vllm.entrypoints.chat_utils.parse_chat_messages``)."""
    chat = []
    for message in messages:
        message = json.loads(json.dumps(message))
        content = message.get("content")
        if not isinstance(content, str):
            message["content"] = "\n".join(part["text"] for part in content or [])
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"].get("arguments") or "{}")
        chat.append(message)
    return chat


@dataclass
class Seen:
    path: str
    raw: bytes
    body: Body
    prompt_ids: list[int] = field(default_factory=list)
    reply_ids: list[int] = field(default_factory=list)
    key: str = ""
    gone: bool = False  # the client hung up before it had its answer
    traceparent: str | None = None

    @property
    def prompt(self) -> str:
        return tokenizer().decode(self.prompt_ids)


@dataclass
class ModelServer:
    """Switches may be changed while it serves.

    Args:
        takes_ids: of a chat's prompt, as vLLM does with `recipe/engine/prompt_ids.py`.
        reply: makes a text, or an assistant message: its `written` is what the model wrote for it, `sampled` the ids
            that it sampled, `stop_reason` vLLM's.
        fault: a status to answer with, "text" for 500 with a plain text, "hang" for no answer at all, "reset" for a
            connection that is reset, "half" for half of the answer's body.
        answer: a whole answer, of status 200, or its JSON, in the place of a completion.
        context: tokens of prompt and reply together; 400 beyond, as vLLM answers.
    """

    template: str | None = None
    takes_ids: bool = True
    reply: Callable[[Body], str | Body] = lambda body: "wait"
    delay: Callable[[str, Body], float] = lambda path, body: 0
    fault: Callable[[str, Body], int | Literal["text", "hang", "reset", "half"] | None] = lambda path, body: None
    answer: Callable[[Body], Any] | None = None
    context: int = 8192
    seen: MutableSequence[Seen] = field(default_factory=list)
    url: str = ""

    def requests(self, path: str = "/v1/chat/completions") -> list[Seen]:
        return [seen for seen in self.seen if seen.path == path]

    @contextmanager
    def serve(self) -> Iterator["ModelServer"]:
        tokenizer()  # importing it takes longer than a client waits on a busy machine
        app = FastAPI()
        app.add_api_route("/{path:path}", self._answer, methods=["POST"])
        with serving(_WithTransport(app)) as url:
            self.url = f"{url}/v1"
            yield self

    async def _answer(self, path: str, request: Request) -> Response:
        try:
            raw = await request.body()
        except ClientDisconnect:
            return Response(status_code=499)
        if path == "v1/traces":  # a collector, too
            return Response()
        body = json.loads(raw)
        key, traceparent = request.headers.get("authorization", ""), request.headers.get("traceparent")
        seen = Seen(f"/{path}", raw, body, key=key, traceparent=traceparent)
        self.seen.append(seen)
        fault = self.fault(seen.path, body)
        seconds = 600 if fault == "hang" else self.delay(seen.path, body)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _POLL_SECONDS))
            if await request.is_disconnected():
                seen.gone = True
                return Response(status_code=499)
        if isinstance(fault, int):
            return _error(fault, "a fault of the test")
        if fault == "text":
            return PlainTextResponse("the engine has ended", 500)
        if fault in ("reset", "half"):
            return _Broken(request.scope["transport"], b'{"choices": [' if fault == "half" else b"")
        if body.get("model") != MODEL:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        try:
            seen.prompt_ids = self.prompt_ids(body, seen.path)
        except (TemplateError, KeyError, TypeError, AttributeError) as error:
            return _error(400, repr(error))
        if seen.path == "/tokenize":
            return JSONResponse({"tokens": seen.prompt_ids, "count": len(seen.prompt_ids), "max_model_len": 8192})
        # Without a limit, a chat fills the context, and a completion has 16 tokens.
        left = max(self.context - len(seen.prompt_ids), 1) if "messages" in body else 16
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or left
        if len(seen.prompt_ids) + limit > self.context:
            return _error(400, f"This model's maximum context length is {self.context} tokens.")
        if self.answer is not None:
            answer = self.answer(body)
            return Response(answer, 200, _JSON) if isinstance(answer, bytes) else JSONResponse(answer)
        chat = seen.path.endswith("chat/completions")
        answer = _completion(body, seen.prompt_ids, self.reply(body), limit, chat=chat)
        seen.reply_ids = answer["choices"][0]["token_ids"]
        return JSONResponse(answer)

    def prompt_ids(self, body: Body, path: str) -> list[int]:
        if "messages" not in body:
            prompt = body["prompt"]
            if isinstance(prompt, list) and isinstance(prompt[0], int):
                return prompt
            text = prompt if isinstance(prompt, str) else prompt[0]
            return tokenizer()(text, add_special_tokens=body.get("add_special_tokens", True))["input_ids"]
        if self.takes_ids and "prompt_token_ids" in body:
            return body["prompt_token_ids"]
        if not isinstance(body["messages"], list) or not body["messages"]:
            raise TypeError("messages: a non-empty list")
        extra = dict(body.get("chat_template_kwargs") or {})
        if path != "/tokenize":  # vLLM's TokenizeChatRequest has no such fields
            extra |= {key: body[key] for key in ("documents", "reasoning_effort") if body.get(key)}
        text = tokenizer().apply_chat_template(
            normal(body["messages"]),
            tools=body.get("tools"),
            chat_template=body.get("chat_template") or self.template,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            tokenize=False,
            **extra,
        )
        return tokenizer()(text, add_special_tokens=False)["input_ids"]


def _completion(body: Body, prompt_ids: list[int], reply: str | Body, limit: int, *, chat: bool) -> Body:
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant", **reply}
    text = message.pop("written", None) or message.get("content") or json.dumps(message.get("tool_calls"))
    written = [*tokenizer()(text, add_special_tokens=False)["input_ids"], tokenizer().eos_token_id]
    ids: Any = message.pop("sampled", written)
    finish = "stop" if len(ids) <= limit else "length"
    ids = ids[:limit]
    if finish == "length":
        message["content"] = tokenizer().decode(ids)
    tokens, log_probs = [tokenizer().decode([each]) for each in ids], [-0.5 - i / 100 for i in range(len(ids))]
    choice: Body = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": message.pop("stop_reason", None),
        "token_ids": ids,
    }
    answer: Body = {"id": "cmpl-1", "created": 0, "model": body["model"], "choices": [choice]}
    if chat:
        of_tokens: Any = zip(ids, tokens, log_probs, strict=True)
        listed = [_log_prob(body, token, text, log_prob) for token, text, log_prob in of_tokens]
        choice |= {"message": {"tool_calls": [], "refusal": None, **message}, "logprobs": {"content": listed}}
        answer |= {"object": "chat.completion", "prompt_token_ids": prompt_ids}
    else:
        choice |= {"text": message["content"], "logprobs": {"token_logprobs": log_probs, "tokens": tokens}}
        choice["prompt_token_ids"] = prompt_ids
        answer["object"] = "text_completion"
    if not body.get("return_token_ids"):
        answer.pop("prompt_token_ids", None)
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
    answer["usage"] = {**usage, "total_tokens": sum(usage.values())}
    return answer


def _log_prob(body: Body, token: int, text: str, log_prob: float) -> Body:
    """A token's entry as vLLM makes it (`OpenAIServingChat._create_chat_logprobs`); a grammar excludes the last one."""

    by_id = body.get("return_tokens_as_token_ids")

    def top(token: int, log_prob: float) -> Body:
        text = f"token_id:{token}" if by_id else tokenizer().decode([token])
        return {"token": text, "logprob": log_prob, "bytes": [*text.encode()]}

    tops = [top(token + i, -9999.0 if i == 19 else log_prob - i) for i in range(body.get("top_logprobs") or 0)]
    shown = f"token_id:{token}" if by_id else text
    return {"token": shown, "logprob": log_prob, "bytes": [*text.encode()], "top_logprobs": tops}


class _WithTransport:
    """ASGI middleware that puts uvicorn's transport into the scope."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "transport": send.__self__.transport}
        await self._app(scope, receive, send)


class _Broken(Response):
    def __init__(self, transport: asyncio.Transport, beginning: bytes) -> None:
        super().__init__()
        self._transport, self._beginning = transport, beginning

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._beginning:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"1000")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self._beginning, "more_body": True})
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
        while (await receive())["type"] != "http.disconnect":
            pass


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "code": status}}, status)
