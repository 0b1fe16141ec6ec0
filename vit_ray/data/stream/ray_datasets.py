"""The training and evaluation streams as Ray Data sets, in an order that does not depend on
readers.

A stream is planned in segments of some thousand tasks, one Ray Data set after another, so that
starting costs the same however long the run and wherever it resumes. `batches` describes the
batches; `stream_server` executes the sets and deals their blocks to the ranks.
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
from vit_ray.data.order import BlockTask, Partition, Plan, read_tasks
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob, StreamSpec, refuse_too_many
from vit_ray.ray_internals import ExecutionCallback, _internal_kv_list, _internal_kv_put

_LOG: Final = logging.getLogger(__name__)

_BAD_ROWS: Final = "vit_ray/bad_rows"
# The remaining allowance is divided among this many processes between two counts.
_PROCESSES: Final = 1024
_WARM_WORKERS: Final = 64
# Blocks that a task makes in advance (Ray Data's own setting).
_BLOCKS_READY: Final = 2
_LARGE_BLOCKS: Final = 2
PAUSE_S: Final = 0.02
"""Short compared with the time that a full buffer lasts, unless it has only a block or two."""
# Tasks planned at a time: about 0.2 ms each, before the first batch of a segment. Planned tasks
# stay in memory, where Python's garbage collector visits them again and again: with 8,192 tasks
# it took a quarter of the server's time.
_SEGMENT_TASKS: Final = 1024
LEAST_SHARED: Final = 1 << 18
"""Row groups from which on a stream server draws the order for all tasks: a process draws that of
fewer in 30 ms, and has less to fetch."""


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a stream as one Ray Data set.

    Attributes:
        ranks: the rank of each block.
        next_at: with this many blocks left, all tasks have started: the next segment may start,
            too.
    """

    dataset: ray.data.Dataset
    ranks: list[int]
    next_at: int


@dataclass(frozen=True)
class HostRanks:
    """The ranks of a group whose blocks one server reads.

    Attributes:
        name: of this reading of the stream, the same on all servers of the group.
        ranks: consecutive ones.
        world_size: ranks of the whole group.
    """

    name: str
    ranks: range
    world_size: int

    @property
    def share(self) -> float:
        """Share of the blocks of the whole group, and so of the cluster's resources for reading."""
        return len(self.ranks) / self.world_size


