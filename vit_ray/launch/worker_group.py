"""A run's workers: trained in a lane, with the reason of a failure told in one line."""

from __future__ import annotations

import ray

from vit_ray.data.stream.batches import StreamSpec
from vit_ray.launch.cluster import ClusterShape
from vit_ray.launch.lane import LaneEndedError, LaneShape, borrowed_lane
from vit_ray.launch.ray_policies import cause
from vit_ray.train.job import TrainJob


class RunFailedError(RuntimeError):
    """The run ended in an error; the message holds the cause."""


def run_workers(
    job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape, *, use_gpu: bool
) -> None:
    """Train on the recipe's group until it ends, through failures and resizes.

    Args:
        streams: what the workers read, by name, as in `RunPlan`.

    Raises:
        RunFailedError: training failed more often than the recipe allows, or cannot work.
    """
    shape = LaneShape.of(job, cluster, use_gpu=use_gpu)
    error: BaseException | None = None
    try:
        with borrowed_lane(shape, is_private=cluster.is_private) as lane:
            # While the lane's workers import: what keeps the record from being opened ends the run.
            ray.get(job.recorder.run_id.remote())
            lane.run(job, streams)
    except LaneEndedError as ended:
        error = ended.__cause__ or ended
    # A worker's own reason says more than the time-outs of those that waited for it.
    reason = ray.get(job.recorder.failure.remote()) or (cause(error) if error else None)
    if reason:
        raise RunFailedError(reason) from error
