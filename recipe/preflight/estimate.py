"""Estimate a run's memory, on each GPU or by process on a CPU, and the time of a step: formulas without I/O.

Sizes are bytes, times seconds, and all of it is estimated: nothing was measured on CUDA. Names: P parameters, T those
that are trained, N GPUs that share them.
"""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from empo2.recipe.config import Settings

GIB = 2**30
USABLE = 0.95  # of a card; the rest is lost to fragments of the allocator
CONTEXT = 1 * GIB  # CUDA context and NCCL's buffers of the trainer's process
ASLEEP = 2 * GIB  # what vLLM keeps while it sleeps: CUDA context, graphs, NCCL
BUCKET = 2 * GIB  # verl's rollout.update_weights_bucket_megabytes
CHUNK = 1024  # positions whose logits are float32 at once: trainer/log_probs.py
# Measured on two cores, bytes as proportional set sizes. Of an agent: a Java process of ScienceWorld has 350 MB at its
# limit of heap and takes 2.3 s of a core for an episode of 30 turns, one of TextWorld-Express 50 MB and 1.0 s; the
# agent is a fork of a process that has imported its class, or a command.
JVMS = {"empo2.agents.scienceworld.": (0.35e9, 2.3), "empo2.agents.textworld_express.": (50e6, 1.0)}
FORK, COMMAND = 25e6, 0.1e9
# Of a process on the CPU with its imports: verl's worker 0.8, vLLM's engine 0.8, the gateway with the embedder 0.7,
# Ray's processes together 0.35 GiB.
IMPORTS, GATEWAY, SMALL = 0.9 * GIB, 0.75 * GIB, 0.1 * GIB
RAY = 0.4 * GIB
EMBEDDER = 1e9  # of a GPU, with its CUDA context
UTILIZATION = 0.35  # of the card's peak, in the update and when prompts are read
IMBALANCE = 1.5  # longest to mean rank with one row a rank; 1.53 simulated on rows of 2,000 to 12,000 tokens
# An episode of ScienceWorld: docs/experiments.md, "What things cost".
TURNS, REPLY, FIRST_PROMPT, TURN = 30, 32, 833, 40


@dataclass(frozen=True)
class Card:
    """A GPU: memory in bytes as nvidia-smi says it, bandwidth in bytes/s, dense bfloat16 FLOP/s; None: unknown."""

    name: str
    memory: float
    bandwidth: float | None = None
    flops: float | None = None
    taken: float = 0  # bytes that other processes hold
    one_process: bool = False  # is all that its compute mode lets in

    @property
    def usable(self) -> float:
        return USABLE * self.memory - self.taken


# NVIDIA's data sheets of the SXM cards, the L40S and the Ada architecture; without sparsity.
CARDS = {
    name: Card(name, mib * 2**20, terabytes * 1e12, teraflops * 1e12)
    for name, mib, terabytes, teraflops in (
        ("h200-141", 143_771, 4.8, 989),
        ("h100-80", 81_559, 3.35, 989),
        ("a100-80", 81_920, 2.039, 312),
        ("a100-40", 40_960, 1.555, 312),
        ("l40s-48", 46_068, 0.864, 362),
        ("rtx4090-24", 24_564, 1.008, 165),
    )
}


@dataclass(frozen=True)
class Shape:
    """A dense decoder of the Llama and Qwen family, by the names of its config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool  # embedding and LM head are one matrix
    bias: bool = False  # of queries, keys and values
    norms: bool = False  # of queries and keys
    positions: int = 0  # tokens that it reads at most; 0: unknown

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        up, down = (self.hidden, self.intermediate), (self.intermediate, self.hidden)
        return [(self.hidden, queries), *[(self.hidden, keys)] * 2, (queries, self.hidden), up, up, down]

    @property
    def layer(self) -> int:
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if self.bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.norms else 0)
        return sum(a * b for a, b in self.linears) + biases + norms

    @property
    def parameters(self) -> int:
        return self.embedding * (1 if self.tied else 2) + self.layers * self.layer + self.hidden

    def lora(self, rank: int) -> int:
        """Parameters of a LoRA on all linear layers."""
        return self.layers * rank * sum(a + b for a, b in self.linears)

    def trained(self, rank: int) -> int:
        return self.lora(rank) if rank else self.parameters

    def trained_tensors(self, rank: int) -> list[int]:
        """Elements of each matrix that is trained; the vectors beside them weigh nothing."""
        if rank:
            return [rank * side for linear in self.linears for side in linear] * self.layers
        return [self.embedding] * (1 if self.tied else 2) + [a * b for a, b in self.linears] * self.layers

    @property
    def kv_token(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


# As published in each model's config.json.
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(24, 896, 14, 2, 64, 4864, 151_936, tied=True, bias=True, positions=32_768),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(28, 1536, 12, 2, 128, 8960, 151_936, tied=True, bias=True, positions=32_768),
    "Qwen/Qwen2.5-3B-Instruct": Shape(36, 2048, 16, 2, 128, 11_008, 151_936, tied=True, bias=True, positions=32_768),
    "Qwen/Qwen2.5-7B-Instruct": Shape(28, 3584, 28, 4, 128, 18_944, 152_064, tied=False, bias=True, positions=32_768),
    "Qwen/Qwen2.5-14B-Instruct": Shape(48, 5120, 40, 8, 128, 13_824, 152_064, tied=False, bias=True, positions=32_768),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151_936, tied=True, norms=True, positions=40_960),
    "Qwen/Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151_936, tied=True, norms=True, positions=40_960),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12_288, 151_936, tied=False, norms=True, positions=40_960),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, tied=False, positions=131_072),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(30, 576, 9, 3, 64, 1536, 49_152, tied=True, positions=8192),
}


def shape_of(config: dict[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None if it is no dense decoder of this family."""
    if (kind := config.get("model_type")) not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    heads = config["num_attention_heads"]
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        bias=kind == "qwen2",
        norms=kind == "qwen3",
        positions=config.get("max_position_embeddings") or 0,
    )


