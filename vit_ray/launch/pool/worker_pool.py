"""A worker pool: the worker group of a training under Ray Train, through failures and resizes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import fsspec
import ray
import ray.train
from joblib import cpu_count
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train.v2.api.config import RunConfig, ScalingConfig

from vit_ray.config import Recipe
from vit_ray.data.stream.batches import StreamSpec
from vit_ray.data.stream.ray_datasets import start_beside_server
from vit_ray.data.stream.stream_server import StreamSource
from vit_ray.launch.cluster.connection import ClusterShape, has_dashboard
from vit_ray.launch.pool.actor_calls import PROCESS_DIED, answer
from vit_ray.launch.pool.failing_nodes import LeaveOutNodes
from vit_ray.launch.pool.group_callbacks import (
    NotePlacement,
    OwnEnvironment,
    SaveBeforeResize,
    remove_groups,
)
from vit_ray.launch.pool.placement_wait import NoPlaceError, PlacementWait, lacking_now, missing_now
from vit_ray.launch.pool.pool_server import PoolServer
from vit_ray.launch.pool.ray_policies import (
    ConsecutiveFailurePolicy,
    DivisorScalingPolicy,
    PolicedTrainer,
)
from vit_ray.launch.pool.replacement import ReplaceWorkers, WatchPreemption
from vit_ray.ray_internals import start_data_actors
from vit_ray.worker.job import TrainJob
from vit_ray.worker.pool_entry import work_in_pool

_SERVER: Final = "the server of the worker pool"
CLOSE_S: Final = 60.0
"""Longest time for the workers of a pool to end."""
ABANDON_S: Final = 30.0
"""Longest time for a controller to end whose group has lost its places, or never had any."""


class PoolEndedError(RuntimeError):
    """The pool's workers ended before their training did; the cause is Ray Train's error."""


class PoolLostError(PoolEndedError):
    """A process between driver and workers has died; a new pool continues the training."""


@dataclass(frozen=True)
class PoolShape:
    """The properties of a pool's workers."""

    num_workers: int | tuple[int, int]
    sizes: tuple[int, ...]
    """Worker counts that divide the batch."""
    cpus_per_worker: float
    reading_cpus: float
    """CPUs of a reading task."""
    kept_cpus: float
    """CPUs that an elastic group leaves for reading when it grows; 0 for others."""
    use_gpu: bool
    hides_gpus: bool
    """There are GPUs that its workers must not see."""
    collective_timeout_s: int
    replaces_failed: bool
    """A worker whose process has died is replaced alone."""
    label_selector: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, recipe: Recipe, cluster: ClusterShape, *, use_gpu: bool, trains: bool = True
    ) -> PoolShape:
        """The shape that a training or an evaluation needs."""
        workers = recipe.workers
        is_elastic = len(workers.sizes) > 1
        sizes = recipe.group_sizes if trains else list(workers.sizes)
        return cls(
            workers.num_workers,
            tuple(sizes) if is_elastic else (),
            workers.cpus_per_worker,
            recipe.data.cpus_per_task,
            recipe.data.cpus_per_task if is_elastic else 0.0,
            use_gpu,
            cluster.num_gpus > 0 and not use_gpu,
            workers.collective_timeout_s,
            # A blocked NCCL call would have to be aborted, which has not been tried on GPUs.
            workers.replace_failed and not use_gpu,
            tuple(sorted(workers.label_selector.items())),
        )

    @property
    def is_elastic(self) -> bool:
        return isinstance(self.num_workers, tuple)

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus_per_worker, **({"GPU": 1.0} if self.use_gpu else {})}

    def reading_tasks(self, cpus: float) -> int:
        """Reading tasks that fit next to the largest group."""
        left = cpus - self.most_workers * self.cpus_per_worker
        return max(0, int(left / self.reading_cpus))

    @property
    def least_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else min(self.sizes)

    @property
    def most_workers(self) -> int:
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers


def _current_job(server: Any) -> TrainJob | None:
    """Called by the controller's policies, in its process."""
    return answer(server.current_job.remote(), _SERVER)


def _ask(server: Any, method: str, *arguments: Any) -> Any:
    try:
        return answer(getattr(server, method).remote(*arguments), _SERVER)
    except PROCESS_DIED as error:
        text = "the process of the pool's server, on the driver's host, has died"
        raise PoolLostError(text) from error


@contextlib.contextmanager
def open_pool(shape: PoolShape, run_folder: str, *, is_private: bool) -> Iterator[WorkerPool]:
    """A pool for the training in this folder, which ends with the block."""
    pool = WorkerPool(shape, run_folder, is_private=is_private)
    end = pool.close
    try:
        yield pool
    except NoPlaceError:
        end = pool.abandon
        raise
    finally:
        end()


