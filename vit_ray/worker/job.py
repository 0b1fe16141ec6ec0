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

if TYPE_CHECKING:  # the driver, which makes a job, needs no torch
    from vit_ray.models.fitting import NewHead


@dataclass(frozen=True)
class TrainJob:
    """Everything that a worker needs to know; the driver makes it, Ray sends it.

    Attributes:
        total_steps: steps of the whole run, for the learning rate schedule.
        new_head: how `init_from` treats the head: as in `initialize_weights`.
        ray_ready_s: unix time at which Ray was up, for the time to the first step.
        record: workers use it through `run_link.RunLink`.
        lock_number: number of the driver's lock of the run's folder; None if nothing is written
            there.
        num_evaluated: images of each stream, by its name.
        few_shot_labels: reads the first label of every image that few-shot examples are drawn from.
        answers: of an evaluation: the correct answers for its images.
        classes: names of the data set's classes, for display.
        data_terms: licence and source address of the training set, if its maker gave them.
        init_run_id: MLflow run whose weights it began with, for its checkpoints.
        evaluate_at: steps at which it is evaluated in addition to those of the recipe.
        micro_batch_limit: most images per pass, after more did not fit into memory in an earlier
            attempt.
        place_wait_s: how long this worker group waited for its place.
    """

    recipe: Recipe
    kind: Literal["train", "evaluate"]
    num_classes: int
    total_steps: int
    data_fingerprint: str
    new_head: NewHead
    few_shot_classes: int
    ray_ready_s: float
    record: Recorder
    lock_number: int | None
    num_evaluated: Mapping[str, int] = field(default_factory=dict)
    few_shot_labels: Callable[[], NDArray[np.int32]] | None = None
    answers: Answers | None = None
    classes: tuple[str, ...] = ()
    data_terms: Mapping[str, str] = field(default_factory=dict)
    init_run_id: str | None = None
    evaluate_at: tuple[int, ...] = ()
    micro_batch_limit: int | None = None

    place_wait_s: float = 0.0


class Streams(Protocol):
    """One rank's streams; `batches` in `data/` describes the batches."""

    def training_batches(self, share: int, start: int, stop: int) -> Iterator[Any]:
        """Positions [start, stop) of the run in batches of `share` rows of a global batch."""

    def evaluation_batches(self, name: str, batch_size: int) -> Iterator[Any]:
        """An evaluation stream: each image once, in order."""


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