Terms = dict[str, float]  # bytes of each part


def logits(settings: Settings, shape: Shape) -> float:
    """Return the bytes of logits at most, in the backward pass, if all of an episode is sampled.

    Five copies of a chunk in float32: scaled logits, the gradient of their gather, three temporaries of logsumexp's.
    Beside the last of several chunks, all logits and the gradients of the other chunks in bfloat16, then these joined.
    """
    positions = settings.model.max_episode_tokens * settings.hardware.micro_batch
    if positions <= CHUNK:
        return positions * shape.vocabulary * 4 * 5
    last = positions * 2 + (positions - CHUNK) * 2 + CHUNK * 4 * 5
    return max(last, positions * (2 + 2 + 2)) * shape.vocabulary


def update_memory(settings: Settings, shape: Shape) -> Terms:
    """Return the bytes of each GPU in a backward pass, at the longest row: verl's FSDP2 engine, float32 shards."""
    model, hardware, gpus = settings.model, settings.hardware, settings.hardware.gpus
    rank = model.lora_rank
    trained, frozen = shape.trained(rank), shape.parameters if rank else 0
    tokens = (model.max_prompt_tokens + model.max_episode_tokens) * hardware.micro_batch
    # Gathered in bfloat16: the LM head and two layers, the next is prefetched. Where they are trained: their gradients
    # in bfloat16, and in float32 to be reduced.
    weights, gradients = shape.embedding + 2 * shape.layer, 0 if rank else shape.embedding + shape.layer
    inside_layer = 6 * shape.intermediate + 16 * shape.hidden  # values a token of the layer that is computed again
    return {
        "weights, float32": 4 * (frozen + trained) / gpus,
        "gradients, float32": 4 * trained / gpus,
        "AdamW, float32": 8 * trained / gpus,
        "LM head and layers, gathered": 2 * weights + (2 + 4) * gradients,
        "activations": tokens * (shape.layers * shape.hidden + inside_layer) * 2,
        "logits": logits(settings, shape),
        "vLLM asleep": ASLEEP,
        "CUDA context, NCCL": CONTEXT,
    }


def generation_memory(settings: Settings, shape: Shape, card: Card) -> Terms:
    """Return the bytes of each GPU while vLLM generates; its cache is what its share leaves, and may be negative."""
    hardware, split = settings.hardware, settings.hardware.tensor_parallel
    batched = max(8192, settings.model.max_context_tokens)  # as verl_config sets it
    overhead = ASLEEP + batched * (3 * shape.intermediate / split + 4 * shape.hidden) * 2
    overhead += hardware.max_sequences * shape.vocabulary * 4 * 2  # logits and probabilities of the sampler
    weights = 2 * shape.parameters / split
    kept = update_memory(settings, shape)
    mine = {name: 0 if hardware.offload else kept[name] for name in ("weights, float32", "AdamW, float32")}
    return {
        **mine,
        "vLLM: weights, bfloat16": weights,
        "vLLM: graphs, activations": overhead,
        "vLLM: KV cache": hardware.gpu_memory_fraction * card.memory - weights - overhead,
        "CUDA context, NCCL": CONTEXT,
    }


