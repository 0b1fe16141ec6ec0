"""Sharded checkpoints in a canonical form: any worker count and any ZeRO stage can read them.

A checkpoint is a folder `step-00001000` under the run's folder, of files as `checkpoint_format` has
them: fp32 fragments of parameters, their averages and the optimizer's states, and the run's
position. Which of a run's folders counts is decided in `run_checkpoints`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from vit_ray.checkpoints.checkpoint_format import (
    DamagedCheckpointError,
    PartialCheckpointError,
    Shard,
    check_coverage,
    commit,
    compare,
    marker_sha256,
    read_all,
    read_folder,
    verify_shard,
    write_part,
)
from vit_ray.metric_names import DEV_LOSS, EVAL_LOSS, averaged_key
from vit_ray.storage import Location, read_again

if TYPE_CHECKING:
    # Torch takes seconds to import: where tensors are written or read, and not where a driver asks
    # which checkpoint its run continues from.
    from torch import Tensor

    Entry = tuple[str, str, int, Tensor]
    """Kind, parameter, start in it, and values (n,) to be filled."""

WEIGHT, AVERAGE = "weight", "average"

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come: what steps change of it, apart from tensors."""

    step: int = 0
    """Steps completed."""
    best_eval_loss: float | None = None
    best_loss_key: str = EVAL_LOSS
    """Metric that `best_eval_loss` is of."""
    evals_without_best: int = 0
    num_evals: int = 0
    """Evaluations among which the best is chosen."""
    eval_step: int = -1
    """Step of the last evaluation; -1 before the first."""
    ended: str = ""
    """Why the run is over before its last step (early stopping); empty if it is not."""
    evaluation_due: bool = False
    """The last step is done, and the evaluation after it is not."""
    train_seconds: float = 0.0
    """Time spent in steps, all attempts together."""
    worker_seconds: float = 0.0
    """The same, of each worker, all workers together."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the run by phase (`measure/phases.py`)."""
    until_s: float = 0.0
    """Unix time until which `seconds` count."""
    nonfinite_steps: int = 0
    """Steps in a row that were refused because they were not finite."""
    skipped_steps: int = 0
    """Steps that were refused by `train.skip_above`."""
    recent_norms: list[float] = field(default_factory=list)
    """Gradient norms of the last steps, which `train.skip_above` compares with."""
    samples_digest: str = ""
    """Of the samples that the ranks received since `digest_from` (`checkpoints/sample_digest.py`),
    16 hexadecimal digits; empty before the first checkpoint."""
    digest_from: int = 0
    """First 0-based step of the digest, which ends before `step`: 0, or where the run was resumed
    with another recipe or data set, or from a checkpoint without a digest."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of every metric."""

    @property
    def loss_key(self) -> str:
        """The validation loss that decides: on held-out training images, if there are any.

        And of the averaged weights, if there are any.
        """
        key = DEV_LOSS if DEV_LOSS in self.metrics else EVAL_LOSS
        return averaged_key(key) if averaged_key(key) in self.metrics else key

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
    init_run_id: str | None = None
    """MLflow run whose weights the run began with."""
    versions: dict[str, str] = field(default_factory=dict)
    data_terms: dict[str, str] = field(default_factory=dict)
    """`license` and `source_url` of the training set, where its maker gave them."""

    @property
    def step(self) -> int:
        """Optimizer steps completed, applied or refused."""
        return self.progress.step

    def resumed(self, recipe: dict[str, Any], data_fingerprint: str) -> Progress:
        """The progress from which a run of this recipe and data set continues."""
        if (recipe, data_fingerprint) == (self.recipe, self.data_fingerprint):
            return self.progress
        return replace(self.progress, samples_digest="")  # the order may be another from here on

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


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` completed steps; names sort by step."""
    return f"step-{step:08d}"


def write_evaluation(folder: Location, progress: Progress) -> None:
    """Note how far a run is after an evaluation at the step of a committed checkpoint.

    It stands next to the folder, which no longer changes, and names the checkpoint by
    its marker: another one of the same step has not been evaluated.

    Raises:
        OSError: the storage does not take it.
    """
    note = {"checkpoint_sha256": marker_sha256(folder), "progress": asdict(progress)}
    evaluation_note(folder).write(json.dumps(note).encode())


def evaluation_note(folder: Location) -> Location:
    """The file next to a checkpoint's folder that records an evaluation made after it."""
    return Location(folder.protocol, f"{folder.path}.evaluated.json")


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
        return AVERAGE in self.kinds()

    def kinds(self) -> set[str]:
        return {kind for shard in self.shards for _, kind, *_ in shard.fragments()}

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters by name, fp32, on the CPU; no GPU, process group or DeepSpeed needed."""
        import torch

        shapes = self.position.shapes  # which files that are there fill: memory is asked for once
        found = {name: torch.empty(shape).view(-1) for name, shape in shapes.items()}
        kind = AVERAGE if averaged else WEIGHT
        self.fill((kind, name, 0, values) for name, values in found.items())
        return {name: values.view(shapes[name]) for name, values in found.items()}

    def parts(self, kind: str) -> Iterable[tuple[str, int, Tensor]]:
        """(parameter, start, values) of one kind, file by file."""
        for shard in self.shards:
            keys = [part for part in shard.fragments() if part[1] == kind]
            tensors = self._load(shard) if keys else {}
            yield from ((name, start, tensors[key]) for key, _, name, start, _ in keys)

    def fill(self, entries: Iterable[Entry]) -> None:
        """Copy saved values into the tensors of `entries`, however they were cut when saved.

        Raises:
            DamagedCheckpointError: some element of a tensor was not in the checkpoint.
        """
        wanted: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        for kind, name, start, target in entries:
            wanted.setdefault((kind, name), []).append((start, target))
        missing = dict.fromkeys((kind for kind, _ in wanted), 0)
        for (kind, _), targets in wanted.items():
            missing[kind] += sum(target.numel() for _, target in targets)
        for shard in self.shards:
            copies = []
            for key, kind, name, start, count in shard.fragments():
                for place, target in wanted.get((kind, name), []):
                    first, last = max(start, place), min(start + count, place + target.numel())
                    if first < last:
                        missing[kind] -= last - first
                        copies.append((target[first - place : last - place], key, first - start))
            tensors = self._load(shard) if copies else {}  # most files hold what other ranks need
            for target, key, skip in copies:
                target.copy_(tensors[key][skip : skip + target.numel()])
        if any(missing.values()):
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {sum(missing.values())} elements of "
                f"{', '.join(kind for kind, count in missing.items() if count)} that this run "
                "needs are not in it"
            )

    def _load(self, shard: Shard) -> dict[str, Tensor]:
        from safetensors.torch import load

        def content() -> bytes:
            content = self.folder.child(shard.file).read()
            compare(self.folder, shard, hashlib.sha256(content).hexdigest())
            return content

        tensors = load(read_again(content, DamagedCheckpointError))
        if {key: values.numel() for key, values in tensors.items()} != shard.tensors:
            raise DamagedCheckpointError(
                f"checkpoint file {self.folder.path}/{shard.file} holds other tensors than its "
                "index says"
            )
        return tensors


def read_checkpoint(folder: Location) -> Checkpoint:
    """The whole checkpoint in `folder`; its tensors are read later.

    Raises:
        PartialCheckpointError: it is not committed.
        DamagedCheckpointError: what is there is not what was written.
        ValueError: it has another format.
    """
    shards, saved = read_again(lambda: read_folder(folder), DamagedCheckpointError)
    try:
        position = Position.from_json(saved)
        check_coverage(folder, shards, position.shapes)
    except (TypeError, AttributeError):
        raise DamagedCheckpointError(f"checkpoint {folder.path}: its position is damaged") from None
    note = evaluation_note(folder)
    if note.exists():
        try:
            content = json.loads(note.read())
            if content["checkpoint_sha256"] == marker_sha256(folder):
                position = replace(position, progress=Progress(**content["progress"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            logger.warning(
                "%s does not describe an evaluation of this checkpoint, and is ignored", note.path
            )
    return Checkpoint(folder, shards, position)


def open_checkpoint(folder: Location) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if it is not whole."""
    try:
        return read_checkpoint(folder)
    except (PartialCheckpointError, DamagedCheckpointError):
        return None


def copy_checkpoint(
    source: Location, target: Location, change: Callable[[Position], Position]
) -> None:
    """Copy a whole checkpoint file by file and commit the copy, which is read back before.

    Args:
        change: of the position, which names the run that the checkpoint is of.

    Raises:
        DamagedCheckpointError: a file is not what was written.
        OSError: the storage cannot be read or written; the copy does not count.
    """
    shards, saved = read_folder(source)
    for rank, shard in enumerate(shards):  # in the order of the ranks, as `commit` lists them
        content = source.child(shard.file).read()
        compare(source, shard, hashlib.sha256(content).hexdigest())
        index: dict[str, Any] = {"tensors": shard.tensors}
        if rank == 0:
            index["position"] = change(Position.from_json(saved)).to_json()
        write_part(target, rank, len(shards), memoryview(content), index)
    commit(target, len(shards), lambda: None)
