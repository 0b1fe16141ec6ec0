"""One rank's part of a checkpoint: copied to host memory, and written from there later.

The copies have the layout of the files, so writing needs no other memory. The next snapshot reuses
the memory: fresh pages cost four times as much as the copy itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.checkpoint_format import (
    FP32_BYTES,
    SavedFile,
    part_of,
    write_file,
)
from vit_ray.storage import Location

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

    from vit_ray.checkpoints.checkpoint import Entry

# Of the values in a safetensors file: its header is padded with spaces.
_ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint in host memory.

    Attributes:
        tensors: number of elements by key, for each file that the rank has (`part_of`).
        memory: the bytes of each file, uint8 (bytes,) on the CPU; its tensors are sorted by key.
    """

    rank: int
    world_size: int
    tensors: dict[str, dict[str, int]]
    memory: dict[str, Tensor]
    position: Position


def take_snapshot(
    entries: Iterable[Entry],
    position: Position,
    rank: int,
    world_size: int,
    memory: Mapping[str, Tensor] | None = None,
) -> Snapshot:
    """Copy this rank's state to host memory; training may continue as soon as this returns.

    Args:
        memory: of an earlier snapshot that is no longer read; it is overwritten where its size
            fits, else new memory is taken.
    """
    values: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for kind, name, start, tensor in entries:
        values[part_of(kind)][f"{kind}|{name}|{start}"] = tensor
    copies = {part: _copy(of_part, (memory or {}).get(part)) for part, of_part in values.items()}
    tensors = {
        part: {key: tensor.numel() for key, tensor in of_part.items()}
        for part, of_part in values.items()
    }
    return Snapshot(rank, world_size, tensors, copies, position)


def write_snapshot(snapshot: Snapshot, folder: Location, token: str) -> list[SavedFile]:
    """Write one rank's files.

    Args:
        token: of the save, in the names of its files.

    Raises:
        OSError: the storage does not take them.
    """
    owner = f"{snapshot.rank:05d}-of-{snapshot.world_size:05d}-{token}"
    return [
        write_file(folder, f"{part}-{owner}.safetensors", content.numpy().data, tensors)
        for (part, content), tensors in zip(
            snapshot.memory.items(), snapshot.tensors.values(), strict=True
        )
    ]


def _copy(values: Mapping[str, Tensor], memory: Tensor | None) -> Tensor:
    """The bytes of a safetensors file of these tensors, in fp32."""
    import torch

    counts = {key: values[key].numel() for key in sorted(values)}  # as safetensors sorts one dtype
    header = _header(counts)
    size = len(header) + FP32_BYTES * sum(counts.values())
    if memory is None or memory.numel() != size:
        memory = torch.empty(size, dtype=torch.uint8)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    places = torch.split(memory[len(header) :].view(torch.float32), list(counts.values()))
    for key, place in zip(counts, places, strict=True):
        place.copy_(values[key].detach())
    return memory


def _header(tensors: Mapping[str, int]) -> bytes:
    """Header of a safetensors file of 1-D fp32 tensors in this order."""
    described, first = {}, 0
    for key, count in tensors.items():
        last = first + FP32_BYTES * count
        described[key] = {"dtype": "F32", "shape": [count], "data_offsets": [first, last]}
        first = last
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
