"""One Ray Train worker, composed of its parts; nothing else in this room knows Ray Train."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray.exceptions
import ray.train
import ray.train.torch
from ray.train import CheckpointUploadMode

from vit_ray.ray_internals import preemption_notice
from vit_ray.storage import Location, locate
from vit_ray.train.attempt import Attempt, WorkerHooks, resume_from, run_attempt
from vit_ray.train.checkpoint_writer import CheckpointWriter
from vit_ray.train.collectives import ProcessGroup
from vit_ray.train.evaluation import Evaluator
from vit_ray.train.job import TrainJob, UnrecoverableError
from vit_ray.train.loop import Batch, RankContext
from vit_ray.train.nonfinite import NonfinitePolicy, describe_batch, roll_back
from vit_ray.train.progress import Progress
from vit_ray.train.run_link import RunLink
from vit_ray.train.saving import (
    CheckpointSaver,
    Publish,
    check_folder_is_shared,
    open_chosen_checkpoint,
)
from vit_ray.train.setup import build_engine, choose_micro_batch, open_batches
from vit_ray.train.watchdog import Watchdog


def train_worker(config: dict[str, Any]) -> None:
    """What `TorchTrainer` runs on every worker; `config["job"]` is a `TrainJob`."""
    job: TrainJob = config["job"]
    quiet_libraries()
    link = RunLink(job.recorder, ray.train.get_context().get_world_rank())
    run_attempt(job, link, lambda start_step: set_up_attempt(job, link, start_step))


def quiet_libraries() -> None:
    """Warnings of libraries that a user can do nothing about."""
    for module in ("deepspeed", "torch", "ray"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


def set_up_attempt(job: TrainJob, link: RunLink, start_step: int | None) -> Attempt:
    """Build this worker's parts; all ranks do it together.

    Args:
        start_step: the checkpoint that the stream was built for; None = there is none.
    """
    recipe, run_folder = job.recipe, locate(job.run_folder)
    check_folder_is_shared(job, platform.node())
    context = _rank_context(job, run_folder)
    batches = _training_batches(job, context) if job.kind == "train" else iter(())
    checkpoint = None if start_step is None else open_chosen_checkpoint(run_folder, start_step)
    engine, report = build_engine(
        job, context.micro_batch_size, context.world_size, loads_weights=checkpoint is None
    )
    if report is not None:
        link.note("weights", str(report), 0)
    progress = Progress() if checkpoint is None else resume_from(checkpoint, engine, link)
    watchdog = Watchdog(progress.step, recipe.train.step_timeout_s, link.beat, link.note_hang)
    writer = CheckpointWriter(run_folder, recipe.checkpoint, link.note_own, job.lock_number)
    saver = CheckpointSaver(job, engine, writer, _publisher(run_folder), link, watchdog)
    nonfinite = NonfinitePolicy(
        recipe.train,
        link,
        lambda batch: describe_batch(engine, batch, context.micro_batch_size),
        lambda: roll_back(engine, run_folder, saver, watchdog),
    )

    def evaluation_batches(name: str) -> Iterator[Batch]:
        return _stream_batches(name, batch_size=recipe.evaluate.batch_size)

    evaluator = Evaluator(job, engine, evaluation_batches, link, watchdog)
    hooks = WorkerHooks(
        link, evaluator, saver, nonfinite, watchdog, preemption_notice, job.ray_ready_s
    )
    watchdog.start()
    return Attempt(job, context, link, engine, batches, hooks, watchdog, progress)


def _rank_context(job: TrainJob, run_folder: Location) -> RankContext:
    ray_context = ray.train.get_context()
    rank, world_size = ray_context.get_world_rank(), ray_context.get_world_size()
    group = ProcessGroup(ray.train.torch.get_device())
    # Ranks on unlike GPUs, or that read the limit at unlike times, must pass equally often.
    micro = -int(group.max([-float(choose_micro_batch(job, run_folder, world_size))])[0])
    return RankContext(job.total_steps, rank, world_size, micro, group)


def _training_batches(job: TrainJob, context: RankContext) -> Iterator[Batch]:
    share = context.batch_size_per_rank(job.recipe.train.global_batch_size)

    def iter_batches(**options: Any) -> Iterator[Any]:
        return _stream_batches("train", **options)

    return open_batches(job, iter_batches, share, ray.train.torch.get_device())


def _stream_batches(name: str, **options: Any) -> Iterator[Any]:
    """Batches of this rank's part of a stream."""
    return refusals_end_the_run(ray.train.get_dataset_shard(name).iter_batches(**options))


def refusals_end_the_run(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches.

    Raises:
        UnrecoverableError: what the stream refuses (too many bad images, say), which it would
            refuse again.
    """
    try:
        yield from batches
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ValueError):
            raise UnrecoverableError(str(error.cause), is_agreed=False) from None
        raise


def _publisher(run_folder: Location) -> Publish:
    """Reports to Ray Train, whose upload thread does the writing."""
    storage = run_folder.for_ray()

    def publish(name: str, metrics: dict[str, float], write: Callable[[], None]) -> None:
        def upload(_: Any, __: str) -> ray.train.Checkpoint:
            write()
            return ray.train.Checkpoint(run_folder.child(name).path, storage)

        ray.train.report(
            metrics,
            checkpoint=ray.train.Checkpoint(run_folder.path, storage),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
        )

    return publish
