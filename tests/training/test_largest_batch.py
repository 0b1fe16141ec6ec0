"""The search for the largest micro-batch, passes with little memory, and memory that ran out."""

import resource
from typing import Any

import pytest
import torch

from tests.recipes import recipe_with
from tests.training.ranks import run_ranks
from vit_ray.training.memory import largest_batch
from vit_ray.training.memory.largest_batch import GIB, pass_bytes, try_micro_batches
from vit_ray.training.memory.out_of_memory import is_out_of_memory, largest_that_fits

SIZES = [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.mark.parametrize("start", [1, 5, 8, 24, 100])
@pytest.mark.parametrize(("most", "expected"), [(0, None), (1, 1), (7, 6), (24, 24), (99, 24)])
def test_the_trial_goes_up_and_down_from_the_estimate(
    start: int, most: int, expected: int | None
) -> None:
    assert largest_that_fits(SIZES, start, lambda size: size <= most) == expected


def test_a_good_estimate_costs_two_trials() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= 8

    assert largest_that_fits(SIZES, 8, fits) == 8
    assert tried == [8, 12]


RECIPE = recipe_with(
    "small",
    model={
        "name": "ViT",
        "image_size": 64,
        "patch_size": 4,
        "depth": 2,
        "width": 64,
        "mlp_dim": 256,
        "num_heads": 2,
    },
    train={"precision": "fp32"},
)


@pytest.mark.parametrize(
    ("share", "start", "most", "tried", "found"),
    [(30, 10, 14, [10, 30], 10), (24, 2, 7, [2, 4, 6, 8], 6), (6, 1, 1, [2], None)],
)
def test_images_that_are_mixed_are_tried_in_pairs(
    share: int,
    start: int,
    most: int,
    tried: list[int],
    found: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def passed(recipe: Any, num_classes: int, size: int, device: torch.device) -> int:
        sizes.append(size)
        assert pass_bytes(recipe, num_classes, size, device) == 0
        return size * GIB

    # The half is more than the state of so small a model.
    free_bytes = int((most + 0.5) * GIB / (1 - largest_batch.RESERVED_FRACTION))
    monkeypatch.setattr(largest_batch, "pass_bytes", passed)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
    recipe = RECIPE.with_changes(train={"mixup": 0.8, "global_batch_size": 2 * share})
    assert try_micro_batches(recipe, 10, 2, torch.device("cpu"), start) == found
    assert sizes == tried


def test_what_the_batches_take_is_not_left_to_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_batch, "pass_bytes", lambda recipe, _, size, device: size * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (9 * GIB, 9 * GIB))
    found = []
    for images in (64, 1 << 16):  # 3 x 12 KiB each: 2 MiB, and 2.25 GiB
        recipe = RECIPE.with_changes(train={"global_batch_size": images})
        found.append(try_micro_batches(recipe, 10, 1, torch.device("cpu"), 1))
    assert found == [8, 4]


def capped(rank: int) -> list[int | None]:
    """In a process that may take 128 MiB more: a large pass, then a small one."""
    cpu = torch.device("cpu")
    pass_bytes(RECIPE, 10, 1, cpu)  # what is loaded and started once
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 27),) * 2)
    return [pass_bytes(RECIPE, 10, size, cpu) for size in (1024, 2, 1024, 2)]


def test_a_pass_that_really_runs_out_of_memory_is_known_and_leaves_the_next_its_place() -> None:
    assert run_ranks(1, capped) == [[None, 0, None, 0]]


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
