"""Log-probs and entropies from logits, in plain PyTorch: the same on every device, with flash-attn installed or not."""

import torch
from torch.utils.checkpoint import checkpoint

# Positions that are computed in float32 at once, 0.6 GB a copy for Qwen2.5's vocabulary. If there are more, they are
# computed again in the backward pass.
CHUNK = 1024


def log_probs_of(
    logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor, *, entropy: bool
) -> list[torch.Tensor]:
    """Return log-probs of the labels, and entropies if asked for, each [rows, positions], computed in float32.

    Args:
        logits: [rows, positions, vocabulary].
        labels: [rows, positions].
        temperature: [rows, 1, 1].
    """

    def numbers(logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        scaled = logits.float() / temperature
        total = scaled.logsumexp(-1)
        log_probs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - total
        return [log_probs, total - (scaled.softmax(-1) * scaled).sum(-1)] if entropy else [log_probs]

    if labels.numel() <= CHUNK:
        return numbers(logits, labels)
    width = max(1, CHUNK // len(labels))
    parts = zip(logits.split(width, dim=1), labels.split(width, dim=1), strict=True)
    chunks = [checkpoint(numbers, *part, use_reentrant=False) for part in parts]
    return [torch.cat(columns, dim=1) for columns in zip(*chunks, strict=True)]
