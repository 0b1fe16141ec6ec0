"""Checkpoints of two ranks, whole or damaged."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from vit_ray.checkpoints.checkpoint import Position, Progress, folder_name
from vit_ray.checkpoints.checkpoint_format import commit
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot, write_snapshot
from vit_ray.storage import Location


def snapshot_of(
    rank: int, world_size: int, tensors: dict[str, torch.Tensor], position: Position
) -> Snapshot:
    parts = [(*key.split("|"), values) for key, values in tensors.items()]
    entries = [(kind, name, int(start), values) for kind, name, start, values in parts]
    return take_snapshot(entries, position, rank, world_size)


def write_snapshots(folder: Location, *ranks: Snapshot) -> None:
    """A checkpoint of these ranks' parts."""
    files = [file for snapshot in ranks for file in write_snapshot(snapshot, folder, "save")]
    commit(folder, files, asdict(ranks[0].position))


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
    if ranks == 2:
        write_snapshots(folder, *snapshots(step))
    else:
        list(write_snapshot(snapshots(step)[0], folder, "save"))
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
