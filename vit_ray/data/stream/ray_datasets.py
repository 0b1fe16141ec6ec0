"""The training and evaluation streams as Ray Data sets, in an order that no reader changes.

A stream is planned in segments of some thousand tasks, one Ray Data set after the other, so that
starting costs the same however long the run and wherever it resumes. `batches` has the batch
contract; `stream_server` executes the sets and deals their blocks to the ranks.
"""

import importlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import cv2
import ray
import ray.data
from ray.data import DataContext, ExecutionOptions, ExecutionResources
from ray.data.block import Block, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from vit_ray import ray_internals
from vit_ray.data.order.partition import (
    BlockTask,
    Partition,
    cut_segments,
    read_tasks,
)
from vit_ray.data.order.samples import rows_per_group
from vit_ray.data.stream.bad_rows import BadRowLimit
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec
from vit_ray.data.stream.blocks import as_one_row
from vit_ray.data.stream.encoded import packed
from vit_ray.data.stream.executor_pace import PauseWhileFull

__all__ = ["StreamSpec", "evaluation_datasets", "training_datasets"]

_WARM_WORKERS: Final = 64
_BLOCKS_READY: Final = 2
"""Blocks that a task makes ahead of whoever takes them (Ray Data's own setting)."""
_FIRST_SEGMENT_TASKS: Final = 512
_LATER_SEGMENT_TASKS: Final = 8192
"""Tasks planned at a time: about 0.2 ms each, before the first batch of a segment."""


