"""Activation checkpointing: run a block now, and again in the backward pass."""

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint


def run_block(block: nn.Module, x: Tensor, recomputes: bool, *rest: object) -> Tensor:
    """`block(x, *rest)`; where `recomputes`, its activations are made again for the backward.

    The random state is kept, so dropout drops the same units both times.
    """
    if not (recomputes and is_grad_enabled()):
        output: Tensor = block(x, *rest)
        return output
    recomputed: Tensor = checkpoint(block, x, *rest, use_reentrant=False, preserve_rng_state=True)
    return recomputed


def is_recomputed(index: int, every: int) -> bool:
    """Whether the block at a 0-based index is recomputed: every n-th one, none where n is 0."""
    return every > 0 and (index + 1) % every == 0


def checked_interval(every: int) -> int:
    """`every` where it is a count.

    Raises:
        ValueError: if it is negative.
    """
    if every < 0:
        raise ValueError(
            f"set_activation_checkpointing(every={every}): give 0 for none, n for every n-th."
        )
    return every
