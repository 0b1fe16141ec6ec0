"""Activation checkpointing from outside a model: blocks run again in the backward pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

_LISTS = (nn.ModuleList, nn.Sequential)


def recompute(model: nn.Module, every: int) -> None:
    """Recompute every n-th block of each chain in the backward pass; the others stay as they are.

    Dropout drops the same units both times: from keys, or else by torch's stored random state.

    Args:
        model: of any kind; compiled before, so that a block is recomputed in compiled code.
        every: n; 0 for none.
    """
    for chain in chains(model) if every else ():
        for block in chain[every - 1 :: every]:
            block.forward = partial(_run, block.forward)


def chains(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Blocks in sequence: the items of a list of modules that are alike and have layers inside."""
    for child in model.children():
        items = list(child.children())
        are_alike = isinstance(child, _LISTS) and len({type(item) for item in items}) == 1
        if are_alike and not isinstance(items[0], _LISTS) and any(items[0].children()):
            yield items
        else:
            yield from chains(child)


def _run(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if not is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
