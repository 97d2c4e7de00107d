"""Record what an agent sends, in the form of tests/recipe/recorded, whose README says what is cut."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response

from empo2.recipe.retrofit.recorder import serving

from .harness import SECONDS
from .model_server import Body

RECORDED = Path(__file__).parent / "recorded"
_WORDS, _DESCRIPTION = 200, 80  # characters that stay
_LEFT_OUT = {"authorization", "x-api-key", "host", "content-length", "connection", "accept", "accept-encoding"} | {
    "accept-language"
}
_ID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\bses_\w{20,}\b")


@contextmanager
def recording(name: str, variables: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield an agent's variables; with EMPO2_RECORD=1 its calls replace recorded/NAME.jsonl, if that is there."""
    file = RECORDED / f"{name}.jsonl"
    if os.environ.get("EMPO2_RECORD") != "1" or not file.exists():
        yield variables
        return
    base, requests, app = variables["AGL_OPENAI_BASE_URL"], list[Body](), FastAPI()
    root = str(httpx.URL(base).copy_with(raw_path=b"/")).rstrip("/")
    below = httpx.URL(base).path.removesuffix("/v1")

    async def forward(request: Request) -> Response:
        content = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        async with httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
            url = f"{root}{request.url.path}?{request.url.query}"
            answer = await client.request(request.method, url, content=content, headers=headers)
        path = request.url.path.removeprefix(below)
        path = path.removeprefix("/v1") if "anthropic-version" not in headers else path
        requests.append(
            {
                "method": request.method,
                "path": "{BASE}" + path + (f"?{request.url.query}" if request.url.query else ""),
                "headers": {name: value for name, value in headers.items() if name not in _LEFT_OUT},
                "body": json.loads(content or b"null"),
                "status": answer.status_code,
            }
        )
        kind = {"content-type": answer.headers.get("content-type", "application/json")}
        return Response(answer.content, answer.status_code, kind)

    app.add_api_route("/{path:path}", forward, methods=["GET", "HEAD", "POST"])
    with serving(app) as url:
        yield variables | {"AGL_OPENAI_BASE_URL": base.replace(root, url)}
    text = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in _shortened(requests))
    file.write_text(_with_names(text))


def _shortened(requests: list[Body]) -> Iterator[Body]:
    before: Body = {}
    for request in requests:
        body = request["body"] or {}
        whole = {name: body[name] for name in ("system", "tools") if body.get(name)}
        short = _changed(body, _cut)
        for name, value in whole.items():
            short[name] = _as_before(value, before.get(name), short[name])
        before |= whole
        yield request | {"body": short}


def _as_before(value: Any, before: Any, short: Any) -> Any:
    same = 0
    if isinstance(value, list) and isinstance(before, list):
        while same < min(len(value), len(before)) and value[same] == before[same]:
            same += 1
    elif value == before:
        return "{as in the request before: 1}"
    return [f"{{as in the request before: {same}}}", *short[same:]] if same else short


def _changed(value: Any, cut: Callable[..., Any], **inside: Any) -> Any:
    if isinstance(value, dict):
        role = {"role": value["role"]} if "role" in value else {}
        role |= {"role": "tool"} if str(value.get("type")).startswith(("tool_", "function_call")) else {}
        return {name: _changed(each, cut, **{**inside, **role, "name": name}) for name, each in value.items()}
    if isinstance(value, list):
        return [_changed(each, cut, **inside) for each in value]
    return cut(value, **inside)


def _cut(value: Any, name: str = "", role: str = "") -> Any:
    """Cut descriptions, and what systems, developers and users say; not what the model and its tools say."""
    own = name in ("system", "instructions") or (
        name in ("content", "text") and role in ("", "system", "developer", "user")
    )
    most = _DESCRIPTION if name == "description" and role == "" else _WORDS if own else None
    if not isinstance(value, str) or most is None or len(value) <= most:
        return value
    return f"{value[:most]}{{+{len(value) - most} chars}}"


def _with_names(text: str) -> str:
    """Put {ID1}, {ID2} in the place of identifiers that differ in each episode."""
    names: dict[str, str] = {}
    return _ID.sub(partial(_name, names), text)


def _name(names: dict[str, str], found: re.Match[str]) -> str:
    return names.setdefault(found[0], f"{{ID{len(names) + 1}}}")