def segments_of(
    spec: StreamSpec,
    readers: HostRanks,
    batch_size: int,
    start: int,
    stop: int | None = None,
) -> Iterator[Segment]:
    """Some ranks' blocks of a stream, in segments that follow each other.

    Args:
        batch_size: rows of a rank that belong together.
        start: training: samples seen before; positions over all epochs joined.
        stop: training: samples seen after. None for an evaluation, which has every image once, in
            order, padded so that all ranks get the same number of whole batches.

    Raises:
        ValueError: a training's range is empty or not a whole number of passes of all ranks.
    """
    job, tasks = _planned(spec, readers, batch_size, start, stop)
    share = readers.share
    most_bytes, most_tasks = None, None
    if spec.object_store_mib is not None:
        # Finished blocks of tasks take at most half of it. Ray Data counts them only once it knows
        # the size of the blocks, and starts with as many tasks as there are CPUs.
        most_bytes = int(share * (spec.object_store_mib << 20))
        rows = job.shape.full_passes(job.partition) * batch_size
        block_bytes = rows * math.prod(spec.augmentation.shape)
        most_tasks = max(1, most_bytes // 2 // (_BLOCKS_READY * block_bytes))
    order = Plan(spec.manifest, spec.seed, job.is_training, job.window).order
    is_large = np.count_nonzero(order.rows) >= LEAST_SHARED
    job_ref = ray.put(job)
    drawn: dict[int, ray.ObjectRef[Any]] = {}
    while some := list(itertools.islice(tasks, _SEGMENT_TASKS)):
        epochs = _epochs_of(job, some) if is_large else range(0)
        drawn = {n: drawn[n] if n in drawn else ray.put(order.draw(n)) for n in epochs}
        source = _BlockSource(readers.name, job_ref, drawn, some)
        ranks = [rank for task in some for rank in task.ranks]
        next_at = 0  # two sets in progress would take twice the object store of one
        if most_bytes is None:
            last = sum(len(task.ranks) for task in some[-reading_tasks(spec, share) :])
            next_at = min(last, len(ranks) - 1)
        yield Segment(_dataset_of(source, spec, most_bytes, most_tasks), ranks, next_at)


def _planned(
    spec: StreamSpec, readers: HostRanks, batch_size: int, start: int, stop: int | None
) -> tuple[StreamJob, Iterator[BlockTask]]:
    partition = Partition(readers.world_size, batch_size)
    rows_per_pass = partition.rows_per_pass
    if stop is None:
        passes = -(-spec.num_images // rows_per_pass)
    elif stop <= start or (stop - start) % rows_per_pass:
        raise ValueError(
            f"stream: positions {start} to {stop} are {stop - start} samples, not a positive "
            f"multiple of workers x batch size per rank ({readers.world_size} x {batch_size} = "
            f"{rows_per_pass}); use a multiple of {rows_per_pass}"
        )
    else:
        passes = (stop - start) // rows_per_pass
    # Ranks of a large group take many blocks, and each block costs its server time.
    factor = 1 if readers.share == 1 or stop is None else _LARGE_BLOCKS
    job = StreamJob(spec, partition, start, stop is not None, factor)
    return job, read_tasks(partition, 0, passes * batch_size, job.shape, readers.ranks)


def _dataset_of(
    source: Datasource, spec: StreamSpec, most_bytes: int | None, most_tasks: int | None
) -> ray.data.Dataset:
    """A set whose blocks come as the tasks emit them, in order.

    Args:
        most_bytes: of the object store; None for Ray Data's own share.
        most_tasks: at a time; None for no limit.
    """
    dataset = ray.data.read_datasource(
        source,
        num_cpus=spec.num_cpus,
        concurrency=most_tasks,
        override_num_blocks=1,
        label_selector=dict(spec.label_selector) or None,
    )
    context = dataset.context
    # Ray Data's output buffer joins what is below this size, and splits what is above, by whole
    # rows. Our blocks are single rows: they are neither joined nor split, and are emitted at once.
    context.target_max_block_size = 1
    resources = ExecutionResources.inf()
    if most_bytes is not None:
        resources = ExecutionResources.for_limits(object_store_memory=most_bytes)
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
    """Most tasks at a time for a share of a stream, if all of the cluster's CPUs were free."""
    cpus = share * ray.cluster_resources().get("CPU", 1)  # type: ignore[no-untyped-call]
    return max(1, min(int(cpus / spec.num_cpus), _WARM_WORKERS))


class PauseWhileFull(ExecutionCallback):
    """A callback of Ray Data, one object for each execution, called after each iteration of its
    loop.

    An iteration of the loop waits for its tasks. While the buffer is full none can start, and
    nothing waits: the loop would take a core from training (Ray 2.60,
    `streaming_executor_state.process_completed_tasks`).
    """

    def on_execution_step(self, executor: Any) -> None:
        """Wait if the next iteration would not, and there is one."""
        operators = ray_internals.operators_of(executor)
        has_tasks = any(op.num_active_tasks() for op in operators)
        if not has_tasks and not all(op.has_completed() for op in operators):
            time.sleep(PAUSE_S)


@ray.remote
def _import_what_tasks_need() -> None:
    # By its name: Ray would send the function itself, and unpickling that imports nothing.
    importlib.import_module("vit_ray.data.stream.ray_datasets")


def warm_up(spec: StreamSpec, share: float) -> None:
    """Let idle workers of a cluster import in the background while a stream is planned."""
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
        """The tasks, in order; Ray Data asks twice."""
        return self._tasks


@dataclass
class BadRowLimit:
    """How many distinct rows of a data set the tasks of one stream may find undecodable.

    `stream` names the stream in the cluster. Every process has one of these per stream. Counts are
    in the cluster's key-value store, so that a stream without bad rows costs nothing.
    """

    stream: str
    num_images: int
    max_fraction: float
    _known: set[int] = field(default_factory=set, init=False)
    _uncounted: int = field(default=0, init=False)
    _until_count: float = field(default=0.0, init=False)

    def note(self, bad: dict[int, str]) -> None:
        """Count bad rows: sample number to description.

        Raises:
            ValueError: more than the allowed fraction of the data set is bad.
        """
        folder = f"{_BAD_ROWS}/{self.stream}"
        new = {sample: text for sample, text in bad.items() if sample not in self._known}
        for sample, description in new.items():
            _LOG.warning("not decodable, replaced by another row: %s", description)
            _internal_kv_put(f"{folder}/{sample}".encode(), description.encode())
        self._known.update(new)
        self._uncounted += len(new)
        # Counting over all processes reads every key. As long as no process has used up its share
        # of the remaining allowance, all together have not exceeded it either.
        if not new or self._uncounted < self._until_count:
            return
        total = len(_internal_kv_list(f"{folder}/".encode()))
        allowed = self.max_fraction * self.num_images
        refuse_too_many(total, self.num_images, self.max_fraction, next(iter(new.values())))
        self._uncounted, self._until_count = 0, (allowed - total) / _PROCESSES


def as_one_row(batch: Batch) -> Block:
    """Columns (b, ...) as a block with columns (1, b, ...).

    Ray Data joins small blocks and splits large ones, by whole rows, with limits that depend on
    estimates. A block of one row is passed on unchanged.
    """
    return BlockAccessor.batch_to_block({k: column[np.newaxis] for k, column in batch.items()})


def cut(blocks: Iterable[Block], batch_size: int) -> Iterator[Batch]:
    """Batches of `batch_size` from blocks of one row, as views; do not write to them.

    Raises:
        RuntimeError: a block is not a whole number of batches: the data are not in the planned
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
_STREAMS_HELD: Final = 2
# For the streams that this process last worked for: training, and an evaluation during it.
#
# The job itself is fetched once: it holds the manifest, and is the same for all servers.
_READERS: Final[dict[str, tuple[BatchReader, BadRowLimit]]] = {}


@dataclass(frozen=True)
class _Blocks:
    name: str
    job_ref: Any
    drawn: Mapping[int, Any]  # `Order.draw` of each epoch for all tasks; empty where each draws it
    task: BlockTask

    def __call__(self) -> Iterator[Block]:
        if self.name not in _READERS:
            # A task has one core; more threads of OpenCV's pool would only spin.
            cv2.setNumThreads(0)
            # no limit: the stream server has put it there before the task started
            job: StreamJob = ray.get(self.job_ref)
            limit = BadRowLimit(self.name, job.spec.num_images, job.spec.max_bad_fraction)
            _READERS[self.name] = BatchReader(job), limit
            if len(_READERS) > _STREAMS_HELD:
                del _READERS[next(iter(_READERS))]
        reader, limit = _READERS[self.name] = _READERS.pop(self.name)
        if self.drawn:  # no limit: the stream server has put it there before the task started
            reader.plan.order.drawn = lambda epoch: ray.get(self.drawn[epoch])
        for rank, first, last in self.task.blocks():
            batch, bad = reader.batch(rank, first, last)
            limit.note(bad)
            yield as_one_row(batch)
