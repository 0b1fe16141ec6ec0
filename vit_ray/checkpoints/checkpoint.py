"""Sharded checkpoints in a canonical form: any worker count and any ZeRO stage can read them.

A checkpoint is a folder `step-00001000` under the run's folder, in the format of
`checkpoint_format`: fp32 fragments of parameters, their averages and the optimizer's states, and
the run's position. These files never change: an evaluation after the checkpoint is noted in another
file, `progress.json`. `run_checkpoints` decides which of a run's folders counts.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.checkpoints.checkpoint_format import (
    AVERAGE,
    WEIGHT,
    DamagedCheckpointError,
    PartialCheckpointError,
    SavedFile,
    commit,
    read_file,
    read_marker,
    sealed,
    unsealed,
)
from vit_ray.metric_names import DEV_LOSS, EVAL_LOSS, averaged_key
from vit_ray.storage import Location, read_again

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor

# A fragment: kind, name of the parameter, start in the parameter, and values (n,).
Entry = tuple[str, str, int, "Tensor"]

# In a checkpoint's folder: its checksum (`checkpoint`), and the `progress` after an evaluation.
# In a run's folder: the newest checkpoint's checksum, or before the first checkpoint the id of the
# `training`.
PROGRESS: Final = "progress.json"
# Above all digests of samples: sums over up to 2^13 ranks are exact in float64.
_DIGESTS: Final = 1 << 40

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is: its state that changes in steps, without tensors.

    Attributes:
        step: steps completed.
        best_loss_key: the metric of `best_eval_loss`.
        evals_without_best: evaluations since the best one.
        num_evals: evaluations from which the best is chosen.
        ended: why the run ended before its last step (early stopping); empty otherwise.
        evaluation_due: the last step is done, and the evaluation after it is not.
        train_seconds: time spent in steps, summed over all attempts.
        worker_seconds: the same, summed over all workers.
        seconds: durations of the run's phases (`measure/phases.py`).
        until_s: Unix time at the end of `seconds`.
        nonfinite_steps: consecutive steps that were refused because they were not finite.
        skipped_steps: steps that were refused by `train.skip_above`.
        recent_norms: gradient norms of the last steps, with which `train.skip_above` compares.
        samples_digest: digest of the samples that the ranks received since `digest_from` (the
            function `samples_digest`); None before the first step.
        digest_from: first 0-based step of the digest, which ends before `step`: 0, or the step at
            which the run was resumed with another recipe or data set, or without a digest.
        metrics: last value of every metric.
    """

    step: int = 0
    best_eval_loss: float | None = None
    best_loss_key: str = EVAL_LOSS
    evals_without_best: int = 0
    num_evals: int = 0
    ended: str = ""
    evaluation_due: bool = False
    train_seconds: float = 0.0
    worker_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    until_s: float = 0.0
    nonfinite_steps: int = 0
    skipped_steps: int = 0
    recent_norms: list[float] = field(default_factory=list)
    samples_digest: int | None = None
    digest_from: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss_key(self) -> str:
        """The validation loss that chooses the best evaluation.

        On held-out training images and of the averaged weights, if the run has them.
        """
        key = DEV_LOSS if DEV_LOSS in self.metrics else EVAL_LOSS
        return averaged_key(key) if averaged_key(key) in self.metrics else key

    def is_over(self, total_steps: int) -> bool:
        """Whether a run of `total_steps` has ended, including its last evaluation."""
        return bool(self.ended) or (self.step >= total_steps and not self.evaluation_due)


