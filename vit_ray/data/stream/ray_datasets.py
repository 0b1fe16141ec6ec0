"""The training and evaluation streams as Ray Data datasets.

A stream is planned in segments of about a thousand tasks, each a Ray Data dataset, so that starting
takes the same time for runs of any length and wherever they resume. `batches` describes the
batches; `stream_server` executes the datasets and deals their blocks to the ranks.
"""

import importlib
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import cv2
import numpy as np
import ray
import ray.data
from ray.data import DataContext, ExecutionOptions, ExecutionResources
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from vit_ray import ray_internals
from vit_ray.data.order import BlockTask, Order, Partition, read_tasks
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob, StreamSpec, refuse_too_many
from vit_ray.ray_internals import ExecutionCallback, _internal_kv_list, _internal_kv_put

_LOG: Final = logging.getLogger(__name__)

_BAD_ROWS: Final = "vit_ray/bad_rows"
# Assumed number of reading processes, among which the remaining allowance of bad rows is divided.
_PROCESSES: Final = 1024
_WARM_WORKERS: Final = 64
# Blocks that a task makes in advance (Ray Data's default).
_BLOCKS_READY: Final = 2
PAUSE_S: Final = 0.02
"""Seconds; short compared with the time that a full buffer of more than two blocks lasts."""
# Tasks of a segment. Planning takes about 0.2 ms a task, before the first batch of a segment.
# Python's garbage collector visits all planned tasks repeatedly: with 8,192 tasks, it took a
# quarter of the server's time.
_SEGMENT_TASKS: Final = 1024
LEAST_SHARED: Final = 1 << 18
"""Minimum number of row groups for which the stream server draws the order for all tasks: a process
draws the order of fewer in 30 ms, and a segment of a small data set has many epochs."""


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a stream as one Ray Data dataset.

    Attributes:
        ranks: the rank of each block.
        next_at: the next segment starts when this many blocks remain: then all tasks of this one
            have started.
    """

    dataset: ray.data.Dataset
    ranks: list[int]
    next_at: int


def segments_of(
    name: str,
    spec: StreamSpec,
    ranks: range,
    partition: Partition,
    start: int,
    stop: int | None = None,
) -> Iterator[Segment]:
    """Some ranks' blocks of a stream, in consecutive segments.

    Args:
        name: identifies this pass over the stream; the same on all servers of the group.
        ranks: consecutive ranks, whose blocks one server reads.
        partition: of the whole group.
        start: training: samples seen before; positions over all epochs joined.
        stop: training: samples seen after, whole passes of all ranks later. None for an evaluation,
            which has every image once, in order, padded so that all ranks get the same number of
            whole batches.
    """
    job = StreamJob(spec, partition, start, is_training=stop is not None)
    passes = -(-spec.num_images // partition.rows_per_pass)
    if stop is not None:
        passes, rest = divmod(stop - start, partition.rows_per_pass)
        assert passes > 0, (start, stop)
        assert rest == 0, (start, stop, partition)
    tasks = read_tasks(partition, 0, passes * partition.batch_size_per_rank, job.shape, ranks)
    # Of the group's blocks, and so of the cluster's resources for reading.
    share = len(ranks) / partition.world_size
    max_bytes, max_tasks = None, None
    if spec.object_store_mib is not None:
        # Limit the tasks so that their finished blocks take at most half of it: Ray Data counts
        # blocks only once it knows their size, and starts with as many tasks as there are CPUs.
        max_bytes = int(share * (spec.object_store_mib << 20))
        rows = job.shape.full_passes(partition) * partition.batch_size_per_rank
        block_bytes = rows * math.prod(spec.augmentation.shape)
        max_tasks = max(1, max_bytes // 2 // (_BLOCKS_READY * block_bytes))
    order = Order(spec.manifest.rows, spec.seed, job.is_training, job.window)
    is_large = np.count_nonzero(order.rows) >= LEAST_SHARED
    job_ref = ray.put(job)
    drawn: dict[int, ray.ObjectRef[Any]] = {}
    while segment_tasks := list(itertools.islice(tasks, _SEGMENT_TASKS)):
        epochs = _epochs_of(job, segment_tasks) if is_large else range(0)
        drawn = {n: drawn[n] if n in drawn else ray.put(order.draw(n)) for n in epochs}
        source = _BlockSource(name, job_ref, drawn, segment_tasks)
        block_ranks = [rank for task in segment_tasks for rank in task.ranks]
        next_at = 0  # two datasets in progress would take twice the object store
        if max_bytes is None:
            last = sum(len(task.ranks) for task in segment_tasks[-reading_tasks(spec, share) :])
            next_at = min(last, len(block_ranks) - 1)
        yield Segment(_dataset_of(source, spec, max_bytes, max_tasks), block_ranks, next_at)


def _dataset_of(
    source: Datasource, spec: StreamSpec, max_bytes: int | None, max_tasks: int | None
) -> ray.data.Dataset:
    """A dataset that delivers blocks unchanged, in the order of the tasks.

    Args:
        max_bytes: limit of the object store; None for Ray Data's default.
        max_tasks: tasks at a time; None for no limit.
    """
    dataset = ray.data.read_datasource(
        source,
        num_cpus=spec.num_cpus,
        concurrency=max_tasks,
        override_num_blocks=1,
        label_selector=dict(spec.label_selector) or None,
    )
    context = dataset.context
    # Ray Data's output buffer joins blocks below this size and splits larger ones, by whole rows.
    # Our blocks are single rows: they are neither joined nor split, and are emitted at once.
    context.target_max_block_size = 1
    resources = ExecutionResources.inf()
    if max_bytes is not None:
        resources = ExecutionResources.for_limits(object_store_memory=max_bytes)
    context.execution_options = ExecutionOptions(preserve_order=True, resource_limits=resources)
    context.enable_progress_bars = False
    context.custom_execution_callback_classes = [PauseWhileFull]
    return dataset


def _epochs_of(job: StreamJob, tasks: list[BlockTask]) -> range:
    if not job.is_training:
        return range(1)
    first = min(task.first for task in tasks)
    last = max(task.first + task.rounds * task.block_rows for task in tasks)
    begin, end = (job.start + rows * job.partition.world_size for rows in (first, last))
    return range(begin // job.spec.num_images, (end - 1) // job.spec.num_images + 1)


def reading_tasks(spec: StreamSpec, share: float) -> int:
    """Maximum number of parallel tasks for a share of a stream, if all CPUs were free."""
    cpus = share * ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    return max(1, min(int(cpus / spec.num_cpus), _WARM_WORKERS))


class PauseWhileFull(ExecutionCallback):
    """A callback of Ray Data after each iteration of an execution's loop, which pauses the loop.

    An iteration waits for running tasks. While the output buffer is full, no task runs, and the
    loop would take a core from training without waiting (Ray 2.60,
    `streaming_executor_state.process_completed_tasks`).
    """

    def on_execution_step(self, executor: Any) -> None:
        """Sleep if no task runs and the execution has not ended."""
        operators = ray_internals.operators_of(executor)
        has_tasks = any(op.num_active_tasks() for op in operators)
        if not has_tasks and not all(op.has_completed() for op in operators):
            time.sleep(PAUSE_S)


@ray.remote
def _import_what_tasks_need() -> None:
    # By name: Ray sends the function by value, and unpickling it imports nothing.
    importlib.import_module("vit_ray.data.stream.ray_datasets")


def warm_up(spec: StreamSpec, share: float) -> None:
    """Let the cluster's idle workers import packages while a stream is planned."""
    for _ in range(reading_tasks(spec, share)):
        _import_what_tasks_need.options(
            num_cpus=spec.num_cpus, label_selector=dict(spec.label_selector)
        ).remote()


