"""A data set in Python: samples by number, and a run's batches without Ray."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.boxes import draw_box
from vit_ray.data.dataset import Manifest
from vit_ray.data.dataset import open_dataset as open_manifest
from vit_ray.data.images import UInt8Array
from vit_ray.data.order import Partition
from vit_ray.data.shards import EncodedRows, RowGroupReader
from vit_ray.data.stream.batches import (
    Batch,
    BatchReader,
    StreamJob,
    StreamSpec,
    refuse_too_many,
)
from vit_ray.launch.resolved_run import ResolvedRun, resolve_data, resolve_run
from vit_ray.own_parts import trust_named

if TYPE_CHECKING:
    from vit_ray.launch.torch_stream import TorchStream

logger = logging.getLogger(__name__)

# Row groups in memory: neighbouring images are read once.
_CACHED_GROUPS: Final = 8


class Sample(NamedTuple):
    """One image of a data set.

    Attributes:
        image: as stored, in any mode and size.
        labels: indices into the classes; several or none if the set has such images.
    """

    image: Image.Image
    labels: tuple[int, ...]
    key: str


class Dataset(Sequence[Sample]):
    """Samples of a converted data set by number, in the order in which they are stored.

    Attributes:
        manifest: counts, classes, shards and fingerprint.
        classes: names in label order.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.classes = manifest, manifest.classes
        self._read = lru_cache(_CACHED_GROUPS)(RowGroupReader(manifest).read)

    def __len__(self) -> int:
        return self.manifest.num_images

    def __getitem__(self, index: int | slice) -> Any:
        """A `Sample`, or of a slice a list of samples."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        number = range(len(self))[index]  # negative numbers count from the end
        rows, row = self._row(number)
        image = Image.open(io.BytesIO(rows.image(row)))
        return Sample(image, tuple(map(int, rows.labels_of(row))), rows.key(row))

    def encoded(self) -> Iterator[tuple[str, bytes]]:
        """Key and encoded image of each sample, in order."""
        for number in range(len(self)):
            rows, row = self._row(number)
            yield rows.key(row), rows.image(row)

    def iter_batches(
        self,
        global_batch_size: int,
        image_size: int | tuple[int, int],
        *,
        epochs: float = 1.0,
        start: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        training: bool = True,
        **data: Any,
    ) -> RankBatches:
        """The batches that one rank of a training gets, bit for bit, without Ray.

        Batches are read when the list is iterated or indexed. A batch is {"image": uint8
        (b, H, W, 3), "labels": int32 (b, L) padded with -1, "sample": int64 (b,)} with
        b = `global_batch_size / world_size`. Any world size has the same global batches, and so
        has a run with equal `train.global_batch_size`, `model.image_size`, `seed` and `data`.

        Args:
            image_size: side of a crop in pixels, or (height, width).
            epochs: length, as `optim.epochs`, from position 0 to the nearest whole batch.
            start: samples seen before, in whole batches; the rest of the epochs follows.
            training: False for an evaluation: each image once (not `epochs`), in stored order,
                cropped by `eval_augment`; the last batch is padded, with "weight" 0.0. With
                `held_out_fraction`, only the images that a training with this `seed` leaves out.
            data: further keys of a recipe's section `data` except `train` and `eval`, such as
                `augment={"min_area": 0.3}`.

        Raises:
            ValueError: a key is unknown, or a value cannot work.
        """
        if global_batch_size <= 0 or epochs <= 0 or start < 0 or start % global_batch_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}, epochs={epochs}, start={start}; the first "
                "two must be above 0, and start a multiple of global_batch_size"
            )
        if taken := {"train", "eval"} & data.keys():
            raise ValueError(f"{min(taken)} is this data set; open another one to read that")
        path, is_whole = self.manifest.path, not data.get("held_out_fraction")
        trust_named(data)
        tree = {
            "name": "batches",
            "seed": seed,
            "model": {"name": "ViT", "image_size": image_size},
            "data": {**data, "train": path, "eval": None if training or not is_whole else path},
            "train": {"global_batch_size": global_batch_size},
            "optim": {"epochs": epochs},
        }
        recipe = recipe_from_dict(tree, "batches")
        # The model has no patch size, and is not checked: any image size is allowed.
        run = resolve_data(recipe, self.manifest, needs_train=training)
        spec = run.streams["train" if training else "eval"]
        images = run.total_steps * global_batch_size if training else spec.num_images
        steps = max(0, ceil((images - start) / global_batch_size))
        return RankBatches(
            spec, global_batch_size, steps, rank, world_size, start=start, is_training=training
        )

    def torch_dataset(
        self, global_batch_size: int, image_size: int | tuple[int, int], **options: Any
    ) -> TorchStream:
        """The same batches as an `IterableDataset` of tensors, for any DataLoader.

            DataLoader(train.torch_dataset(256, 224, epochs=90), batch_size=None, num_workers=8)

        Args:
            options: as of `iter_batches`.
        """
        from vit_ray.launch.torch_stream import TorchStream  # torch takes a second

        return TorchStream(self.iter_batches(global_batch_size, image_size, **options))

    def _row(self, number: int) -> tuple[EncodedRows, int]:
        group, row = self.manifest.place(number)
        return self._read(group), row


def open_dataset(path: str) -> Dataset:
    """Open a converted data set.

    Args:
        path: folder or `s3://` prefix.

    Raises:
        ValueError: there is no complete data set.
    """
    return Dataset(open_manifest(path))


class RankBatches(Sequence[Batch]):
    """Item k is what one rank gets at step k, bit for bit as in a run.

    A batch is {"image": uint8 (b, H, W, 3), "labels": int32 (b, L) padded with -1, "sample": int64
    (b,)} with b = global batch size / world size. An image that cannot be decoded is replaced by
    its neighbour, as in a run, with a warning; each process allows `data.max_bad_fraction` of the
    data set. Evaluation batches also have "weight": float32 (b,), 0.0 for padding.

    The list is a map-style data set for torch, which makes tensors and keeps the order:

        DataLoader(training_batches(recipe)[step:], batch_size=None, num_workers=8)

    A slice is again such a list, so `[step:]` resumes. Consecutive steps share row groups, which
    each process caches (`StreamSpec.cache_mib`): random access reads more.
    """

    def __init__(
        self,
        spec: StreamSpec,
        global_batch_size: int,
        steps: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        start: int = 0,
        is_training: bool = True,
    ) -> None:
        """No image is read yet.

        Args:
            start: position of the first sample, counted over all epochs.

        Raises:
            ValueError: the rank is not below `world_size`, or the global batch does not divide by
                it.
        """
        if not 0 <= rank < world_size or global_batch_size % world_size:
            raise ValueError(
                f"rank={rank}, world_size={world_size}; give 0 <= rank < world_size, and as "
                f"world_size a divisor of train.global_batch_size={global_batch_size}"
            )
        self._rank, self._share = rank, global_batch_size // world_size
        self._job = StreamJob(spec, Partition(world_size, self._share), start, is_training)
        self._steps = range(steps)
        self._reader: tuple[int, BatchReader] | None = None
        # Problem of each sample that this process could not decode
        self._bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int | slice) -> Any:
        """A `Batch`, or of a slice a list of batches."""
        if isinstance(index, slice):
            part = object.__new__(RankBatches)
            part.__dict__ = {**self.__getstate__(), "_steps": self._steps[index]}
            return part
        step, spec = self._steps[index], self._job.spec
        start, stop = step * self._share, (step + 1) * self._share
        batch, bad = self.reader.batch(self._rank, start, stop)
        self._bad |= bad
        for problem in bad.values():
            logger.warning("step %d: %s", step, problem)
            refuse_too_many(len(self._bad), spec.num_images, spec.max_bad_fraction, problem)
        return batch

    @property
    def reader(self) -> BatchReader:
        """This process's: workers of a DataLoader must not use the parent's open files."""
        if self._reader is None or self._reader[0] != os.getpid():
            if multiprocessing.parent_process() is not None:
                cv2.setNumThreads(0)  # a worker has one core, and a fork has no threads
            self._reader = os.getpid(), BatchReader(self._job)
        return self._reader[1]

    def planned(self, step: int) -> NDArray[np.int64]:
        """Sample numbers of a training's global batch in the planned order; no image is read."""
        size = self._job.partition.rows_per_pass
        positions = np.arange(step * size, (step + 1) * size, dtype=np.int64)
        _, groups, rows = self.reader.order.places(positions)
        return self._job.spec.manifest.samples_at(groups, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def training_batches(recipe: Recipe, rank: int = 0, world_size: int = 1) -> RankBatches:
    """The batches of a recipe's training on one rank.

    Any world size that divides the global batch gives the same global batches.

    Raises:
        ValueError: the recipe or its data cannot work, or as `RankBatches`.
    """
    return batches_of(resolve_run(recipe), rank, world_size)


def batches_of(run: ResolvedRun, rank: int = 0, world_size: int = 1) -> RankBatches:
    """As `training_batches`, of a recipe that is resolved on its data."""
    batch = run.recipe.train.global_batch_size
    return RankBatches(run.streams["train"], batch, run.total_steps, rank, world_size)


def read_batch(run: ResolvedRun, step: int) -> tuple[UInt8Array, list[dict[str, Any]]]:
    """Crops of a run's global batch before mixing and masking, and a table about them.

    Returns:
        uint8 (n, H, W, 3), and n rows of the table in the same order.
    """
    batches = batches_of(run)
    batch, spec, samples = batches[step], run.streams["train"], batches.planned(step).tolist()
    epochs = np.arange(step * len(samples), (step + 1) * len(samples)) // spec.num_images
    columns = batch["sample"].tolist(), samples, epochs.tolist()
    manifest, augmentation = spec.manifest, spec.augmentation
    table: list[dict[str, Any]] = []
    for index, (sample, planned, epoch) in enumerate(zip(*columns, strict=True)):
        group, row = manifest.place(sample)
        rng_key, encoded = (spec.seed, epoch, sample), batches.reader.read_group(group)
        size, labels = encoded.sizes[row], encoded.labels_of(row).tolist()
        box = draw_box(size, augmentation, rng_key)
        table.append({
            "step": step, "place": index,
            "sample": sample, "epoch": epoch, "key": encoded.key(row), "labels": labels,
            "classes": [manifest.classes[label] for label in labels],
            "height": size[0], "width": size[1],
            "top": float(box.top), "left": float(box.left),
            "crop_height": float(box.height), "crop_width": float(box.width),
            "is_mirrored": box.is_flipped,
            "operations": [*map(str, augmentation.operations(rng_key))],  # in this order
            "shard": manifest.files[int(manifest.file_index[group])].path,
            "row_group": int(manifest.row_group[group]), "row": row,
            "instead_of": planned if sample != planned else None,  # not decodable
        })  # fmt: skip
    return batch["image"], table
