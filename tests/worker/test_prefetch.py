"""Batches that a thread reads ahead."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import ray
import torch

from vit_ray.outcomes import RunFailedError
from vit_ray.training.loop import Batch
from vit_ray.worker.job import with_stream_errors
from vit_ray.worker.prefetch import Prefetched, device_batches


def batch(number: int) -> Batch:
    return {"image": np.full((2, 4, 4, 3), number, np.uint8), "sample": np.array([number])}


def doubled(one: Batch) -> Batch:
    return {**one, "sample": one["sample"] * 2}


@pytest.mark.parametrize("error", [None, ValueError("too many bad images")])
def test_batches_come_prepared_and_in_order_and_an_error_where_its_batch_was_due(error):
    def batches() -> Iterator[Batch]:
        yield from (batch(number) for number in range(9))
        if error:
            raise error

    prefetched = Prefetched(batches(), doubled)
    found = [int(next(prefetched)["sample"][0]) for _ in range(9)]
    assert found == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    if error:
        with pytest.raises(ValueError, match="too many bad images"):
            next(prefetched)
    assert [next(prefetched, "the end") for _ in range(2)] == ["the end"] * 2


def test_on_a_gpu_columns_are_pinned_and_the_image_is_copied_by_a_thread(monkeypatch):
    """A GPU that only pretends: tensors stay where they are, and calls are counted by thread."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., torch.Tensor]:
        def method(tensor: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
            calls[f"{threading.current_thread().name}: {name} {options}"] += 1
            return tensor

        return method

    side, computing, within = Mock(), Mock(), Mock(return_value=nullcontext())
    side.record_event.return_value = "event"
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: computing)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", within)
    for name in ("pin_memory", "to", "record_stream"):
        monkeypatch.setattr(torch.Tensor, name, counted(name))
    read = (batch(n) for n in range(4))
    found = list(device_batches(read, torch.device("cuda"), 2, ("image", "sample")))
    assert [int(one["sample"][0]) for one in found] == [0, 1, 2, 3]
    assert calls == {
        "prefetch: pin_memory {}": 8,
        "prefetch: to {'non_blocking': True}": 4,
        "MainThread: record_stream {}": 4,
    }
    assert within.call_args_list == [call(side)] * 4
    assert computing.wait_event.call_args_list == [call("event")] * 4


def test_a_reader_that_is_given_up_ends_its_thread_and_lets_its_batches_go():
    def endless() -> Iterator[Batch]:
        while True:
            yield batch(0)

    before = set(threading.enumerate())
    prefetched = Prefetched(endless(), doubled, 3)
    next(prefetched)
    (reader,) = set(threading.enumerate()) - before
    del prefetched
    reader.join(timeout=30)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("cause", "depth", "expected"),
    [
        (ValueError("too many bad"), 1, RunFailedError),
        (ValueError("too many bad"), 2, RunFailedError),
        (ValueError("too many bad"), 0, ValueError),
        (OSError("the storage is away"), 1, ray.exceptions.RayTaskError),
    ],
)
def test_a_tasks_own_value_error_is_not_met_again_by_a_restart(cause, depth, expected):
    error: Exception = cause
    for _ in range(depth):
        error = ray.exceptions.RayTaskError("read", str(cause), error).as_instanceof_cause()

    def batches() -> Iterator[Batch]:
        yield batch(0)
        raise error

    read = with_stream_errors(batches())
    next(read)
    with pytest.raises(Exception, match=str(cause)) as raised:
        next(read)
    assert isinstance(raised.value, expected)
    assert isinstance(raised.value, RunFailedError) == (expected is RunFailedError)
