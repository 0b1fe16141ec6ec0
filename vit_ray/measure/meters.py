"""Rates of a training run, time and memory of its device, and a profiler trace of some steps."""

import gc
import itertools
import logging
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from vit_ray.metric_names import PERF_MFU, PERF_MODEL_TFLOPS_PER_GPU

# Messages of `RuntimeError`s: of torch 2's allocators, and of CUDA libraries with their own memory.
_EXHAUSTED: Final = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, cuSOLVER
    "Failed to CUDA calloc",  # NCCL
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class DeviceTimes:
    """Adds up the time that a device computes for the blocks in `measured`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the device's work of this block, without a host-device sync."""
        begin = self._mark()
        yield
        self._spans.append((begin, self._mark()))

    def take_s(self) -> float:
        """Seconds of the blocks since the last call; the device must have finished them."""
        spans, self._spans = self._spans, []
        if self._is_cuda:
            return sum(begin.elapsed_time(end) for begin, end in spans) / 1e3
        return float(sum(end - begin for begin, end in spans))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()  # a CPU has no events
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass(frozen=True)
class Compute:
    """Work per image, for rates in FLOP/s.

    Attributes:
        model_macs: multiply-adds that the model needs for one image, forward and backward pass.
        peak_flops: dense peak of one worker's device in FLOP/s; None if unknown.
    """

    model_macs: int
    peak_flops: float | None = None

    def rates(self, images_per_s_per_worker: float) -> dict[str, float]:
        """Model TFLOP/s per worker, and MFU if the peak is known; a multiply-add is 2 FLOPs."""
        model = 2.0 * self.model_macs * images_per_s_per_worker
        rates = {PERF_MODEL_TFLOPS_PER_GPU: model / 1e12}
        if self.peak_flops:
            rates[PERF_MFU] = model / self.peak_flops
        return rates


def peak_memory_gib() -> float:
    """Maximum memory of this process so far: on its GPU, or without a GPU its resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a pass ran out of memory on this worker, in any library.

    Errors of data tasks, which Ray raises here, do not count.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    is_of_torch = isinstance(error, RuntimeError) and not type(error).__module__.startswith("ray")
    return is_of_torch and any(words in str(error) for words in _EXHAUSTED)


def unless_out_of_memory(run: Callable[[], T], device: torch.device) -> T | None:
    """The result of `run`, or None if it ran out of memory; its memory is free afterwards."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        # The error's frames refer to the pass's tensors, so it must not be used after this block.
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def profiled(
    batches: Iterator[T],
    steps: tuple[int, int],
    next_step: int,
    keep: Callable[[str, bytes], Any],
) -> Iterator[T]:
    """The same batches; steps `steps[0]` to `steps[1]`, counted from 1, are traced.

    The trace is for chrome://tracing or https://ui.perfetto.dev. A step lasts from the request of
    its batch to the request of the next, so the trace has the wait for data, passes, communication
    and the update.

    Args:
        next_step: number of the step that the first batch is for.
        keep: takes the trace's file name and its gzipped JSON.
    """
    first, last = max(steps[0], next_step), steps[1]
    yield from itertools.islice(batches, first - next_step)
    if first <= last:
        yield from _traced(itertools.islice(batches, last - first + 1), steps, keep)
    yield from batches


def _traced(
    batches: Iterator[T], steps: tuple[int, int], keep: Callable[[str, bytes], Any]
) -> Iterator[T]:
    """These batches, traced; a separate function, so that the trace is freed after them."""
    name = f"trace-steps-{steps[0]}-{steps[1]}.json.gz"

    def export(tracer: profile) -> None:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / name
                tracer.export_chrome_trace(str(path))
                keep(name, path.read_bytes())
        except OSError as error:  # the training goes on without a trace
            logger.warning("the trace of steps %d to %d is lost: %s", *steps, error)

    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    activities = [ProfilerActivity.CPU, *on_gpu]
    with profile(activities=activities, record_shapes=True, on_trace_ready=export):
        yield from batches
