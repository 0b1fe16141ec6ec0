"""One Ray Train worker, composed of its parts."""

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import ray
import ray.exceptions
import ray.train
import torch
import torch.distributed as dist
from torch import nn

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.outcomes import EventKind
from vit_ray.ray_internals import preemption_notice, without_retry_note
from vit_ray.storage import locate
from vit_ray.training.engine.collectives import all_max, all_sum
from vit_ray.training.engine.deepspeed_setup import warm_up_process
from vit_ray.training.engine.predictor import Predictor
from vit_ray.training.loop import Batch, RankContext
from vit_ray.worker.attempt import Attempt, EvaluationAttempt, run_attempt
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import GroupStart, Streams, TrainJob, UnrecoverableError
from vit_ray.worker.nonfinite import NonfinitePolicy, describe_batch
from vit_ray.worker.resume_point import agreed_checkpoint, restore_newest
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import (
    CheckpointSaver,
    check_folder_is_shared,
    gather_by_own_group,
)
from vit_ray.worker.setup import (
    build_engine,
    check_same_on_all_ranks,
    choose_micro_batch,
    initial_model,
    open_batches,
)
from vit_ray.worker.watchdog import Watchdog


def work(start: GroupStart) -> None:
    """Train, or evaluate, to the end of the run or of this worker's group."""
    quiet_libraries()
    job, context = start.job, ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    first = rank - context.get_local_rank()
    host_ranks = range(first, first + context.get_local_world_size())
    # The server's process starts while this one imports.
    streams = start.streams.for_rank(start.name, rank, world_size, host_ranks)
    warm_up_process()
    device = training_device(start.use_gpu)
    link = RunLink(job.record, rank, world_size)
    set_up = set_up_attempt if job.kind == "train" else set_up_evaluation
    run_attempt(link, partial(set_up, job, link, streams, device))


