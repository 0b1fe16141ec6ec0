"""Rates, shares and times of a training run, over a window of steps."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Clock = Callable[[], float]


@dataclass
class StepTimes:
    """Durations in seconds of the steps since the last `reset`, on this worker."""

    clock: Clock = time.perf_counter
    steps: list[float] = field(default_factory=list)
    """Whole steps, waiting for data included."""
    waits: list[float] = field(default_factory=list)
    """The part of each step spent waiting for its batch."""

    def record(self, step_s: float, wait_s: float) -> None:
        """One finished step."""
        self.steps.append(step_s)
        self.waits.append(wait_s)

    @property
    def total_s(self) -> float:
        """Time spent in steps."""
        return sum(self.steps)

    @property
    def wait_fraction(self) -> float:
        """Share of the steps' time that waited for data."""
        return sum(self.waits) / self.total_s if self.steps else 0.0

    @property
    def median_s(self) -> float:
        """Median step."""
        return statistics.median(self.steps) if self.steps else 0.0

    def reset(self) -> None:
        """Start a new window."""
        self.steps.clear()
        self.waits.clear()


@dataclass(frozen=True)
class Compute:
    """Work per image, for rates in FLOP/s."""

    model_macs: int
    """Multiply-adds that the model needs for one image, forward and backward pass."""
    recomputed_macs: int = 0
    """Multiply-adds of the forward pass that are done again (activation checkpointing)."""
    peak_flops: float | None = None
    """Dense peak of one worker's device in FLOP/s; None where it is not known."""

    def rates(self, images_per_s_per_worker: float) -> dict[str, float]:
        """Model TFLOP/s per worker, and MFU and HFU where the peak is known; 2 FLOPs each."""
        model = 2.0 * self.model_macs * images_per_s_per_worker
        hardware = model + 2.0 * self.recomputed_macs * images_per_s_per_worker
        rates = {"perf/model_tflops_per_gpu": model / 1e12}
        if self.peak_flops:
            rates["perf/mfu"] = model / self.peak_flops
            rates["perf/hfu"] = hardware / self.peak_flops
        return rates


def peak_memory_gib() -> float:
    """Most memory that this process has held: of its GPU, or without one its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
