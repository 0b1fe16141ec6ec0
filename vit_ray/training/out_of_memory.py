"""Running out of memory: recognized from any library's message.

It imports only torch, so that benchmarks run on a machine without anything else.
"""

import gc
from collections.abc import Callable
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