class WorkerPool:
    """Owner of a worker group, its streams' process, and the thread that runs its controller."""

    def __init__(self, shape: PoolShape, run_folder: str, *, is_private: bool) -> None:
        """Start it; workers are placed and import in the background.

        Args:
            run_folder: of the training, which this process holds: places of an earlier pool of it,
                whose driver has died, are given back.
            is_private: this driver started Ray for itself.
        """
        self.shape = shape
        of_run = f"pool-{hashlib.sha256(run_folder.encode()).hexdigest()[:16]}"
        remove_groups(of_run)
        server: Any = (
            ray.remote(PoolServer)
            .options(
                num_cpus=0,
                scheduling_strategy="DEFAULT",  # not in the place of a trial of Ray Tune
                max_concurrency=3 * shape.most_workers + 8,
                label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()},
            )
            .remote(
                keeps_statistics=not is_private or has_dashboard(),
                warms_up=not is_private,
                cpus_per_rank=shape.cpus_per_worker,
            )
        )
        self.server, self.name = server, f"{of_run}-{server._actor_id.hex()}"
        """The name that Ray shows: of Ray Train's run and, before a number, of its placement
        groups."""
        if is_private:
            cpus = ray.cluster_resources()["CPU"]  # type: ignore[no-untyped-call]
            start_beside_server(shape.reading_tasks(cpus), cpu_count())
        else:
            start_data_actors()
        self._thread = threading.Thread(
            target=self._run_workers, args=(is_private,), daemon=True, name="pool"
        )
        self._thread.start()

    def run(self, job: TrainJob, streams: dict[str, StreamSpec]) -> None:
        """Train, until all workers are done, through failures and resizes.

        Raises:
            PoolEndedError: the group has ended, and the pool with it.
            PoolLostError: not because of the training.
            NoPlaceError: there is no place for the group, or a stop came before it was placed.
        """
        shape, server = self.shape, self.server
        labels = dict(shape.label_selector)
        watch = PlacementWait(
            job,
            lambda: missing_now(shape.least_workers, shape.resources, labels),
            lambda: lacking_now(job.recipe, use_gpu=shape.use_gpu),
        )
        _ask(server, "assign", job, shape.use_gpu, StreamSource(server, ray.put(streams)))
        while not _ask(server, "wait_until_ended"):
            is_closed, error = _ask(server, "closed")
            if is_closed:
                if isinstance(error, PROCESS_DIED):
                    text = "the process of Ray Train's controller, on the driver's host, has died"
                    raise PoolLostError(text) from error
                raise PoolEndedError(str(error)) from error
            watch.check(is_placed=_ask(server, "is_placed"))

    def close(self) -> None:
        """Let the workers end, and wait for them; workers that do not end lose their places."""
        with contextlib.suppress(ray.exceptions.RayError):  # the processes have ended already
            ray.get(self.server.close.remote(), timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        self.abandon()

    def abandon(self) -> None:
        """End the server, and remove the group's placement until the group has ended.

        The controller of a group that is not placed gets no message meanwhile, and ends once there
        is no placement to wait for and no server; it may still be starting.
        """
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.server)
        deadline = time.monotonic() + ABANDON_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(ray.exceptions.RayError):
                remove_groups(self.name)
            self._thread.join(0.5)

    def _run_workers(self, is_private: bool) -> None:
        error = None
        try:
            # no limit: a thread; `close` and `abandon` end the trainer
            _trainer(self.shape, self.name, self.server, is_private=is_private).fit()
        except BaseException as raised:  # raised where the training is waited for
            error = raised
        with contextlib.suppress(ray.exceptions.RayError):
            remove_groups(self.name)  # of a controller that has died
            # In a tuple: an actor's error, passed by itself, would fail the call that receives it.
            ray.get(self.server.close.remote((error,)), timeout=CLOSE_S)


def driver_environment(*, is_private: bool) -> dict[str, str]:
    """Ray Train's settings for every pool of this driver; the user's own settings are kept."""
    return _unless_given(
        {
            # How soon Ray Train notices that a worker has ended or died.
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
            # A private Ray has a single node, which is not preempted, and its metrics are not read.
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0" if is_private else "1",
            "RAY_TRAIN_METRICS_ENABLED": "0" if is_private else "1",
        }
    )


def pool_environment(shape: PoolShape) -> dict[str, str]:
    """Ray Train's settings for one pool; the user's own settings are kept."""
    return _unless_given(
        {
            "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(shape.collective_timeout_s),
            # An elastic group must give up a size that is no longer possible after a node was lost:
            # Ray takes 15 s to notice, and decides again each time a group is not placed.
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10" if shape.is_elastic else "600",
        }
    )


def _unless_given(wanted: dict[str, str]) -> dict[str, str]:
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


def _trainer(shape: PoolShape, name: str, server: Any, *, is_private: bool) -> PolicedTrainer:
    os.environ |= driver_environment(is_private=is_private)
    scaling = ScalingConfig(
        num_workers=shape.num_workers,
        use_gpu=shape.use_gpu,
        resources_per_worker=shape.resources,
        label_selector=dict(shape.label_selector) or None,
    )
    current_job = partial(_current_job, server)
    callbacks: list[Any] = [
        OwnEnvironment(pool_environment(shape)),
        NotePlacement(server),
        LeaveOutNodes(current_job),
        ReplaceWorkers(server),
    ]
    if shape.replaces_failed and os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] != "0":
        callbacks.append(WatchPreemption())
    if shape.is_elastic:
        callbacks.append(SaveBeforeResize(current_job))
    policies: dict[str, Any] = {"failure_policy": ConsecutiveFailurePolicy(current_job)}
    if shape.is_elastic:
        policies["scaling_policy"] = DivisorScalingPolicy(
            scaling, shape.sizes, shape.kept_cpus, current_job
        )
    return PolicedTrainer(
        policies,
        replaces=shape.replaces_failed,
        train_loop_per_worker=work_in_pool,
        train_loop_config={"server": server, "replaces": shape.replaces_failed},
        scaling_config=scaling,
        run_config=RunConfig(
            name=name,
            # Ray Train's own state, which is never read, goes to the controller's memory, so that
            # no files are left behind. Checkpoints do not go through Ray Train.
            storage_path="pools",
            storage_filesystem=PyFileSystem(FSSpecHandler(fsspec.filesystem("memory"))),
            # Ray leaves a machine's GPUs visible to workers that did not ask for one.
            worker_runtime_env=(
                {"env_vars": {"CUDA_VISIBLE_DEVICES": ""}} if shape.hides_gpus else None
            ),
            callbacks=callbacks,
        ),
    )
