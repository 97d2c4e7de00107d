"""Serve a model to agents without a trainer: vLLM (or a server that runs already), gateway and, to play, controller."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from empo2.memory.cpu import CACHE_BLOCK, EXECUTOR, fast_dtype
from empo2.recipe.config import VLLM_TRACES, Settings, traces_endpoint
from empo2.recipe.files.run_directory import write_settings
from empo2.recipe.files.tool_calls import tool_support
from empo2.recipe.launcher import commands
from empo2.recipe.launcher.processes import Processes, running
from empo2.recipe.network import bind, gateway_host
from empo2.recipe.preflight.server import SERVER_KEY
from empo2.recipe.protocol import KEY_CHECK, MODEL_KEY, PROMPT_IDS, Keys, Serving, model_key

_GPU_MEMORY = 0.9  # of each GPU: there is no trainer beside vLLM


@dataclass(frozen=True)
class Served:
    """A gateway with a model behind it."""

    client: httpx.Client  # of the gateway, with its admin key
    url: str
    keys: Keys
    processes: Processes  # the gateway's and all others


@contextlib.contextmanager
def serving(settings: Settings, directory: Path, model: str) -> Iterator[Served]:
    """Start a gateway as `gateway_of` and the controller that plays its rollouts, and stop both afterwards."""
    with gateway_of(settings, directory, model) as served:
        commands.start_controller(served.processes, settings, served.url, served.keys)
        yield served


@contextlib.contextmanager
def gateway_of(settings: Settings, directory: Path, model: str, *, agents: Serving | None = None) -> Iterator[Served]:
    """Start a gateway with ``model`` behind it, and stop it when the block is left.

    Args:
        settings: with ``model.server`` set, no vLLM is started.
        directory: existing folder for logs, settings and the gateway's memory.
        model: the name or folder that vLLM loads, or the server's name for it.
        agents: how agents are answered that have no rollout; None if there are none.
    """
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
    write_settings(settings, directory)
    keys = commands.given_or_random_keys()
    server = settings.model.server
    variables = _vllm_environment(settings) if server is None else {}
    # For the gateway alone, which sends the agents' calls.
    secrets = {} if server is None else {SERVER_KEY: os.environ.get(SERVER_KEY, "")}
    options = [] if agents is None else ["--serving", agents.model_dump_json()]
    with bind(gateway_host(settings), settings.gateway.port) as listener:
        url = commands.url_of(listener)
        environment = commands.environment_without(*secrets, url=url) | variables
        with running(directory, environment) as processes, commands.settings_descriptor(settings) as descriptor:
            name, key = agents and agents.name, model_key(keys.admin)
            endpoints = [server] if server else _start_vllm(settings, model, processes, name, key=key)
            commands.start_gateway(processes, descriptor, listener, keys, options=options, secrets=secrets)
            commands.wait_for(f"{url}/healthz", processes.check)
            for endpoint in [] if server else endpoints:
                commands.wait_for(f"{endpoint}/models", processes.check)
            headers = {"Authorization": f"Bearer {keys.admin}"}
            with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
                servers = [{"model": model, "endpoint": endpoint} for endpoint in endpoints]
                client.post("/api/models", json=servers).raise_for_status()
                yield Served(client, url, keys, processes)


def vllm_command(settings: Settings, model: str, port: int, name: str | None = None) -> list[str]:
    """Return the command line of a vLLM server that answers on 127.0.0.1.

    Args:
        name: of the model in its answers; by default ``model``, by which it can be asked for in any case.
    """
    hardware, parser = settings.hardware, tool_support(settings.model, model).parser
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": settings.model.max_context_tokens,
        "max-num-seqs": hardware.max_sequences,
        "generation-config": "vllm",  # not the model's own top_p and the like, which training does not use either
        "middleware": PROMPT_IDS if settings.gateway.cumulative_tokens else KEY_CHECK,
    }
    if hardware.device == "cpu":
        # vLLM starts with a batch of the second size to measure memory.
        options |= {"dtype": fast_dtype(), "max-num-batched-tokens": 1024, "block-size": CACHE_BLOCK}
        options |= {"distributed-executor-backend": EXECUTOR}
        flags = ["--enforce-eager"]
    else:
        options |= {
            "dtype": "bfloat16",
            "gpu-memory-utilization": _GPU_MEMORY,
            "tensor-parallel-size": hardware.tensor_parallel,
        }
        flags = []
    if endpoint := traces_endpoint(settings):
        options["otlp-traces-endpoint"] = endpoint
        flags.append("--enable-prompt-tokens-details")  # which of them were cached
    tools = ["--tool-call-parser", parser, "--enable-auto-tool-choice"] if parser else []
    names = ["--served-model-name", name, model] if name is not None else []
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *words, *names, *tools, *flags]


def _vllm_environment(settings: Settings) -> dict[str, str]:
    if settings.hardware.device == "gpu":
        return {}
    os.environ["EMPO2_DEVICE"] = "cpu"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.hardware.kv_cache))
    from empo2.recipe.trainer.ray_environment import VARIABLES

    return VARIABLES


def _start_vllm(
    settings: Settings, model: str, processes: Processes, name: str | None = None, *, key: str = ""
) -> list[str]:
    """Start vLLM on free ports, once for each ``hardware.tensor_parallel`` GPUs; return the addresses.

    As in training, a rollout's calls go to one of them, whose prefix cache has its chat. The engines of one server,
    ``data-parallel-size``, would get them by load.
    """
    secrets, hardware = {MODEL_KEY: key} | (VLLM_TRACES if traces_endpoint(settings) else {}), settings.hardware
    split = hardware.tensor_parallel
    engines = hardware.gpus_per_node // split if hardware.device == "gpu" else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    cards = visible if all(visible) else [str(number) for number in range(hardware.gpus_per_node)]
    endpoints = []
    for number in range(engines):
        with bind("127.0.0.1", 0) as probe:
            port = probe.getsockname()[1]
        mine = {"CUDA_VISIBLE_DEVICES": ",".join(cards[number * split : (number + 1) * split])} if engines > 1 else {}
        log = f"vllm-{number}" if engines > 1 else "vllm"
        processes.start(log, vllm_command(settings, model, port, name), secrets=secrets | mine)
        endpoints.append(f"http://127.0.0.1:{port}/v1")
    return endpoints