@dataclass(frozen=True)
class Position:
    """The part of a checkpoint that is not tensors: a run's progress and what it trains.

    Attributes:
        applied_steps: steps that changed the weights: Adam's bias correction counts these.
        samples_seen: position in the sample order at which the next batch begins.
        shapes: shapes of all parameters, trained or frozen by the recipe.
        init_run_id: MLflow run whose weights the run began with.
        data_terms: `license` and `source_url` of the training set, if its manifest has them.
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
        return replace(self.progress, samples_digest=None)  # the order may be another from here on

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Position:
        """The reverse of `dataclasses.asdict`."""
        return cls(**{**saved, "progress": Progress(**saved["progress"])})


def folder_name(step: int) -> str:
    """Folder of the checkpoint after `step` completed steps; names sort by step."""
    return f"step-{step:08d}"


def write_note(folder: Location, **note: Any) -> None:
    """Write the `PROGRESS` of a checkpoint's or a run's folder.

    Raises:
        OSError: the storage does not accept it.
    """
    folder.child(PROGRESS).write(sealed(note))


def read_note(folder: Location) -> dict[str, Any]:
    """The content of `PROGRESS` in a folder; empty if there is no such file, or it was changed."""
    try:
        return read_again(lambda: unsealed(folder.child(PROGRESS)), DamagedCheckpointError)
    except FileNotFoundError:
        return {}
    except DamagedCheckpointError as error:
        logger.warning("%s; it is ignored", error)
        return {}


class Checkpoint:
    """A complete checkpoint in storage, opened for reading; `sha256` is the marker's checksum."""

    def __init__(
        self, folder: Location, files: list[SavedFile], position: Position, sha256: str
    ) -> None:
        self.folder, self.position, self.sha256 = folder, position, sha256
        self.files = files

    def verify(self) -> None:
        """Read every byte and compare checksums.

        Raises:
            DamagedCheckpointError: naming a file that differs from what was written.
        """
        for file in self.files:
            read_file(self.folder, file)

    def has_average(self) -> bool:
        return any(kind == AVERAGE for file in self.files for _, kind, *_ in file.fragments())

    def takes_average(self, averaged: bool | None) -> bool:
        """Whether to read averaged weights; None = if the checkpoint has any.

        Raises:
            ValueError: they are requested, and there are none.
        """
        if averaged and not self.has_average():
            raise ValueError(f"{self.folder.uri} has no averaged weights; set averaged to null")
        return self.has_average() if averaged is None else averaged

    def weights(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters by name, fp32, on the CPU; no GPU, process group or DeepSpeed needed."""
        import torch

        shapes = self.position.shapes
        weights = {name: torch.empty(shape).view(-1) for name, shape in shapes.items()}
        kind = AVERAGE if averaged else WEIGHT
        self.fill((kind, name, 0, values) for name, values in weights.items())
        return {name: values.view(shapes[name]) for name, values in weights.items()}

    def fill(self, entries: Iterable[Entry]) -> None:
        """Copy saved values into the tensors of `entries`, for any division into fragments.

        Reads only files that have some of the values, each completely and compared with its
        checksum.

        Raises:
            DamagedCheckpointError: the checkpoint lacks some element of a tensor, or a file was
                changed.
        """
        from safetensors.torch import load

        wanted: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)
        missing: Counter[str] = Counter()
        for kind, name, start, target in entries:
            wanted[kind, name].append((start, target))
            missing[kind] += target.numel()
        for file in self.files:
            copies = []
            for key, kind, name, start, count in file.fragments():
                for begin, target in wanted.get((kind, name), []):
                    first, last = max(start, begin), min(start + count, begin + target.numel())
                    if first < last:
                        missing[kind] -= last - first
                        copies.append((target[first - begin : last - begin], key, first - start))
            tensors = load(read_file(self.folder, file)) if copies else {}
            for target, key, skip in copies:
                target.copy_(tensors[key][skip : skip + target.numel()])
        if any(missing.values()):
            raise DamagedCheckpointError(
                f"checkpoint {self.folder.path}: {sum(missing.values())} elements of "
                f"{', '.join(kind for kind, count in missing.items() if count)} that this run "
                "needs are not in it"
            )


def read_checkpoint(folder: Location) -> Checkpoint:
    """The checkpoint in `folder`; its tensors are read later.

    Raises:
        PartialCheckpointError: the folder is not committed.
        DamagedCheckpointError: a file is missing, was changed, or has another size.
        ValueError: the checkpoint has another format.
    """
    marker, note = read_marker(folder), read_note(folder)
    position = Position.from_json(marker.position)
    if note.get("checkpoint") == marker.sha256:
        position = replace(position, progress=Progress(**note["progress"]))
    return Checkpoint(folder, marker.files, position, marker.sha256)


def open_checkpoint(folder: Location) -> Checkpoint | None:
    """The checkpoint in `folder`, or None if it is damaged or not committed."""
    try:
        return read_checkpoint(folder)
    except (PartialCheckpointError, DamagedCheckpointError):
        return None


def copy_checkpoint(
    source: Location, run_folder: Location, change: Callable[[Position], Position]
) -> None:
    """Copy a checkpoint to another run, each file compared with its checksum, and commit the copy.

    Args:
        change: changes the position, which names the checkpoint's run.

    Raises:
        DamagedCheckpointError: a file was changed.
        OSError: the storage cannot be read or written; the copy does not count.
    """
    marker = read_marker(source)
    position = change(Position.from_json(marker.position))
    folder = run_folder.child(folder_name(position.step))
    for file in marker.files:
        folder.child(file.name).write(read_file(source, file))
    write_note(run_folder, checkpoint=commit(folder, marker.files, asdict(position)))


def samples_digest(first_index: int, samples: NDArray[np.int64]) -> int:
    """A 40-bit digest of consecutive samples and of their indices in the training.

    It is a sum of hashes: the digests of ranks and steps add up in any order, to the same digest on
    any number of ranks.

    Args:
        first_index: step x global batch size + index in the batch, of the first sample.
    """
    indices = np.arange(first_index, first_index + len(samples), dtype=np.uint64)
    return add_digests(int(_mix(_mix(indices) ^ samples.astype(np.uint64)).sum(dtype=np.uint64)))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele et al. 2014), a bijection of 64-bit numbers."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def add_digests(*digests: int) -> int:
    """The digest of the samples of several digests, or of sums of them, in any order."""
    return sum(digests) % _DIGESTS
