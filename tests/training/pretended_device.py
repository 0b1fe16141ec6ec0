"""A device that only pretends: the CPU under another name, and a list of the host's waits for it.

What makes the host wait for a GPU is known from CUDA: bringing a value to the host, and copies
between the GPU and memory of the host that are not left to its stream.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
# What needs a value of a tensor, or the number of those that are not 0, on the host.
READS = {"item", "tolist", "numpy", "nonzero", "equal", "unique", "masked_select"} | {
    f"__{name}__" for name in ("bool", "float", "int", "index", "contains")
}
# Of numbers that the host has: for a device, a copy that the host waits for.
MADE = {"tensor", "as_tensor", "scalar_tensor"}
INDEXED = {"__getitem__", "__setitem__", "index_put_"}


class HostWaits(TorchFunctionMode):
    """Names of what makes the host wait for `DEVICE`, in turn.

    A tensor is where it was made, or where what it is made of is. One from before belongs to the
    device, or to page-locked memory where it is copied there. A copy from other memory that is left
    to the stream is no wait: CUDA takes small ones aside, and these are numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        # By the address of its memory, which it keeps from becoming another tensor's.
        self._on_host: dict[int, Tensor] = {}
        plain = torch._C._group_tensors_by_device_and_dtype

        def grouped(*args: Any) -> Any:
            return {(DEVICE, kind[1]): group for kind, group in plain(*args).items()}

        # In C++, which knows nothing of the pretence.
        self._grouping = mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped)

    def __enter__(self) -> HostWaits:
        self._grouping.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._grouping.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return HOST if self._is_on_host(args[0]) else DEVICE
        given = list(_tensors((args, kwargs)))
        target = self._target(name, args, kwargs)
        are_on_host = [self._is_on_host(one) for one in given]
        if self._waits(name, args, kwargs, are_on_host, target):
            self.names.append(name)
        found = func(*args, **kwargs)
        is_on_host = target == HOST if target else all(are_on_host)
        for made in _tensors(found):
            if not any(made is one for one in given):  # what is written in place stays there
                self._place(made, is_on_host)
        return found

    def _waits(
        self, name: str, args: Any, kwargs: Any, on_host: list[bool], target: torch.device | None
    ) -> bool:
        if name in MADE:
            return target == DEVICE
        if not on_host:
            return False
        if name in READS:
            return not all(on_host)
        if name in ("to", "cpu"):
            crosses = target is not None and (target == HOST) != on_host[0]
            return crosses and not kwargs.get("non_blocking")
        if name == "copy_":  # what is left to the stream still has to arrive in such memory
            is_async = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            return on_host[0] != on_host[1] and (on_host[0] or not is_async)
        if name in INDEXED:
            is_mask = any(one.dtype == torch.bool for one in _tensors(args[1]))
            return not on_host[0] and (is_mask or any(on_host))
        return False

    def _target(self, name: str, args: Any, kwargs: Any) -> torch.device | None:
        """The device that a call names, or that of the tensor that it names in its place."""
        if name == "cpu":
            return HOST
        for one in (kwargs.get("device"), *(args[1:] if name == "to" else ())):
            if isinstance(one, torch.device | str):
                return torch.device(one)
            if isinstance(one, Tensor):
                return HOST if self._is_on_host(one) else DEVICE
        return None

    def _is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_host

    def _place(self, tensor: Tensor, is_on_host: bool) -> None:
        address = tensor.untyped_storage().data_ptr()
        if is_on_host and address:
            self._on_host[address] = tensor
        else:
            self._on_host.pop(address, None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class PretendedGpu:
    """A stream that computes and one beside it, in the order in which they are used."""

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