class _BlockSource(Datasource):
    """One read task per block task; the job is sent once, through the object store."""

    def __init__(
        self, name: str, job_ref: Any, drawn: Mapping[int, Any], tasks: list[BlockTask]
    ) -> None:
        self._tasks = [ReadTask(_Blocks(name, job_ref, drawn, task), _UNKNOWN) for task in tasks]

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """The tasks, in order; called twice by Ray Data."""
        return self._tasks


@dataclass
class BadRowLimit:
    """Counts the distinct undecodable rows that all tasks of one stream find, and limits them.

    `stream` names the stream in the cluster. Each process has one object per stream. Bad rows are
    keys in the cluster's key-value store, so that a stream without bad rows costs nothing.
    """

    stream: str
    num_images: int
    max_fraction: float
    _noted: set[int] = field(default_factory=set, init=False)
    _num_uncounted: int = field(default=0, init=False)
    _max_uncounted: float = field(default=0.0, init=False)

    def note(self, bad: dict[int, str]) -> None:
        """Count bad rows: sample number to description.

        Raises:
            ValueError: more than the allowed fraction of the data set is bad.
        """
        folder = f"{_BAD_ROWS}/{self.stream}"
        new = {sample: text for sample, text in bad.items() if sample not in self._noted}
        for sample, description in new.items():
            _LOG.warning("not decodable, replaced by another row: %s", description)
            _internal_kv_put(f"{folder}/{sample}".encode(), description.encode())
        self._noted.update(new)
        self._num_uncounted += len(new)
        # Counting over all processes reads every key. As long as no process has used up its share
        # of the remaining allowance, all together have not exceeded it either.
        if not new or self._num_uncounted < self._max_uncounted:
            return
        total = len(_internal_kv_list(f"{folder}/".encode()))
        refuse_too_many(total, self.num_images, self.max_fraction, next(iter(new.values())))
        self._num_uncounted = 0
        self._max_uncounted = (self.max_fraction * self.num_images - total) / _PROCESSES


