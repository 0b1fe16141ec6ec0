"""How often reading tasks read each row group: the code's own plan and memory, without files."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from vit_ray.config.training_sections import DataConfig
from vit_ray.data.boxes import Augmentation
from vit_ray.data.dataset import Manifest, ShardFile
from vit_ray.data.stream import batches
from vit_ray.data.stream.ray_datasets import HostRanks, planned
from vit_ray.launch.inputs import shuffle_window
from vit_ray.launch.inputs.shuffle_window import window_rows
from vit_ray.launch.inputs.streams import training_stream

IMAGE_BYTES = 110_631
"""Of an ImageNet photograph on average: data_shrink_to_cpu_2026-11-22.md."""


def manifest_of(rows: list[int], image_bytes: int) -> Manifest:
    """A data set of row groups of so many images; there are no shards."""
    counts, zeros, total = np.array(rows, np.int32), np.zeros(len(rows), np.int32), sum(rows)
    return Manifest(
        zeros, np.arange(len(rows), dtype=np.int32), counts, counts.astype(np.int64) * image_bytes,
        {}, "nowhere", "nowhere", total, ["a"], 1, "test",
        [ShardFile("part.parquet", total, 1 << 40, 0)],
    )  # fmt: skip


def spec_of(
    rows: list[int] | Manifest,
    batch: int,
    window: int | Literal["auto"],
    memory_mib: int = 256,
    size: int = 224,
    image_bytes: int = IMAGE_BYTES,
) -> batches.StreamSpec:
    """The training stream of a run of crops of `size` pixels, whose window is made definite."""
    manifest = manifest_of(rows, image_bytes) if isinstance(rows, list) else rows
    data = DataConfig(train="nowhere", shuffle_window=window)
    with mock.patch.object(shuffle_window, "TASK_MEMORY_MIB", memory_mib):
        found = window_rows(data, batch, (size, size), manifest)
    data = data.model_copy(update={"shuffle_window": found})
    spec = training_stream(data, 0, Augmentation(size=1), batch, manifest)
    return replace(spec, cache_mib=memory_mib)


def readers_of(world_size: int, servers: int) -> Iterator[HostRanks]:
    """The ranks of each server, as `StreamServer` gives them to the stream."""
    bounds = [number * world_size // servers for number in range(servers + 1)]
    for first, last in itertools.pairwise(bounds):
        yield HostRanks("", range(first, last), world_size)


class _Reads(batches.BatchReader):
    """Reads row groups into the memory of a task, and cuts no image."""

    def __init__(self, job: batches.StreamJob, counts: NDArray[np.int64]) -> None:
        super().__init__(job)
        self._counts, self.most_bytes = counts, 0
        self.forget()

    def forget(self) -> None:
        """As a task in a process of its own."""
        most = self._job.spec.cache_mib << 20
        self.read_group = batches._RowGroupCache(self._read, most)

    def _read(self, group: int) -> Any:
        self._counts[group] += 1
        return SimpleNamespace(nbytes=int(self._job.spec.manifest.bytes[group]))

    def _write(self, batch: Any, rows: Any, places: Any) -> None:
        for group in np.unique(rows.groups[places]).tolist():
            self.read_group(group)
        self.most_bytes = max(self.most_bytes, self.read_group._bytes)


@dataclass
class Reads:
    """What the tasks of all servers have read.

    Attributes:
        per_group: times of each row group.
        rows: that were made of them.
        most_rows: of a task.
        first_step: row groups that the blocks of the first step have read.
        most_bytes: that a task has held.
    """

    per_group: NDArray[np.int64]
    rows: int = 0
    most_rows: int = 0
    first_step: int = 0
    most_bytes: int = 0


def reads_of(
    spec: batches.StreamSpec,
    batch: int,
    world_size: int,
    servers: int,
    start: int,
    steps: range,
) -> Reads:
    """Of some steps of a stream that begins at a position, with nothing kept between tasks."""
    share = batch // world_size
    found = Reads(np.zeros(spec.manifest.num_row_groups, np.int64))
    for readers in readers_of(world_size, servers):
        job, tasks = planned(spec, readers, share, start, start + steps.stop * batch)
        reader = _Reads(job, found.per_group)
        for task in tasks:
            reader.forget()
            made = sum(last - first for _, first, last in task.blocks())
            found.most_rows = max(found.most_rows, made)
            for rank, first, last in task.blocks():
                before = found.per_group.copy()
                reader.batch(rank, first, last)
                if not first:
                    found.first_step += int((found.per_group - before).sum())
                if first < steps.start * job.partition.batch_size_per_rank:
                    found.per_group[:] = before
                else:
                    found.rows += last - first
        found.most_bytes = max(found.most_bytes, reader.most_bytes)
    return found


def blocks_of(
    spec: batches.StreamSpec, readers: HostRanks, share: int, start: int, stop: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Number of the rank, and samples, of each block of a server in turn."""
    job, tasks = planned(spec, readers, share, start, stop)
    plan = batches.BatchReader(job).plan
    for task in tasks:
        for rank, first, last in task.blocks():
            yield rank, plan.rows_at(start + job.partition.offsets(rank, first, last)).samples
