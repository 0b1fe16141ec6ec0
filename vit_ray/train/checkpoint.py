"""Sharded checkpoints in a canonical form: any worker count and any ZeRO stage can read them.

A checkpoint is a folder `step-00001000` under the run's folder. Rank r of n writes
`rank-0000r-of-0000n.safetensors`, 1-D fp32 tensors named `KIND|PARAMETER|START` for the fragments
that it owns, and then `rank-0000r-of-0000n.json` with that file's size and checksum. KIND is
`weight`, `average` or a state of the optimizer. Rank 0's JSON also holds the run's position.

A checkpoint counts only when it is whole: all n JSON files are there. `damaged.json` marks one
whose files have another size or checksum than their JSON says, so that all processes pass it over
alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor

from vit_ray.storage import Location, locate
from vit_ray.train.fragments import Fragment, State
from vit_ray.train.progress import Progress

FORMAT_VERSION = 1
WEIGHT, AVERAGE = "weight", "average"
_READERS: Final = 8
"""Files read at a time."""
_PIECE_BYTES: Final = 32 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Where a run stands, and what it is: all that is not a tensor."""

    progress: Progress
    applied_steps: int
    """Steps that moved the weights: Adam's bias correction counts these."""
    samples_seen: int
    """Position in the sample order from which the next batch is read."""
    global_batch_size: int
    shapes: dict[str, list[int]]
    """Shape of every trained parameter."""
    recipe: dict[str, Any]
    data_fingerprint: str
    tracking_run_id: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps completed, applied or refused."""
        return self.progress.step

    def to_json(self) -> dict[str, Any]:
        """One flat object: the fields of the progress stand beside the others."""
        saved = asdict(self)
        return {**saved.pop("progress"), **saved}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Position:
        """What `to_json` gave; a field of the progress that is not there has its default."""
        names = {entry.name for entry in fields(Progress)}
        progress = Progress(**{key: value for key, value in saved.items() if key in names})
        rest = {key: value for key, value in saved.items() if key not in names}
        return cls(progress, **rest)


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, copied to host memory."""

    rank: int
    world_size: int
    tensors: dict[str, Tensor]
    position: Position


