"""Chat completions and completions with ``stream=true``: the whole reply, as a stream's chunks."""

from collections.abc import Iterator

from starlette.responses import Response

from empo2.recipe.gateway.dialects.dialect import KEEP_ALIVE, Body, error_of, event, event_stream

_DONE = "data: [DONE]\n\n"
_SHARED = ("id", "created", "model", "system_fingerprint")
_SPOKEN = ("reasoning", "reasoning_content", "refusal")  # parts of a message that are texts, beside its content


class StreamedCompletion:
    """A streamed call of ``chat/completions`` or ``completions``."""

    def __init__(self, path: str, body: Body) -> None:
        self.path = path
        self.body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        options = body.get("stream_options")
        self._with_usage = isinstance(options, dict) and bool(options.get("include_usage"))

    def answer(self, completion: Body) -> Response:
        return event_stream([*map(event, self._chunks(completion)), _DONE])

    def waiting(self) -> str:
        return KEEP_ALIVE

    def failed(self, answer: Response) -> str:
        return event(error_of(answer, anthropic=False)) + _DONE

    def _chunks(self, completion: Body) -> Iterator[Body]:
        chat = self.path == "chat/completions"
        head = {name: completion[name] for name in _SHARED if name in completion}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        usage = {"usage": None} if self._with_usage else {}
        for choice in completion["choices"]:
            for part in _chat_parts(choice) if chat else [_text_part(choice)]:
                yield {**head, "choices": [{"index": choice["index"], **part}], **usage}
        if self._with_usage:
            yield {**head, "choices": [], "usage": completion.get("usage")}


def _chat_parts(choice: Body) -> Iterator[Body]:
    message = choice["message"]
    yield {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for name in _SPOKEN:
        if message.get(name):
            yield {"delta": {name: message[name]}, "finish_reason": None}
    if message.get("content"):
        yield {"delta": {"content": message["content"]}, "logprobs": choice.get("logprobs"), "finish_reason": None}
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls") or [])]
    if calls:
        yield {"delta": {"tool_calls": calls}, "finish_reason": None}
    yield {"delta": {}, "finish_reason": choice.get("finish_reason") or "stop"}


def _text_part(choice: Body) -> Body:
    return {
        "text": choice["text"],
        "logprobs": choice.get("logprobs"),
        "finish_reason": choice.get("finish_reason") or "stop",
    }
