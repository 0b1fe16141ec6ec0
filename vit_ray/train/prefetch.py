"""Batches made ready beside the training: read, and put where the GPU copies from by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Queue

import torch

from vit_ray.train.loop import Batch, as_tensor


def prefetch(
    batches: Iterable[Batch], prepare: Callable[[Batch], Batch], ahead: int = 1
) -> Iterator[Batch]:
    """The same batches; while one is used, `ahead` and one more are made ready in a thread.

    Reading begins at once. An error of `batches` is raised where its batch was due.
    """
    ready: Queue[Batch | BaseException | None] = Queue(maxsize=max(1, ahead))

    def read() -> None:
        try:
            for batch in batches:
                ready.put(prepare(batch))
        except BaseException as error:
            ready.put(error)
        else:
            ready.put(None)

    # A daemon: where training stops early it waits for ever, and must not hold up the process.
    threading.Thread(target=read, daemon=True, name="prefetch").start()
    return _taken(ready)


def pin_batch(batch: Batch) -> Batch:
    """The images in page-locked memory, so that a copy to the GPU does not wait for the CPU.

    From other memory it does, for 3 ms of a ViT-L/16 step of 100 ms (128 images at 6 GB/s).
    """
    images = as_tensor(batch["image"])
    if images.is_cuda or not torch.cuda.is_available():
        return batch
    return {**batch, "image": images.pin_memory()}


def _taken(ready: Queue[Batch | BaseException | None]) -> Iterator[Batch]:
    while (item := ready.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item