class DamagedCheckpointError(ValueError):
    """A checkpoint's files do not match what was written."""


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` completed steps; names sort by step."""
    return f"step-{step:08d}"


def take_snapshot(
    fragments: Iterable[Fragment],
    optimizer_state: State,
    state_keys: tuple[str, ...],
    averages: dict[str, list[tuple[int, Tensor]]],
    position: Position,
    rank: int,
    world_size: int,
) -> Snapshot:
    """Copy this rank's state to host memory; training may go on as soon as this returns."""
    tensors: dict[str, Tensor] = {}
    for fragment in fragments:
        tensors[_key(WEIGHT, fragment.name, fragment.start)] = _to_host(fragment.weight)
        for key in state_keys:
            values = fragment.state(optimizer_state, key)
            tensors[_key(key, fragment.name, fragment.start)] = _to_host(values)
    for name, parts in averages.items():
        for start, values in parts:
            tensors[_key(AVERAGE, name, start)] = _to_host(values)
    return Snapshot(rank, world_size, tensors, position)


def write_snapshot(snapshot: Snapshot, folder: Location) -> int:
    """Write one rank's part: tensors first, its JSON last. Returns the bytes written.

    Raises:
        OSError: the storage does not take it; nothing that counts as a checkpoint is left.
    """
    stem = f"rank-{snapshot.rank:05d}-of-{snapshot.world_size:05d}"
    content = safetensors.torch.save(snapshot.tensors)
    folder.child(f"{stem}.safetensors").write(content)
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "tensors": {key: values.numel() for key, values in snapshot.tensors.items()},
    }
    if snapshot.rank == 0:
        index["position"] = snapshot.position.to_json()
    folder.child(f"{stem}.json").write(json.dumps(index).encode())
    return len(content)


@dataclass(frozen=True)
class Shard:
    """One rank's file of a whole checkpoint."""

    file: str
    bytes: int
    sha256: str
    tensors: dict[str, int]


class Checkpoint:
    """A whole checkpoint in storage, opened for reading."""

    def __init__(self, folder: Location, shards: list[Shard], position: Position) -> None:
        self.folder = folder
        self.shards = shards
        self.position = position

    def verify(self) -> None:
        """Read every byte and compare checksums, some files at a time.

        Raises:
            DamagedCheckpointError: a file differs from what was written; names the file.
        """
        with ThreadPoolExecutor(_READERS) as readers:
            for sha256, shard in zip(
                readers.map(self._checksum, self.shards), self.shards, strict=True
            ):
                self._compare(shard, sha256)

    def has_average(self) -> bool:
        """Whether averaged weights were saved."""
        return any(key.startswith(f"{AVERAGE}|") for s in self.shards for key in s.tensors)

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters by name, fp32, on the CPU; no GPU, process group or DeepSpeed needed."""
        kind = AVERAGE if averaged else WEIGHT
        full = {
            name: torch.full((_numel(shape),), float("nan"))
            for name, shape in self.position.shapes.items()
        }
        filled = dict.fromkeys(full, 0)
        for name, start, values in self.parts(kind):
            full[name][start : start + values.numel()] = values
            filled[name] += values.numel()
        missing = [name for name, values in full.items() if filled[name] != values.numel()]
        if missing:
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {kind} of {', '.join(missing[:5])} is incomplete"
            )
        return {name: t.view(self.position.shapes[name]) for name, t in full.items()}

    def parts(self, kind: str) -> Iterable[tuple[str, int, Tensor]]:
        """(parameter, start, values) of one kind, file by file."""
        for shard in self.shards:
            if not any(key.startswith(f"{kind}|") for key in shard.tensors):
                continue
            tensors = safetensors.torch.load(self._read(shard))
            for key, values in tensors.items():
                its_kind, name, start = key.split("|")
                if its_kind == kind:
                    yield name, int(start), values

    def fill(self, kinds: dict[str, list[tuple[Fragment, Tensor]]]) -> None:
        """Copy saved values into tensors that stand for fragments, whatever their cuts.

        Args:
            kinds: kind -> list of (fragment, destination (n,)).

        Raises:
            DamagedCheckpointError: some element of a destination was not in the checkpoint.
        """
        wanted: dict[tuple[str, str], list[tuple[Fragment, Tensor]]] = {}
        for kind, targets in kinds.items():
            for fragment, destination in targets:
                wanted.setdefault((kind, fragment.name), []).append((fragment, destination))
        missing = sum(f.weight.numel() for parts in wanted.values() for f, _ in parts)
        for shard in self.shards:
            if not _overlaps(shard, wanted):
                continue  # under ZeRO most files hold what other ranks need
            tensors = safetensors.torch.load(self._read(shard))
            for key, values in tensors.items():
                kind, name, start = key.split("|")
                for fragment, destination in wanted.get((kind, name), []):
                    missing -= _copy_overlap(values, int(start), fragment.start, destination)
        if missing:
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {missing} elements of {', '.join(kinds)} that "
                "this run needs are not in it"
            )

    def _read(self, shard: Shard) -> bytes:
        content = self.folder.child(shard.file).read()
        self._compare(shard, hashlib.sha256(content).hexdigest())
        return content

    def _checksum(self, shard: Shard) -> str:
        """Without holding the file, which may be gigabytes."""
        file, digest = self.folder.child(shard.file), hashlib.sha256()
        for offset in range(0, shard.bytes, _PIECE_BYTES):
            digest.update(file.read_range(offset, min(_PIECE_BYTES, shard.bytes - offset)))
        return digest.hexdigest()

    def _compare(self, shard: Shard, sha256: str) -> None:
        if sha256 != shard.sha256:
            raise DamagedCheckpointError(
                f"checkpoint file {self.folder.path}/{shard.file}: its bytes do not match the "
                f"checksum of the {shard.bytes} bytes that were written"
            )


def open_checkpoint(folder: Location) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if it is not whole."""
    try:
        return _open(folder)
    except DamagedCheckpointError:
        return None


def _open(folder: Location) -> Checkpoint | None:
    """None where a rank has not written yet, or the folder is marked.

    Raises:
        DamagedCheckpointError: all ranks have written, and what is there is not what they wrote.
    """
    sizes = {info.base_name: info.size for info in folder.list_files(recursive=False)}
    names = sorted(n for n in sizes if n.startswith("rank-") and n.endswith(".json"))
    if not names or "damaged.json" in sizes:
        return None
    world_sizes = {int(name.removesuffix(".json").split("-of-")[1]) for name in names}
    if len(names) != max(world_sizes) or len(world_sizes) != 1:
        return None
    shards: list[Shard] = []
    position: Position | None = None
    with ThreadPoolExecutor(_READERS) as readers:
        contents = list(readers.map(lambda name: folder.child(name).read(), names))
    for name, content in zip(names, contents, strict=True):
        index = _parsed(content, f"{folder.path}/{name}")
        if index["format_version"] > FORMAT_VERSION:
            raise ValueError(
                f"checkpoint {folder.path} has format {index['format_version']}; this code reads "
                f"up to {FORMAT_VERSION}: use a newer version of vit_ray"
            )
        file = name.replace(".json", ".safetensors")
        if sizes.get(file) != index["bytes"]:  # it was there before its JSON was
            raise DamagedCheckpointError(
                f"checkpoint file {folder.path}/{file}: {sizes.get(file, 'none')} of the "
                f"{index['bytes']} bytes that were written are there"
            )
        shards.append(Shard(file, index["bytes"], index["sha256"], index["tensors"]))
        if "position" in index:
            position = Position.from_json(index["position"])
    return Checkpoint(folder, shards, position) if position else None


def _parsed(content: bytes, path: str) -> dict[str, Any]:
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        raise DamagedCheckpointError(f"checkpoint file {path} is not what was written") from None


def count_ranks(folder: Location) -> int:
    """Ranks that have written their part of the checkpoint in `folder`."""
    names = [info.base_name for info in folder.list_files(recursive=False)]
    return sum(name.startswith("rank-") and name.endswith(".json") for name in names)


def list_checkpoints(run_folder: Location) -> list[tuple[int, Location]]:
    """(step, folder) of everything that looks like a checkpoint, newest first."""
    steps = []
    for name in run_folder.list_folders():
        if name.startswith("step-") and name[5:].isdigit():
            steps.append((int(name[5:]), run_folder.child(name)))
    return sorted(steps, key=lambda found: found[0], reverse=True)


def newest_checkpoint(run_folder: Location) -> Checkpoint | None:
    """The newest whole checkpoint that is not marked as damaged."""
    for _, folder in list_checkpoints(run_folder):
        checkpoint = open_checkpoint(folder)
        if checkpoint is not None:
            return checkpoint
    return None


def newest_verified_checkpoint(
    run_folder: Location, tell: Callable[[str], None] = logger.warning, *, marks: bool = True
) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as written; damaged ones are reported.

    Args:
        marks: damaged ones are also marked; for the driver whose run it is.

    Raises:
        DamagedCheckpointError: there are checkpoints and none of them is good. Starting over
            would lose the run in silence.
    """
    found = list_checkpoints(run_folder)
    for _, folder in found:
        try:
            checkpoint = _open(folder)
            if checkpoint is not None:
                checkpoint.verify()
                return checkpoint
        except FileNotFoundError:
            continue  # the run that it belongs to lives, and has just removed it
        except DamagedCheckpointError as error:
            # Errors of the storage may pass; they end the start, and mark nothing.
            tell(f"damaged checkpoint passed over: {error}")
            if marks:
                _mark_damaged(folder, str(error))
    if any(_has_damage_mark(folder) for _, folder in found):
        raise DamagedCheckpointError(
            f"run {run_folder.path}: every checkpoint is damaged "
            f"({', '.join(folder_name(step) for step, _ in found)}); restore one of them, "
            "or start a run of another name"
        )
    return None


def discard_newer(run_folder: Location, step: int) -> list[int]:
    """Delete every checkpoint folder after `step`; returns their steps.

    What lies there is not whole or damaged, and training is about to write the same folders
    again: shards of two attempts must never stand together.
    """
    newer = [(s, folder) for s, folder in list_checkpoints(run_folder) if s > step]
    for _, folder in newer:
        folder.delete()
    return [s for s, _ in newer]


def prune(run_folder: Location, keep_last: int, keep: set[int]) -> list[int]:
    """Delete old checkpoints; returns their steps.

    The newest `keep_last` whole ones and the steps in `keep` stay. What is not whole is deleted
    only if a newer whole one exists: a newer folder may be in the middle of being written.
    """
    whole = [s for s, folder in list_checkpoints(run_folder) if open_checkpoint(folder)]
    stay = set(whole[:keep_last]) | keep
    newest = whole[0] if whole else -1
    deleted = []
    for step, folder in list_checkpoints(run_folder):
        if step not in stay and step < newest:
            folder.delete()
            deleted.append(step)
    return deleted


def find_weights(path: str) -> Checkpoint:
    """The checkpoint that `path` names: a checkpoint folder, or a run folder (its newest).

    Raises:
        ValueError: there is none.
    """
    location = locate(path)
    # The run may live, and belong to somebody else: nothing is written there.
    checkpoint = open_checkpoint(location) or newest_verified_checkpoint(location, marks=False)
    if checkpoint is None:
        raise ValueError(
            f"{path!r} holds no whole checkpoint; give a run folder, one of its step-* folders, "
            "or an exported weight file"
        )
    return checkpoint


def _mark_damaged(folder: Location, reason: str) -> None:
    """Make every process pass this checkpoint over from now on."""
    content = json.dumps({"reason": reason, "found_s": time.time()}).encode()
    folder.child("damaged.json").write(content)


def _overlaps(shard: Shard, wanted: dict[tuple[str, str], list[tuple[Fragment, Tensor]]]) -> bool:
    for key, count in shard.tensors.items():
        kind, name, start = key.split("|")
        for fragment, destination in wanted.get((kind, name), []):
            last = min(int(start) + count, fragment.start + destination.numel())
            if max(int(start), fragment.start) < last:
                return True
    return False


def _key(kind: str, name: str, start: int) -> str:
    return f"{kind}|{name}|{start}"


def _to_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", torch.float32, copy=True).contiguous()


def _numel(shape: list[int]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _copy_overlap(values: Tensor, start: int, wanted_start: int, destination: Tensor) -> int:
    first = max(start, wanted_start)
    last = min(start + values.numel(), wanted_start + destination.numel())
    if first >= last:
        return 0
    target = destination.narrow(0, first - wanted_start, last - first)
    target.copy_(values.narrow(0, first - start, last - first))
    return last - first


def _has_damage_mark(folder: Location) -> bool:
    return folder.child("damaged.json").exists()
