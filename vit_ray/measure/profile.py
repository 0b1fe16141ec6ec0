"""A trace of chosen training steps, for chrome://tracing or https://ui.perfetto.dev."""

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

logger = logging.getLogger(__name__)


def profiled(
    batches: Iterator[T],
    steps: tuple[int, int],
    next_step: int,
    keep: Callable[[str, bytes], Any],
) -> Iterator[T]:
    """The same batches, with steps `steps[0]` to `steps[1]` (both counted from 1) traced.

    A step lasts from the moment that its batch is asked for until the next is asked for, so that
    waiting for data, passes, communication and the update are all in the trace.

    Args:
        next_step: number of the step that the first batch is for.
        keep: takes the trace's file name and its gzipped JSON.
    """
    first, last = max(steps[0], next_step), steps[1]
    yield from itertools.islice(batches, first - next_step)
    if first <= last:
        with _traced(steps, keep):
            yield from itertools.islice(batches, last - first + 1)
    yield from batches


@contextmanager
def _traced(steps: tuple[int, int], keep: Callable[[str, bytes], Any]) -> Iterator[None]:
    on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    tracer = profile(activities=[ProfilerActivity.CPU, *on_gpu], record_shapes=True)
    name = f"trace-steps-{steps[0]}-{steps[1]}.json.gz"
    try:
        with tracer:
            yield
    finally:
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / name
                tracer.export_chrome_trace(str(path))
                content = path.read_bytes()
        except OSError as error:  # which costs the trace, not the training
            logger.warning("the trace of steps %d to %d is lost: %s", *steps, error)
        else:
            keep(name, content)
