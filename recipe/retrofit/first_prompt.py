"""How long an agent's first prompt is, and what to do where the policy's training rows do not hold it."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from empo2.recipe.config import Settings, parse_yaml
from empo2.recipe.files.models import files_of, is_built_in, model_of, read_file
from empo2.recipe.gateway.tokens.tokenizer import EstimatedTokenizer, tokenizer_of
from empo2.recipe.messages import text_of
from empo2.recipe.retrofit.scripted_model import Body

SWITCHES = Path(__file__).with_name("small_prompts.yaml")
_STEP = 1024  # to which proposed sizes are rounded up


@dataclass(frozen=True)
class FirstPrompt:
    """The tokens of a request, without those that the chat template adds to each message."""

    tools: int
    system: int
    rest: int

    @property
    def tokens(self) -> int:
        return self.tools + self.system + self.rest

    def __str__(self) -> str:
        parts = {"tools": self.tools, "system message": self.system}
        named = ", ".join(f"{name} {tokens:,}" for name, tokens in parts.items() if tokens)
        return f"about {self.tokens:,} tokens" + (f" ({named})" if named else "")


def first_prompt(body: Body, settings: Settings) -> FirstPrompt:
    """Return the size of a request by the policy's tokenizer; by characters if that is not on this machine."""
    path = settings.model.path
    here = files_of(path) is not None
    try:
        count = tokenizer_of(model_of(settings) if here else path, external=not here).count
    except OSError:  # a folder without one
        count = EstimatedTokenizer().count
    messages = body.get("messages") or [{"role": "user", "content": str(body.get("prompt"))}]
    sizes = {True: 0, False: 0}
    for message in messages:
        said = text_of(message.get("content")) + (json.dumps(message["tool_calls"]) if "tool_calls" in message else "")
        sizes[message.get("role") == "system"] += count(said)
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in body.get("tools") or [])
    return FirstPrompt(count(tools) if tools else 0, sizes[True], sizes[False])


def needed(prompt: FirstPrompt, settings: Settings) -> list[str]:
    """Return the settings that hold a first prompt with tips; none if those that are given do."""
    model = settings.model
    with_tips = prompt.tokens + (settings.memory.episode_tokens if settings.algorithm.name == "empo2" else 0)
    if with_tips <= model.max_prompt_tokens:
        return []
    most = math.ceil(1.05 * with_tips / _STEP) * _STEP  # what the chat template adds, and what differs between tasks
    context = most + model.max_context_tokens - model.max_prompt_tokens
    return [f"model.max_prompt_tokens={most}", f"model.max_context_tokens={context}"]


def holds(settings: Settings, changes: Sequence[str]) -> bool:
    """Return whether the policy's own context holds what `needed` proposes; True if it is not known."""
    if not changes or not (folder := files_of(settings.model.path)):
        return True
    where = model_of(settings) if is_built_in(settings.model.path) else str(folder)
    most = json.loads(read_file(where, "config.json") or "{}").get("max_position_embeddings")
    return most is None or int(changes[-1].partition("=")[2]) <= most


def advice(prompt: FirstPrompt, settings: Settings) -> str:
    """Return what is to do about a first prompt; "" if it fits."""
    if not (changes := needed(prompt, settings)):
        return ""
    model = settings.model
    tips = f", of which tips may take {settings.memory.episode_tokens:,}" if settings.algorithm.name == "empo2" else ""
    limit = f"model.max_prompt_tokens={model.max_prompt_tokens} holds {model.max_prompt_tokens:,}{tips}"
    longer = " ".join(changes) + ("" if holds(settings, changes) else ", and a model with so long a context")
    switches = _switches(settings.agent.env.get("AGENT_COMMAND", ""), prompt)
    return f"the first prompt has {prompt}; {limit}: give {longer}{switches}"


def _switches(line: str, prompt: FirstPrompt) -> str:
    """Return the switches of a known agent in a command line that has a shorter prompt than this one."""
    known = parse_yaml(SWITCHES.read_text())
    try:
        programs = [word.rpartition("/")[2] for part in shlex.split(line) for word in part.split()]
    except ValueError:
        return ""
    found = [known[name] for name in programs if name in known and known[name]["tokens"] < prompt.tokens]
    return f"; or add to the agent's command what leaves {found[0]['tokens']:,}: {found[0]['add']}" if found else ""
