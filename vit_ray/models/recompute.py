"""Activation checkpointing: run a block now, and again in the backward pass."""

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint


def is_recomputed(index: int, every: int) -> bool:
    """Whether the block at a 0-based index is recomputed: every n-th one; none if n is 0."""
    return every > 0 and (index + 1) % every == 0


def run_block(block: nn.Module, x: Tensor, recomputes: bool, *rest: object) -> Tensor:
    """`block(x, *rest)`; if `recomputes`, its activations are computed again for the backward pass.

    Dropout drops the same units both times: from keys, or else by torch's stored random state.
    """
    if not (recomputes and is_grad_enabled()):
        return block(x, *rest)
    return checkpoint(block, x, *rest, use_reentrant=False, preserve_rng_state=True)


class Chain(nn.ModuleList):
    """Blocks that run in sequence, every n-th of them again in the backward pass."""

    recompute_every = 0

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self):
            x = run_block(block, x, is_recomputed(index, self.recompute_every))
        return x


class Recomputable(nn.Module):
    """A module with chains somewhere in it."""

    def set_activation_checkpointing(self, every: int) -> None:
        """Recompute every n-th block of each chain in the backward pass; 0 recomputes none.

        Raises:
            ValueError: if it is negative.
        """
        if every < 0:
            raise ValueError(
                f"set_activation_checkpointing(every={every}): give 0 for none, n for every n-th"
            )
        for module in self.modules():
            if isinstance(module, Chain):
                module.recompute_every = every
