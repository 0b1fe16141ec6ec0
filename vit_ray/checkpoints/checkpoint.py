"""Sharded checkpoints in a canonical form: any worker count and any ZeRO stage can read them.

A checkpoint is a folder `step-00001000` under the run's folder, of files as `checkpoint_format` has
them: fp32 fragments of parameters, their averages and the optimizer's states, and the run's
position. These no longer change: an evaluation after it is noted in a file of its own,
`progress.json`. Which of a run's folders counts is decided in `run_checkpoints`.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.checkpoints.checkpoint_format import (
    AVERAGE,
    WEIGHT,
    DamagedCheckpointError,
    PartialCheckpointError,
    SavedFile,
    check_coverage,
    commit,
    read_file,
    read_marker,
    read_tensors,
    sealed,
    unsealed,
)
from vit_ray.metric_names import DEV_LOSS, EVAL_LOSS, averaged_key
from vit_ray.storage import Location, read_again

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

# Kind, parameter, start in it, and values (n,) to be filled.
Entry = tuple[str, str, int, "Tensor"]

# In a checkpoint's folder: the run's progress after an evaluation. In a run's folder: that it has
# had a checkpoint, or before the first the id of its training.
PROGRESS: Final = "progress.json"
# Bits of a digest of samples, by parts.
_PARTS: Final = (0, 16, 32, 48)

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come: what steps change of it, apart from tensors.

    Attributes:
        step: steps completed.
        best_loss_key: metric that `best_eval_loss` is of.
        num_evals: evaluations among which the best is chosen.
        eval_step: of the last evaluation; -1 before the first.
        ended: why the run is over before its last step (early stopping); empty if it is not.
        evaluation_due: the last step is done, and the evaluation after it is not.
        train_seconds: time spent in steps, all attempts together.
        worker_seconds: the same, of each worker, all workers together.
        seconds: of the run by phase (`measure/phases.py`).
        until_s: Unix time until which `seconds` count.
        nonfinite_steps: steps in a row that were refused because they were not finite.
        skipped_steps: steps that were refused by `train.skip_above`.
        recent_norms: gradient norms of the last steps, which `train.skip_above` compares with.
        samples_digest: of the samples that the ranks received since `digest_from` (the function
            `samples_digest`), 16 hexadecimal digits; empty before the first checkpoint.
        digest_from: first 0-based step of the digest, which ends before `step`: 0, or where the run
            was resumed with another recipe or data set, or from a checkpoint without a digest.
        metrics: last value of every metric.
    """

    step: int = 0
    best_eval_loss: float | None = None
    best_loss_key: str = EVAL_LOSS
    evals_without_best: int = 0
    num_evals: int = 0
    eval_step: int = -1
    ended: str = ""
    evaluation_due: bool = False
    train_seconds: float = 0.0
    worker_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    until_s: float = 0.0
    nonfinite_steps: int = 0
    skipped_steps: int = 0
    recent_norms: list[float] = field(default_factory=list)
    samples_digest: str = ""
    digest_from: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

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
    """Where a run stands, and what it is: all that is not a tensor.

    Attributes:
        applied_steps: steps that moved the weights: Adam's bias correction counts these.
        samples_seen: position in the sample order from which the next batch is read.
        shapes: of every parameter, trained or frozen by the recipe.
        init_run_id: MLflow run whose weights the run began with.
        data_terms: `license` and `source_url` of the training set, where its maker gave them.
    """

    progress: Progress
    applied_steps: int
    samples_seen: int
    global_batch_size: int
    shapes: dict[str, list[int]]
    recipe: dict[str, Any]
    data_fingerprint: str
    tracking_run_id: str | None = None
    init_run_id: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data_terms: dict[str, str] = field(default_factory=dict)

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


def write_progress(folder: Location, marker_sha256: str, progress: Progress) -> None:
    """Note how far a run is after an evaluation of the checkpoint in `folder`.

    Raises:
        OSError: the storage does not take it.
    """
    note = {"checkpoint": marker_sha256, "progress": asdict(progress)}
    folder.child(PROGRESS).write(sealed(note))


def note_commit(folder: Location, marker_sha256: str) -> None:
    """Note in the run's folder that it has a checkpoint, the one in `folder`.

    Raises:
        OSError: the storage does not take it.
    """
    run_folder = Location(folder.protocol, folder.path.rpartition("/")[0])
    run_folder.child(PROGRESS).write(sealed({"checkpoint": marker_sha256}))


def read_progress(folder: Location) -> dict[str, Any]:
    """The note in a folder; empty if there is none, or it was changed."""
    try:
        return read_again(lambda: unsealed(folder.child(PROGRESS)), DamagedCheckpointError)
    except FileNotFoundError:
        return {}
    except DamagedCheckpointError as error:
        logger.warning("%s; it is ignored", error)
        return {}


