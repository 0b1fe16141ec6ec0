"""Batches of pixels from positions of a stream: the work of every reading task.

Training batches: {"image": uint8 (b, H, W, 3), "labels": int32 (b, max_labels) padded with -1,
"sample": int64 (b,)}, with sample numbers of the data set. Evaluation batches also have
"weight": float32 (b,), 0.0 for padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import cv2
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
# Blocks and tasks of a training have more rows: each block takes 6 ms of the stream server.
_TRAINING_BLOCKS: Final = 2
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
        block_rows: approximate rows per block, a multiple of a rank's batch; a training without
            `object_store_mib` has twice as many.
        task_rows: approximate rows per task, or twice as many, too.
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
    """

    spec: StreamSpec
    partition: Partition
    start: int
    is_training: bool

    @property
    def window(self) -> ShuffleWindow | None:
        """The shuffle window; None in evaluation."""
        return self.spec.window if self.is_training else None

    @property
    def shape(self) -> BlockShape:
        rows_per_pass = self.partition.rows_per_pass
        window = self.window.num_rows if self.window else rows_per_pass
        passes = window // rows_per_pass if window % rows_per_pass == 0 else 1
        # An evaluation of few images is divided among all nodes.
        is_large = self.is_training and self.spec.object_store_mib is None
        factor = _TRAINING_BLOCKS if is_large else 1
        blocks, tasks = factor * self.spec.block_rows, factor * self.spec.task_rows
        return BlockShape(blocks, tasks, passes, self.start // rows_per_pass)


class BatchReader:
    """Makes the batches of one stream; caches its order and some row groups between calls."""

    def __init__(self, job: StreamJob) -> None:
        self._job, manifest = job, job.spec.manifest
        self.order = Order(manifest.rows, job.spec.seed, job.is_training, job.window)
        bytes_of_group = max(1, int(manifest.bytes.mean()))
        self._max_groups = max(1, (job.spec.cache_mib << 20) // bytes_of_group)
        reader = RowGroupReader(manifest, job.spec.cache)
        self.read_group = lru_cache(self._max_groups)(reader.read)

    def batch(self, rank: int, first: int, last: int) -> tuple[Batch, dict[int, str]]:
        """Rows [first, last) of a rank, and a description of each bad row by its sample number.

        A bad row is replaced by another in training, and is padding in evaluation.
        """
        job, manifest, size = self._job, self._job.spec.manifest, last - first
        positions = job.start + job.partition.offsets(rank, first, last)
        if not job.is_training:
            positions = positions[positions < self.order.num_images]
        epochs, groups, rows = self.order.places(positions)
        samples = manifest.samples_at(groups, rows)
        batch: Batch = {
            "image": np.empty((size, *job.spec.augmentation.shape), np.uint8),
            "labels": np.full((size, manifest.max_labels), NO_LABEL, np.int32),
            "sample": np.full(size, _PADDING_SAMPLE, np.int64),
        }
        bad: dict[int, str] = {}
        # Rows are written in turns, so that the row groups of a turn fit into memory together.
        turns = np.unique(groups, return_inverse=True)[1] // self._max_groups
        for turn in np.unique(turns):
            indices = np.flatnonzero(turns == turn)
            bad |= self._write(batch, indices, epochs[indices], samples[indices])
        if not job.is_training:
            is_padding = batch["sample"] == _PADDING_SAMPLE
            batch["image"][is_padding] = 0
            batch["weight"] = 1 - is_padding.astype(np.float32)
        return batch, bad

    def _write(
        self,
        batch: Batch,
        indices: NDArray[np.intp],
        epochs: NDArray[np.int64],
        samples: NDArray[np.int64],
    ) -> dict[int, str]:
        """Write samples at some indices of a batch, and describe the bad ones.

        Their crops are drawn together.
        """
        spec, bad = self._job.spec, dict[int, str]()
        groups, stored_rows = (numbers.tolist() for numbers in spec.manifest.places(samples))
        rows = [
            (self.read_group(group), row) for group, row in zip(groups, stored_rows, strict=True)
        ]
        sizes = np.array([encoded.sizes[row] for encoded, row in rows])
        boxes = draw_boxes(sizes, spec.augmentation, spec.seed, epochs, samples)
        columns = indices.tolist(), epochs.tolist(), samples.tolist(), rows, boxes
        for i, epoch, sample, row, box in zip(*columns, strict=True):
            if problem := self._write_row(batch, i, epoch, sample, *row, box):
                bad[sample] = problem
                if self._job.is_training:
                    bad |= self._write_neighbour(batch, i, epoch, sample)
        return bad

    def _write_row(
        self,
        batch: Batch,
        i: int,
        epoch: int,
        sample: int,
        encoded: EncodedRows,
        row: int,
        box: CropBox,
    ) -> str:
        """Write a stored row as row `i`; the description of a row that is not decodable."""
        spec = self._job.spec
        try:
            pixels = crop(encoded.stored(row), box, spec.augmentation, batch["image"][i])
            spec.augmentation.changed(pixels, (spec.seed, epoch, sample))
        except (ValueError, cv2.error) as error:
            group, _ = spec.manifest.place(sample)
            shard = spec.manifest.files[int(spec.manifest.file_index[group])].path
            return (
                f"{encoded.key(row)!r} in {shard!r}, row {row} of row group "
                f"{int(spec.manifest.row_group[group])}: {error}"
            )
        labels = encoded.labels_of(row)
        batch["labels"][i, : len(labels)] = labels
        batch["sample"][i] = sample
        return ""

    def _write_neighbour(self, batch: Batch, i: int, epoch: int, bad_sample: int) -> dict[int, str]:
        """Write the next decodable row after a sample, of its row group or a following one.

        Returns:
            A description of each bad row between them, by its sample number.
        """
        spec, manifest, bad = self._job.spec, self._job.spec.manifest, dict[int, str]()
        group, _ = manifest.place(bad_sample)
        groups = np.flatnonzero(manifest.rows)
        groups = np.roll(groups, -int(np.searchsorted(groups, group)))
        for near in groups[:_GROUPS_TRIED].tolist():
            samples = manifest.samples_of(near)
            num_before = int(np.searchsorted(samples, bad_sample, side="right"))
            for sample in np.roll(samples, -num_before).tolist():
                _, row = manifest.place(sample)
                encoded = self.read_group(near)
                box = draw_box(encoded.sizes[row], spec.augmentation, (spec.seed, epoch, sample))
                problem = self._write_row(batch, i, epoch, sample, encoded, row, box)
                if not problem:
                    return bad
                bad[sample] = problem
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
