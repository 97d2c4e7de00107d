"""The tier `parts` of gpu_proof: engine, attention, model and embedder, each alone."""

import copy
import importlib.util
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from empo2.memory import SentenceEmbedder
from empo2.recipe.config import load_settings
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.preflight import estimate
from empo2.recipe.trainer import log_probs

VOCABULARY, HIDDEN = 152_064, 3_584  # Qwen2.5-7B
ROW, SAMPLED = 12_692, 960  # tokens of the longest row, and those of a usual one that the policy has sampled
STATES_PER_SECOND = 100
_SHARING_SECONDS = 120  # a cold start of Python with torch takes most of it
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
    for name, part in PARTS.items():
        if device.type != "cuda" and name in ("peak", "attention"):
            continue
        try:
            yield part(device)
        except Exception as error:  # a kernel, a package or memory that is missing: the next part may work
            traceback.print_exc()
            yield Part(name, f"{type(error).__name__}: {error}"[:300], "no error", passed=False)
        finally:
            torch.cuda.empty_cache()  # the next part may start a process that needs some


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


def _loss(device: torch.device) -> Part:
    """The hybrid loss and its gradients, of log-probs at the sampled positions of a tiny model, in float32."""
    if importlib.util.find_spec("verl") is None:
        return Part("loss", "left out: verl is not installed")
    warnings.simplefilter("ignore")  # verl's own, of engines that are not used
    from empo2.recipe.trainer import ray_environment  # noqa: F401  before verl is imported

    # isort: split
    from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
    from tensordict import TensorDict
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.padding import left_right_2_no_padding

    from empo2.recipe.trainer.objective import hybrid_loss

    mode = PolicyLossConfig(loss_mode=PER_ROLLOUT_MEAN_LOSS_MODE)
    clips: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 10.0}
    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=mode, **clips)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=997, **sizes, **heads))
    rows, prompt, reply = 4, 16, 48
    ids, mask = torch.randint(997, (rows, prompt + reply)), torch.randint(2, (rows, reply))
    off_policy = torch.tensor([False, True] * 2)
    given = TensorDict(
        {
            **{"input_ids": ids, "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "response_mask": mask},
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(prompt + reply).expand(rows, -1),
            "old_log_probs": -6.9 + 0.3 * torch.randn(rows, reply),  # a vocabulary of 997, without training
            "advantages": torch.randn(rows, 1) * mask,
            **{"off_policy": off_policy, "memory": off_policy, "distilled": torch.zeros_like(off_policy)},
            **{"token_weight": torch.ones(rows), "first_index": torch.arange(rows) * reply},
        },
        batch_size=rows,
    )

    def of(where: torch.device) -> torch.Tensor:
        placed, data = copy.deepcopy(model).to(where), left_right_2_no_padding(given.clone()).to(where)
        tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=rows)
        columns, one = torch.arange(prompt - 1, prompt + reply - 1, device=where), torch.ones(1, 1, 1, device=where)
        logits = placed(ids.to(where), logits_to_keep=columns).logits
        (kept,) = log_probs.log_probs_of(logits, ids[:, prompt:].to(where), one, entropy=False)
        values, offsets = F.pad(kept, (prompt - 1, 1)).flatten(), torch.arange(rows + 1, device=where) * ids.shape[1]
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(values, offsets)}
        loss, _ = hybrid_loss(config, output, data, mask_threshold=0.001)
        loss.backward()
        return torch.cat([loss.detach().view(1), *(each.grad.flatten() for each in placed.parameters())]).cpu()

    found, expected = of(device), of(torch.device("cpu"))
    gap = float((found - expected).abs().max() / expected.abs().max())
    passed = gap < 1e-3 and float(expected.abs().max()) > 0
    return Part("loss", f"loss and gradients at most {gap:.0e} of the largest apart from the CPU's", "0.001", passed)


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
    settings = load_settings("gpu")
    sampled = settings.model.model_copy(update={"max_episode_tokens": SAMPLED})
    settings = settings.model_copy(update={"model": sampled})
    expected = estimate.logits(settings, estimate.SHAPES["Qwen/Qwen2.5-7B-Instruct"]) / GB
    limit = 1.2 * expected
    every = "out of memory" if peaks[1] is None else f"{peaks[1]:.1f} GB"
    found = "out of memory" if peaks[0] is None else f"{peaks[0]:.1f} GB"
    said = f"{found}, estimated {expected:.1f}; at all positions {every}"
    return Part("peak", said, f"{limit:.1f} GB (20 % above)", peaks[0] is not None and peaks[0] < limit)


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
    heads = {"query": 28, "key": 4, "value": 4}  # Qwen2.5-7B's
    query, key, value = (
        torch.randn(1, count, 8_192, 128, device=device, dtype=torch.bfloat16) for count in heads.values()
    )

    import empo2.recipe.trainer.ray_environment  # noqa: F401 - its variables have a say in it

    choice = torch.ops.aten._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True)
    taken = SDPBackend(choice).name.lower()

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def masked() -> None:
        mask = torch.ones(8_192, 8_192, device=device, dtype=torch.bool).tril()
        every = (each.repeat_interleave(7, dim=1) for each in (key, value))  # as transformers does beside a mask
        F.scaled_dot_product_attention(query, *every, attn_mask=mask)

    try:
        fast = _milliseconds(flash, device)
    except RuntimeError as error:
        return Part("attention", f"no flash kernel: {str(error).splitlines()[0]}", "a flash kernel", False)
    try:
        slow = f"{_milliseconds(masked, device):.1f} ms"
    except torch.OutOfMemoryError:
        slow = "out of memory"
    found = f"{taken} is taken; flash {fast:.1f} ms, with a dense mask {slow}"
    return Part("attention", found, "a flash kernel", taken == "flash_attention")


def _milliseconds(compute: Callable[[], None], device: torch.device) -> float:
    compute()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(5):
        compute()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 200


def sharing(device: torch.device) -> Part:
    """Memory that another process writes to, as verl hands weights to vLLM: a container may forbid it (CUDA IPC)."""
    shared = torch.zeros(1 << 20, device=device)
    process = torch.multiprocessing.get_context("spawn").Process(target=_fill, args=(shared,), daemon=True)
    process.start()
    process.join(_SHARING_SECONDS)
    passed = process.exitcode == 0 and bool((shared == 1).all())
    found = "memory of another process"
    if process.exitcode is None:
        found = f"no answer of another process within {_SHARING_SECONDS} s"
    elif not passed:
        found = f"another process ended with {process.exitcode}, and has {'not ' * (not shared.any())}written"
    return Part("sharing", found, "memory of another process", passed)


def _fill(shared: torch.Tensor) -> None:
    shared.fill_(1)
    if shared.is_cuda:
        torch.cuda.synchronize(shared.device)


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
    if device.type != "cuda":  # what else runs there decides
        return Part("embedder", f"{rate:,.0f} states a second")
    return Part("embedder", f"{rate:,.0f} states a second", f"{STATES_PER_SECOND}", rate >= STATES_PER_SECOND)


PARTS: dict[str, Callable[[torch.device], Part]] = {
    **{"log-probs": _log_probs, "loss": _loss, "peak": _peak, "attention": _attention},
    **{"sharing": sharing, "model": _model, "embedder": _embedder},
}
