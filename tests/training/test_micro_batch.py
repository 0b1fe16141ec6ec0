"""Images per pass: divisors of the share, under a limit; its trial, and memory that ran out."""

import resource
from typing import Any

import pytest
import torch

from tests.recipes import recipe_with
from tests.training.ranks import run_ranks
from vit_ray.config import Recipe
from vit_ray.measure.memory import is_out_of_memory
from vit_ray.training import memory_estimate
from vit_ray.training.memory_estimate import GIB, RESERVED_FRACTION, pass_bytes, tried_micro_batch
from vit_ray.training.steps import micro_batch_size


def batch_recipe(micro: int | str, workers: int | list[int] = 4) -> Recipe:
    train = {"global_batch_size": 96, "micro_batch_size": micro}
    return recipe_with("a", train=train, workers={"num_workers": workers})


@pytest.mark.parametrize(
    ("micro", "world", "limit", "images"),
    [
        ("auto", 4, None, 24),
        ("auto", 4, 10, 8),
        ("auto", 3, 31, 16),
        (12, 4, None, 12),
        (12, 4, 5, 4),
    ],
)
def test_it_is_the_largest_divisor_of_the_share_within_the_limit(micro, world, limit, images):
    assert micro_batch_size(batch_recipe(micro), world, limit) == images


def test_a_number_is_the_most_for_an_elastic_group():
    sizes = [micro_batch_size(batch_recipe(20, [1, 4]), world) for world in (1, 2, 3, 4)]
    assert sizes == [16, 16, 16, 12]
    with pytest.raises(ValueError, match="nearest valid"):  # for a fixed one
        micro_batch_size(batch_recipe(5), 4)


SIZES = {"image_size": 64, "patch_size": 4, "depth": 2, "width": 64, "mlp_dim": 256, "num_heads": 2}
RECIPE = recipe_with("small", model={"name": "ViT", **SIZES}, train={"precision": "fp32"})


@pytest.mark.parametrize(
    ("mixup", "share", "estimate", "most", "tried", "found"),
    [
        (0.0, 24, 24, 30, [24], 24),  # a good estimate costs one trial
        (0.0, 24, 24, 7, [24, 12, 6], 6),
        (0.0, 24, 12, 30, [12], 12),
        (0.0, 24, 24, 1, [24, 12, 6, 3], 1),
        (0.0, 24, None, 0, [], 1),  # the first pass of the training reports it
        (0.8, 30, 30, 14, [30, 10], 10),  # pairs: no 15
        (0.8, 24, 24, 1, [24, 12, 6], 2),
    ],
)
def test_the_estimate_is_tried_and_halved_until_it_fits(
    mixup, share, estimate, most, tried, found, monkeypatch
):
    sizes: list[int] = []

    def passed(recipe: Any, num_classes: int, size: int, device: torch.device) -> int:
        sizes.append(size)
        return size * GIB

    # The half is more than the state of so small a model.
    free_bytes = int((most + 0.5) * GIB / (1 - RESERVED_FRACTION))
    monkeypatch.setattr(memory_estimate, "pass_bytes", passed)
    monkeypatch.setattr(memory_estimate, "largest_micro_batch", lambda *_: estimate)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_bytes, free_bytes))
    recipe = RECIPE.with_changes(train={"mixup": mixup, "global_batch_size": 2 * share})
    assert tried_micro_batch(recipe, 10, 2, torch.device("cpu")) == found
    assert sizes == tried


def test_what_the_batches_take_is_not_left_to_the_passes(monkeypatch):
    monkeypatch.setattr(memory_estimate, "pass_bytes", lambda recipe, _, size, device: size * GIB)
    monkeypatch.setattr(memory_estimate, "largest_micro_batch", lambda *_: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (9 * GIB, 9 * GIB))
    found = []
    for images in (64, 1 << 16):  # 3 x 12 KiB each: 2 MiB, and 2.25 GiB
        recipe = RECIPE.with_changes(train={"global_batch_size": images})
        found.append(tried_micro_batch(recipe, 10, 1, torch.device("cpu")))
    assert found == [8, 4]


def test_a_cpu_counts_no_memory_and_asks_no_gpu(monkeypatch):
    monkeypatch.delattr(torch.cuda, "memory_allocated")
    monkeypatch.delattr(torch.cuda, "max_memory_allocated")
    assert pass_bytes(RECIPE, 10, 1, torch.device("cpu")) == 0


def capped(rank: int) -> list[int | None]:
    """In a process that may take 128 MiB more: a large pass, then a small one."""
    cpu = torch.device("cpu")
    pass_bytes(RECIPE, 10, 1, cpu)  # what is loaded and started once
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 27),) * 2)
    return [pass_bytes(RECIPE, 10, size, cpu) for size in (1024, 2, 1024, 2)]


def test_a_pass_that_really_runs_out_of_memory_is_known_and_leaves_the_next_its_place():
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
def test_memory_that_ran_out_is_known_by_every_librarys_word(error, is_it):
    assert is_out_of_memory(error) is is_it
