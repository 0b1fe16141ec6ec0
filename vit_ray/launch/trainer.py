"""One training (or evaluation) from recipe to result: checks, recorder, Ray Train, history."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer

from vit_ray.config import Recipe
from vit_ray.data.bad_rows import BadRowLimit
from vit_ray.data.ingest import PendingEvaluation, PendingStream, StreamConfig
from vit_ray.launch.cluster import ClusterShape, connect
from vit_ray.launch.lease import held
from vit_ray.launch.preflight import (
    RunPlan,
    check_cluster,
    check_same_run,
    check_weights,
    find_resume_point,
    plan_run,
    spool_path,
)
from vit_ray.launch.progress import shown_progress
from vit_ray.launch.recorder import start_recorder
from vit_ray.storage import locate
from vit_ray.train.checkpoint import (
    Checkpoint,
    discard_newer,
    newest_checkpoint,
    newest_verified_checkpoint,
)
from vit_ray.train.worker import TrainJob, train_worker

_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_GIVEN_START_TIMEOUT = os.environ.get(_START_TIMEOUT)

Kind = Literal["pretrain", "finetune", "sweep_trial", "study_cell", "evaluate"]
_HEADS: dict[str, bool] = {"finetune": True, "sweep_trial": True, "evaluate": False}


@dataclass(frozen=True)
class RunResult:
    """What came of a run."""

    run_id: str | None
    """MLflow run; None if MLflow was away all the time."""
    name: str
    steps: int
    """Optimizer steps completed."""
    total_steps: int
    metrics: dict[str, float]
    """Last value of every metric."""
    checkpoint: str
    """Folder of the newest checkpoint."""
    already_complete: bool = False
    """The run had ended before; nothing was trained."""
    hint: str = ""
    """How to open MLflow's page."""
    events: list[str] = field(default_factory=list)
    """What happened on the way: restarts, refused steps, failed saves."""

    ended: str = ""
    """Why it was over before its last step (early stopping); empty if it was not."""

    @property
    def is_complete(self) -> bool:
        """Whether it reached its end (and was not stopped on request)."""
        return self.steps >= self.total_steps or bool(self.ended)


class RunFailedError(RuntimeError):
    """The run ended in an error; the message holds the cause."""


@dataclass(frozen=True)
class Family:
    """The sweep or study that a run is part of."""

    recorder: Any
    """Recorder of the parent run, which shows how far its children are."""
    node_id: str
    """Node of the parent's driver, where MLflow is written."""


def train(
    recipe: Recipe,
    *,
    kind: Kind = "pretrain",
    tags: dict[str, str] | None = None,
    family: Family | None = None,
) -> RunResult:
    """Train as the recipe says, from the newest checkpoint of this name if there is one.

    Raises:
        ValueError: the recipe cannot work; nothing was started.
        RunFailedError: training failed more often than the recipe allows.
    """
    recipe = recipe.with_absolute_paths()
    plan = plan_run(recipe)
    resume_from = find_resume_point(recipe)
    if resume_from is not None:
        check_same_run(recipe, resume_from, plan.manifest.fingerprint)
        if resume_from.position.step >= plan.total_steps or resume_from.position.ended:
            return _finished_before(recipe, resume_from, plan.total_steps)
    else:
        check_weights(recipe)
    cluster = connect(recipe)
    use_gpu = check_cluster(recipe, cluster)
    # A sweep or study holds its trainings, too.
    with held(locate(recipe.run_folder)) if family is None else contextlib.nullcontext():
        return _run(recipe, plan, kind, tags or {}, cluster, use_gpu, resume_from, family)


def finetune(recipe: Recipe, *, tags: dict[str, str] | None = None) -> RunResult:
    """Train from the weights in `init_from` with a new head; positions are resized.

    Raises:
        ValueError: no weights are given, or as `train`.
    """
    if recipe.init_from is None:
        raise ValueError("init_from is not set; give the run, checkpoint or file to fine-tune")
    return train(recipe, kind="finetune", tags=tags)


