"""How every library that takes memory says that there is none left."""

import torch

# Of torch's allocators, and of the CUDA libraries that take memory past them.
_EXHAUSTED = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER
    "Failed to CUDA calloc",  # NCCL
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a pass ran out of memory on this worker, whichever library raised the error.

    Errors of data tasks, which arrive through Ray, are not of the pass.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError) and not type(error).__module__.startswith("ray")
    return is_of_torch and any(words in str(error) for words in _EXHAUSTED)
