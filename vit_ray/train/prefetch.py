"""Batches read ahead in a thread beside the training, and put in pinned memory for the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue

import torch

from vit_ray.train.loop import Batch, as_tensor


def prefetch(
    batches: Iterable[Batch], prepare: Callable[[Batch], Batch], ahead: int = 1
) -> Iterator[Batch]:
    """The same batches; while one is used, `ahead` and one more are made ready in a thread.

    Reading begins at once. An error of `batches` is raised where its batch was due.
    """
    return _Prefetched(batches, prepare, max(1, ahead))


def pin_batch(batch: Batch) -> Batch:
    """The images in page-locked memory, so that a copy to the GPU does not wait for the CPU.

    From other memory it does, for 3 ms of a ViT-L/16 step of 100 ms (128 images at 6 GB/s).
    """
    images = as_tensor(batch["image"])
    if images.is_cuda or not torch.cuda.is_available():
        return batch
    return {**batch, "image": images.pin_memory()}


class _Prefetched(Iterator[Batch]):
    """An iterator that ends its thread when it is collected, as where a training stops early."""

    def __init__(
        self, batches: Iterable[Batch], prepare: Callable[[Batch], Batch], ahead: int
    ) -> None:
        self._ready: Queue[Batch | BaseException | None] = Queue(maxsize=ahead)
        self._closed = threading.Event()
        # A daemon, and no reference to this object: the thread must not keep either alive.
        threading.Thread(
            target=_read,
            args=(batches, prepare, self._ready, self._closed),
            daemon=True,
            name="prefetch",
        ).start()

    def __next__(self) -> Batch:
        item = self._ready.get()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def __del__(self) -> None:
        self._closed.set()
        with contextlib.suppress(Empty):
            while True:  # lets a thread that waits for a place go on, and see that it is closed
                self._ready.get_nowait()


def _read(
    batches: Iterable[Batch],
    prepare: Callable[[Batch], Batch],
    ready: Queue[Batch | BaseException | None],
    closed: threading.Event,
) -> None:
    last: BaseException | None = None
    try:
        for batch in batches:
            ready.put(prepare(batch))
            if closed.is_set():
                return
    except BaseException as error:
        last = error
    ready.put(last)
