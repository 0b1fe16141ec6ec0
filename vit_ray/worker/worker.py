"""One Ray Train worker, composed of its parts; no other module in this folder uses Ray Train.

A worker belongs to a pool: its group is placed once and takes one training after another, each with
its own process group, engine and streams. After the death of another worker, which is replaced, the
training is repeated from its checkpoint: imports and compiled code stay.
"""

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
import ray.util
import torch
import torch.distributed as dist

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.measure.goodput import TimeClass
from vit_ray.outcomes import EventKind
from vit_ray.ray_internals import preemption_notice, without_retry_note
from vit_ray.storage import Location, locate
from vit_ray.training.engine.collectives import all_max, all_sum
from vit_ray.training.engine.deepspeed_setup import warm_up_process
from vit_ray.training.loop import Batch, RankContext
from vit_ray.training.memory.out_of_memory import is_out_of_memory
from vit_ray.worker.attempt import Attempt, run_attempt
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import TrainJob, UnrecoverableError
from vit_ray.worker.nonfinite import NonfinitePolicy, describe_batch
from vit_ray.worker.pool_link import (
    REASSIGNED_S,
    Assignment,
    GroupBrokenError,
    Member,
    PoolLink,
    Streams,
)
from vit_ray.worker.process_group import (
    RankPlace,
    joined_process_group,
    leave_process_group,
    open_store,
)
from vit_ray.worker.resume_point import ResumePoint, ResumePointChoice, choose_resume_point
from vit_ray.worker.run_link import DELIVERY_S, RunLink
from vit_ray.worker.saving import (
    CheckpointSaver,
    check_folder_is_shared,
    open_chosen_checkpoint,
    start_thread,
    writers_have_ended,
)
from vit_ray.worker.setup import (
    build_engine,
    choose_micro_batch,
    open_batches,
)
from vit_ray.worker.watchdog import Watchdog, end_process


def serve_pool(config: dict[str, Any]) -> None:
    """What Ray Train runs on every worker: the pool's trainings, until there are no more.

    Args:
        config: `server`, the handle of the pool's `PoolServer`; `replaces`: a worker whose process
            has died is replaced alone, and the others join the new one.
    """
    quiet_libraries()
    warm_up_process()  # while the driver plans, and the streams' process starts
    context = ray.train.get_context()
    pool = PoolLink(config["server"], context.get_world_rank(), context.get_world_size())
    for assignment in pool.assignments():
        try:
            _train(assignment, pool, context.get_world_rank(), replaces=config["replaces"])
        except RuntimeError as error:
            if not config["replaces"] or not _may_be_of_others(error):
                raise
            leave_process_group(keeps_compiled=True)
            if not (writers_have_ended() and pool.is_reassigned(assignment, REASSIGNED_S)):
                raise
            continue
        pool.end(assignment)


def _may_be_of_others(error: RuntimeError) -> bool:
    """Whether another rank's end may have caused it: torch has no type for that."""
    is_ours = type(error).__module__.startswith("vit_ray")
    return isinstance(error, GroupBrokenError) or not (is_ours or is_out_of_memory(error))