def quiet_libraries() -> None:
    """Library warnings that a user cannot act on."""
    for module in ("deepspeed", "torch", "ray"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


def training_device(use_gpu: bool) -> torch.device:
    """The GPU that Ray gave this worker, made torch's current device; or the CPU."""
    if not use_gpu:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device = get_device()
    torch.cuda.set_device(device)
    # DeepSpeed computes on the GPU with this number. Ray sorts the GPUs of its workers as text, so
    # with more than ten GPUs the worker of local rank 2 has GPU 10.
    os.environ["LOCAL_RANK"] = str(device.index)
    return device


def set_up_attempt(
    job: TrainJob, link: RunLink, streams: Streams, device: torch.device
) -> Attempt | None:
    """Build this worker's parts, all ranks together; None if an earlier attempt ended the run."""
    recipe, run_folder = job.recipe, locate(job.run_folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    watchdog = _started_watchdog(job, link)
    unless_set_up: contextlib.ExitStack[None] = contextlib.ExitStack()
    with unless_set_up:
        unless_set_up.callback(watchdog.stop)
        check_folder_is_shared(job, platform.node())
        damaged = partial(link.note, EventKind.CHECKPOINT_DAMAGED, step=0)
        with watchdog.paused():  # storage has its own limits
            checkpoint = agreed_checkpoint(run_folder, damaged, device)
        if checkpoint and checkpoint.position.progress.is_over(job.total_steps):
            return None
        micro = choose_micro_batch(
            job, world_size, lambda images: -int(all_max([-float(images)], device)[0])
        )
        context = RankContext(
            job.total_steps,
            rank,
            world_size,
            micro,
            partial(all_sum, device=device),
            evaluate_at=job.evaluate_at,
        )
        seen = checkpoint.position.samples_seen if checkpoint else 0
        batches = _training_batches(job, world_size, streams, seen, device)
        model = _model(job, link, device, loads_weights=checkpoint is None)
        engine = build_engine(job, model, micro, world_size)
        unless_set_up.callback(engine.close)
        assert engine.device == device, (engine.device, device)
        progress = Progress()
        if checkpoint is not None:
            newest = checkpoint
            checkpoint = restore_newest(engine, newest, run_folder, damaged)
            position = checkpoint.position
            if checkpoint is not newest:
                seen = position.samples_seen
                batches = _training_batches(job, world_size, streams, seen, device)
            progress = position.resumed(recipe.recorded(), job.data_fingerprint)
            text = f"from step {position.step} ({position.samples_seen} samples seen)"
            link.note(EventKind.RESUMED, text, position.step)
        link.clock.resume(progress.seconds, progress.until_s, job.ray_ready_s, job.place_wait_s)
        writer = CheckpointWriter(
            run_folder,
            recipe.checkpoint,
            link.note_own,
            job.lock_number,
            gather_by_own_group(),
            checkpoint,
        )
        saver = CheckpointSaver(job, engine.state, writer, link, watchdog)
        describe = partial(describe_batch, engine, micro_batch_size=micro)
        nonfinite = NonfinitePolicy(recipe.train, link, describe)
        evaluator = Evaluator(job, engine, _opener(job, streams, world_size), link, watchdog)
        watchdog.begin_steps(progress.step)
        unless_set_up.pop_all()
        return Attempt(
            job,
            context,
            link,
            engine,
            batches,
            evaluator,
            saver,
            nonfinite,
            watchdog,
            progress,
            preemption_notice,
        )


def set_up_evaluation(
    job: TrainJob, link: RunLink, streams: Streams, device: torch.device
) -> EvaluationAttempt:
    """Build this worker's parts of an evaluation, which has the model's weights alone."""
    watchdog = _started_watchdog(job, link)
    try:
        check_folder_is_shared(job, platform.node())
        model = _model(job, link, device, loads_weights=True)
        predictor = Predictor(model, job.recipe.train, device)
    except BaseException:
        watchdog.stop()
        raise
    opener = _opener(job, streams, dist.get_world_size())
    watchdog.begin_steps(0)
    return EvaluationAttempt(link, Evaluator(job, predictor, opener, link, watchdog), watchdog)


def _started_watchdog(job: TrainJob, link: RunLink) -> Watchdog:
    watchdog = Watchdog(0, job.recipe.train.step_timeout_s, link.beat, link.note_hang)
    link.beat(0)  # a stop may have been requested before
    watchdog.start()
    return watchdog


def _model(job: TrainJob, link: RunLink, device: torch.device, *, loads_weights: bool) -> nn.Module:
    """The model with its initial weights, whose source becomes an event."""
    model, report = initial_model(job, loads_weights=loads_weights)
    if report is not None:
        check_same_on_all_ranks(str(report), device)
        link.note(EventKind.WEIGHTS, str(report), 0)
    return model


def _opener(job: TrainJob, streams: Streams, world_size: int) -> Callable[[str], Iterator[Batch]]:
    """Opens this rank's evaluation batches of a named stream."""
    return lambda name: _refusing(
        streams.evaluation_batches(name, job.evaluation_batch(name, world_size))
    )


def _training_batches(
    job: TrainJob, world_size: int, streams: Streams, samples_seen: int, device: torch.device
) -> Iterator[Batch]:
    batch = job.recipe.train.global_batch_size
    if samples_seen >= job.total_steps * batch:
        return iter(())  # nothing of the run is left, or only its last evaluation
    share = batch // world_size
    batches = streams.training_batches(share, samples_seen, job.total_steps * batch)
    return open_batches(_refusing(batches), device)


def _refusing(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches.

    Raises:
        UnrecoverableError: an error of the stream (such as too many bad images) that would happen
            again.
    """
    try:
        yield from batches
    except ray.exceptions.RayTaskError as error:
        cause: BaseException = error  # the original error, without the wrappers of Ray's processes
        while isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if isinstance(cause, ValueError):
            raise UnrecoverableError(without_retry_note(str(cause)), is_agreed=False) from None
        raise
