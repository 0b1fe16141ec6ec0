"""A run's workers under Ray Train: what it is given to run, from where, and with what data."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig
from ray.train.v2.api.config import RunConfig, ScalingConfig

from vit_ray.data.stream.ray_datasets import StreamSpec
from vit_ray.data.stream.train_ingest import PendingEvaluation, PendingStream, StreamConfig
from vit_ray.launch.cluster import ClusterShape
from vit_ray.launch.ray_policies import (
    ConsecutiveFailurePolicy,
    DivisorScalingPolicy,
    PolicedTrainer,
    SaveBeforeResize,
    cause,
)
from vit_ray.storage import Location, locate
from vit_ray.train.checkpoint import Checkpoint, discard_newer, newest_verified_checkpoint
from vit_ray.train.job import TrainJob
from vit_ray.train.worker import train_worker

_PAUSES_S = (1.0, 5.0, 15.0, 60.0, 120.0)
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_GIVEN_START_TIMEOUT = os.environ.get(_START_TIMEOUT)


class RunFailedError(RuntimeError):
    """The run ended in an error; the message holds the cause."""


def run_workers(
    job: TrainJob, streams: dict[str, StreamSpec], cluster: ClusterShape, *, use_gpu: bool
) -> None:
    """Run `train_worker` on the recipe's group until it ends, through failures and resizes.

    Args:
        streams: what the workers read, by name, as in `RunPlan`.

    Raises:
        RunFailedError: training failed more often than the recipe allows, or cannot work.
    """
    error: BaseException | None = None
    try:
        _fit(job, streams, use_gpu, hides_gpus=cluster.num_gpus > 0 and not use_gpu)
    except ray.train.TrainingFailedError as failed:
        error = failed
    # A worker's own reason says more than the time-outs of those that waited for it.
    reason = ray.get(job.recorder.failure.remote()) or (cause(error) if error else None)
    if reason:
        raise RunFailedError(reason) from error


def _fit(job: TrainJob, streams: dict[str, StreamSpec], use_gpu: bool, *, hides_gpus: bool) -> None:
    recipe, workers = job.recipe, job.recipe.workers
    # Reports carry checkpoints only; at Ray's own 2 s each would wait for the controller.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    # An elastic group must give up the size that a node lost a moment ago had allowed.
    start_timeout_s = "60" if len(workers.sizes) > 1 else "600"
    os.environ[_START_TIMEOUT] = _GIVEN_START_TIMEOUT or start_timeout_s
    _set_aside_ray_snapshot(job)
    storage = locate(recipe.output)
    scaling = ScalingConfig(
        num_workers=workers.num_workers,
        use_gpu=use_gpu,
        resources_per_worker={"CPU": workers.cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
    )
    callbacks: list[Any] = []
    if job.kind == "train" and len(workers.sizes) > 1:
        callbacks.append(SaveBeforeResize(job.recorder, job.run_folder))
    trainer = PolicedTrainer(
        _policies(job, scaling),
        train_loop_per_worker=train_worker,
        train_loop_config={"job": job},
        torch_config=TorchConfig(
            backend="nccl" if use_gpu else "gloo", timeout_s=workers.collective_timeout_s
        ),
        scaling_config=scaling,
        run_config=RunConfig(
            name=recipe.name,
            storage_path=storage.path,
            storage_filesystem=storage.for_ray(),  # the workers' reports name the same
            # Ray leaves a machine's GPUs visible to workers that did not ask for one.
            worker_runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if hides_gpus else None,
            callbacks=callbacks,
        ),
        datasets=_datasets(job, streams),
        dataset_config=StreamConfig(),
    )
    trainer.fit()


def _datasets(job: TrainJob, streams: dict[str, StreamSpec]) -> dict[str, Any]:
    """Streams by name; the training stream is built anew at each start of a worker group."""
    recipe = job.recipe
    datasets: dict[str, Any] = {
        name: _Evaluation(PendingEvaluation(spec, recipe.evaluate.batch_size))
        for name, spec in streams.items()
        if name != "train"
    }
    if job.kind == "train":
        datasets["train"] = _Remaining(job, streams["train"])
    return datasets


def _policies(job: TrainJob, scaling: ScalingConfig) -> dict[str, Any]:
    recipe, workers = job.recipe, job.recipe.workers
    policies: dict[str, Any] = {
        "failure_policy": ConsecutiveFailurePolicy(
            job.recorder, workers.max_failures, job.run_folder
        )
    }
    if len(workers.sizes) > 1:
        sizes = recipe.group_sizes if job.kind == "train" else workers.sizes
        policies["scaling_policy"] = DivisorScalingPolicy(scaling, sizes, recipe.data.cpus_per_task)
    return policies


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
    spec: StreamSpec

    def __call__(self) -> PendingStream:
        folder = locate(self.job.run_folder)
        checkpoint = self._newest(folder)
        step = checkpoint.position.step if checkpoint else None
        is_over = checkpoint is not None and bool(checkpoint.position.progress.ended)
        ray.get(self.job.recorder.start_from.remote(self.job.total_steps if is_over else step))
        batch = self.job.recipe.train.global_batch_size
        start = checkpoint.position.samples_seen if checkpoint else 0
        return PendingStream(
            self.spec,
            lambda world_size: batch // world_size,
            start=start,
            stop=self.job.total_steps * batch,
        )

    def _newest(self, folder: Location) -> Checkpoint | None:
        """Storage that is away for some minutes must not end the run: an error here would."""
        for pause_s in _PAUSES_S:
            try:
                return self._newest_once(folder)
            except OSError as error:
                self.job.recorder.event.remote("storage away", f"{folder.path}: {error}", 0)
                time.sleep(pause_s)
        return self._newest_once(folder)

    def _newest_once(self, folder: Location) -> Checkpoint | None:
        checkpoint = newest_verified_checkpoint(folder, self._tell)
        discard_newer(folder, checkpoint.position.step if checkpoint else -1)
        return checkpoint

    def _tell(self, text: str) -> None:
        self.job.recorder.event.remote("damaged checkpoint", text, 0)


def _set_aside_ray_snapshot(job: TrainJob) -> None:
    """Ray Train's own list of checkpoints refuses to start where one was pruned or is damaged.

    The folders themselves are the truth here: what counts is found by reading them.
    """
    locate(job.run_folder).child("checkpoint_manager_snapshot.json").delete()
