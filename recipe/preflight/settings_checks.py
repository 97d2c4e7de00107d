"""What is wrong with settings, and with the environment that changes them. Each check yields what it finds.

Raises:
    ConfigError: names the key, its value and the fix.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from empo2.recipe.config import Settings, traces_endpoint, warnings_of
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.models import files_of, read_file
from empo2.recipe.files.run_directory import check_run_directory
from empo2.recipe.gateway.stages.untrained import choice_of
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.preflight.agent import check_fields, check_first_call, first_calls
from empo2.recipe.preflight.estimate import Shape
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.server import check_server
from empo2.recipe.preflight.start import Start
from empo2.recipe.protocol import KEY, given_keys, scope_of
from empo2.recipe.scopes import recurrence_warning
from empo2.recipe.trainer.verl_config import build_verl_config, name_middleware

_EXPERTS = re.compile(r"num_(local_)?experts|n_routed_experts|moe_num_experts")  # of a config.json


def environment(start: Start) -> None:
    """Refuse keys that are equal, and GPUs that are named otherwise than vLLM reads them."""
    given_keys()
    visible, hardware = os.environ.get("CUDA_VISIBLE_DEVICES", ""), start.settings.hardware
    named = [each for each in visible.split(",") if not each.strip().lstrip("-").isdigit()]
    if visible and named and hardware.device == "gpu" and not start.joins_cluster and start.pretended is None:
        why = "vLLM 0.20 reads indices alone, neither UUIDs nor slices of MIG"
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible}: {why}; give the indices of whole GPUs, as nvidia-smi -L")


def concurrency(start: Start) -> None:
    """Refuse a training without a controller of this host, unless those of others have a key."""
    if not start.settings.agent.concurrency and not given_keys().agent:
        raise ConfigError(f"agent.concurrency=0: controllers of other hosts need a key; give it as {KEY}")


def concurrency_here(start: Start) -> None:
    """Refuse a host that plays alone, and has no controller."""
    if not start.settings.agent.concurrency:
        raise ConfigError("agent.concurrency=0: is for empo2 train; here this host's controller plays, so raise it")


def model(start: Start) -> None:
    """Refuse a model that is not there, or that verl cannot train; one of the hub as far as its files are here."""
    settings, shape = start.settings, start.shape
    if settings.model.server is not None:
        raise ConfigError(f"model.server={settings.model.server!r}: training starts its own vLLM; set it to null")
    if shape is not None:
        _refuse_sizes(settings, shape)
    if folder := files_of(settings.model.path):
        _refuse_experts(settings.model.path, read_file(str(folder), "config.json"))


def _refuse_sizes(settings: Settings, shape: Shape) -> None:
    context, split, path = settings.model.max_context_tokens, settings.hardware.tensor_parallel, settings.model.path
    if 0 < shape.positions < context:
        fix = "lower it, with model.max_prompt_tokens and model.max_episode_tokens, or choose another model"
        raise ConfigError(f"model.max_context_tokens={context}: {path} reads {shape.positions} at most; {fix}")
    if shape.heads % split:
        divisors = ", ".join(str(n) for n in range(1, shape.heads + 1) if shape.heads % n == 0)
        said = f"must divide the {shape.heads} attention heads of {path}"
        raise ConfigError(f"hardware.tensor_parallel={split}: {said}; take one of {divisors}")


def _values_in(config: str | None) -> dict[str, Any]:
    """Return what a config.json holds; nothing if that is no JSON object."""
    try:
        values = json.loads(config or "{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _sees_images(config: str | None) -> bool:
    return any("vision" in name or name == "visual" for name in _values_in(config))


def _refuse_experts(path: str, config: str | None) -> None:
    values = _values_in(config)
    inside = [each for each in values.values() if isinstance(each, dict)]  # text_config of a model that sees
    counts = [item for each in (values, *inside) for item in each.items() if _EXPERTS.fullmatch(item[0])]
    if experts := [name for name, count in counts if count not in (None, 0, 1)]:
        why = f"a mixture of experts ({experts[0]} in its config.json), whose weights verl 0.8 pushes wrongly into vLLM"
        raise ConfigError(f"model.path={path!r}: is {why}; choose a dense model")


def hub_model(start: Start) -> None:
    """As `model` and `first_call`, for a model that must be fetched; takes half a minute without a network."""
    path = start.settings.model.path
    if files_of(path) is not None:
        return
    if (config := read_file(path, "config.json")) is None:
        where = "neither on this machine nor, as far as it can be reached, on the Hugging Face hub"
        raise ConfigError(f"model.path={path!r}: is {where}; give a folder or a model's name")
    _refuse_experts(path, config)
    check_first_call(start.settings, start.tasks.train[0], path, sees=_sees_images(config))


def served(start: Start) -> None:
    """Refuse a server that has no such model."""
    if start.settings.model.server is not None:
        check_server(start.settings.model.server, start.model)


def agent(start: Start) -> Iterator[Finding]:
    yield Finding("agent", start.agent or start.settings.agent.name)


def tasks(start: Start) -> Iterator[Finding]:
    settings, found = start.settings, start.tasks
    for name, rows in (("training", found.train), ("validation", found.val)):
        check_fields(settings, f"tasks.source={settings.tasks.source!r}, {name}", rows)
    yield Finding("tasks", f"{len(found.train)} for training, {len(found.val)} for validation")
    scopes = [scope_of(task, settings.memory.scope) for task in found.train]
    if warning := recurrence_warning(scopes, settings, settings.run.steps):
        yield Finding("scopes", "", warning, "advice")


def first_call(start: Start) -> Iterator[Finding]:
    """Refuse an agent whose tools the model cannot call, or that sends images."""
    _ = start.shape  # or there is no such model
    if folder := files_of(start.settings.model.path):
        sees = _sees_images(read_file(str(folder), "config.json"))
        check_first_call(start.settings, start.tasks.train[0], str(folder), sees=sees)
        if sees:
            yield Finding(
                "images", "the model sees them; calls with any are left out, and counted in empo2/image_calls"
            )


def first_prompt(start: Start) -> Iterator[Finding]:
    """Start a user's agent, for the length of its first prompt; those of this package fit."""
    settings = start.settings
    if "AGENT_COMMAND" not in settings.agent.env and settings.agent.name.startswith("empo2."):
        return
    from empo2.recipe.retrofit.first_prompt import advice, first_prompt
    from empo2.recipe.retrofit.rows import tell

    calls = first_calls(settings, start.tasks.train[0])
    told = tell(calls, settings.gateway)
    said, problem = "", "the agent was not seen to call the model; empo2 init says why"
    if turns := [call for call, each in zip(calls, told, strict=True) if each.row]:
        prompt = first_prompt(turns[0].body, settings)
        said, problem = str(prompt), advice(prompt, settings)
    yield Finding("first prompt", "" if problem else said, problem, "advice")


def state(start: Start) -> None:
    StateReader(start.settings.memory)


def calls(start: Start) -> None:
    choice_of(start.settings.gateway.trained_calls)


def traces(start: Start) -> Iterator[Finding]:
    if endpoint := traces_endpoint(start.settings):
        yield Finding("traces", f"are sent to {endpoint}")


def options(start: Start) -> Iterator[Finding]:
    """Refuse options of verl and agent-lightning that do not exist, or that EMPO² cannot be right with."""
    if start.pretended is not None and importlib.util.find_spec("verl") is None:
        yield Finding("verl", "not installed here", weight="estimate")
        return
    settings, path = start.settings, start.settings.model.path
    config = build_verl_config(settings, model_path=path, run_directory=Path(), gateway_url="", gateway_key="")
    name_middleware(config, settings)


def run_folder(start: Start) -> Iterator[Finding]:
    yield Finding("run", check_run_directory(start.settings))


def advice(start: Start) -> Iterator[Finding]:
    yield from (Finding("advice", "", warning, "advice") for warning in warnings_of(start.settings))