def training_datasets(
    spec: StreamSpec, *, world_size: int, batch_size_per_rank: int, start: int, stop: int
) -> Iterator[ray.data.Dataset]:
    """Positions [start, stop) of a run: a Ray Data set for each segment, one after the other.

    Args:
        start, stop: samples seen before and after; positions over all epochs joined.

    Raises:
        ValueError: if the range is empty or not a whole number of passes of all ranks.
    """
    partition = Partition(world_size, batch_size_per_rank)
    if stop <= start or (stop - start) % partition.rows_per_pass:
        raise ValueError(
            f"stream: positions {start} to {stop} are {stop - start} samples, not a positive "
            f"multiple of workers x batch size per rank ({world_size} x {batch_size_per_rank} = "
            f"{partition.rows_per_pass}); use a multiple of {partition.rows_per_pass}."
        )
    counts = rows_per_group(spec.manifest, spec.rows)
    job = StreamJob(spec, partition, start, is_training=True, counts=counts)
    return _datasets(job, (stop - start) // world_size)


def evaluation_datasets(
    spec: StreamSpec, *, world_size: int, batch_size: int, start: int = 0
) -> Iterator[ray.data.Dataset]:
    """Every image once, in order, padded so that all ranks get equally many whole batches.

    Args:
        start: images at the beginning that are left out.
    """
    partition = Partition(world_size, batch_size)
    passes = max(0, -((start - spec.num_images) // partition.rows_per_pass))
    counts = rows_per_group(spec.manifest, spec.rows)
    job = StreamJob(spec, partition, start, is_training=False, counts=counts)
    return _datasets(job, passes * batch_size)


def _datasets(job: StreamJob, rows_per_rank: int) -> Iterator[ray.data.Dataset]:
    spec = job.spec
    bounds = cut_segments(
        job.partition,
        rows_per_rank,
        task_rows=spec.task_rows,
        first_tasks=_FIRST_SEGMENT_TASKS,
        later_tasks=_LATER_SEGMENT_TASKS,
    )
    job_ref = ray.put(job)
    return (_segment(job, job_ref, first, last) for first, last in bounds)


def _segment(job: StreamJob, job_ref: Any, first: int, last: int) -> ray.data.Dataset:
    dataset = ray.data.read_datasource(
        _BlockSource(job, job_ref, first, last),
        num_cpus=job.spec.num_cpus,
        concurrency=_most_tasks(job),
        override_num_blocks=1,
    )
    _configure(dataset.context, job.spec)
    return dataset


def _configure(context: DataContext, spec: StreamSpec) -> None:
    # Ray Data's output buffer joins what is below this size, and slices what is above, by whole
    # rows. A block of ours is one row: it is neither joined nor sliced, and is emitted at once.
    context.target_max_block_size = 1
    limits = ExecutionResources.inf()
    if spec.object_store_mib is not None:
        limits = ExecutionResources.for_limits(object_store_memory=spec.object_store_mib << 20)
    context.execution_options = ExecutionOptions(preserve_order=True, resource_limits=limits)
    context.enable_progress_bars = False
    context.custom_execution_callback_classes = [PauseWhileFull]


def _block_bytes(job: StreamJob) -> int:
    """Size of a full block; of encoded images, on average."""
    spec = job.spec
    rows = job.shape.full_passes(job.partition) * job.partition.batch_size_per_rank
    if job.is_encoded:
        return int(rows * spec.manifest.bytes.sum() / spec.manifest.num_images)
    return rows * math.prod(spec.augmentation.shape)


def _most_tasks(job: StreamJob) -> int | None:
    """Tasks at a time: what they have ready takes at most half of the stream's object store.

    Ray Data counts it only once it knows the size of the blocks, and starts with as many tasks as
    there are CPUs.
    """
    spec = job.spec
    if spec.object_store_mib is None:
        return spec.concurrency
    ready = _BLOCKS_READY * _block_bytes(job)
    tasks = max(1, (spec.object_store_mib << 20) // 2 // ready)
    return min(tasks, spec.concurrency or tasks)


@ray.remote
def _import_what_tasks_need() -> None:
    """This module, and with it all that a reading task uses.

    By its name: Ray sends the function itself, which imports nothing when it is unpickled.
    """
    importlib.import_module("vit_ray.data.stream.ray_datasets")


def start_beside_server(num_tasks: int) -> None:
    """Start what a stream waits for while the process that is to serve it starts.

    Those are Ray Data's own actor, and the imports of some tasks' processes: these take no CPUs of
    Ray's, so that no actor waits for its place behind them. For a Ray on one machine, half of whose
    cores are left for the others: the first batch needs one task, which more imports would delay.
    """
    ray_internals.get_or_create_autoscaling_coordinator()
    cores = os.cpu_count() or 1
    for _ in range(min(num_tasks, max(1, cores // 2), _WARM_WORKERS)):
        _import_what_tasks_need.options(num_cpus=0).remote()


def warm_up(spec: StreamSpec) -> None:
    """Let idle workers of a cluster import while a stream is planned; nobody waits for it."""
    cpus = ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    tasks = min(int(cpus / spec.num_cpus), spec.concurrency or _WARM_WORKERS, _WARM_WORKERS)
    for _ in range(tasks):
        _import_what_tasks_need.options(num_cpus=spec.num_cpus).remote()


class _BlockSource(Datasource):
    """One read task per block task; the job travels once, through the object store."""

    def __init__(self, job: StreamJob, job_ref: Any, first: int, last: int) -> None:
        self._partition = job.partition
        self._shape = job.shape
        self._job_ref = job_ref
        self._first, self._last = first, last

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """The tasks of rows [first, last) of all ranks."""
        tasks = read_tasks(self._partition, self._first, self._last, self._shape)
        return [ReadTask(_Blocks(self._job_ref, task), _UNKNOWN) for task in tasks]


_UNKNOWN: Final = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)


class _Reader:
    """What a process keeps of a stream between tasks."""

    def __init__(self, job: StreamJob, name: str) -> None:
        # A task has one core; the threads of OpenCV's pool would only spin beside it.
        cv2.setNumThreads(0)
        self.batches = BatchReader(job)
        self.limit = BadRowLimit(name, job.spec.num_images, job.spec.max_bad_fraction)
        self.is_encoded = job.is_encoded


_STREAMS_HELD: Final = 2
_READERS: Final[OrderedDict[str, _Reader]] = OrderedDict()
"""Of the streams that this process last worked for: training, and an evaluation beside it."""


def _reader_of(job_ref: Any) -> _Reader:
    """The job itself is fetched once: it holds the manifest."""
    name = job_ref.hex()
    if name not in _READERS:
        # no limit: the driver has put it there before the task began
        _READERS[name] = _Reader(ray.get(job_ref), name)
        if len(_READERS) > _STREAMS_HELD:
            _READERS.popitem(last=False)
    _READERS.move_to_end(name)
    return _READERS[name]


@dataclass(frozen=True)
class _Blocks:
    job_ref: Any
    task: BlockTask

    def __call__(self) -> Iterator[Block]:
        reader = _reader_of(self.job_ref)
        for rank, first, last in self.task.blocks():
            batch, bad = reader.batches.batch(rank, first, last)
            reader.limit.note(bad)
            yield packed(batch) if reader.is_encoded else as_one_row(batch)