def evaluate(recipe: Recipe) -> dict[str, float]:
    """Accuracy, and few-shot accuracy if the recipe asks for it, of the weights in `init_from`.

    Raises:
        ValueError: no weights or no data set are given, or they do not fit.
    """
    if recipe.init_from is None:
        raise ValueError("init_from is not set; give the run, checkpoint or file to evaluate")
    recipe = recipe.with_absolute_paths()
    # A run of its own: the training of this name keeps its record as it is.
    recipe = recipe.with_changes(name=f"{recipe.name}-evaluation-{time.strftime('%Y%m%d-%H%M%S')}")
    plan = plan_run(recipe, needs_train=False)
    check_weights(recipe)
    cluster = connect(recipe)
    use_gpu = check_cluster(recipe, cluster)
    return _run(recipe, plan, "evaluate", {}, cluster, use_gpu, None).metrics


def _run(
    recipe: Recipe,
    plan: RunPlan,
    kind: Kind,
    tags: dict[str, str],
    cluster: ClusterShape,
    use_gpu: bool,
    resume_from: Checkpoint | None,
    family: Family | None = None,
) -> RunResult:
    if len(recipe.workers.sizes) > 1 and not use_gpu:
        plan = _without_reserving(plan, cluster)
    recorder = start_recorder(
        recipe.tracking,
        recipe.name,
        spool_path(recipe),
        run_id=resume_from.position.tracking_run_id if resume_from else None,
        params=recipe.flat(),
        tags={**run_facts(kind, plan, cluster), **tags},
        resume_step=resume_from.position.step if resume_from else None,
        parent=family.recorder if family else None,
        node_id=family.node_id if family else None,
    )
    job = TrainJob(
        recipe=recipe,
        kind="evaluate" if kind == "evaluate" else "train",
        num_classes=plan.manifest.num_classes,
        num_images=plan.num_images,
        total_steps=plan.total_steps,
        data_fingerprint=plan.manifest.fingerprint,
        run_folder=recipe.run_folder,
        new_head=_HEADS.get(kind, "auto"),
        few_shot_classes=plan.few_shot_classes,
        ray_ready_s=cluster.ready_s,
        recorder=recorder,
        note_bad_images=_bad_images(recipe, plan).note,
    )
    status: Literal["FINISHED", "FAILED", "KILLED"] = "FAILED"
    try:
        with (
            shown_progress(recorder, recipe.name, plan.total_steps, is_shown=family is None),
            stopping_on_sigterm(recorder),
        ):
            _fit_or_say_why(job, plan, use_gpu, cluster)
        result = _result(job, recorder)
        status = finished_status(result.is_complete or kind == "evaluate")
        return result
    finally:
        with contextlib.suppress(ray.exceptions.RayError):  # the result stands without its record
            ray.get(recorder.finish.remote(status))
            ray.kill(recorder)


def _without_reserving(plan: RunPlan, cluster: ClusterShape) -> RunPlan:
    """An elastic group on CPUs takes all that are left: a task that needs some would never run."""
    streams = {
        name: replace(spec, num_cpus=0.0, concurrency=spec.concurrency or int(cluster.num_cpus))
        for name, spec in plan.streams.items()
    }
    return replace(plan, streams=streams)


def _bad_images(recipe: Recipe, plan: RunPlan) -> BadRowLimit:
    """Of images that travel encoded, and turn out bad in a training worker."""
    return BadRowLimit(recipe.run_folder, plan.num_images, recipe.data.max_bad_fraction)


def _fit_or_say_why(job: TrainJob, plan: RunPlan, use_gpu: bool, cluster: ClusterShape) -> None:
    error: BaseException | None = None
    try:
        _fit(job, plan, use_gpu, hides_gpus=cluster.num_gpus > 0 and not use_gpu)
    except ray.train.TrainingFailedError as failed:
        error = failed
    # A worker's own reason says more than the time-outs of those that waited for it.
    reason = ray.get(job.recorder.failure.remote()) or (_cause(error) if error else None)
    if reason:
        raise RunFailedError(reason) from error