def push_memory(settings: Settings, shape: Shape) -> Terms:
    """Return the bytes of each GPU while vLLM gets the weights, tensor by tensor: verl's ``update_weights``."""
    kept = update_memory(settings, shape)
    return {
        "weights, float32": kept["weights, float32"],  # offload moves them only afterwards
        "AdamW, float32": 0 if settings.hardware.offload else kept["AdamW, float32"],
        "vLLM: weights, bfloat16": 2 * shape.parameters / settings.hardware.tensor_parallel,
        "vLLM asleep": ASLEEP,
        "bucket, largest tensor": BUCKET + shape.embedding * (4 + 2),
        "CUDA context, NCCL": CONTEXT,
    }


def phases(settings: Settings, shape: Shape, card: Card) -> dict[str, Terms]:
    found = {
        "update": update_memory(settings, shape),
        "generation": generation_memory(settings, shape, card),
        "weight push": push_memory(settings, shape),
    }
    if settings.memory.accelerated:
        found = {name: terms | {"embedder, on GPU 0": EMBEDDER} for name, terms in found.items()}
    return found


def sequences(settings: Settings, shape: Shape, card: Card) -> float:
    """Return how many sequences of ``model.max_context_tokens`` the cache of one vLLM holds."""
    cache = generation_memory(settings, shape, card)["vLLM: KV cache"] * settings.hardware.tensor_parallel
    return cache / (shape.kv_token * settings.model.max_context_tokens)


def excess(settings: Settings, shape: Shape, card: Card) -> float:
    """Return the largest phase as a share of the card's usable memory: it fits up to 1; 2 if vLLM has no room."""
    if sequences(settings, shape, card) < 1 or card.usable <= 0:
        return 2.0
    return max(sum(terms.values()) for terms in phases(settings, shape, card).values()) / card.usable


def remedies(settings: Settings, shape: Shape, card: Card) -> list[str]:
    """Return the smallest sets of settings with which the run fits, as ``key=value``; else the cards it fits on."""
    model, hardware = settings.model, settings.hardware
    changes: list[tuple[str, str, Any]] = [
        *([("hardware", "micro_batch", 1)] if hardware.micro_batch > 1 else []),
        *([] if hardware.offload else [("hardware", "offload", True)]),
        *[("hardware", "gpu_memory_fraction", share) for share in (0.3, 0.4, 0.5, 0.7, 0.8)],
        *[("hardware", "tensor_parallel", n) for n in (2, 4, 8) if hardware.gpus_per_node % n == shape.heads % n == 0],
        *[("model", "max_episode_tokens", n) for n in (4096, 2560) if n < model.max_episode_tokens],
        *([] if model.lora_rank else [("model", "lora_rank", 64)]),
    ]
    for size in (1, 2, 3):
        sets = [each for each in combinations(changes, size) if len({key for _, key, _ in each}) == size]
        if good := [each for each in sets if excess(_changed(settings, each), shape, card) <= 1]:
            return [" ".join(f"{section}.{key}={str(value).lower()}" for section, key, value in each) for each in good]
    names = [other.name for other in CARDS.values() if excess(settings, shape, other) <= 1]
    return [f"another card: {', '.join(names)}"] if names else ["a smaller model.path"]


def _changed(settings: Settings, changes: tuple[tuple[str, str, Any], ...]) -> Settings:
    for section, key, value in changes:
        part = getattr(settings, section).model_copy(update={key: value})
        settings = settings.model_copy(update={section: part})
    return settings


@dataclass(frozen=True)
class Step:
    """A training step by roofline: tokens of all GPUs, seconds of each phase."""

    read: int
    sampled: int
    generation: float
    update: float


