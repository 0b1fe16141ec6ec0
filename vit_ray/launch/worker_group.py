"""Runs a training on a lane's workers, and reports the reason of a failure in one line."""

from __future__ import annotations

from typing import Final

from vit_ray.data.stream.batches import StreamSpec
from vit_ray.launch.actor_calls import ANSWER_LIMIT_S
from vit_ray.launch.cluster import ClusterShape
from vit_ray.launch.lane import LaneEndedError, LaneLostError, LaneShape, borrowed_lane
from vit_ray.launch.placement_wait import NoPlaceError, StoppedWaitingError
from vit_ray.launch.ray_policies import cause
from vit_ray.outcomes import EventKind, Failure
from vit_ray.train.job import TrainJob

MOST_LANES: Final = 4
"""Of one training; a lane is lost where the process of its server dies, as for lack of memory."""


class RunFailedError(RuntimeError):
    """The run ended in an error; the message holds the cause."""


class RunDivergedError(RunFailedError):
    """Its loss or gradient is not finite: the same recipe would diverge again."""


def run_workers(
    job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape, *, use_gpu: bool
) -> None:
    """Train on the recipe's group until it ends, through failures and resizes.

    A stop while the group has no place ends it with the event `stopped`, as workers end it who
    have written a checkpoint before.

    Args:
        streams: what the workers read, by name, as in `ResolvedRun`.

    Raises:
        RunDivergedError: the loss or the gradient is not finite.
        RunFailedError: training failed more often than the recipe allows, or cannot work.
    """
    shape = LaneShape.of(job.recipe, cluster, use_gpu=use_gpu, trains=job.kind == "train")
    error: BaseException | None = None
    for _ in range(MOST_LANES):
        error = _run_in_lane(shape, job, streams, cluster)
        if not isinstance(error, LaneLostError):
            break
        text = f"{error}; the training goes on with new workers"
        job.record.event(EventKind.WORKER_FAILED, text, 0)
    # A worker's own reason says more than the time-outs of those that waited for it.
    failure = job.control.failure()
    if isinstance(error, StoppedWaitingError) and failure is None:
        text = f"{error}; no workers were running, so no checkpoint was written for it"
        job.record.event(EventKind.STOPPED, text, 0, ANSWER_LIMIT_S)
        return
    if failure is None and error is not None:
        failure = Failure(cause(error.__cause__ or error))
    if failure is not None:
        kind = RunDivergedError if failure.has_diverged else RunFailedError
        raise kind(failure.reason) from error


def _run_in_lane(
    shape: LaneShape, job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape
) -> Exception | None:
    """Why the lane ended before the training did; None if it did not."""
    try:
        with borrowed_lane(shape, is_private=cluster.is_private) as lane:
            # While the lane's workers import: what keeps the record from being opened ends the run.
            job.record.run_id(ANSWER_LIMIT_S)
            lane.run(job, streams)
    except (LaneEndedError, NoPlaceError) as ended:
        return ended
    return None
