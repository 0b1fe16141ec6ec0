"""Checkpoints of two ranks, whole or damaged."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import SavedFile, commit
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot
from vit_ray.checkpoints.checkpoint_writer import write_snapshot as write_part
from vit_ray.storage import Location

_PARTS: dict[str, dict[int, list[SavedFile]]] = defaultdict(dict)
"""By folder and rank, of checkpoints that some ranks have not written."""


def snapshot_of(
    rank: int, world_size: int, tensors: dict[str, torch.Tensor], position: Position
) -> Snapshot:
    parts = [(*key.split("|"), values) for key, values in tensors.items()]
    entries = [(kind, name, int(start), values) for kind, name, start, values in parts]
    return take_snapshot(entries, position, rank, world_size)


def write_snapshot(
    snapshot: Snapshot, folder: Location, before_commit: Callable[[], object] = lambda: None
) -> bool:
    """Write a rank's part, and commit the checkpoint if it was the last one."""
    parts = _PARTS[folder.uri]
    parts[snapshot.rank] = list(write_part(snapshot, folder, "save"))
    if len(parts) < snapshot.world_size:
        return False
    before_commit()
    del _PARTS[folder.uri]
    files = [file for rank in sorted(parts) for file in parts[rank]]
    commit(folder, files, asdict(snapshot.position))
    return True


SHAPES = {"a": [3, 4], "b": [5]}
WEIGHTS_0, REST_0 = (f"{part}-00000-of-00002-save.safetensors" for part in ("weights", "rest"))
WEIGHTS_1 = "weights-00001-of-00002-save.safetensors"


def position(step: int) -> Position:
    return Position(
        Progress(step=step), applied_steps=step, samples_seen=8 * step, global_batch_size=8,
        shapes=SHAPES, recipe={"name": "x"}, data_fingerprint="f",
    )  # fmt: skip


def values(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(12.0) + step, "b": torch.arange(5.0) - step}


def snapshots(step: int) -> list[Snapshot]:
    """Two ranks that own uneven parts of two parameters; the first has a moment of one, too."""
    a, b = values(step)["a"], values(step)["b"]
    parts = [{"weight|a|0": a[:7], "exp_avg|a|0": -a}, {"weight|a|7": a[7:], "weight|b|0": b}]
    return [snapshot_of(rank, 2, part, position(step)) for rank, part in enumerate(parts)]


def write_checkpoint(run: Location, step: int, ranks: int = 2) -> Location:
    """A checkpoint of the run, whole if both ranks write; returns its folder."""
    folder = run.child(folder_name(step))
    for snapshot in snapshots(step)[:ranks]:
        write_snapshot(snapshot, folder)
    _PARTS.pop(folder.uri, None)
    return folder


def flip(folder: Location, name: str = WEIGHTS_0) -> None:
    path = Path(folder.path) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read from now on."""
    names: list[str] = []
    plain = Location.read_range

    def read_range(place: Location, *args: Any) -> bytes:
        names.append(place.path.rpartition("/")[2])
        return plain(place, *args)

    monkeypatch.setattr(Location, "read_range", read_range)
    return names