def step_time(settings: Settings, shape: Shape, card: Card) -> Step | None:
    """Return a step's time with episodes of `TURNS` turns; None for a card of unknown speed.

    Decoding reads weights and cache once a token; an update computes 8P FLOPs a token: forward 2, again for the
    checkpoints 2, backward 4 (2 with a LoRA, whose P has no gradients). Environments and communication take no time.
    """
    if card.bandwidth is None or card.flops is None:
        return None
    algorithm, gpus, split = settings.algorithm, settings.hardware.gpus, settings.hardware.tensor_parallel
    episodes, engines = algorithm.tasks_per_step * algorithm.rollouts_per_task, gpus // split
    reflection = settings.reflection.max_tokens if algorithm.name == "empo2" else 0
    row = FIRST_PROMPT + TURNS * TURN
    together = max(1, min(episodes, settings.agent.concurrency or episodes) // engines)
    token = (2 * shape.parameters + together * row * shape.kv_token) / split / card.bandwidth
    waves = -(-episodes // (together * engines))
    useful = UTILIZATION * card.flops * gpus
    reading = 2 * shape.parameters * episodes * row / useful
    trained = episodes + algorithm.replayed_tasks
    rows = trained / algorithm.updates_per_step
    of_rank = math.ceil(rows / gpus)  # the others wait for a rank that has so many
    imbalance = (IMBALANCE if of_rank == 1 else of_rank) * gpus / rows
    if not algorithm.learning_rate:
        trained, imbalance = algorithm.updates_per_step, IMBALANCE  # frozen: a row an update
    flops = algorithm.update_epochs * (6 if settings.model.lora_rank else 8) * shape.parameters * trained * row
    flops += 2 * shape.parameters * episodes * row * (algorithm.kl_coefficient > 0)
    return Step(
        read=episodes * row,
        sampled=episodes * (TURNS * REPLY + reflection),
        generation=waves * (TURNS * REPLY + reflection) * token + reading,
        update=flops / useful * imbalance,
    )


def offloaded(settings: Settings, shape: Shape) -> float:
    """Return the bytes of weights and optimizer that are moved to main memory, and of the reference of the KL term.

    verl moves AdamW's two moments without waiting, so that torch pins them: in blocks of a power of two each.
    """
    rank, gpus = settings.model.lora_rank, settings.hardware.gpus
    moved = 0
    if settings.hardware.offload:
        pinned = sum(2 ** math.ceil(math.log2(4 * size / gpus)) for size in shape.trained_tensors(rank))
        moved = 4 * shape.parameters + 2 * gpus * pinned
    reference = 4 * shape.parameters if settings.algorithm.kl_coefficient > 0 and not rank else 0
    return (moved + reference) / settings.hardware.nodes


def most_checkpoints(settings: Settings) -> int:
    """Return how many checkpoints lie on the disk at most: the last one is kept until the next one is complete."""
    return max(2, settings.run.keep_checkpoints) if settings.run.save_every else 0


def checkpoints(settings: Settings, shape: Shape) -> float:
    """Return the bytes of a run's checkpoints: weights and optimizer in float32, weights in bfloat16."""
    each = 6 * shape.parameters + 8 * shape.trained(settings.model.lora_rank)
    return each * most_checkpoints(settings)


def java_of(settings: Settings) -> tuple[float, float]:
    """Return the bytes of the Java process of an agent and its seconds of a core; 0 if its world needs none."""
    name = settings.agent.class_ or ""
    return next((costs for world, costs in JVMS.items() if name.startswith(world)), (0.0, 0.0))


def java_seconds(settings: Settings) -> float:
    """Return the seconds of a core that the Java processes of a step take."""
    return settings.algorithm.tasks_per_step * settings.algorithm.rollouts_per_task * java_of(settings)[1]


def agents_memory(settings: Settings) -> float:
    own = COMMAND if (settings.agent.class_ or "").startswith("empo2.agents.command.") else FORK
    return settings.agent.concurrency * (own + java_of(settings)[0])


def stack_memory(settings: Settings, shape: Shape) -> float:
    """Return the bytes of main memory on a node with GPUs: each process's imports, and a LoRA merged for the push."""
    hardware = settings.hardware
    engines = max(1, hardware.gpus_per_node // hardware.tensor_parallel)
    processes = 1 + 2 * hardware.gpus_per_node + 2 * engines  # trainer; its and vLLM's workers; vLLM's servers, engines
    merged = 4 * shape.parameters / hardware.nodes if settings.model.lora_rank else 0
    return processes * IMPORTS + GATEWAY + RAY + 2 * SMALL + merged


def cpu_memory(settings: Settings, shape: Shape, *, width: int) -> Terms:
    """Return the bytes of main memory by process, for ``hardware.device=cpu``, at the longest row.

    Args:
        width: bytes of a weight in vLLM and of an activation, 2 or 4: ``empo2.memory.cpu.fast_dtype``.
    """
    model, workers = settings.model, settings.hardware.gpus
    tokens = (model.max_prompt_tokens + model.max_episode_tokens) * settings.hardware.micro_batch
    values = 5 * shape.intermediate + 14 * shape.hidden  # of a layer and token; all are kept: no checkpoints on CPUs
    trained = 16 * shape.trained(model.lora_rank) + (4 * shape.parameters if model.lora_rank else 0)
    row = tokens * shape.layers * values * width + logits(settings, shape)
    return {
        "trainer's workers": workers * (IMPORTS + row) + trained,
        "trainer": IMPORTS,
        "vLLM: server": IMPORTS,
        "vLLM: engine": IMPORTS + width * shape.parameters + settings.hardware.kv_cache * GIB,
        "gateway with embedder": GATEWAY,
        "Ray": RAY,
        "launcher, controller": 2 * SMALL,
        "agents": agents_memory(settings),
    }
