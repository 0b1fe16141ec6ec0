"""A data set in Python: samples by number, and a run's batches without Ray."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload

from PIL import Image

from vit_ray.config.schema import validated
from vit_ray.config.training_sections import DataConfig, ModelConfig
from vit_ray.data.augment import augmentation_of
from vit_ray.data.dataset import Manifest
from vit_ray.data.dataset import open_dataset as open_manifest
from vit_ray.data.parts import select
from vit_ray.data.shards import EncodedRows, RowGroupReader
from vit_ray.launch.dataset import RankBatches
from vit_ray.launch.resolved_run import require_trainable, stream_of, training_stream, window_rows
from vit_ray.own_parts import trust_named

if TYPE_CHECKING:
    from vit_ray.launch.torch_stream import TorchStream

_KEPT_GROUPS: Final = 8
"""Row groups in memory: neighbours are read once."""


class Sample(NamedTuple):
    """One image of a data set.

    Attributes:
        image: as it is stored, whatever its mode and size.
        labels: indices into the classes; several or none where the set has such images.
    """

    image: Image.Image
    labels: tuple[int, ...]
    key: str


class Dataset(Sequence[Sample]):
    """Samples of a converted data set by number, in the order in which they are stored.

    Attributes:
        manifest: counts, classes, shards and fingerprint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._read = lru_cache(_KEPT_GROUPS)(RowGroupReader(manifest).read)

    @property
    def classes(self) -> list[str]:
        """Class names in label order."""
        return self.manifest.classes

    def __len__(self) -> int:
        return self.manifest.num_images

    @overload
    def __getitem__(self, at: int) -> Sample: ...
    @overload
    def __getitem__(self, at: slice) -> list[Sample]: ...
    def __getitem__(self, at: int | slice) -> Sample | list[Sample]:
        if isinstance(at, slice):
            return [self[number] for number in range(len(self))[at]]
        number = range(len(self))[at]  # from the end where it is negative, and IndexError beyond
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

        They are a list, read as it is iterated, indexed or sliced. A batch is {"image": uint8
        (b, H, W, 3), "labels": int32 (b, L) padded with -1, "sample": int64 (b,)} with
        b = `global_batch_size / world_size`. Any world size has the same global batches, and so
        has a run with equal `train.global_batch_size`, `model.image_size`, `seed` and `data`.

        Args:
            image_size: side of a crop in pixels, or (height, width).
            epochs: length, as `optim.epochs`, from position 0 to the nearest whole batch.
            start: samples seen before, in whole batches; what is left of the epochs follows.
            training: False for an evaluation: each image once (not `epochs`), in stored order, cut
                as `eval_augment` says; the last batch is padded, with "weight" 0.0. With
                `held_out_fraction` only the images that a training with it and `seed` leaves out.
            data: further keys of a recipe's section `data`, such as `augment={"min_area": 0.3}`.

        Raises:
            ValueError: a key is unknown, or a value cannot work.
        """
        if not (global_batch_size > 0 and epochs > 0 and start >= 0):
            raise ValueError(
                f"global_batch_size={global_batch_size}, epochs={epochs}, start={start}; the first "
                "two must be above 0, and start not below"
            )
        if start % global_batch_size:
            raise ValueError(
                f"start={start} is no multiple of global_batch_size={global_batch_size}; the "
                f"nearest is {round(start / global_batch_size) * global_batch_size}"
            )
        if "train" in data:
            raise ValueError("train is this data set itself; open another one to read that")
        manifest, batch = self.manifest, global_batch_size
        trust_named(data)
        config = validated(DataConfig, {**data, "train": manifest.path}, "data")
        # Of patches that are not given, so that any size is a whole number of them.
        model = validated(ModelConfig, {"name": "ViT", "image_size": image_size}, "model")
        part, held_out = select(
            manifest,
            seed=seed,
            held_out_fraction=config.held_out_fraction,
            fraction=config.fraction,
        )
        if not training:
            cut = augmentation_of(model, config.eval_augment)
            spec = stream_of(config, seed, cut, held_out or manifest)
            images = spec.num_images
        else:
            require_trainable(manifest)
            window = window_rows(config, batch, model.sides, manifest)
            config = config.model_copy(update={"shuffle_window": window})
            cut = augmentation_of(model, config.augment)
            spec = training_stream(config, seed, cut, batch, part)
            total_steps = max(1, round(spec.num_images * epochs / batch))
            images = total_steps * batch
        steps = max(0, ceil((images - start) / batch))
        return RankBatches(spec, batch, steps, rank, world_size, start=start, is_training=training)

    def torch_dataset(
        self, global_batch_size: int, image_size: int | tuple[int, int], **options: Any
    ) -> TorchStream:
        """The same batches as an `IterableDataset` of tensors, for a DataLoader of any workers.

            DataLoader(train.torch_dataset(256, 224, epochs=90), batch_size=None, num_workers=8)

        Args:
            options: as of `iter_batches`.
        """
        from vit_ray.launch.torch_stream import TorchStream

        return TorchStream(self.iter_batches(global_batch_size, image_size, **options))

    def _row(self, number: int) -> tuple[EncodedRows, int]:
        """The row group of a sample, and its row there."""
        group, row = self.manifest.place(number)
        return self._read(group), row

    def __repr__(self) -> str:
        return (
            f"Dataset({self.manifest.path!r}: {len(self):,} images of {len(self.classes):,} "
            f"classes, fingerprint {self.manifest.fingerprint[:12]})"
        )


def open_dataset(path: str) -> Dataset:
    """Open a converted data set to look at its samples.

    Args:
        path: folder or `s3://` prefix.

    Raises:
        ValueError: there is no whole data set.
    """
    return Dataset(open_manifest(path))
