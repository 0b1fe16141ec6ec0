"""Batches read ahead in a thread, and copied to the GPU while it computes."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import Any, TypeVar

import torch

from vit_ray.training.loop import Batch, as_tensor

T = TypeVar("T")
Item = TypeVar("Item")


def device_batches(
    batches: Iterable[Batch],
    device: torch.device,
    ahead: int = 1,
    pinned: tuple[str, ...] = ("image", "labels", "sample"),
) -> Iterator[Batch]:
    """The same batches, read ahead, with their images on the device.

    Without a GPU the batches are unchanged.

    Args:
        ahead: as for `Prefetched`.
        pinned: columns that become tensors in page-locked memory; a copy from other memory would
            make the host wait.
    """
    if device.type != "cuda":
        return Prefetched(batches, lambda batch: batch, ahead)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(batch: Batch) -> Batch:
        return {**batch, **{name: as_tensor(batch[name]).pin_memory() for name in pinned}}

    def copy(batch: Batch) -> tuple[Batch, Any]:
        # In a separate stream, so that neither the host nor the computation waits.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            image = batch["image"].to(device, non_blocking=True)
            return {**batch, "image": image}, stream.record_event()

    def hand_over(copied: tuple[Batch, Any]) -> Batch:
        # The computing stream waits for the copy; the host does not.
        batch, event = copied
        computing = torch.cuda.current_stream(device)
        computing.wait_event(event)
        # The memory belongs to the copying stream: it is not reused before `computing` has read it.
        batch["image"].record_stream(computing)
        return batch

    return map(hand_over, Prefetched(Prefetched(batches, pin, ahead), copy))


class Prefetched(Iterator[T]):
    """The results of `prepare` for each item; `ahead` + 1 are prepared beyond the item in use.

    A thread prepares them. It starts at once and ends when this object is garbage-collected, for
    example if a training stops early. An error of `items` or `prepare` is raised at the position of
    its item; no items follow.
    """

    def __init__(self, items: Iterable[Item], prepare: Callable[[Item], T], ahead: int = 1) -> None:
        self._ready: Queue[T | BaseException | None] = Queue(maxsize=max(1, ahead))
        self._closed = threading.Event()
        # A daemon without a reference to this object: the thread must not keep either alive.
        threading.Thread(
            target=_read,
            args=(items, prepare, self._ready, self._closed),
            daemon=True,
            name="prefetch",
        ).start()

    def __next__(self) -> T:
        item = self._ready.get()  # no limit: train.step_timeout_s ends a step that waits for images
        if item is None or isinstance(item, BaseException):
            self._ready.put(None)  # the thread has ended: later calls must not wait
            raise item or StopIteration
        return item

    def __del__(self) -> None:
        self._closed.set()
        with contextlib.suppress(Empty):
            while True:  # unblocks a thread that waits for a free slot, so that it sees the end
                self._ready.get_nowait()


def _read(
    items: Iterable[Item],
    prepare: Callable[[Item], T],
    ready: Queue[T | BaseException | None],
    closed: threading.Event,
) -> None:
    last: BaseException | None = None
    try:
        for item in items:
            ready.put(prepare(item))
            if closed.is_set():
                return
    except BaseException as error:
        last = error
    ready.put(last)
