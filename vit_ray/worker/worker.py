"""One Ray Train worker: builds model, engine, streams and checkpoint writer; runs an attempt."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import nn

from vit_ray.checkpoints.checkpoint import Checkpoint, Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, shared_folder
from vit_ray.outcomes import EventKind, RunFailedError
from vit_ray.training.collectives import all_max, all_sum, read_by_first
from vit_ray.training.engine import DeepSpeedEngine, Predictor, warm_up_process
from vit_ray.training.loop import Batch, EvaluationCutError, RankContext
from vit_ray.training.memory_estimate import chosen_micro_batch
from vit_ray.training.objective import build_objective, load_initial_weights, make_loss
from vit_ray.worker.attempt import Attempt, reported_failures
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import Streams, TrainJob, with_stream_errors
from vit_ray.worker.prefetch import device_batches
from vit_ray.worker.run_link import DELIVERY_S, RunLink
from vit_ray.worker.saving import CheckpointSaver, gather_by_own_group, restore_newest

# Batches that a worker has fetched beyond the batch in use.
BATCHES_AHEAD: Final = 2


def work(job: TrainJob, rank: int, world_size: int, streams: Streams, *, use_gpu: bool) -> None:
    """Train, or evaluate, to the end of the run or of this worker group."""
    warnings.filterwarnings("ignore", module="deepspeed|torch|ray")  # users cannot act on them
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    warm_up_process()
    device = training_device(use_gpu)
    link = RunLink(job.record, rank, world_size, job.recipe.train.step_timeout_s)
    link.beat(0)  # a stop may already be requested
    link.watchdog.start()
    try:
        with reported_failures(link):
            if attempt := begin(job, link, streams, device):
                attempt.run()
    finally:
        link.watchdog.stop()


def begin(job: TrainJob, link: RunLink, streams: Streams, device: torch.device) -> Attempt | None:
    """Set up the training, or evaluate; None if nothing remains to train.

    Raises:
        RunFailedError: a ValueError, which a restart would meet again: there is no usable
            checkpoint, or perhaps this host alone lacks a file or module of the user's.
    """
    try:
        if job.kind == "train":
            return set_up_attempt(job, link, streams, device)
        evaluate_alone(job, link, streams, device)
    except ValueError as error:
        raise RunFailedError(str(error)) from error
    return None


def training_device(use_gpu: bool) -> torch.device:
    """The CPU, or this worker's GPU, which also becomes torch's current device."""
    if not use_gpu:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device = get_device()
    torch.cuda.set_device(device)
    # DeepSpeed uses the GPU with this number. Ray sorts GPUs as text, so with more than ten GPUs
    # the worker of local rank 2 has GPU 10.
    os.environ["LOCAL_RANK"] = str(device.index)
    return device


def set_up_attempt(
    job: TrainJob, link: RunLink, streams: Streams, device: torch.device
) -> Attempt | None:
    """Build this worker's parts; all ranks call it. None if an earlier attempt ended the run.

    Raises:
        ValueError: as `shared_folder`, `checkpoint_to_resume` and `initial_model`.
    """
    recipe, train, world_size = job.recipe, job.recipe.train, link.world_size
    damaged = partial(link.note, EventKind.CHECKPOINT_DAMAGED, step=0)
    with link.watchdog.paused():  # storage has other limits
        run_folder = shared_folder(recipe.run_folder, job.lock_number)
        find = partial(checkpoint_to_resume, run_folder, damaged)
        checkpoint: Checkpoint | None = read_by_first(find, device)
    if checkpoint and checkpoint.position.progress.is_over(job.total_steps):
        return None
    # Ranks with different GPUs must do the same number of passes: the smallest size of all ranks.
    chosen = chosen_micro_batch(recipe, job.num_classes, world_size, job.micro_batch_limit)
    micro = -int(all_max([-float(chosen)], device)[0])
    samples_seen = checkpoint.position.samples_seen if checkpoint else 0
    # The first batch is read during the rest of the set-up.
    batches = training_batches(job, world_size, streams, samples_seen, device)
    engine = DeepSpeedEngine(
        initial_model(job, link, device, loads_weights=checkpoint is None),
        train,
        recipe.optim,
        micro_batch_size=micro,
        accumulation_steps=train.global_batch_size // (micro * world_size),
        loss_function=make_loss(recipe),
    )
    assert engine.device == device, (engine.device, device)
    progress = Progress()
    if checkpoint is not None:
        checkpoint = restore_newest(engine, checkpoint, find, damaged)
        position = checkpoint.position
        if position.samples_seen != samples_seen:  # an older checkpoint
            batches = training_batches(job, world_size, streams, position.samples_seen, device)
        progress = position.resumed(recipe.recorded(), job.data_fingerprint)
        text = f"from step {position.step} ({position.samples_seen} samples seen)"
        link.note(EventKind.RESUMED, text, position.step)
    link.clock.resume(progress.seconds, progress.until_s, job.ray_ready_s, job.place_wait_s)
    writer = CheckpointWriter(
        run_folder,
        recipe.checkpoint,
        link.record.event,
        job.lock_number,
        gather_by_own_group(),
        checkpoint,
    )
    link.watchdog.note_step(progress.step)
    link.watchdog.expect_long_step()
    return Attempt(
        job,
        RankContext(
            job.total_steps,
            link.rank,
            world_size,
            micro,
            partial(all_sum, device=device),
            evaluate_at=job.evaluate_at,
        ),
        link,
        engine,
        batches,
        Evaluator(job, engine, streams, link),
        CheckpointSaver(job, engine, writer, link),
        progress,
    )


def evaluate_alone(job: TrainJob, link: RunLink, streams: Streams, device: torch.device) -> None:
    """The work of a run that only evaluates.

    Raises:
        ValueError: as `initial_model` and `Evaluator.evaluate`.
    """
    model = initial_model(job, link, device, loads_weights=True)
    predictor = Predictor(model, job.recipe.train, device)
    try:
        link.log(0, Evaluator(job, predictor, streams, link).evaluate(0))
    except EvaluationCutError:
        text = f"{link.asked_stop_reason()}; the evaluation has no results"
        link.note(EventKind.STOPPED, text, 0, DELIVERY_S)


def training_batches(
    job: TrainJob, world_size: int, streams: Streams, samples_seen: int, device: torch.device
) -> Iterator[Batch]:
    """This rank's batches after the first `samples_seen` of the run."""
    batch_size = job.recipe.train.global_batch_size
    total_samples = job.total_steps * batch_size
    if samples_seen >= total_samples:
        return iter(())  # at most the last evaluation remains
    batches = streams.training_batches(batch_size // world_size, samples_seen, total_samples)
    return device_batches(with_stream_errors(batches), device, BATCHES_AHEAD)


def initial_model(
    job: TrainJob, link: RunLink, device: torch.device, *, loads_weights: bool
) -> nn.Module:
    """The model with its initial weights; their source becomes an event; all ranks call it.

    Args:
        loads_weights: start from `init_from`; False if a checkpoint is restored afterwards.

    Raises:
        ValueError: the weights do not fit the model, or do not exist, or a custom component.
        RuntimeError: this rank has read other weights than rank 0; the next attempt reads them
            again.
    """
    recipe = job.recipe
    torch.manual_seed(recipe.seed)
    model = build_objective(recipe, job.num_classes)
    if recipe.init_from is None or not loads_weights:
        return model
    report = load_initial_weights(model, recipe.init_from, job.new_head)
    # The other run may still train, or a file may be damaged on one host.
    if read_by_first(lambda: report, device) != report:
        raise RuntimeError(f"the workers have read different weights; this one: {report}")
    link.note(EventKind.WEIGHTS, report, 0)
    return model