def quiet_libraries() -> None:
    """Library warnings that a user cannot act on."""
    for module in ("deepspeed", "torch", "ray"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


def _train(assignment: Assignment, pool: PoolLink, rank: int, *, replaces: bool) -> None:
    job = assignment.job
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    device = training_device(assignment.use_gpu)
    node = ray.get_runtime_context().get_node_id()
    timeout_s = job.recipe.workers.collective_timeout_s
    store = open_store(host, timeout_s) if rank == 0 else None
    member = Member(host, node, os.getpid(), f"{host}:{store.port}" if store else "")
    group, members = pool.meet(assignment, member, timeout_s)
    place = RankPlace.of(rank, [one.host for one in members])
    link = RunLink(job.record, job.control, rank, place.world_size, host, node, own_place())
    streams = assignment.streams.for_rank(group, rank, place.world_size, place.host_ranks)

    def end_hang() -> None:
        silent = link.silent_ranks(job.recipe.train.step_timeout_s / 2) if replaces else []
        if not (replaces and pool.end_silent(assignment, silent)):
            end_process()

    def is_broken() -> bool:
        return replaces and pool.is_reassigned(assignment)

    with joined_process_group(
        place,
        device,
        members[0].store,
        store,
        host=host,
        backend="nccl" if assignment.use_gpu else "gloo",
        timeout_s=timeout_s,
    ):
        set_up = partial(set_up_attempt, job, link, streams, place, device, end_hang, is_broken)
        run_attempt(link, set_up)
    if rank == 0:
        link.send_work(DELIVERY_S)


def own_place() -> str:
    """GPU, process and log file of this worker: Ray sends standard error to a separate file."""
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    log = os.readlink("/proc/self/fd/2") if os.path.exists("/proc/self/fd/2") else ""
    parts = [f"GPU {', '.join(gpus)}"] if gpus else []
    parts += [f"pid {os.getpid()}", f"log {log}" if log.endswith(".err") else ""]
    return ", ".join(filter(None, parts))


def training_device(use_gpu: bool) -> torch.device:
    """The GPU that Ray gave this worker, made torch's current device; or the CPU."""
    if not use_gpu:
        return torch.device("cpu")
    from ray.train.torch import get_device

    device = get_device()
    torch.cuda.set_device(device)
    return device


def set_up_attempt(
    job: TrainJob,
    link: RunLink,
    streams: Streams,
    place: RankPlace,
    device: torch.device,
    end_hang: Callable[[], None],
    is_broken: Callable[[], bool],
) -> Attempt | None:
    """Build this worker's parts, all ranks together; None if an earlier attempt ended the run."""
    recipe, run_folder = job.recipe, locate(job.run_folder)
    watchdog = Watchdog(0, recipe.train.step_timeout_s, link.beat, link.note_hang, end=end_hang)
    link.beat(0)  # later errors name this worker's place
    watchdog.start()
    unless_set_up: contextlib.ExitStack[None] = contextlib.ExitStack()
    with unless_set_up:
        unless_set_up.callback(watchdog.stop)
        check_folder_is_shared(job, platform.node())
        point = ResumePoint(None, 0)
        if job.kind == "train":
            watchdog.pause()  # the selection has its own limit
            with link.clock.within(TimeClass.RESTORING):
                point = _agreed_point(job, link, run_folder, place.rank)
            watchdog.resume()
            if point.is_over:
                return None
        micro = choose_micro_batch(
            job,
            run_folder,
            place.world_size,
            lambda images: -int(all_max([-float(images)], device)[0]),
            place.rank,
        )
        context = RankContext(
            job.total_steps,
            place.rank,
            place.world_size,
            micro,
            partial(all_sum, device=device),
            evaluate_at=job.evaluate_at,
        )
        batches = _training_batches(job, place.world_size, streams, point.samples_seen, device)
        checkpoint = None if point.step is None else open_chosen_checkpoint(run_folder, point.step)
        engine, report = build_engine(
            job,
            micro,
            place.world_size,
            loads_weights=checkpoint is None,
        )
        unless_set_up.callback(engine.close)
        assert engine.device == device, (engine.device, device)
        if report is not None:
            link.note(EventKind.WEIGHTS, str(report), 0)
        progress = Progress()
        if checkpoint is not None:
            try:
                with link.clock.within(TimeClass.RESTORING):
                    engine.restore(checkpoint)
            except DamagedCheckpointError:
                raise  # the next attempt selects an older one
            except ValueError as error:
                raise UnrecoverableError(str(error)) from None
            position = checkpoint.position
            progress = position.resumed(recipe.recorded(), job.data_fingerprint)
            text = f"from step {position.step} ({position.samples_seen} samples seen)"
            link.note(EventKind.RESUMED, text, position.step)
        writer = CheckpointWriter(run_folder, recipe.checkpoint, link.note_own, job.lock_number)
        saver = CheckpointSaver(job, engine.state, writer, link, watchdog, start_thread, is_broken)
        describe = partial(describe_batch, engine, micro_batch_size=micro)
        nonfinite = NonfinitePolicy(recipe.train, link, describe)

        def evaluation_batches(name: str) -> Iterator[Batch]:
            size = job.evaluation_batch(name, place.world_size)
            return _refusing(streams.evaluation_batches(name, size))

        evaluator = Evaluator(job, engine, evaluation_batches, link, watchdog)
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


def _agreed_point(job: TrainJob, link: RunLink, run_folder: Location, rank: int) -> ResumePoint:
    """The checkpoint that rank 0 selects to continue from, broadcast to all ranks."""
    note = partial(link.note, step=0)
    choosing: ResumePointChoice | None = None
    if rank == 0:
        choosing = ResumePointChoice(lambda: choose_resume_point(run_folder, job.total_steps, note))
    chosen: list[ResumePoint | str | None] = [None]
    while chosen[0] is None:
        # Reading a checkpoint back may take longer than a collective operation is allowed to.
        chosen = [choosing.wait(note) if choosing else None]
        dist.broadcast_object_list(chosen, src=0)
    point = chosen[0]
    if isinstance(point, ResumePoint):
        return point
    raise UnrecoverableError(point)


def _training_batches(
    job: TrainJob, world_size: int, streams: Streams, samples_seen: int, device: torch.device
) -> Iterator[Batch]:
    batch = job.recipe.train.global_batch_size
    if job.kind != "train" or samples_seen >= job.total_steps * batch:
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
