"""Tools: what the small model's template says of them, what vLLM's real parsers read, and which parser is chosen."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from empo2.memory.cpu import EXECUTOR
from empo2.recipe.config import load_settings
from empo2.recipe.files import models
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.files.tool_calls import PARSERS, tool_support
from empo2.recipe.launcher.serving import vllm_command
from empo2.recipe.trainer.verl_config import build_verl_config

from .model_server import tokenizer

PARAMETERS = {"type": "object", "properties": {"action": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "act", "parameters": PARAMETERS}}]
USER = {"role": "user", "content": "a dark room"}


def render(chat: list[Any], *, template: str | None = None, answer_next: bool = True, tools: Any = None) -> str:
    options = {"chat_template": template, "tools": tools, "add_generation_prompt": answer_next}
    return tokenizer().apply_chat_template(chat, tokenize=False, **options)


@pytest.mark.slow
def test_without_tools_the_template_is_the_models_own():
    from gguf import GGUFReader

    template = GGUFReader(models.smollm2_gguf()).fields["tokenizer.chat_template"].contents()
    for chat in (
        [USER],
        [{"role": "system", "content": "You play.\n"}, USER],
        [USER, {"role": "assistant", "content": "go\n\n"}, {"role": "tool", "content": " x "}, USER],
        [{"role": "assistant", "content": ""}, {"role": "user", "content": "<tools>{{ 1 }}"}],
    ):
        for answer_next in (False, True):
            own = render(chat, template=template, answer_next=answer_next)
            assert render(chat, answer_next=answer_next) == own


def parsed(text: str, name: str = "hermes") -> tuple[str | None, list[tuple[str, Any]]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest.model_validate({"messages": [USER], "tools": TOOLS})
    found = ToolParserManager.get_tool_parser(name)(tokenizer()).extract_tool_calls(text, request)
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
    return found.content, calls


@pytest.mark.stack
@pytest.mark.parametrize(
    ("content", "calls"),
    [
        (None, [{"action": "go north"}]),
        ("I look.\n", [{"action": 'say "höher" <b>', "far": [1, None, 0.5]}]),
        (None, [{}, {"action": "wait"}]),
    ],
)
def test_a_call_reads_the_same_from_the_prompt_of_the_next_turn(content: str | None, calls: list[Any]):
    """So that the next prompt extends this one and its reply: one row."""
    functions = [{"type": "function", "function": {"name": "act", "arguments": arguments}} for arguments in calls]
    said = {"role": "assistant", "content": content, "tool_calls": functions}
    before = render([USER], tools=TOOLS)
    after = render([USER, said, {"role": "tool", "content": "snow"}], tools=TOOLS)
    assert after.startswith(before)
    reply, _, rest = after[len(before) :].partition("<|im_end|>\n")
    assert parsed(reply) == (content, [("act", arguments) for arguments in calls])
    assert rest == "<|im_start|>user\n<tool_response>\nsnow\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.stack
def test_the_example_in_the_prompt_is_a_call():
    prompt = render([{"role": "system", "content": "You play."}, USER], tools=TOOLS)
    system = prompt.partition("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nYou play.\n\n")
    assert json.dumps(TOOLS[0]) in system
    assert parsed(system[system.rindex("<tool_call>") :])[1] == [("NAME", {"ARGUMENT": "VALUE"})]


@pytest.mark.stack
@pytest.mark.parametrize(("mark", "name"), [each for each in PARSERS if each[1]])
def test_every_parser_is_one_of_vllms_and_reads_its_mark(mark: str, name: str):
    from vllm.tool_parsers import ToolParserManager

    assert mark in inspect.getsource(inspect.getmodule(ToolParserManager.get_tool_parser(name)))  # pyright: ignore


# Excerpts of chat templates, as their makers publish them.
TEMPLATES = {
    "hermes": '{%- if tools %}<tool_call>\\n{"name": <function-name>}\\n</tool_call>{% endif %}',
    "qwen3_coder": "{%- if tools %}<tool_call>\\n<function=example>\\n<parameter=a>{% endif %}",
    "mistral": "{%- if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "llama3_json": "{%- if tools is not none %}Environment: ipython{% endif %}<|python_tag|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_parser(tmp_path: Path, name: str):
    template, named = TEMPLATES[name], {"name": "default", "template": "{{ messages }}"}
    for given in (template, [named, {"name": "tool_use", "template": template}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        assert tool_support(load_settings("cpu").model, str(tmp_path)).parser == name
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")  # counts before the other one
    assert tool_support(load_settings("cpu").model, str(tmp_path)).parser is None


def test_where_calls_cannot_be_read_it_is_said_what_to_do(tmp_path: Path):
    for template, problem in (
        (None, "cannot be read: name one of vLLM's parsers with model.tool_parser"),
        ("{{ messages }}", "has no tools: choose a model that can call them"),
        ("{% if tools %}CALL{% endif %}", "is unknown: name one of vLLM's parsers"),
    ):
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        support = tool_support(load_settings("cpu").model, str(tmp_path))
        assert support.parser is None and problem in support.problem
    named = load_settings("cpu", ["model.tool_parser=glm45"]).model
    assert tool_support(named, str(tmp_path)) == ("glm45", "")


def test_the_parser_reaches_vllm():
    settings, model = load_settings("cpu"), str(resolve_model(SMOLLM2))
    assert tool_support(settings.model, model).parser == "hermes"
    words = vllm_command(settings, model, 1)
    assert words[words.index("--tool-call-parser") + 1] == "hermes"
    assert "--enable-auto-tool-choice" in words
    off = vllm_command(load_settings("cpu", ["model.tool_parser=none"]), model, 1)
    assert not {"--tool-call-parser", "--enable-auto-tool-choice"} & {*off}
    given: Any = {"model_path": model, "run_directory": Path(), "gateway_url": "", "gateway_key": ""}
    config = build_verl_config(settings, tool_parser="hermes", **given)
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    assert (engine.enable_auto_tool_choice, engine.tool_call_parser) == (True, "hermes")
    assert engine.distributed_executor_backend == EXECUTOR
