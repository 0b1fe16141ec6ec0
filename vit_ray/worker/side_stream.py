"""A CUDA stream of its own for copying and decoding later batches while the device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vit_ray.train.loop import Batch

Made = tuple["Batch", Any]
"""A batch, and the event after which its image is whole; None without a GPU."""


class SideStream:
    """A stream of the device's own for what one thread makes and another uses."""

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
        """The batch, which the stream that computes waits for; the host does not."""
        batch, event = made
        if event is not None:
            user = torch.cuda.current_stream(self._device)
            user.wait_event(event)
            # Its memory is this stream's, and must not be given out again while the other reads it.
            batch["image"].record_stream(user)
        return batch
