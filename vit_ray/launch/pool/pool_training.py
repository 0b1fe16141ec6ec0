"""Runs a training on a pool's workers, and reports the cause of a failure in one line."""

import logging
import sys
from typing import Final

from vit_ray.config import Recipe
from vit_ray.config.secrets import redact
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.pool.actor_calls import ANSWER_LIMIT_S
from vit_ray.launch.pool.failure_causes import cause
from vit_ray.launch.pool.group_callbacks import newest_step
from vit_ray.launch.pool.placement_wait import NoPlaceError, StoppedWaitingError
from vit_ray.launch.pool.worker_pool import PoolEndedError, PoolLostError, PoolShape, open_pool
from vit_ray.outcomes import EventKind, Failure
from vit_ray.worker.job import TrainJob

logger = logging.getLogger(__name__)

MOST_POOLS: Final = 4
"""Lost pools of one training without a new checkpoint between them. A pool is lost if the process
of its server or controller dies, for example from lack of memory."""


class RunFailedError(RuntimeError):
    """The run ended in an error; the message has the cause."""


class RunDivergedError(RunFailedError):
    """The loss or gradient is not finite: the same recipe would diverge again."""


def run_workers(
    job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape, *, use_gpu: bool
) -> None:
    """Train on the recipe's worker group until it ends, through failures and resizes.

    A stop before the group is placed ends the training with the event `stopped`, the same as
    workers send after their last checkpoint.

    Args:
        streams: what the workers read, by name, as in `ResolvedRun`.

    Raises:
        RunDivergedError: the loss or the gradient is not finite.
        RunFailedError: training failed more often than the recipe allows, or cannot work.
    """
    shape = PoolShape.of(job.recipe, cluster, use_gpu=use_gpu, trains=job.kind == "train")
    error: BaseException | None = None
    num_lost, lost_at = 0, -1
    while num_lost < MOST_POOLS:
        error = None
        try:
            with open_pool(shape, job.run_folder, is_private=cluster.is_private) as pool:
                # While the pool's workers import: an error in opening the record ends the run.
                if job.record.run_id(ANSWER_LIMIT_S) is None:
                    _say_that_the_record_waits(job.recipe)
                pool.run(job, streams)
        except (PoolEndedError, NoPlaceError) as ended:
            error = ended
        if not isinstance(error, PoolLostError):
            break
        newest = newest_step(job.run_folder)
        num_lost, lost_at = (num_lost + 1 if newest == lost_at else 1), newest
        after = "training continues with new workers"
        if num_lost == MOST_POOLS:
            after = (
                f"{num_lost} such losses without a new checkpoint between them; check the memory "
                "of that host, then run the same command again"
            )
        job.record.event(EventKind.WORKER_FAILED, f"{error}; {after}", 0)
    # A worker's own error says more than the time-outs of those that waited for it.
    failure = job.control.failure()
    if isinstance(error, StoppedWaitingError) and failure is None:
        text = f"{error}; no workers were running, so no checkpoint was written"
        job.record.event(EventKind.STOPPED, text, 0, ANSWER_LIMIT_S)
        return
    if failure is None and error is not None:
        failure = Failure(cause(error.__cause__ or error))
    if failure is not None:
        kind = RunDivergedError if failure.has_diverged else RunFailedError
        raise kind(failure.reason) from error


def _say_that_the_record_waits(recipe: Recipe) -> None:
    """A note for a SQLite file, whose schema takes MLflow seconds; a warning for a server."""
    uri = redact(recipe.tracking.uri)
    if uri.startswith("sqlite:"):
        print(
            f"MLflow is still creating or opening {uri}; {recipe.name} trains meanwhile, and is "
            "recorded there when it is open",
            file=sys.stderr,
            flush=True,
        )
    else:
        logger.warning(
            "MLflow at %s does not answer; %s continues, and its record waits in %s",
            uri,
            recipe.name,
            recipe.run_folder,
        )
