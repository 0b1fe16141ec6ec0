"""What a training worker is given, and the errors with which it ends an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vit_ray.config import Recipe
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.tracking.recorder import Recorder

if TYPE_CHECKING:  # the controller, which carries a job, needs no torch
    from vit_ray.models.fitting import NewHead


@dataclass(frozen=True)
class TrainJob:
    """Everything that a worker needs to know; the driver makes it, Ray sends it."""

    recipe: Recipe
    kind: Literal["train", "evaluate"]
    num_classes: int
    total_steps: int
    """Steps of the whole run, for the learning rate schedule."""
    data_fingerprint: str
    run_folder: str
    new_head: NewHead
    """How `init_from` treats the head: as in `initialize_weights`."""
    few_shot_classes: int
    ray_ready_s: float
    """Unix time at which Ray was up, for the time to the first step."""
    record: Recorder
    """Workers use it through `run_link.RunLink`."""
    lock_number: int | None
    """Number of the driver's lock of the run's folder; None if nothing is written there."""
    num_evaluated: Mapping[str, int] = field(default_factory=dict)
    """Images of each stream, by its name."""
    few_shot_labels: Callable[[], NDArray[np.int32]] | None = None
    """Reads the first label of every image that few-shot examples are drawn from."""
    answers: Answers | None = None
    """Of an evaluation: the correct answers for its images."""
    classes: tuple[str, ...] = ()
    """Names of the data set's classes, for display."""
    data_terms: Mapping[str, str] = field(default_factory=dict)
    """Licence and source address of the training set, if its maker gave them."""
    init_run_id: str | None = None
    """MLflow run whose weights it began with, for its checkpoints."""
    evaluate_at: tuple[int, ...] = ()
    """Steps at which it is evaluated in addition to those of the recipe."""
    micro_batch_limit: int | None = None
    """Most images per pass, after more did not fit into memory in an earlier attempt."""

    place_wait_s: float = 0.0
    """How long this worker group waited for its place."""

    def evaluation_batch(self, stream: str, world_size: int) -> int:
        """Images of a rank in one pass: no more than it has, since the rest would be padding."""
        share = -(-self.num_evaluated[stream] // world_size)
        return min(self.recipe.evaluate.batch_size, share)


class Streams(Protocol):
    """One rank's streams; `batches` in `data/` describes the batches."""

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Any]:
        """Positions [start, stop) of the run in batches of `share` rows of a global batch."""

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Any]:
        """An evaluation stream: each image once, in order."""


class OpensStreams(Protocol):
    """Opens the streams of a run for a worker."""

    def for_rank(self, group: str, rank: int, world_size: int, ranks: range) -> Streams:
        """`group`: name of the worker group; `ranks`: of this rank's host."""


@dataclass(frozen=True)
class GroupStart:
    """What the driver gives to each worker of a group that starts."""

    job: TrainJob
    name: str
    """New at each start."""
    use_gpu: bool
    streams: OpensStreams


class UnrecoverableError(RuntimeError):
    """A restart would meet the same error: the run must end."""

    def __init__(self, text: str, *, is_agreed: bool = True) -> None:
        """`is_agreed`: all workers raise it at the same place, so that all may simply return."""
        super().__init__(text)
        self.is_agreed = is_agreed


class DivergedError(UnrecoverableError):
    """The loss or the gradient is not finite, and the recipe says to end the run then."""


class SmallerMicroBatchError(RuntimeError):
    """A pass did not fit into memory; the next attempt takes at most `limit` images."""

    def __init__(self, text: str, limit: int) -> None:
        super().__init__(text, limit)
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])
