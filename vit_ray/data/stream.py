"""The training and evaluation streams: Ray Data sets whose order does not depend on who reads.

Training batches: {"image": uint8 (b, H, W, 3), "labels": int32 (b, max_labels) padded with -1,
"sample": int64 (b,)}. Evaluation batches have "weight": float32 (b,) too, 0.0 for padding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import ray
import ray.data
import ray.train
from numpy.typing import NDArray
from ray.data import DataContext, ExecutionOptions
from ray.data.block import Block, BlockAccessor, BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from vit_ray.data.bad_rows import BadRowLimit, new_ledger
from vit_ray.data.images import Augmentation, training_crop
from vit_ray.data.layout import ReadTask as BlockTask
from vit_ray.data.layout import World, read_tasks
from vit_ray.data.manifest import Manifest
from vit_ray.data.plan import Plan, Rows
from vit_ray.data.reader import EncodedRows, RowGroupReader
from vit_ray.data.schema import NO_LABEL
from vit_ray.data.selection import RowSelection

Batch = dict[str, NDArray[Any]]

_PADDING_SAMPLE: Final = -1


@dataclass(frozen=True)
class StreamSpec:
    """What a stream reads and how; everything but who reads it.

    Attributes:
        seed: of the order and of the augmentation.
        rows: which rows take part; None for all.
        max_bad_fraction: share of the images that may be undecodable before an error.
        num_cpus: CPUs that one reading task takes.
        concurrency: most reading tasks at a time; None for as many as there are CPUs.
        block_rows: rows that travel together, about; a multiple of the micro-batch is used.
        task_rows: rows that one task makes, about.
    """

    manifest: Manifest
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    rows: RowSelection | None = None
    max_bad_fraction: float = 0.001
    num_cpus: float = 1.0
    concurrency: int | None = None
    block_rows: int = 128
    task_rows: int = 1024

    @property
    def num_images(self) -> int:
        """Images of one epoch."""
        return self.manifest.num_images if self.rows is None else self.rows.count


@dataclass(frozen=True)
class PendingStream:
    """A training stream that waits for the world size; `StreamConfig` makes the Dataset of it.

    `micro_batch_size` may be a function of the world size, for groups that change size.
    """

    spec: StreamSpec
    micro_batch_size: int | Callable[[int], int]
    start: int
    stop: int

    def dataset(self, world_size: int) -> ray.data.Dataset:
        """The stream for this many ranks."""
        size = self.micro_batch_size
        return training_stream(
            self.spec,
            world_size=world_size,
            micro_batch_size=size if isinstance(size, int) else size(world_size),
            start=self.start,
            stop=self.stop,
        )


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation stream that waits for the world size."""

    spec: StreamSpec
    batch_size: int

    def dataset(self, world_size: int) -> ray.data.Dataset:
        """The stream for this many ranks."""
        return evaluation_stream(self.spec, world_size=world_size, batch_size=self.batch_size)


