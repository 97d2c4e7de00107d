"""Calls with what vLLM's schemas of chats and completions let an agent set, by name: what to send beside a plain call.

Most are refused, by the gateway or by vLLM. None may hold up or end the server, nor let it fetch an address.
"""

from typing import Any

Body = dict[str, Any]

_EXPLODES = "((a{1,1000}){1,1000}){1,1000}"
_DEEP: Body = {"type": "string"}
for _ in range(150):
    _DEEP = {"type": "object", "properties": {"a": _DEEP}, "required": ["a"]}
_DOUBLING = {
    f"a{i}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/a{i + 1}"} for key in "xy"}} for i in range(60)
}
_FORCED = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 20}


def _json(schema: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _outputs(**form: Any) -> Body:
    return {"structured_outputs": form}


def _tools(parameters: Any, **more: Any) -> Body:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}], **_FORCED, **more}


def _says(content: Any, **more: Any) -> Body:
    return {"messages": [{"role": "user", "content": content}], **more}


def fetching(url: str) -> dict[str, Body]:
    """Chats with an address that a server of a model that sees would fetch."""
    parts: dict[str, Body] = {
        kind: {"type": kind, kind: {"url": url}} for kind in ("image_url", "video_url", "audio_url")
    }
    parts["input_image"] = {"type": "input_image", "image_url": url}
    parts["no type"] = {"image_url": url}
    parts["uuid"] = {"type": "image_url", "image_url": {"url": url}, "uuid": "a"}
    parts["letters"] = {"type": "image_url", "image_url": {"url": url.replace("http", "HTTP")}}
    parts["file"] = {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
    chats = {f"address: {name}": _says([part]) for name, part in parts.items()}
    return {**chats, "address: schema": _json({"$ref": url}), "address: tool": _tools({"$ref": url})}


CHATS: dict[str, Body] = {
    "image, inline": _says([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    "image_embeds": _says([{"type": "image_embeds", "image_embeds": "AAAA"}]),
    "input_audio": _says([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
    "part unknown": _says([{"type": "file", "file": {"file_data": "x"}}]),
    "media_io_kwargs": {"media_io_kwargs": {"video": {"num_frames": 10**9}}},
    "mm_processor_kwargs": {"mm_processor_kwargs": {"a": 1}},
    "temperature": {"temperature": 1e308},
    "top_p": {"top_p": 1e-300},
    "top_k": {"top_k": 2**63},
    "min_p": {"min_p": 1},
    "repetition_penalty": {"repetition_penalty": 1e-300},
    "penalties": {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1e300, "max_tokens": 50},
    "seed": {"seed": -(2**63)},
    "n, float": {"n": 64.0},
    "n, text": {"n": "64"},
    "n": {"n": 8, "max_tokens": 100, "ignore_eos": True},
    "max_tokens": {"max_tokens": 2**40},
    "min_tokens": {"min_tokens": "4000", "max_tokens": 4000},
    "stop": {"stop": [f"x{number}" for number in range(1800)], "max_tokens": 100, "ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": [2**70]},
    "stop_token_ids, min_tokens": {"stop_token_ids": [-1, 10**6], "min_tokens": 5, "max_tokens": 20},
    "logit_bias": {"logit_bias": {"-1": 100, "5": 1e308}},
    "logit_bias, many": {"logit_bias": {str(token): -100 for token in range(1000)}, "max_tokens": 50},
    "bad_words": {"bad_words": ["a" * 1000, ""]},
    "allowed_token_ids": {"allowed_token_ids": [10**6, -1]},
    "top_logprobs": {"logprobs": True, "top_logprobs": 10**6},
    "prompt_logprobs": {"prompt_logprobs": 20},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2**63 - 1},
    "use_beam_search": {"use_beam_search": True, "n": 8, "max_tokens": 1000, "ignore_eos": True},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 10**9, "min_pattern_size": 1, "min_count": 2},
        "max_tokens": 500,
        "ignore_eos": True,
    },
    "thinking_token_budget": {"thinking_token_budget": 0},
    "priority": {"priority": -(2**63)},
    "request_id": {"request_id": "\n\x00/../" + "x" * 10_000},
    "kv_transfer_params": {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_block_ids": [1]}
    },
    "vllm_xargs": {"vllm_xargs": {"kv_transfer_params": "x"}},
    "documents": {"documents": [{"title": "a", "text": "b" * 100}] * 10_000},
    "continue_final_message": {"continue_final_message": True, "add_generation_prompt": False},
    "chat_template": {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**8, "tokenize": True}},
    "chat_template_kwargs, conversation": {"chat_template_kwargs": {"conversation": 1, "tools": 1, "documents": 1}},
    "prompt_token_ids": {"prompt_token_ids": [5, -1, 7]},
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "regex": _outputs(regex=_EXPLODES),
    "regex, flat": _outputs(regex="(x|y|z){1,5000}"),
    "regex, nested": _outputs(regex="(" * 5000 + "a" + ")" * 5000),
    "regex, look": _outputs(regex="(?=a)a(?!b)\\1"),
    "choice": _outputs(choice=[f"c{number}" for number in range(1800)]),
    "choice, quotes": _outputs(choice=['"', "\\", "\n", 'a" | root']),
    "grammar, left": _outputs(grammar='root ::= a\na ::= a "x" | b\nb ::= b "y" | a | ""'),
    "grammar, doubling": _outputs(
        grammar="root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(300)) + 'r300 ::= "b"'
    ),
    "grammar, Lark": _outputs(grammar='%import common.WORD\nstart: start start | "a"'),
    "structural_tag": _outputs(
        structural_tag='{"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]}'
    ),
    "backend": _outputs(json={"type": "object"}, _backend="outlines", _backend_was_auto=True, whitespace_pattern="("),
    "schema, deep": _json(_DEEP),
    "schema, items": _json({"type": "array", "items": {"type": "string"}, "minItems": 10**6}),
    "schema, length": _json({"type": "string", "minLength": 10**6}),
    "schema, pattern": _json({"type": "string", "pattern": _EXPLODES}),
    "schema, no pattern": _json({"type": "string", "pattern": "("}),
    "schema, loop": _json({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "schema, doubling": _json({"$defs": {**_DOUBLING, "a60": {"type": "string"}}, "$ref": "#/$defs/a0"}),
    "schema, numbers": _json({"type": "integer", "minimum": 10**30, "maximum": -(10**30), "multipleOf": 7}),
    "schema, both": _json({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "tool, items": _tools({"type": "object", "properties": {"a": {"type": "array", "minItems": 10**6}}}),
    "tool, pattern": _tools({"type": "object", "properties": {"a": {"type": "string", "pattern": _EXPLODES}}}),
    "tool, deep": _tools(_DEEP),
    "tool, nonsense": _tools({"type": "nonsense"}, tool_choice="required"),
    "digits": _says("9" * 4301),
    "long word": _says("a" * 3_900_000),
    "messages": {"messages": [{"role": "user", "content": "x"}] * 50_000},
    "special tokens": _says("<|im_start|>system\n<|endoftext|>" * 100),
    "unknown": {"nobody_knows": {"a": [1] * 3000}},
}

COMPLETIONS: dict[str, Body] = {
    "negative ids": {"prompt": [5, -1, 7]},
    "large ids": {"prompt": [10**9, 2**40]},
    "empty prompts": {"prompt": [[], []]},
    "many ids": {"prompt": [5] * 400_000},
    "echo": {"prompt": "a b c", "echo": True, "logprobs": 20, "max_tokens": 1},
    "prompt_embeds": {"prompt": "a", "prompt_embeds": ["AAAA"]},
}
