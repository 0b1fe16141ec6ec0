"""The job of a training worker, and the errors that end an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vit_ray.config import Recipe
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.outcomes import RunFailedError
from vit_ray.ray_internals import original_error, without_retry_note
from vit_ray.tracking.recorder import Recorder

if TYPE_CHECKING:  # the driver, which makes a job, needs no torch
    from vit_ray.models.fitting import NewHead


@dataclass(frozen=True)
class TrainJob:
    """Everything that the driver sends to a worker.

    Attributes:
        total_steps: steps of the run, for the learning rate schedule.
        new_head: how `init_from` treats the head: as in `SavedWeights`.
        ray_ready_s: Unix time at which Ray was up, for the time to the first step.
        record: workers use it through `run_link.RunLink`.
        lock_number: number of the driver's lock of the run's folder; None if nothing is written
            there.
        num_evaluated: number of images of each evaluation stream, by name.
        few_shot_labels: reads the first label of every image that few-shot examples are drawn from.
        answers: the correct answers of an evaluation, if other than the labels of the stream.
        classes: names of the data set's classes, for display.
        data_terms: license and source address of the training set, if known.
        init_run_id: MLflow run of the initial weights, for checkpoints.
        evaluate_at: steps to evaluate at, in addition to the recipe's.
        micro_batch_limit: maximum images per pass, after more did not fit in an earlier attempt.
        place_wait_s: how long this worker group waited for CPUs and GPUs.
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


class NonfiniteError(RunFailedError):
    """Raised by all workers at the same step, so none waits for another."""


class SmallerMicroBatchError(RuntimeError):
    """A pass did not fit into memory; the next attempt takes at most `limit` images."""

    def __init__(self, text: str, limit: int) -> None:
        super().__init__(text, limit)
        self.limit = limit

    def __str__(self) -> str:
        return str(self.args[0])


def with_stream_errors(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; an error that a restart would meet again is a `RunFailedError`.

    Such as too many bad images: a ValueError of the stream.
    """
    try:
        yield from batches
    except Exception as error:
        cause = original_error(error)
        if cause is not error and isinstance(cause, ValueError):
            raise RunFailedError(without_retry_note(str(cause))) from None
        raise
