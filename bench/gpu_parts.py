"""The tier `parts` of gpu_proof.py: engine, attention, model and embedder, each alone."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from empo2.memory import SentenceEmbedder
from empo2.recipe.launcher.model_files import SMOLLM2, resolve_model
from empo2.recipe.trainer import log_probs

VOCABULARY, HIDDEN = 152_064, 3_584  # Qwen2.5-7B
ROW, SAMPLED = 12_692, 960  # tokens of the longest row, and those of a usual one that the policy has sampled
STATES_PER_SECOND = 100
GB = 1e9


class Part(NamedTuple):
    """What was found of one part, and what is needed; a part that is only reported needs nothing."""

    name: str
    found: str
    needed: str = ""
    passed: bool = True


def parts(device: torch.device) -> Iterator[Part]:
    """Yield what is found; on the CPU sizes are small, and what only a GPU can show is left out."""
    torch.manual_seed(0)
    yield _log_probs(device)
    if device.type == "cuda":
        yield _peak(device)
        yield _attention(device)
    yield _model(device)
    yield _embedder(device)


def _log_probs(device: torch.device) -> Part:
    gpu = device.type == "cuda"
    vocabulary, positions = (VOCABULARY, 2_100) if gpu else (2_000, 2_100)
    logits = (4 * torch.randn(1, positions, vocabulary, device=device)).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (1, positions), device=device)
    temperature = torch.full((1, 1, 1), 0.7, device=device)
    found, entropies = log_probs.log_probs_of(logits, labels, temperature, entropy=True)
    (found.sum() + entropies.sum()).backward()
    assert logits.grad is not None
    worst = {"log-probs": 0.0, "gradients": 0.0}
    for at in range(0, positions, 300):  # float64 takes 2.5 GB for 2,100 positions
        part = slice(at, at + 300)
        exact = logits.detach()[:, part].double().requires_grad_()
        log_softmax = (exact / 0.7).log_softmax(-1)
        expected = log_softmax.gather(-1, labels[:, part, None]).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        (expected.sum() + entropy.sum()).backward()
        assert exact.grad is not None
        for name, ours, theirs in (
            ("log-probs", found, expected),
            ("log-probs", entropies, entropy),
            ("gradients", logits.grad, exact.grad),
        ):
            worst[name] = max(worst[name], float((ours[:, part] - theirs).detach().abs().max()))
    said = ", ".join(f"{name} {gap:.0e}" for name, gap in worst.items())
    passed = worst["log-probs"] < 1e-3 and worst["gradients"] < 0.02
    return Part("log-probs", f"at most apart: {said}", "0.001; 0.02 (rounded to bfloat16)", passed)


def _peak(device: torch.device) -> Part:
    """The last layer of a row: hidden states, LM head, log-probs, and back."""
    hidden = torch.randn(1, ROW, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, device=device, dtype=torch.bfloat16)
    labels = torch.randint(VOCABULARY, (1, ROW), device=device)
    columns = torch.arange(ROW - SAMPLED, ROW, device=device)

    def ours() -> torch.Tensor:
        one = torch.ones(1, 1, 1, device=device)
        return log_probs.log_probs_of(hidden[:, columns] @ head.T, labels[:, columns], one, entropy=False)[0]

    def all_positions() -> torch.Tensor:
        return (hidden @ head.T).float().log_softmax(-1).gather(-1, labels.unsqueeze(-1))

    peaks = [_gigabytes(way, device) for way in (ours, all_positions)]
    limit = (2 * SAMPLED * 2 + 4 * min(SAMPLED, log_probs.CHUNK) * 4) * VOCABULARY / GB + 1
    every = "out of memory" if peaks[1] is None else f"{peaks[1]:.1f} GB"
    found = "out of memory" if peaks[0] is None else f"{peaks[0]:.1f} GB"
    return Part(
        "peak", f"{found}; at all positions {every}", f"{limit:.1f} GB", peaks[0] is not None and peaks[0] < limit
    )


def _gigabytes(compute: Callable[[], torch.Tensor], device: torch.device) -> float | None:
    """Return the memory that a forward and backward pass adds; None if there is too little."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        compute().sum().backward()
    except torch.OutOfMemoryError:
        return None
    return (torch.cuda.max_memory_allocated(device) - before) / GB


def _attention(device: torch.device) -> Part:
    query, key, value = (torch.randn(1, 28, 8_192, 128, device=device, dtype=torch.bfloat16) for _ in range(3))

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def masked() -> None:
        mask = torch.ones(8_192, 8_192, device=device, dtype=torch.bool).tril()
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    try:
        times = [_milliseconds(way, device) for way in (flash, masked)]
    except RuntimeError as error:
        return Part("attention", f"no flash kernel: {str(error).splitlines()[0]}", "a flash kernel", False)
    return Part("attention", f"{times[0]:.1f} ms; with a dense mask {times[1]:.1f} ms", "a flash kernel", True)


def _milliseconds(compute: Callable[[], None], device: torch.device) -> float:
    compute()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(5):
        compute()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 200


def _model(device: torch.device) -> Part:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(SMOLLM2), dtype=torch.float32).eval()
    ids = torch.randint(1_000, 40_000, (1, 200))

    @torch.no_grad()
    def of(where: torch.device, dtype: torch.dtype) -> torch.Tensor:
        placed = model.to(where, dtype)
        logits = placed(ids.to(where)).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None].to(where)).squeeze(-1).cpu()

    expected = of(torch.device("cpu"), torch.float32)
    gap = float((of(device, torch.bfloat16) - expected).mean().abs())
    return Part("model", f"mean log-probs {gap:.4f} nats apart in bfloat16", "0.05", gap < 0.05)


def _embedder(device: torch.device) -> Part:
    embedder = SentenceEmbedder("all-MiniLM-L6-v2", device=str(device))
    count = 960 if device.type == "cuda" else 64
    states = [
        f"{number} " + "a door leads to the hall, on the table there is a red jug; " * 8 for number in range(count)
    ]
    embedder.embed(states[:32])
    begin = time.perf_counter()
    embedder.embed(states)
    rate = count / (time.perf_counter() - begin)
    needed = STATES_PER_SECOND if device.type == "cuda" else 5
    return Part("embedder", f"{rate:,.0f} states a second", f"{needed}", rate >= needed)
