"""float32 in bfloat16 without losing what is smaller than half of its last bit."""

import torch


def rounded_at_random(weights: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Return float32 weights in bfloat16, each rounded up or down with the chance that makes its mean right.

    Those that bfloat16 holds exactly stay as they are.
    """
    added = torch.randint(1 << 16, weights.shape, generator=noise, dtype=torch.int32, device=weights.device)
    return (weights.view(torch.int32) + added).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()