class Checkpoint:
    """A whole checkpoint in storage, opened for reading; `sha256` is of its marker."""

    def __init__(
        self, folder: Location, files: list[SavedFile], position: Position, sha256: str
    ) -> None:
        self.folder, self.position, self.sha256 = folder, position, sha256
        self.files = files

    def verify(self) -> None:
        """Read every byte and compare checksums.

        Raises:
            DamagedCheckpointError: a file differs from what was written; names the file.
        """
        for file in self.files:
            read_file(self.folder, file)

    def has_average(self) -> bool:
        return any(kind == AVERAGE for file in self.files for _, kind, *_ in file.fragments())

    def takes_average(self, averaged: bool | None) -> bool:
        """Whether averaged weights are meant; None = if it has any.

        Raises:
            ValueError: it has none.
        """
        if averaged and not self.has_average():
            raise ValueError(f"{self.folder.uri} has no averaged weights; set averaged to null")
        return self.has_average() if averaged is None else averaged

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters by name, fp32, on the CPU; no GPU, process group or DeepSpeed needed."""
        import torch

        shapes = self.position.shapes  # which files that are there fill: memory is asked for once
        weights = {name: torch.empty(shape).view(-1) for name, shape in shapes.items()}
        kind = AVERAGE if averaged else WEIGHT
        self.fill((kind, name, 0, values) for name, values in weights.items())
        return {name: values.view(shapes[name]) for name, values in weights.items()}

    def fill(self, entries: Iterable[Entry]) -> None:
        """Copy saved values into the tensors of `entries`, however they were cut when saved.

        Only files that have some of them are read, each of them whole and against its checksum.

        Raises:
            DamagedCheckpointError: some element of a tensor was not in the checkpoint, or a file
                is not what was written.
        """
        wanted: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
        missing: Counter[str] = Counter()
        for kind, name, start, target in entries:
            wanted[kind, name].append((start, target))
            missing[kind] += target.numel()
        for file in self.files:
            copies = []
            for key, kind, name, start, count in file.fragments():
                for place, target in wanted.get((kind, name), []):
                    first, last = max(start, place), min(start + count, place + target.numel())
                    if first < last:
                        missing[kind] -= last - first
                        copies.append((target[first - place : last - place], key, first - start))
            tensors = read_tensors(self.folder, file) if copies else {}
            for target, key, skip in copies:
                target.copy_(tensors[key][skip : skip + target.numel()])
        if any(missing.values()):
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {sum(missing.values())} elements of "
                f"{', '.join(kind for kind, count in missing.items() if count)} that this run "
                "needs are not in it"
            )


def read_checkpoint(folder: Location) -> Checkpoint:
    """The whole checkpoint in `folder`; its tensors are read later.

    Raises:
        PartialCheckpointError: it is not committed.
        DamagedCheckpointError: what is there is not what was written.
        ValueError: it has another format.
    """
    marker = read_marker(folder)
    try:
        position = Position.from_json(marker.position)
        check_coverage(folder, marker.files, position.shapes)
        note = read_progress(folder)
        if note.get("checkpoint") == marker.sha256:
            position = replace(position, progress=Progress(**note["progress"]))
    except (TypeError, AttributeError):
        raise DamagedCheckpointError(f"checkpoint {folder.path}: its position is damaged") from None
    return Checkpoint(folder, marker.files, position, marker.sha256)


def open_checkpoint(folder: Location) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if it is not whole."""
    try:
        return read_checkpoint(folder)
    except (PartialCheckpointError, DamagedCheckpointError):
        return None


def copy_checkpoint(
    source: Location, target: Location, change: Callable[[Position], Position]
) -> None:
    """Copy a whole checkpoint file by file, each compared with its checksum, and commit the copy.

    Args:
        change: of the position, which names the run that the checkpoint is of.

    Raises:
        DamagedCheckpointError: a file is not what was written.
        OSError: the storage cannot be read or written; the copy does not count.
    """
    marker = read_marker(source)
    position = change(Position.from_json(marker.position))
    for file in marker.files:
        target.child(file.name).write(read_file(source, file))
    note_commit(target, commit(target, marker.files, position.to_json()).sha256)


def samples_digest(first_place: int, samples: NDArray[np.int64]) -> int:
    """64 bits of which sample stood at which place of which step, for consecutive samples.

    It is a sum of hashes: the digests of ranks and of steps add up in any order, to the same on any
    number of ranks.

    Args:
        first_place: step x global batch size + place in the batch, of the first.
    """
    places = np.arange(first_place, first_place + len(samples), dtype=np.uint64)
    return int(_mix(_mix(places) ^ samples.astype(np.uint64)).sum(dtype=np.uint64))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele et al. 2014): any two inputs have unlike outputs."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def add_digests(*digests: int) -> int:
    """The digest of the samples of all of them."""
    return sum(digests) % (1 << 64)


def to_floats(digest: int) -> list[float]:
    """Parts of 16 bits, whose sums over up to 2^37 ranks are exact in float64."""
    return [float(digest >> shift & 0xFFFF) for shift in _PARTS]


def of_floats(sums: list[float]) -> int:
    """The digest from its parts, or from sums of the parts of several ranks."""
    return add_digests(*(int(part) << shift for part, shift in zip(sums, _PARTS, strict=True)))