def as_one_row(batch: Batch) -> Block:
    """Columns (b, ...) as a block with columns (1, b, ...).

    Ray Data joins small blocks and splits large ones, by whole rows, with limits that depend on
    estimates. A block of one row is passed on unchanged.
    """
    return BlockAccessor.batch_to_block({k: column[np.newaxis] for k, column in batch.items()})


def cut(blocks: Iterable[Block], batch_size: int) -> Iterator[Batch]:
    """Batches of `batch_size` images from blocks of one row, as views; do not write to them.

    Raises:
        RuntimeError: a block is not a whole number of batches, so the data are not in the planned
            order.
    """
    for block in blocks:
        columns = BlockAccessor.for_block(block).to_batch_format("numpy")
        sizes = [column.shape[:2] for column in columns.values()]
        rows, count = sizes[0]
        if rows != 1 or set(sizes) != {(1, count)} or count % batch_size:
            raise RuntimeError(
                f"a block has {sizes}, not one row of a multiple of {batch_size} images"
            )
        for first in range(0, count, batch_size):
            yield {k: column[0, first : first + batch_size] for k, column in columns.items()}


_UNKNOWN: Final = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
_MAX_STREAMS: Final = 2
# Of the streams that this process read last, by name: training, and an evaluation during training.
# The job, which holds the manifest, is fetched once for each.
_READERS: Final[dict[str, tuple[BatchReader, BadRowLimit]]] = {}


@dataclass(frozen=True)
class _Blocks:
    name: str
    job_ref: Any
    drawn: Mapping[int, Any]  # references to `Order.draw` by epoch; empty: the task draws it
    task: BlockTask

    def __call__(self) -> Iterator[Block]:
        if self.name not in _READERS:
            # A task has one core; more threads of OpenCV's pool would only spin.
            cv2.setNumThreads(0)
            # no limit: the stream server has put the job there before the task started
            job: StreamJob = ray.get(self.job_ref)
            limit = BadRowLimit(self.name, job.spec.num_images, job.spec.max_bad_fraction)
            _READERS[self.name] = BatchReader(job), limit
            if len(_READERS) > _MAX_STREAMS:
                del _READERS[next(iter(_READERS))]
        reader, limit = _READERS[self.name] = _READERS.pop(self.name)
        if self.drawn:  # no limit: the stream server has put these there before the task started
            reader.order.drawn = lambda epoch: ray.get(self.drawn[epoch])
        for rank, first, last in self.task.blocks():
            batch, bad = reader.batch(rank, first, last)
            limit.note(bad)
            yield as_one_row(batch)
