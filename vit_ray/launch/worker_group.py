"""A run's workers under Ray Train: what it is given to run, from where, and with what data."""

from __future__ import annotations

import os
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
from vit_ray.launch.resume_point import choose_resume_point
from vit_ray.storage import locate
from vit_ray.train.job import TrainJob
from vit_ray.train.worker import train_worker

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
    """What is left of the training stream when a worker group starts.

    Ray Train calls it in its controller before each start: the actor then gives all workers
    the step of the checkpoint that the stream goes on from.
    """

    job: TrainJob
    spec: StreamSpec

    def __call__(self) -> PendingStream:
        job = self.job
        point = choose_resume_point(locate(job.run_folder), job.total_steps, self._note)
        ray.get(job.recorder.start_from.remote(point.step))
        batch = job.recipe.train.global_batch_size
        return PendingStream(
            self.spec,
            lambda world_size: batch // world_size,
            start=point.samples_seen,
            stop=job.total_steps * batch,
        )

    def _note(self, kind: str, text: str) -> None:
        self.job.recorder.event.remote(kind, text, 0)


def _set_aside_ray_snapshot(job: TrainJob) -> None:
    """Ray Train's own list of checkpoints refuses to start where one was pruned or is damaged.

    The folders themselves are the truth here: what counts is found by reading them.
    """
    locate(job.run_folder).child("checkpoint_manager_snapshot.json").delete()
