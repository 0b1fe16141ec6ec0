"""Sharded checkpoints in a canonical form: any worker count and any ZeRO stage can read them.

A checkpoint is a folder `step-00001000` under the run's folder, of files as `checkpoint_format` has
them: fp32 fragments of parameters, their averages and the optimizer's states, and the run's
position. Which of a run's folders counts is decided in `run_checkpoints`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
    Shard,
    check_coverage,
    compare,
    is_committed,
    marker_sha256,
    read_all,
    read_folder,
    verify_shard,
    write_part,
)
from vit_ray.retry import read_again
from vit_ray.storage import Location

if TYPE_CHECKING:
    # Torch takes seconds to import: where tensors are written or read, and not where a driver asks
    # which checkpoint its run goes on from.
    from torch import Tensor

    from vit_ray.checkpoints.fragments import Fragment, State

WEIGHT, AVERAGE = "weight", "average"
LEAST_BYTES = 2
"""Of an element: moments may be in bf16."""

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come: what steps change of it, apart from tensors."""

    step: int = 0
    """Steps completed."""
    best_eval_loss: float | None = None
    best_loss_key: str = "eval/loss"
    """Metric that `best_eval_loss` is of."""
    evals_without_best: int = 0
    num_evals: int = 0
    """Evaluations of which the best is chosen."""
    eval_step: int = -1
    """Step of the last evaluation; -1 before the first."""
    ended: str = ""
    """Why the run is over before its last step (early stopping); empty if it is not."""
    evaluation_due: bool = False
    """The last step is done, and the evaluation after it is not."""
    train_seconds: float = 0.0
    """Time spent training, all attempts together."""
    worker_seconds: float = 0.0
    """The same, of each worker, all workers together."""
    nonfinite_steps: int = 0
    """Refused steps in a row."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of every metric."""

    @property
    def loss_key(self) -> str:
        """The validation loss that decides: on held-out images beside a test set, if there are any.

        And of the averaged weights, if there are any.
        """
        images = "dev" if "dev/loss" in self.metrics else "eval"
        averaged = f"{images}/averaged_loss"
        return averaged if averaged in self.metrics else f"{images}/loss"

    def is_over(self, total_steps: int) -> bool:
        """Whether nothing is left to do of a run of so many steps."""
        return bool(self.ended) or (self.step >= total_steps and not self.evaluation_due)


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
    """Shape of every parameter, trained or frozen by the recipe."""
    recipe: dict[str, Any]
    data_fingerprint: str
    tracking_run_id: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Optimizer steps completed, applied or refused."""
        return self.progress.step

    def to_json(self) -> dict[str, Any]:
        """One flat object: the fields of the progress are on one level with the others."""
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


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` completed steps; names sort by step."""
    return f"step-{step:08d}"


def take_snapshot(
    fragments: Iterable[Fragment],
    optimizer_state: State,
    state_keys: tuple[str, ...],
    averages: dict[str, list[tuple[int, Tensor]]] | None,
    position: Position,
    rank: int,
    world_size: int,
    frozen: Iterable[Fragment] = (),
    second_moments: Iterable[tuple[str, Fragment]] = (),
) -> Snapshot:
    """Copy this rank's state to host memory; training may go on as soon as this returns.

    Args:
        frozen: fragments that are not trained; they have no state, and are their own average.
        second_moments: of one rank, (kind, values) that are not kept for each element.
    """
    tensors: dict[str, Tensor] = {}
    for fragment in fragments:
        tensors[_key(WEIGHT, fragment.name, fragment.start)] = _to_host(fragment.weight)
        for key in state_keys:
            values = fragment.state(optimizer_state, key)
            tensors[_key(key, fragment.name, fragment.start)] = _to_host(values)
    for name, parts in (averages or {}).items():
        for start, values in parts:
            tensors[_key(AVERAGE, name, start)] = _to_host(values)
    for fragment in frozen:
        for kind in (WEIGHT,) if averages is None else (WEIGHT, AVERAGE):
            tensors[_key(kind, fragment.name, fragment.start)] = _to_host(fragment.weight)
    for kind, fragment in second_moments:
        tensors[_key(kind, fragment.name, fragment.start)] = _to_host(fragment.weight)
    return Snapshot(rank, world_size, tensors, position)


def write_snapshot(snapshot: Snapshot, folder: Location) -> None:
    """Write one rank's part, and read it back.

    Raises:
        OSError: the storage does not take it; nothing that counts as a checkpoint is left.
        FileExistsError: the folder has been committed; nothing was written.
        DamagedCheckpointError: what was written is not what can be read.
    """
    from safetensors.torch import save

    if is_committed(folder):
        raise FileExistsError(f"step {snapshot.position.step} is committed; it is left as it is")
    index: dict[str, Any] = {
        "tensors": {key: values.numel() for key, values in snapshot.tensors.items()}
    }
    if snapshot.rank == 0:
        index["position"] = snapshot.position.to_json()
    write_part(folder, snapshot.rank, snapshot.world_size, save(snapshot.tensors), index)


def write_evaluation(folder: Location, progress: Progress) -> None:
    """Note how far a run is after an evaluation at the step of a committed checkpoint.

    It stands beside the folder, in which nothing is written any more, and names the checkpoint by
    its marker: another one of the same step has not been evaluated.

    Raises:
        OSError: the storage does not take it.
    """
    note = {"checkpoint_sha256": marker_sha256(folder), "progress": asdict(progress)}
    evaluation_note(folder).write(json.dumps(note).encode())