def _fit(job: TrainJob, plan: RunPlan, use_gpu: bool, *, hides_gpus: bool) -> None:
    recipe, workers = job.recipe, job.recipe.workers
    # Reports carry checkpoints only; at Ray's own 2 s each would wait for the controller.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    # An elastic group must give up the size that a node lost a moment ago had allowed.
    start_timeout_s = "60" if len(workers.sizes) > 1 else "600"
    os.environ[_START_TIMEOUT] = _GIVEN_START_TIMEOUT or start_timeout_s
    _set_aside_ray_snapshot(job)
    storage = locate(recipe.output)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(
            backend="nccl" if use_gpu else "gloo", timeout_s=workers.collective_timeout_s
        ),
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,  # type: ignore[arg-type]
            use_gpu=use_gpu,
            resources_per_worker={
                "CPU": workers.cpus_per_worker,
                **({"GPU": 1} if use_gpu else {}),
            },
        ),
        run_config=RunConfig(
            name=recipe.name,
            storage_path=storage.path,
            storage_filesystem=storage.for_ray(),  # the workers' reports name the same
            # Ray leaves a machine's GPUs visible to workers that did not ask for one.
            worker_runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if hides_gpus else None,
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=-1,  # `_Failures` counts
                controller_failure_limit=20,
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=None),
            callbacks=[_Failures(job.recorder, workers.max_failures)],  # type: ignore[list-item]
        ),
        datasets=_datasets(job, plan),
        dataset_config=StreamConfig(),
    )
    trainer.fit()


def _datasets(job: TrainJob, plan: RunPlan) -> dict[str, Any]:
    """Streams by name; the training stream is built anew at each start of a worker group."""
    recipe = job.recipe
    datasets: dict[str, Any] = {
        name: _Evaluation(PendingEvaluation(spec, recipe.evaluate.batch_size))
        for name, spec in plan.streams.items()
        if name != "train"
    }
    if job.kind == "train":
        datasets["train"] = _Remaining(job, plan)
    return datasets


