"""Batches of pixels from positions of a stream: the work of every reading task.

Training batches: {"image": uint8 (b, H, W, 3), "labels": int32 (b, max_labels) padded with -1,
"sample": int64 (b,)}, with sample numbers of the data set. Evaluation batches also have
"weight": float32 (b,), 0.0 for padding.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.boxes import Augmentation, CropBox, draw_box, draw_boxes
from vit_ray.data.crops import crop
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import BlockShape, Order, Partition, ShuffleWindow
from vit_ray.data.shards import NO_LABEL, Cache, EncodedRows, RowGroupReader

Batch = dict[str, NDArray[Any]]

TASK_MEMORY_MIB: Final = 256
"""Encoded images that one reading task keeps in memory; at least one row group."""

_PADDING_SAMPLE: Final = -1
# Row groups that are searched for a substitute of a bad image.
_GROUPS_TRIED: Final = 8


@dataclass(frozen=True)
class StreamSpec:
    """What a stream reads and how, except for the ranks.

    Attributes:
        augmentation: of all images.
        seed: of the order and of the augmentation.
        window: shuffle window of training; None for no window.
        max_bad_fraction: a larger fraction of undecodable images is an error.
        num_cpus: CPUs that one reading task takes.
        block_rows: approximate rows per block; a multiple of the micro-batch is used.
        task_rows: approximate rows per task.
        cache_mib: encoded images that a reading task keeps in memory; at least one row group.
        object_store_mib: MiB of the object store that blocks of this stream may take before
            reading waits for training; None for Ray Data's default.
        cache: cache on each node's disk, for later epochs; None for no cache.
        label_selector: labels of the nodes that read; empty for all nodes.
    """

    manifest: Manifest
    augmentation: Augmentation = field(default_factory=Augmentation)
    seed: int = 0
    window: ShuffleWindow | None = None
    max_bad_fraction: float = 0.001
    num_cpus: float = 0.66
    block_rows: int = 128
    task_rows: int = 1024
    cache_mib: int = TASK_MEMORY_MIB
    object_store_mib: int | None = None
    cache: Cache | None = None
    label_selector: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_images(self) -> int:
        return self.manifest.num_images


@dataclass(frozen=True)
class StreamJob:
    """A stream for a known number of ranks.

    Attributes:
        start: training: samples seen before; positions over all epochs joined.
        block_factor: multiplies `block_rows` and `task_rows` of the spec.
    """

    spec: StreamSpec
    partition: Partition
    start: int
    is_training: bool
    block_factor: int = 1

    @property
    def window(self) -> ShuffleWindow | None:
        """The shuffle window; None in evaluation."""
        return self.spec.window if self.is_training else None

    @property
    def shape(self) -> BlockShape:
        rows_per_pass = self.partition.rows_per_pass
        window = self.window.num_rows if self.window else rows_per_pass
        passes = window // rows_per_pass if window % rows_per_pass == 0 else 1
        blocks, tasks = (self.block_factor * n for n in (self.spec.block_rows, self.spec.task_rows))
        return BlockShape(blocks, tasks, passes, self.start // rows_per_pass)


class BatchReader:
    """Makes the batches of one stream; caches its order and some row groups between calls."""

    def __init__(self, job: StreamJob) -> None:
        spec = job.spec
        self._job = job
        self.order = Order(spec.manifest.rows, spec.seed, job.is_training, job.window)
        self.read_group = _RowGroupCache(
            RowGroupReader(spec.manifest, spec.cache).read, spec.cache_mib << 20
        )

    def batch(self, rank: int, first: int, last: int) -> tuple[Batch, dict[int, str]]:
        """Rows [first, last) of a rank, and a description of each bad row by its sample number.

        A bad row is replaced by another in training, and is padding in evaluation.
        """
        positions = self._job.start + self._job.partition.offsets(rank, first, last)
        if not self._job.is_training:
            positions = positions[positions < self.order.num_images]
        places, spec = self.order.places(positions), self._job.spec
        samples = spec.manifest.samples_at(places.groups, places.rows)
        batch = _Batch(self._job, last - first)
        # Rows are written in turns, so that the row groups of a turn fit into memory together.
        groups = np.unique(places.groups)
        turns = np.cumsum(spec.manifest.bytes[groups]) // max(1, spec.cache_mib << 20)
        turn_of_row = turns[np.searchsorted(groups, places.groups)]
        for turn in np.unique(turns):
            indices = np.flatnonzero(turn_of_row == turn)
            columns = (column[indices] for column in (places.epochs, places.groups, samples))
            self._write(batch, indices, *columns)
        return batch.columns(), batch.bad

    def _write(
        self,
        batch: "_Batch",
        indices: NDArray[np.intp],
        epochs: NDArray[np.int64],
        groups: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> None:
        """Write samples at some indices of the batch; their crops are drawn together."""
        spec, manifest = self._job.spec, self._job.spec.manifest
        stored = [manifest.place(sample)[1] for sample in samples.tolist()]
        read = {group: self.read_group(group) for group in np.unique(groups).tolist()}
        encoded = [read[group] for group in groups.tolist()]
        sizes = np.array([block.sizes[row] for block, row in zip(encoded, stored, strict=True)])
        boxes = draw_boxes(sizes, spec.augmentation, spec.seed, epochs, samples)
        columns = (encoded, epochs.tolist(), groups.tolist(), stored, samples.tolist(), boxes)
        for i, row in zip(indices.tolist(), zip(*columns, strict=True), strict=True):
            if not batch.try_row(i, *row) and self._job.is_training:
                _, epoch, group, _, sample, _ = row
                self._fill_with_neighbour(batch, i, epoch, group, sample)

    def _fill_with_neighbour(
        self, batch: "_Batch", i: int, epoch: int, group: int, bad: int
    ) -> None:
        """Write the next decodable row after sample `bad`, of its row group or a following one."""
        spec, manifest = self._job.spec, self._job.spec.manifest
        groups = np.flatnonzero(manifest.rows)
        groups = np.roll(groups, -int(np.searchsorted(groups, group)))
        for near in groups[:_GROUPS_TRIED].tolist():
            encoded, samples = self.read_group(near), manifest.samples_of(near)
            first = int(np.searchsorted(samples, bad)) + 1 if near == group else 0
            for sample in np.roll(samples, -first).tolist():
                _, stored = manifest.place(sample)
                box = draw_box(encoded.sizes[stored], spec.augmentation, (spec.seed, epoch, sample))
                if sample != bad and batch.try_row(i, encoded, epoch, near, stored, sample, box):
                    return
        raise ValueError(
            f"shard {manifest.shard_location(group).path!r}: no image of its row group "
            f"{int(manifest.row_group[group])} and of the next {_GROUPS_TRIED - 1} can be decoded; "
            "run `vit-ray verify`"
        )


def refuse_too_many(num_bad: int, num_images: int, max_fraction: float, example: str) -> None:
    """Raise a ValueError if more than the allowed fraction of a data set cannot be decoded.

    Args:
        example: description of one of the bad images.
    """
    if num_bad > max_fraction * num_images:
        raise ValueError(
            f"{num_bad} of {num_images} images cannot be decoded, above "
            f"data.max_bad_fraction={max_fraction}; one of them is {example}; run `vit-ray "
            "verify`, or raise the limit"
        )


class _RowGroupCache:
    """The row groups that were used last; consecutive blocks of a task share row groups."""

    def __init__(self, read: Callable[[int], EncodedRows], max_bytes: int) -> None:
        self._read = read
        self._max_bytes = max_bytes
        self._cached: OrderedDict[int, EncodedRows] = OrderedDict()
        self._bytes = 0

    def __call__(self, group: int) -> EncodedRows:
        if group not in self._cached:
            self._cached[group] = self._read(group)
            self._bytes += self._cached[group].nbytes
            while self._bytes > self._max_bytes and len(self._cached) > 1:
                self._bytes -= self._cached.popitem(last=False)[1].nbytes
        self._cached.move_to_end(group)
        return self._cached[group]


class _Batch:
    """A batch that is being filled; rows that are not written are padding.

    Attributes:
        bad: a description of each bad row, by its sample number.
    """

    def __init__(self, job: StreamJob, size: int) -> None:
        self._job, self._spec = job, job.spec
        self.bad: dict[int, str] = {}
        self._images = np.zeros((size, *job.spec.augmentation.shape), np.uint8)
        self._labels = np.full((size, job.spec.manifest.max_labels), NO_LABEL, np.int32)
        self._samples = np.full(size, _PADDING_SAMPLE, np.int64)

    def try_row(
        self,
        i: int,
        encoded: EncodedRows,
        epoch: int,
        group: int,
        stored: int,
        sample: int,
        box: CropBox,
    ) -> bool:
        """Write a stored row as row `i`; False, with an entry in `bad`, if it is not decodable."""
        try:
            image, augmentation = encoded.stored(stored), self._spec.augmentation
            pixels = crop(image, box, augmentation, self._images[i])
            augmentation.changed(pixels, (self._spec.seed, epoch, sample))
        except ValueError as error:
            manifest = self._spec.manifest
            shard = manifest.files[int(manifest.file_index[group])].path
            self.bad[sample] = (
                f"{encoded.key(stored)!r} in {shard!r}, row {stored} of row group "
                f"{int(manifest.row_group[group])}: {error}"
            )
            return False
        labels = encoded.labels_of(stored)
        self._labels[i, : len(labels)] = labels
        self._samples[i] = sample
        return True

    def columns(self) -> Batch:
        batch: Batch = {"image": self._images, "labels": self._labels, "sample": self._samples}
        if not self._job.is_training:
            batch["weight"] = (self._samples != _PADDING_SAMPLE).astype(np.float32)
        return batch
