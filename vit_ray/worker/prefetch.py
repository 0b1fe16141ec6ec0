"""Batches read ahead in a thread, and copied to the GPU while it computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import TypeVar

import torch

from vit_ray.train.loop import Batch, as_tensor
from vit_ray.worker.side_stream import SideStream

T = TypeVar("T")


def device_batches(
    batches: Iterable[Batch],
    device: torch.device,
    ahead: int = 1,
    pinned: tuple[str, ...] = ("image", "labels", "sample"),
) -> Iterator[Batch]:
    """The same batches, their images on the device; read ahead as `prefetch` does.

    Without a GPU they are handed on as they are.

    Args:
        pinned: columns that become tensors in page-locked memory.
    """
    if device.type != "cuda":
        return prefetch(batches, lambda batch: batch, ahead)
    side = SideStream(device)
    ready = prefetch(batches, lambda batch: pin_batch(batch, pinned), ahead)
    copied = prefetch(ready, lambda batch: side.make(lambda: image_on(batch, device)), 1)
    return map(side.hand_over, copied)


def prefetch(
    batches: Iterable[Batch], prepare: Callable[[Batch], T], ahead: int = 1
) -> Iterator[T]:
    """What `prepare` makes of each; while one is used, `ahead` and one more are made in a thread.

    Reading begins at once. An error of `batches` is raised where its batch was due, and ends it.
    """
    return _Prefetched(batches, prepare, max(1, ahead))


def pin_batch(batch: Batch, columns: tuple[str, ...]) -> Batch:
    """With columns in page-locked memory: from other memory the host waits for the copy."""
    return {**batch, **{name: as_tensor(batch[name]).pin_memory() for name in columns}}


def image_on(batch: Batch, device: torch.device) -> Batch:
    """With its image on the device, once the stream that this is called on has come so far."""
    return {**batch, "image": batch["image"].to(device, non_blocking=True)}


class _Prefetched(Iterator[T]):
    """An iterator that ends its thread when it is collected, as where a training stops early."""

    def __init__(self, batches: Iterable[Batch], prepare: Callable[[Batch], T], ahead: int) -> None:
        self._ready: Queue[T | BaseException | None] = Queue(maxsize=ahead)
        self._closed = threading.Event()
        # A daemon, and no reference to this object: the thread must not keep either alive.
        threading.Thread(
            target=_read,
            args=(batches, prepare, self._ready, self._closed),
            daemon=True,
            name="prefetch",
        ).start()

    def __next__(self) -> T:
        item = self._ready.get()  # no limit: train.step_timeout_s ends a step that waits for images
        if item is None or isinstance(item, BaseException):
            self._ready.put(None)  # the thread has ended: who asks again must not wait for it
            raise item or StopIteration
        return item

    def __del__(self) -> None:
        self._closed.set()
        with contextlib.suppress(Empty):
            while True:  # unblocks a thread that waits for a place, so that it sees the end
                self._ready.get_nowait()


def _read(
    batches: Iterable[Batch],
    prepare: Callable[[Batch], T],
    ready: Queue[T | BaseException | None],
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
