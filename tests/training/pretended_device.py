"""A GPU that only pretends: what is copied to it, how, and in which order streams are used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch


class PretendedGpu:
    """A stream that computes and one beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.on_side = False
        self.pinned: list[torch.Tensor] = []
        self.there: list[torch.Tensor] = []
        self.copies: list[str] = []
        """To it, each as its thread, its stream, and what it is a copy of."""
        gpu = self

        class Stream:
            def __init__(self, *_: Any) -> None: ...

            def record_event(self) -> str:
                gpu.order.append("event")
                return "event"

            def wait_event(self, event: str) -> None:
                gpu.order.append(f"computing waits for {event}")

        @contextlib.contextmanager
        def stream(_: Any) -> Iterator[None]:
            self.on_side = True
            yield
            self.on_side = False

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda *_: self.order.append("memory is kept")
        )
        plain = torch.Tensor.to

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            self.pinned.append(tensor)
            return tensor

        def to(tensor: torch.Tensor, *args: Any, non_blocking: bool = False) -> torch.Tensor:
            if args[0] != torch.device("cuda"):
                return plain(tensor, *args, non_blocking=non_blocking)
            if _has(self.there, tensor):
                return tensor
            how = "left to the stream" if non_blocking else "waited for"
            source = "pinned" if _has(self.pinned, tensor) else "pageable"
            place = "beside" if self.on_side else "in the way"
            thread = threading.current_thread().name
            self.copies.append(f"{thread}: {source}, {how}, {place}")
            self.there.append(tensor.clone())
            return self.there[-1]

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "to", to)


def _has(tensors: list[torch.Tensor], tensor: torch.Tensor) -> bool:
    return any(one is tensor for one in tensors)
