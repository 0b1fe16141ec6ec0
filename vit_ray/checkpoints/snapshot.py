"""One rank's part of a checkpoint: copied to host memory, and written from there later.

The copy has the layout of the file, so writing needs no other memory. The next snapshot reuses the
memory: fresh pages cost four times as much as the copy itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.checkpoint_format import is_committed, write_part
from vit_ray.storage import Location

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

    from vit_ray.checkpoints.checkpoint import Entry

_FP32_BYTES: Final = 4
_ALIGNMENT: Final = 8
"""Alignment of the values in a safetensors file: its header is padded with spaces."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint in host memory."""

    rank: int
    world_size: int
    tensors: dict[str, int]
    """Number of elements by key, in the order of the state."""
    content: Tensor
    """The file's bytes: uint8 (bytes,) on the CPU; its tensors are sorted by key."""
    position: Position


def take_snapshot(
    entries: Iterable[Entry],
    position: Position,
    rank: int,
    world_size: int,
    memory: Tensor | None = None,
) -> Snapshot:
    """Copy this rank's state to host memory; training may continue as soon as this returns.

    Args:
        memory: the content of an earlier snapshot that is no longer read; it is overwritten if its
            size fits, else new memory is taken.
    """
    import torch

    values = {f"{kind}|{name}|{start}": tensor for kind, name, start, tensor in entries}
    tensors = {key: tensor.numel() for key, tensor in values.items()}
    in_file = {key: tensors[key] for key in sorted(tensors)}  # as safetensors sorts one dtype
    header = _header(in_file)
    size = len(header) + _FP32_BYTES * sum(in_file.values())
    if memory is None or memory.numel() != size:
        memory = torch.empty(size, dtype=torch.uint8)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    places = torch.split(memory[len(header) :].view(torch.float32), list(in_file.values()))
    for key, place in zip(in_file, places, strict=True):
        place.copy_(values[key].detach())
    return Snapshot(rank, world_size, tensors, memory, position)


def write_snapshot(snapshot: Snapshot, folder: Location) -> None:
    """Write one rank's part, and read it back.

    Raises:
        OSError: the storage does not take it; nothing that counts as a checkpoint is left.
        FileExistsError: the folder has been committed; nothing was written.
        DamagedCheckpointError: what was written is not what can be read.
    """
    if is_committed(folder):
        raise FileExistsError(f"step {snapshot.position.step} is committed; it is left as it is")
    index: dict[str, Any] = {"tensors": snapshot.tensors}
    if snapshot.rank == 0:
        index["position"] = snapshot.position.to_json()
    content = snapshot.content.numpy().data
    write_part(folder, snapshot.rank, snapshot.world_size, content, index)


def _header(tensors: Mapping[str, int]) -> bytes:
    """Header of a safetensors file of 1-D fp32 tensors in this order."""
    described, first = {}, 0
    for key, count in tensors.items():
        last = first + _FP32_BYTES * count
        described[key] = {"dtype": "F32", "shape": [count], "data_offsets": [first, last]}
        first = last
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
