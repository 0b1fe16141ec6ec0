"""Activation checkpointing: run a block now, and again in the backward pass."""

from collections.abc import Iterable

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint


def run_block(block: nn.Module, x: Tensor, recomputes: bool, *rest: object) -> Tensor:
    """`block(x, *rest)`; where `recomputes`, its activations are made again for the backward.

    Dropout drops the same units both times: from keys, or else by torch's random state, kept.
    """
    if not (recomputes and is_grad_enabled()):
        output: Tensor = block(x, *rest)
        return output
    recomputed: Tensor = checkpoint(block, x, *rest, use_reentrant=False, preserve_rng_state=True)
    return recomputed


class Chain(nn.ModuleList):
    """Blocks that run one after the other, every n-th of them again in the backward pass."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__(blocks)
        self._recompute_every = 0

    def forward(self, x: Tensor) -> Tensor:
        """What the last block makes."""
        for index, block in enumerate(self):
            x = run_block(block, x, is_recomputed(index, self._recompute_every))
        return x

    def set_activation_checkpointing(self, every: int) -> None:
        """Recompute every n-th block in the backward pass; 0 recomputes none."""
        self._recompute_every = checked_interval(every)


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