class _Failures(UserCallback):
    """In Ray Train's controller: every failure becomes part of the run's history, and is counted.

    Ray Train itself counts all failures since the start: a run of weeks would end at the sixth
    node that it lost, however far apart they were.
    """

    def __init__(self, recorder: Any, max_failures: int) -> None:
        self._recorder, self._max_failures = recorder, max_failures

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Ray calls it before it restarts the group.

        Raises:
            RunFailedError: the run must end; Ray does not restart after an error here.
        """
        errors = worker_exceptions.values()
        # The one has a smaller micro-batch for its remedy, the other is part of renting such nodes.
        is_remedied = any(
            isinstance(error, torch.OutOfMemoryError) or getattr(error, "preempted", False)
            for error in errors
        )
        rank, first = min(worker_exceptions.items())
        ends = self._recorder.worker_failed.remote(
            f"worker {rank}: {_cause(first)}", self._max_failures, is_counted=not is_remedied
        )
        if ray.get(ends):
            raise RunFailedError("see the recorder")


@dataclass(frozen=True)
class _Evaluation:
    pending: PendingEvaluation

    def __call__(self) -> PendingEvaluation:
        return self.pending


@dataclass(frozen=True)
class _Remaining:
    """What is left of the training stream, from the newest good checkpoint on.

    Ray Train calls it in its controller before each start, so this is also where a damaged
    checkpoint is found and marked, before any worker looks for one.
    """

    job: TrainJob
    plan: RunPlan

    def __call__(self) -> PendingStream:
        folder = locate(self.job.run_folder)
        checkpoint = newest_verified_checkpoint(folder, self._tell)
        step = checkpoint.position.step if checkpoint else None
        discard_newer(folder, -1 if step is None else step)
        is_over = checkpoint is not None and bool(checkpoint.position.ended)
        ray.get(self.job.recorder.start_from.remote(self.job.total_steps if is_over else step))
        batch = self.job.recipe.train.global_batch_size
        start = checkpoint.position.samples_seen if checkpoint else 0
        return PendingStream(
            self.plan.streams["train"],
            lambda world_size: batch // world_size,
            start=start,
            stop=self.plan.total_steps * batch,
        )

    def _tell(self, text: str) -> None:
        self.job.recorder.event.remote("damaged checkpoint", text, 0)


def _result(job: TrainJob, recorder: Any) -> RunResult:
    standing = ray.get(recorder.standing.remote())
    checkpoint = newest_checkpoint(locate(job.run_folder)) if job.kind == "train" else None
    steps = checkpoint.position.step if checkpoint else 0
    ended = checkpoint.position.ended if checkpoint else ""
    was_stopped = any(event.kind == "stopped" for event in standing.events)
    if job.kind == "train" and not (steps >= job.total_steps or ended or was_stopped):
        raise RunFailedError(
            f"training ended, but its newest whole checkpoint is of step {steps} of "
            f"{job.total_steps}: the last one could not be written to {job.run_folder}; see the "
            "events, make room there and run the same command again"
        )
    return RunResult(
        run_id=ray.get(recorder.run_id.remote()),
        name=job.recipe.name,
        steps=steps,
        total_steps=job.total_steps,
        ended=ended,
        metrics=dict(standing.metrics),
        checkpoint=checkpoint.folder.path if checkpoint else "",
        hint=ray.get(recorder.hint.remote()),
        events=[f"{event.kind}: {event.text}" for event in standing.events],
    )


def _finished_before(recipe: Recipe, checkpoint: Checkpoint, total_steps: int) -> RunResult:
    position = checkpoint.position
    return RunResult(
        run_id=position.tracking_run_id,
        name=recipe.name,
        steps=position.step,
        total_steps=total_steps,
        metrics=dict(position.metrics),
        checkpoint=checkpoint.folder.path,
        already_complete=True,
        ended=position.ended,
    )


def finished_status(is_complete: bool) -> Literal["FINISHED", "KILLED"]:
    """MLflow's word for a run that ended without an error."""
    return "FINISHED" if is_complete else "KILLED"


def run_facts(kind: str, plan: RunPlan, cluster: ClusterShape) -> dict[str, str]:
    """Tags that say what ran, on which code, data and cluster."""
    return {
        "vit_ray.kind": kind,
        "vit_ray.git_commit": git_commit(),
        "vit_ray.data_fingerprint": plan.manifest.fingerprint,
        "vit_ray.cluster": str(cluster),
        "vit_ray.driver": platform.node(),
        "vit_ray.ray_version": ray.__version__,
    }


def git_commit() -> str:
    """Commit of the code that runs, "+" if it was changed since; "unknown" outside a checkout.

    A submitted job's folder travels without .git: `VIT_RAY_GIT_COMMIT` says it there.
    """
    if told := os.environ.get("VIT_RAY_GIT_COMMIT"):
        return told
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        commit = _git("rev-parse", "HEAD", cwd=here)
        return commit + ("+" if _git("status", "--porcelain", cwd=here) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str, cwd: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def stopping_on_sigterm(recorder: Any) -> Iterator[None]:
    """SIGTERM asks the workers for a checkpoint and a clean end; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a sweep's trial: its driver is stopped by Ray Tune
        return

    def on_sigterm(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        recorder.request_stop.remote("SIGTERM")

    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _set_aside_ray_snapshot(job: TrainJob) -> None:
    """Ray Train's own list of checkpoints refuses to start where one was pruned or is damaged.

    The folders themselves are the truth here: what counts is found by reading them.
    """
    locate(job.run_folder).child("checkpoint_manager_snapshot.json").delete()


def _cause(error: BaseException) -> str:
    """The worker's own words, without the frames around them."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, first = min(failures.items())
        return f"worker {rank}: {_cause(first)}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)
