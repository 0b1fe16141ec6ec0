"""Images per second and the largest batch of a model on one device, by input size.

The paper's appendix D.5 and Figure 12: the batch is doubled until it no longer fits, then refined
between the last two. Speed is that of the fastest batch, with images already on the device. Eager:
compiled passes take minutes for each of the many shapes, and no more memory.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import torch

from vit_ray.config import Recipe
from vit_ray.config.command_sections import BenchmarkModelsConfig
from vit_ray.measure.memory import GIB
from vit_ray.train.memory.largest_batch import fits_training, free_gib
from vit_ray.train.memory.memory_estimate import estimate_memory, inference_bytes, prepared_model
from vit_ray.train.memory.out_of_memory import largest_that_fits, unless_out_of_memory
from vit_ray.train.objective import make_loss, normalize

Mode = Literal["inference", "training"]
EndedBy = Literal["memory", "max_batch_size", "pass time"]

CPU_GIB: Final = 2.0
NUM_CLASSES: Final = 1000
"""Classes of the head."""
MAX_PASS_S: Final = 10.0
"""Stop the search when a pass is predicted to take longer than this, from the last pass's speed."""
WARM_UP_PASSES: Final = 2
MIN_PASSES: Final = 3
TIMED_S: Final = 1.0
"""Seconds to repeat the passes of a batch, at least `MIN_PASSES`; the result is the median."""
_STEPS_BETWEEN: Final = 8
"""The largest batch is found to an eighth of itself."""


@dataclass(frozen=True)
class BatchSpeed:
    """One batch size that fits."""

    batch_size: int
    images_per_s: float


@dataclass(frozen=True)
class ModelSpeed:
    """A model at one input size."""

    mode: Mode
    image_size: int
    batches: tuple[BatchSpeed, ...]
    """Ascending; empty if not even one image fits."""
    ended_by: EndedBy
    """What kept the batch from growing."""

    @property
    def fastest(self) -> BatchSpeed | None:
        return max(self.batches, key=lambda one: one.images_per_s, default=None)

    @property
    def largest_batch(self) -> int:
        """Images of the largest batch that was tried and fits; 0 if none does."""
        return self.batches[-1].batch_size if self.batches else 0

    def metrics(self) -> dict[str, float]:
        """For MLflow: the largest batch only if memory ended the search."""
        prefix = f"benchmark/{self.mode}_{self.image_size}px"
        found = {}
        if self.fastest is not None:
            found[f"{prefix}_images_per_s"] = self.fastest.images_per_s
            found[f"{prefix}_fastest_batch"] = float(self.fastest.batch_size)
        is_known = self.ended_by == "memory"
        found[f"{prefix}_{'largest_batch' if is_known else 'batch_at_least'}"] = float(
            self.largest_batch
        )
        return found


def measure_model(
    recipe: Recipe, config: BenchmarkModelsConfig, *, use_gpu: bool
) -> tuple[str, list[ModelSpeed]]:
    """The device's name, and every mode at every input size."""
    device = torch.device("cuda" if use_gpu else "cpu")
    name = torch.cuda.get_device_name(device) if use_gpu else "CPU"
    sizes = dict.fromkeys(map(recipe.model.side_in_whole_patches, config.image_sizes))
    with _memory_cap(device, config.memory_gib):
        return name, [
            _searched(recipe.with_changes(model={"image_size": size}), mode, config, device)
            for mode in config.modes
            for size in sizes
        ]


def _searched(
    recipe: Recipe, mode: Mode, config: BenchmarkModelsConfig, device: torch.device
) -> ModelSpeed:
    speeds: dict[int, BatchSpeed] = {}
    ended_by: EndedBy = "max_batch_size"

    def fits(batch_size: int) -> bool:
        """Whether the batch fits; its speed is kept."""
        nonlocal ended_by
        if batch_size in speeds:
            return True
        before = max(speeds, default=batch_size)
        if batch_size > before and batch_size / speeds[before].images_per_s > MAX_PASS_S:
            ended_by = "pass time"
            return False

        def images_per_s() -> float:
            run_pass = _prepared(recipe, mode, batch_size, device)
            return batch_size / _median_s(run_pass, device)

        # By a trial on a GPU, for inference by the run itself, and on a CPU by the estimate; for a
        # step of one pass, whose batch is on the device too.
        step = recipe.with_changes(train={"global_batch_size": batch_size})
        if device.type == "cuda":
            limit_gib = min(config.memory_gib or math.inf, free_gib(device))
            has_memory = mode == "inference" or fits_training(
                step, NUM_CLASSES, 1, batch_size, device, limit_gib
            )
        else:
            limit_gib = config.memory_gib or CPU_GIB
            if mode == "training":
                needed_gib = estimate_memory(step, NUM_CLASSES, batch_size, 1).total
            else:
                needed_gib = inference_bytes(recipe, NUM_CLASSES, batch_size) / GIB
            has_memory = needed_gib <= limit_gib
        rate = unless_out_of_memory(images_per_s, device) if has_memory else None
        if rate is None:
            ended_by = "memory"
            return False
        speeds[batch_size] = BatchSpeed(batch_size, rate)
        return True

    most = config.max_batch_size
    doubled = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    best = largest_that_fits(doubled, 1, fits)
    if best is not None and ended_by == "memory":
        above = doubled[doubled.index(best) + 1]
        parts = range(_STEPS_BETWEEN)
        between = sorted({best + (above - best) * part // _STEPS_BETWEEN for part in parts})
        largest_that_fits(between, (best + above) // 2, fits)
    assert isinstance(recipe.model.image_size, int)
    batches = tuple(speed for _, speed in sorted(speeds.items()))
    return ModelSpeed(mode, recipe.model.image_size, batches, ended_by)


def _prepared(
    recipe: Recipe, mode: Mode, batch_size: int, device: torch.device
) -> Callable[[], None]:
    """A pass over images of random pixels that are on the device."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    model = prepared_model(recipe, NUM_CLASSES, device)
    height, width = recipe.model.sides
    with device:
        images = torch.randint(0, 256, (batch_size, height, width, 3), dtype=torch.uint8)
        numbers = torch.arange(batch_size)
    if mode == "inference":
        predicts = getattr(model.eval(), "model", model)  # of an objective around a model

        @torch.no_grad()
        def predict() -> None:
            predicts(normalize(images, dtype))

        return predict
    loss = make_loss(recipe)
    labels = (numbers % NUM_CLASSES)[:, None]

    def train() -> None:
        loss(model, images, labels, numbers, 0).backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    return train


def _median_s(run_pass: Callable[[], None], device: torch.device) -> float:
    def end_passes() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP_PASSES):
        run_pass()
    end_passes()
    times: list[float] = []
    while len(times) < MIN_PASSES or sum(times) < TIMED_S:
        start_s = time.perf_counter()
        run_pass()
        end_passes()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


@contextmanager
def _memory_cap(device: torch.device, memory_gib: float | None) -> Iterator[None]:
    """Inside the block, torch takes no more than this of the GPU's memory."""
    if device.type != "cuda" or memory_gib is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
