"""Memory that ran out, in every library's words."""

import pytest
import torch

from vit_ray.train.out_of_memory import is_out_of_memory


class RayTaskError(RuntimeError):
    """As Ray raises a data task's error on a worker."""


RayTaskError.__module__ = "ray.exceptions"


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory", 2), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (
            torch.distributed.DistBackendError(
                "NCCL error: unhandled cuda error, NCCL version 2.27.3 Last error: Failed to CUDA "
                "calloc async 608 bytes"
            ),
            True,
        ),
        (torch.AcceleratorError("CUDA error: device-side assert triggered", 710), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (RayTaskError("a task of the stream ran out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_every_librarys_word(error: Exception, is_it: bool) -> None:
    assert is_out_of_memory(error) is is_it


def test_memory_that_really_ran_out_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)  # more than an address can name
    assert is_out_of_memory(caught.value)
