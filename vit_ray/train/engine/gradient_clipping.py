"""Clipping of gradients to `optim.clip_norm`: here at stage 0, by DeepSpeed at stages 1 to 3."""

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients(gradients: list[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scale gradients, in place, so that their global norm is at most `clip_norm`; 0 = no change.

    Args:
        norm: of all gradients together.
    """
    if clip_norm:
        torch._foreach_mul_(gradients, torch.clamp(clip_norm / (norm + 1e-6), max=1.0))
