"""A trace of chosen training steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import gzip
import logging
import tempfile
from collections.abc import Callable, Iterator
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
    first, last = steps
    tracer: Any = None
    try:
        while True:
            if tracer is None and first <= next_step <= last:
                tracer = _started()
            elif tracer is not None and next_step > last:
                _finish(tracer, steps, keep)
                tracer = None
            batch = next(batches, None)
            if batch is None:
                return
            next_step += 1
            yield batch
    finally:
        if tracer is not None:
            _finish(tracer, steps, keep)


def _started() -> Any:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    tracer = profile(activities=activities, record_shapes=True)
    tracer.start()
    return tracer


def _finish(tracer: Any, steps: tuple[int, int], keep: Callable[[str, bytes], Any]) -> None:
    tracer.stop()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            tracer.export_chrome_trace(str(path))
            content = gzip.compress(path.read_bytes())
    except OSError as error:  # it costs itself, not the training
        logger.warning("the trace of steps %d to %d is lost: %s", *steps, error)
        return
    keep(f"trace-steps-{steps[0]}-{steps[1]}.json.gz", content)
