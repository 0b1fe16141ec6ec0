"""Rates of a training run, and what its device does."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vit_ray.metric_names import PERF_MFU, PERF_MODEL_TFLOPS_PER_GPU

Clock = Callable[[], float]


class DeviceTimes:
    """Adds up the time that a device takes for what it is given in the blocks."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        """`clock`: of a device that works while the host waits, a CPU."""
        self._is_cuda, self._clock = device.type == "cuda", clock
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What the device is given in the block counts; the host does not wait for it."""
        begin = self._mark()
        yield
        self._spans.append((begin, self._mark()))

    def take_s(self) -> float:
        """Seconds since the last call, of work that the device has come to the end of."""
        spans, self._spans = self._spans, []
        if self._is_cuda:
            return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
        return float(sum(end - begin for begin, end in spans))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Compute:
    """Work per image, for rates in FLOP/s.

    Attributes:
        model_macs: multiply-adds that the model needs for one image, forward and backward pass.
        peak_flops: dense peak of one worker's device in FLOP/s; None where it is not known.
    """

    model_macs: int
    peak_flops: float | None = None

    def rates(self, images_per_s_per_worker: float) -> dict[str, float]:
        """Model TFLOP/s per worker, and MFU where the peak is known; 2 FLOPs each."""
        model = 2.0 * self.model_macs * images_per_s_per_worker
        rates = {PERF_MODEL_TFLOPS_PER_GPU: model / 1e12}
        if self.peak_flops:
            rates[PERF_MFU] = model / self.peak_flops
        return rates


def peak_memory_gib() -> float:
    """Most memory that this process has held: of its GPU, or without one its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