def training_stream(
    spec: StreamSpec, *, world_size: int, micro_batch_size: int, start: int, stop: int
) -> ray.data.Dataset:
    """Positions [start, stop) of a run, for `streaming_split(world_size, equal=True)`.

    Args:
        start, stop: samples seen before and after; positions over all epochs joined.

    Raises:
        ValueError: if the range is empty or not a whole number of passes of all ranks.
    """
    world = World(world_size, micro_batch_size)
    if stop <= start or (stop - start) % world.rows_per_pass:
        raise ValueError(
            f"stream: positions {start} to {stop} are {stop - start} samples, not a positive "
            f"multiple of workers x micro-batch ({world_size} x {micro_batch_size} = "
            f"{world.rows_per_pass}); use a multiple of {world.rows_per_pass}."
        )
    job = _StreamJob(spec, world, start, is_training=True)
    return _dataset(job, (stop - start) // world_size)


def evaluation_stream(spec: StreamSpec, *, world_size: int, batch_size: int) -> ray.data.Dataset:
    """Every image once, in order, padded so that all ranks get equally many whole batches."""
    world = World(world_size, batch_size)
    passes = -(-spec.num_images // world.rows_per_pass)
    job = _StreamJob(spec, world, start=0, is_training=False)
    return _dataset(job, passes * batch_size)


@dataclass(frozen=True)
class _StreamJob:
    spec: StreamSpec
    world: World
    start: int
    is_training: bool


def _dataset(job: _StreamJob, rows_per_rank: int) -> ray.data.Dataset:
    spec = job.spec
    tasks = read_tasks(
        job.world, rows_per_rank, block_rows=spec.block_rows, task_rows=spec.task_rows
    )
    source = _BlockSource(job, tasks)
    dataset = ray.data.read_datasource(
        source,
        num_cpus=spec.num_cpus,
        concurrency=spec.concurrency,
        override_num_blocks=len(tasks),
    )
    _shape_blocks_as_given(dataset.context, max(t.block_rows for t in tasks), spec)
    return dataset


def _shape_blocks_as_given(context: DataContext, largest_rows: int, spec: StreamSpec) -> None:
    """Make Ray Data emit each block as it is made.

    Its output buffer emits what exceeds `target_max_block_size` and slices what exceeds 1.5 times
    that; between the two lies the full block. A smaller block is the only one of its task.
    """
    height, width, channels = spec.augmentation.shape
    context.target_max_block_size = largest_rows * height * width * channels * 3 // 4
    context.execution_options = ExecutionOptions(preserve_order=True)
    context.enable_progress_bars = False


class _BlockSource(Datasource):
    """One read task per block task; the job travels once, through the object store."""

    def __init__(self, job: _StreamJob, tasks: list[BlockTask]) -> None:
        self._job_ref = ray.put(job)
        self._ledger = new_ledger() if job.is_training else None
        self._tasks = tasks

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        return [self._read_task(task) for task in self._tasks]

    def _read_task(self, task: BlockTask) -> ReadTask:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return ReadTask(_Blocks(self._job_ref, self._ledger, task), metadata)


@dataclass(frozen=True)
class _Blocks:
    job_ref: Any
    ledger: Any
    task: BlockTask

    def __call__(self) -> Iterator[Block]:
        job: _StreamJob = ray.get(self.job_ref)
        reading = _Reading.of(job, self.job_ref.hex())
        limit = BadRowLimit(self.ledger, job.spec.num_images, job.spec.max_bad_fraction)
        for rank, first, last in self.task.blocks():
            batch, bad = reading.batch(rank, first, last)
            limit.note(bad)
            yield BlockAccessor.batch_to_block(batch)


class _Reading:
    """Makes batches of one stream; kept between the tasks of a process."""

    def __init__(self, job: _StreamJob) -> None:
        self._job = job
        spec = job.spec
        self._plan = Plan(spec.manifest, spec.seed, spec.rows, is_shuffled=job.is_training)
        self._reader = RowGroupReader(spec.manifest)
        self._read = lru_cache(maxsize=_ROW_GROUPS_HELD)(self._reader.read)

    @classmethod
    def of(cls, job: _StreamJob, name: str) -> "_Reading":
        if name not in _READINGS:
            _READINGS.clear()
            _READINGS[name] = cls(job)
        return _READINGS[name]

    def batch(self, rank: int, first: int, last: int) -> tuple[Batch, dict[int, str]]:
        """Rows [first, last) of a rank as a batch, and the bad rows that were replaced."""
        offsets = self._job.world.offsets(rank, first, last)
        rows = self._rows_at(self._job.start + offsets)
        return _BatchMaker(self._job, self._read).make(rows, last - first)

    def _rows_at(self, positions: NDArray[np.int64]) -> Rows:
        if not self._job.is_training:
            positions = positions[positions < self._plan.num_images]
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        runs = [run for run in np.split(positions, breaks) if len(run)]
        parts = [self._plan.rows_at(int(run[0]), int(run[-1]) + 1) for run in runs]
        columns = [(p.epochs, p.groups, p.rows, p.samples) for p in parts]
        if not columns:
            empty = np.empty(0, np.int64)
            return Rows(empty, empty, empty, empty)
        return Rows(*(np.concatenate(column) for column in zip(*columns, strict=True)))


_ROW_GROUPS_HELD: Final = 64
_READINGS: dict[str, _Reading] = {}


class _BatchMaker:
    def __init__(self, job: _StreamJob, read: Callable[[int], EncodedRows]) -> None:
        self._spec = job.spec
        self._is_training = job.is_training
        self._read = read
        self._bad: dict[int, str] = {}

    def make(self, rows: Rows, size: int) -> tuple[Batch, dict[int, str]]:
        spec = self._spec
        batch: Batch = {
            "image": np.zeros((size, *spec.augmentation.shape), np.uint8),
            "labels": np.full((size, spec.manifest.max_labels), NO_LABEL, np.int32),
            "sample": np.full(size, _PADDING_SAMPLE, np.int64),
        }
        if not self._is_training:
            batch["weight"] = (np.arange(size) < len(rows.samples)).astype(np.float32)
        for i in range(len(rows.samples)):
            self._fill(batch, i, int(rows.epochs[i]), int(rows.groups[i]), int(rows.rows[i]))
        return batch, self._bad

    def _fill(self, batch: Batch, i: int, epoch: int, group: int, row: int) -> None:
        """Write row `i`: the image, or the next one of its row group that can be decoded."""
        size = int(self._spec.manifest.rows[group])
        for candidate in range(row, row + size):
            if self._try_row(batch, i, epoch, group, candidate % size):
                return
        raise ValueError(
            f"shard {self._spec.manifest.shard_location(group).path!r}: no image of row group "
            f"{int(self._spec.manifest.row_group[group])} can be decoded; run jobs/verify.py."
        )

    def _try_row(self, batch: Batch, i: int, epoch: int, group: int, row: int) -> bool:
        spec = self._spec
        encoded = self._read(group)
        stored = int(spec.manifest.stored_rows(group, np.array([row]))[0])
        sample = int(spec.manifest.first_samples[group]) + row
        try:
            key = (spec.seed, epoch, sample)
            training_crop(encoded.image(stored), spec.augmentation, key, out=batch["image"][i])
        except ValueError as error:
            shard = spec.manifest.shard_location(group).path
            self._bad[sample] = (
                f"{shard}, row {stored} of its row group, {encoded.key(stored)!r}: {error}"
            )
            return False
        labels = encoded.labels_of(stored)
        batch["labels"][i, : len(labels)] = labels
        batch["sample"][i] = sample
        return True


class StreamConfig(ray.train.DataConfig):
    """Builds each stream for exactly the workers of each worker-group start.

    A data set of the trainer is a `PendingStream`, a `PendingEvaluation`, or a callable that
    returns one, which Ray Train calls at every start; a plain Dataset is split as it is.
    """

    def configure(
        self,
        datasets: dict[str, Any],
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """One dict of iterators per rank."""
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, source in datasets.items():
            is_pending = isinstance(source, PendingStream | PendingEvaluation)
            dataset = source.dataset(world_size) if is_pending else source
            for rank, shard in enumerate(dataset.streaming_split(world_size, equal=True)):
                shards[rank][name] = shard
        return shards
