"""Running out of memory: recognized from any library's message, and searched for by passes.

It imports only torch, so that benchmarks run on a machine without anything else.
"""

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")

# Messages of torch 2's allocators, and of the CUDA libraries that take memory without them:
# `RuntimeError`s.
_EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER
    "Failed to CUDA calloc",  # NCCL
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a pass ran out of memory on this worker, whichever library raised the error.

    Errors of data tasks, which arrive through Ray, do not belong to the pass.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError) and not type(error).__module__.startswith("ray")
    return is_of_torch and any(words in str(error) for words in _EXHAUSTED)


def unless_out_of_memory(run: Callable[[], T], device: torch.device) -> T | None:
    """The result of `run`; None if it ran out of memory. Its memory is free afterwards."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        # The error's frames hold the tensors of the pass; nothing must keep it after this block.
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def largest_that_fits(sizes: Sequence[int], start: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` that `fits`, tried one by one up or down from `start`.

    Args:
        sizes: ascending; if a size fits, smaller ones are assumed to fit.
        start: the largest that is expected to fit.
    """
    first = max((i for i, size in enumerate(sizes) if size <= start), default=0)
    if fits(sizes[first]):
        best = first
        while best + 1 < len(sizes) and fits(sizes[best + 1]):
            best += 1
        return sizes[best]
    return next((size for size in reversed(sizes[:first]) if fits(size)), None)
