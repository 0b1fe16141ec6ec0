"""Snapshots of a run in host memory, written to storage while training continues.

A snapshot has the bytes of the files, so writing needs no more memory. The next snapshot reuses the
memory: allocating new pages costs four times as much as the copy itself. The writer reports
failures, and removes old checkpoints.
"""

import contextlib
import json
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    Entry,
    Position,
    Progress,
    folder_name,
    write_note,
)
from vit_ray.checkpoints.checkpoint_format import (
    FP32_BYTES,
    DamagedCheckpointError,
    SavedFile,
    commit,
    part_of,
    write_file,
)
from vit_ray.checkpoints.run_checkpoints import prune
from vit_ray.config.training_sections import CheckpointConfig, is_due
from vit_ray.lock import check_lock
from vit_ray.metric_names import RESULT_STEP
from vit_ray.outcomes import EventKind
from vit_ray.storage import Location

MAX_FAILED_SAVES: Final = 3
_MAX_NAMED_RANKS: Final = 8  # in the error of a failed save
# Bytes; the header of a safetensors file is padded with spaces to a multiple.
_ALIGNMENT: Final = 8


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint in host memory.

    Attributes:
        tensors: numbers of elements by key, for each of the rank's files (`part_of`).
        memory: the bytes of each file, uint8 (bytes,) on the CPU, with its tensors sorted by key.
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
        memory: of an earlier snapshot that is no longer read; it is reused if the size is equal.
    """
    files: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for kind, name, start, tensor in entries:
        files[part_of(kind)][f"{kind}|{name}|{start}"] = tensor
    copies = {part: _copy(values, (memory or {}).get(part)) for part, values in files.items()}
    tensors = {
        part: {key: tensor.numel() for key, tensor in values.items()}
        for part, values in files.items()
    }
    return Snapshot(rank, world_size, tensors, copies, position)


def write_snapshot(snapshot: Snapshot, folder: Location, token: str) -> Iterator[SavedFile]:
    """Write one rank's files, one after another.

    Args:
        token: identifies the save, in the names of its files.

    Raises:
        OSError: the storage does not accept them.
    """
    owner = f"{snapshot.rank:05d}-of-{snapshot.world_size:05d}-{token}"
    for part, content in snapshot.memory.items():
        name = f"{part}-{owner}.safetensors"
        yield write_file(folder, name, content.numpy().data, snapshot.tensors[part])


def _copy(values: Mapping[str, Tensor], memory: Tensor | None) -> Tensor:
    """The bytes of a safetensors file of these tensors, in fp32."""
    counts = {key: values[key].numel() for key in sorted(values)}  # safetensors' order of one dtype
    offsets = list(accumulate((FP32_BYTES * count for count in counts.values()), initial=0))
    described = {
        key: {"dtype": "F32", "shape": [count], "data_offsets": span}
        for (key, count), span in zip(counts.items(), pairwise(offsets), strict=True)
    }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    size = len(header) + offsets[-1]
    if memory is None or memory.numel() != size:
        memory = torch.empty(size, dtype=torch.uint8)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    copies = torch.split(memory[len(header) :].view(torch.float32), list(counts.values()))
    for key, copy in zip(counts, copies, strict=True):
        copy.copy_(values[key].detach())
    return memory


@dataclass(frozen=True)
class Part:
    """The files that a rank has written of a checkpoint, and why it has not written the others."""

    files: list[SavedFile]
    error: str = ""


# Waits until all ranks have written their parts or failed. Rank 0 gets the parts of all ranks, the
# other ranks get an empty list. Raises RuntimeError if some rank has died or is late: the ranks can
# no longer wait for each other.
Gather = Callable[[Part], list[Part]]


class CheckpointWriter:
    """Writes one rank's part of each checkpoint; rank 0 commits it, and removes old ones.

    Args:
        notify: called with kind, text and step of an event for the run's history.
        lock_number: number of the driver's lock of the run; None = there is none.
        gather: collects the parts of all ranks; by default there is only this rank.
        resumed: the checkpoint from which the run continues.
    """

    def __init__(
        self,
        run_folder: Location,
        keep: CheckpointConfig,
        notify: Callable[[EventKind, str, int], object],
        lock_number: int | None = None,
        gather: Gather = lambda part: [part],
        resumed: Checkpoint | None = None,
    ) -> None:
        self._run_folder, self._keep, self._notify = run_folder, keep, notify
        self._lock_number, self._gather = lock_number, gather
        self._num_failed = 0
        # On rank 0: step of the newest checkpoint, and checksum of its marker.
        self._committed = (resumed.position.step, resumed.sha256) if resumed else (-1, "")
        self._resumed_step, self._written = self._committed[0], set[int]()

    def write(self, snapshot: Snapshot) -> None:
        """Write this rank's part; rank 0 waits for the parts of all ranks, and commits.

        A failed save is reported, and training continues: the next save may succeed.

        Raises:
            OSError: on rank 0, too many saves in a row have failed.
            RuntimeError: as `Gather`.
            LockLostError: on rank 0, another driver has taken over the run.
        """
        step = snapshot.position.step
        folder = self._run_folder.child(folder_name(step))
        parts = self._gather(self._write_part(snapshot, folder))
        if snapshot.rank > 0:
            return
        try:
            self._commit(snapshot, folder, parts)
        except (OSError, DamagedCheckpointError) as error:
            self._notify(EventKind.CHECKPOINT_FAILED, f"{folder.path}: {error}", step)
            self._num_failed += 1
            if self._num_failed < MAX_FAILED_SAVES:
                return
            raise OSError(
                f"{self._num_failed} checkpoints in a row could not be written to "
                f"{folder.path}: {error}; free space there, or set output to another place "
                "that all workers share"
            ) from error
        self._num_failed = 0
        for tidy_up in (
            partial(write_note, self._run_folder, checkpoint=self._committed[1]),
            partial(self._prune, snapshot.position.progress),
        ):
            try:
                tidy_up()
            except (OSError, ValueError) as error:
                self._notify(EventKind.CHECKPOINT_LEFT, f"{self._run_folder.path}: {error}", step)

    def note_evaluation(self, progress: Progress) -> bool:
        """Record, on rank 0, the progress after an evaluation of the newest checkpoint.

        A failure is reported: the next start repeats the evaluation.

        Returns:
            False if this step has no checkpoint yet, and must be saved.

        Raises:
            LockLostError: another driver has taken over the run.
        """
        if not self.is_whole(progress.step):
            return False
        folder = self._run_folder.child(folder_name(progress.step))
        try:
            self._check_lock()
            write_note(folder, checkpoint=self._committed[1], progress=asdict(progress))
        except OSError as error:
            text = f"{folder.path}: {error}"
            self._notify(EventKind.EVALUATION_NOT_RECORDED, text, progress.step)
        return True

    def is_whole(self, step: int) -> bool:
        """On rank 0, whether the newest checkpoint is of this step."""
        return self._committed[0] == step

    def _write_part(self, snapshot: Snapshot, folder: Location) -> Part:
        """Write the files, or return the error: the other ranks wait for this rank's part."""
        token = uuid.uuid4().hex[:8]
        files: list[SavedFile] = []
        try:
            self._check_lock()
            for file in write_snapshot(snapshot, folder, token):
                files.append(file)  # also if the next one fails
        except Exception as error:
            return Part(files, str(error) or repr(error))
        return Part(files)

    def _commit(self, snapshot: Snapshot, folder: Location, parts: list[Part]) -> None:
        self._check_lock()
        files = [file for part in parts for file in part.files]
        failed = [(rank, part.error) for rank, part in enumerate(parts) if part.error]
        if failed:
            with contextlib.suppress(OSError):  # no rank writes any more; this frees the space
                for file in files:
                    folder.child(file.name).delete()
                if folder.is_local:  # a store has no empty folders
                    os.rmdir(folder.path)  # fails if other files are in it
            reasons = "; ".join(
                f"rank {rank}: {error}" for rank, error in failed[:_MAX_NAMED_RANKS]
            )
            raise OSError(f"not whole: {len(failed)} of {len(parts)} workers failed: {reasons}")
        sha256 = commit(folder, files, asdict(snapshot.position))
        self._committed = snapshot.position.step, sha256
        self._written.add(snapshot.position.step)

    def _prune(self, progress: Progress) -> None:
        keep, best = self._keep, progress.metrics.get(RESULT_STEP)
        prune(
            self._run_folder,
            # Newer ones than the resumed checkpoint were not usable.
            lambda step: step <= self._resumed_step or step in self._written,
            keep.keep_last,
            lambda step: step == best or is_due(step, keep.keep_every_steps, keep.keep_steps),
        )

    def _check_lock(self) -> None:
        if self._lock_number is not None:
            check_lock(self._run_folder, self._lock_number)
