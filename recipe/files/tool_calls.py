"""Whether vLLM can read the tool calls that a model writes, and with which of its parsers."""

import json
from typing import NamedTuple

from empo2.recipe.config import Model
from empo2.recipe.files.models import read_file

# vLLM 0.20.2's parsers, by what a chat template holds whose model writes calls in that form; the first that fits.
# Where one mark belongs to several forms, the parser is unknown (None).
PARSERS = (
    ("[TOOL_CALLS]", "mistral"),  # Mistral
    ("<|tool_calls_section_begin|>", "kimi_k2"),  # Kimi K2
    ("<minimax:tool_call>", "minimax_m2"),  # MiniMax M2
    ("<seed:tool_call>", "seed_oss"),  # Seed-OSS
    ("<longcat_tool_call>", "longcat"),  # LongCat
    ("<start_function_call>", "functiongemma"),  # FunctionGemma
    ("<|action_start|>", "internlm"),  # InternLM 2.5
    ("<|tool_call|>", "granite"),  # Granite 3
    ("<|python_start|>", "llama4_pythonic"),  # Llama 4
    ("<|python_tag|>", "llama3_json"),  # Llama 3.1, 3.3
    ("<function_calls>", "olmo3"),  # OLMo 3
    ("<arg_key>", None),  # GLM 4.5, GLM 4.7, Hunyuan
    ("<tool_calls>", None),  # Jamba, Hunyuan, MiniMax
    ("<function=", "qwen3_coder"),  # Qwen3-Coder, Qwen3.5
    ("<tool_call>", "hermes"),  # Qwen2.5, Qwen3, Hermes 2 and 3, SmolLM2 as made here
)


class ToolSupport(NamedTuple):
    """vLLM's ``--tool-call-parser``, or why it reads no calls of tools that an agent offers, and what to do."""

    parser: str | None
    problem: str = ""


def tool_support(model: Model, path: str) -> ToolSupport:
    """Return what ``model.tool_parser`` says or, for ``auto``, the chat template of a folder or a model of the hub."""
    if model.tool_parser == "none":
        return ToolSupport(None, "model.tool_parser=none: vLLM reads no tool calls; set it to auto, or name a parser")
    if model.tool_parser != "auto":
        return ToolSupport(model.tool_parser)
    hint = "name one of vLLM's parsers with model.tool_parser"
    template = _chat_template(path)
    if template is None:
        return ToolSupport(None, f"the chat template of {path} cannot be read: {hint}")
    if "tools" not in template:
        return ToolSupport(None, f"the chat template of {path} has no tools: choose a model that can call them")
    parser = next((parser for mark, parser in PARSERS if mark in template), None)
    return ToolSupport(parser, "" if parser else f"how {path} writes tool calls is unknown: {hint}")


def _chat_template(path: str) -> str | None:
    """Return the template that vLLM renders chats with tools with; None if it cannot be read."""
    if (text := read_file(path, "chat_template.jinja")) is not None:
        return text
    try:
        template = json.loads(read_file(path, "tokenizer_config.json") or "{}").get("chat_template")
    except ValueError:
        return None
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in template}
        return named.get("tool_use", named.get("default"))
    return template