def evaluation_note(folder: Location) -> Location:
    """The file beside a checkpoint's folder that records an evaluation made after it."""
    return Location(folder.filesystem, f"{folder.path}.evaluated.json")


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
        read_all(self.shards, lambda shard: verify_shard(self.folder, shard))

    def has_average(self) -> bool:
        """Whether averaged weights were saved."""
        return any(key.startswith(f"{AVERAGE}|") for s in self.shards for key in s.tensors)

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters by name, fp32, on the CPU; no GPU, process group or DeepSpeed needed."""
        import torch

        kind = AVERAGE if averaged else WEIGHT
        self._check_counts(kind)
        full = {
            name: torch.full((math.prod(shape),), float("nan"))
            for name, shape in self.position.shapes.items()
        }
        for name, start, values in self.parts(kind):
            full[name][start : start + values.numel()] = values
        return {name: t.view(self.position.shapes[name]) for name, t in full.items()}

    def _check_counts(self, kind: str) -> None:
        """Before memory is asked for: all is there, and fits into the files that are there.

        Raises:
            DamagedCheckpointError: it does not; opening it has shown that no two parts overlap.
        """
        counts = dict.fromkeys(self.position.shapes, 0)
        for shard in self.shards:
            for part, name, _, count in shard.fragments():
                if part == kind and name in counts:
                    counts[name] += count
            if LEAST_BYTES * sum(shard.tensors.values()) > shard.bytes:
                raise DamagedCheckpointError(
                    f"checkpoint file {self.folder.path}/{shard.file} of {shard.bytes} bytes "
                    f"cannot hold {sum(shard.tensors.values())} elements"
                )
        shapes = self.position.shapes.items()
        missing = [name for name, shape in shapes if counts[name] != math.prod(shape)]
        if missing:
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {kind} of {', '.join(missing[:5])} is incomplete"
            )

    def parts(self, kind: str) -> Iterable[tuple[str, int, Tensor]]:
        """(parameter, start, values) of one kind, file by file."""
        for shard in self.shards:
            if not any(key.startswith(f"{kind}|") for key in shard.tensors):
                continue
            for key, values in self._load(shard).items():
                its_kind, name, start = key.split("|")
                if its_kind == kind:
                    yield name, int(start), values

    def fill(self, kinds: dict[str, list[tuple[Fragment, Tensor]]]) -> None:
        """Copy saved values into tensors that mirror fragments, however those are sharded.

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
            for key, values in self._load(shard).items():
                kind, name, start = key.split("|")
                for fragment, destination in wanted.get((kind, name), []):
                    missing -= _copy_overlap(values, int(start), fragment.start, destination)
        if missing:
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {missing} elements of {', '.join(kinds)} that "
                "this run needs are not in it"
            )

    def _load(self, shard: Shard) -> dict[str, Tensor]:
        from safetensors.torch import load

        tensors = load(read_again(lambda: self._content(shard), DamagedCheckpointError))
        if {key: values.numel() for key, values in tensors.items()} != shard.tensors:
            raise DamagedCheckpointError(
                f"checkpoint file {self.folder.path}/{shard.file} holds other tensors than its "
                "index says"
            )
        return tensors

    def _content(self, shard: Shard) -> bytes:
        content = self.folder.child(shard.file).read()
        compare(self.folder, shard, hashlib.sha256(content).hexdigest())
        return content


def read_checkpoint(folder: Location) -> Checkpoint:
    """The whole checkpoint in `folder`; its tensors are read later.

    Raises:
        PartialCheckpointError: nobody has committed it.
        DamagedCheckpointError: what is there is not what was written.
        ValueError: it has another format.
    """
    content = read_again(lambda: read_folder(folder), DamagedCheckpointError)
    try:
        position = Position.from_json(content.position)
        check_coverage(folder, content.shards, position.shapes)
    except (TypeError, AttributeError):
        raise DamagedCheckpointError(f"checkpoint {folder.path}: its position is damaged") from None
    return Checkpoint(folder, content.shards, _after_evaluation(folder, position))


def _after_evaluation(folder: Location, position: Position) -> Position:
    """With the progress of an evaluation that was made after it was written."""
    note = evaluation_note(folder)
    if not note.exists():
        return position
    try:
        content = json.loads(note.read())
        if content["checkpoint_sha256"] == marker_sha256(folder):
            return replace(position, progress=Progress(**content["progress"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        logger.warning(
            "%s does not describe an evaluation of this checkpoint, and is ignored", note.path
        )
    return position


def open_checkpoint(folder: Location) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if it is not whole."""
    try:
        return read_checkpoint(folder)
    except (PartialCheckpointError, DamagedCheckpointError):
        return None


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
    import torch

    return values.detach().to("cpu", torch.float32, copy=True).contiguous()


def _copy_overlap(values: Tensor, start: int, wanted_start: int, destination: Tensor) -> int:
    first = max(start, wanted_start)
    last = min(start + values.numel(), wanted_start + destination.numel())
    if first >= last:
        return 0
    target = destination.narrow(0, first - wanted_start, last - first)
    target.copy_(values.narrow(0, first - start, last - first))
    return last - first
