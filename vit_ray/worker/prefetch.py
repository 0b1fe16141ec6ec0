"""Batches read ahead in a thread, and copied or decoded on the GPU while it computes."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Queue
from typing import Any, TypeVar

import torch

from vit_ray.training.loop import Batch, as_tensor

T = TypeVar("T")
Item = TypeVar("Item")

Made = tuple[Batch, Any]
"""A batch, and the event after which its image is complete; None without a GPU."""


class SideStream:
    """A separate CUDA stream for batches that one thread makes and another uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make(self, make_batch: Callable[[], Batch]) -> Made:
        """Have a batch made on this stream; neither the device's computing nor the host waits."""
        if self._stream is None:
            return make_batch(), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = make_batch()
            return batch, self._stream.record_event()

    def hand_over(self, made: Made) -> Batch:
        """The batch; the computing stream waits for it, the host does not."""
        batch, event = made
        if event is not None:
            user = torch.cuda.current_stream(self._device)
            user.wait_event(event)
            # Its memory belongs to this stream, and must not be reused while the other stream reads
            # it.
            batch["image"].record_stream(user)
        return batch


def device_batches(
    batches: Iterable[Batch],
    device: torch.device,
    ahead: int = 1,
    pinned: tuple[str, ...] = ("image", "labels", "sample"),
) -> Iterator[Batch]:
    """The same batches, their images on the device; read ahead as `Prefetched` does.

    Without a GPU they are passed on unchanged.

    Args:
        pinned: columns that become tensors in page-locked memory: a copy from other memory makes
            the host wait.
    """
    if device.type != "cuda":
        return Prefetched(batches, lambda batch: batch, ahead)
    side = SideStream(device)

    def pin(batch: Batch) -> Batch:
        return {**batch, **{name: as_tensor(batch[name]).pin_memory() for name in pinned}}

    def copy(batch: Batch) -> Made:
        return side.make(lambda: {**batch, "image": batch["image"].to(device, non_blocking=True)})

    return map(side.hand_over, Prefetched(Prefetched(batches, pin, ahead), copy))


class Prefetched(Iterator[T]):
    """What `prepare` makes of each item; while one is used, `ahead` and one more are made.

    Runs in a thread, which starts at once, and ends when this object is collected, for example if a
    training stops early. An error of `items` or `prepare` is raised at the position of its item,
    and ends it.
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
            self._ready.put(None)  # the thread has ended: later calls must not wait for it
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
