"""Log-probs and entropies from logits, in plain PyTorch: the same on every device, with flash-attn installed or not."""

import torch
from torch.utils.checkpoint import checkpoint

# Positions that are computed in float32 at once, 0.6 GB a copy for Qwen2.5's vocabulary. If there are more, they are
# computed again in the backward pass.
CHUNK = 1024


def log_probs_of(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: torch.Tensor,
    *,
    entropy: bool,
    others: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Return log-probs of the labels, and entropies and log-probs of other tokens if asked for, computed in float32.

    Args:
        logits: [rows, positions, vocabulary].
        labels: [rows, positions].
        temperature: [rows, 1, 1], or [rows, positions, 1].
        others: [rows, positions, tokens], ids.

    Returns:
        [rows, positions] each, of other tokens [rows, positions, tokens].
    """
    ids = labels.unsqueeze(-1)  # one gather for all, since the gradient of each has the size of the logits
    ids = ids if others is None else torch.cat([ids, others], dim=-1)

    def numbers(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor) -> list[torch.Tensor]:
        scaled = logits.float() / temperature
        total = scaled.logsumexp(-1)
        log_probs = scaled.gather(-1, ids) - total.unsqueeze(-1)
        found = [log_probs[..., 0]]
        if entropy:
            found.append(total - (scaled.softmax(-1) * scaled).sum(-1))
        return found if others is None else [*found, log_probs[..., 1:]]

    if labels.numel() <= CHUNK:
        return numbers(logits, ids, temperature)
    width = max(1, CHUNK // len(labels))
    given = logits, ids, temperature.expand(*labels.shape, 1)
    parts = zip(*(each.split(width, dim=1) for each in given), strict=True)
    chunks = [checkpoint(numbers, *part, use_reentrant=False) for part in parts]
    return [torch.cat(columns, dim=1) for columns in zip(*chunks, strict=True)]


def trained_places(tokens: torch.Tensor, of_trained: torch.Tensor) -> torch.Tensor:
    """Return where each token is among the trained tokens of its row, [rows, tokens]; any place for one that is none.

    Args:
        tokens: [rows, tokens], which are trained.
        of_trained: [rows, trained tokens, ...], as wide as the row with the most has them.
    """
    return (tokens.cumsum(-1) - 1).clamp(0, of_trained.shape[1] - 1)
