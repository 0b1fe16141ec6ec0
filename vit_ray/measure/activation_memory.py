"""Bytes that a computation needs at once, counted on tensors without memory.

On the meta device inside `gpu_kernels`, sizes, views and lifetimes are those of a GPU, and a
model of any size takes a second and no memory.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ActivationMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operations inside it make, while they live.

    Args:
        known: storages that are not to be counted, such as those of the weights.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {_storage_key(tensor) for tensor in known}
        self.current = 0
        """Bytes alive now."""
        self.peak = 0
        """Most bytes alive at a time."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (key := _storage_key(leaf)) not in self._known:
                storage = leaf.untyped_storage()
                self._known.add(key)
                self.current += storage.nbytes()
                self.peak = max(self.peak, self.current)
                weakref.finalize(storage, self._forget, key, storage.nbytes())
        return result

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.current -= num_bytes


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Flash attention; memory-efficient attention for fp32 and for a bias. Neither keeps N x N."""
    aten = torch.ops.aten
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, True)[0]


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Keeps a mask of one byte per element, as on CUDA."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0.0 else input


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Inside, attention and dropout are the fused kernels of a GPU, whatever the device.

    torch's own functions are replaced for the while: its modes do not reach into the backward
    pass, where blocks are recomputed.
    """
    plain = F.scaled_dot_product_attention, F.dropout
    replaced: Any = F
    replaced.scaled_dot_product_attention, replaced.dropout = _fused_attention, _fused_dropout
    try:
        yield
    finally:
        replaced.scaled_dot_product_attention, replaced.dropout = plain


def peak_bytes(forward: Callable[[], Tensor], weights: list[Tensor]) -> int:
    """Most bytes alive at a time in `forward()` and its backward pass.

    Weights are not counted, and a weight's gradient only until it is whole: who keeps it, and
    how, is not the model's affair.
    """
    hooks = drop_gradients(weights)
    with ActivationMemory(weights) as memory:
        forward().backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return memory.peak


def drop_gradients(weights: Iterable[Tensor]) -> list[Any]:
    """Have each gradient go as soon as it is whole; returns the hooks."""

    def drop(weight: Tensor) -> None:
        weight.grad = None

    return [
        weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        for weight in weights
        if weight.requires_grad
    ]


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
