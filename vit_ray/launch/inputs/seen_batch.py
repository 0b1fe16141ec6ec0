"""The images of a global batch as a training sees them, and where each of them comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.boxes import CropBox, draw_box
from vit_ray.data.crops import UInt8Array
from vit_ray.data.partition import Partition
from vit_ray.data.shards import keys
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob
from vit_ray.launch.inputs.streams import ResolvedRun

if TYPE_CHECKING:
    from torch import Tensor

_GREY: Final = 128


@dataclass(frozen=True)
class SeenImage:
    """One image of a batch, as it was drawn."""

    step: int
    """0-based; MLflow shows the loss of this step at `step + 1`."""
    place: int
    """In the global batch."""
    sample: int
    """Number of the image in the data set."""
    epoch: int
    key: str
    labels: tuple[int, ...]
    shard: str
    row_group: int
    row: int
    """In the row group of the shard."""
    size: tuple[int, int]
    """Height and width of the stored image."""
    box: CropBox
    """What is cut out of it; mirrored or not."""
    operations: tuple[str, ...] = ()
    """On the crop, in this order, but for a user's own: a name and its numbers."""
    instead_of: int | None = None
    """The sample that stood here and cannot be decoded."""
    partner: int | None = None
    """The sample that it is mixed with."""
    own_share: float | None = None
    """Of its label; the rest is its partner's."""
    content: bytes = b""
    """The stored file."""

    def row_of_table(self, classes: list[str]) -> dict[str, Any]:
        """Its facts by column."""
        names = {"top": self.box.top, "left": self.box.left}
        sides = {"crop_height": self.box.height, "crop_width": self.box.width}
        return {
            "step": self.step, "place": self.place, "sample": self.sample,
            "epoch": self.epoch, "key": self.key, "labels": list(self.labels),
            "classes": [classes[label] for label in self.labels],
            "height": self.size[0], "width": self.size[1],
            **{name: float(value) for name, value in {**names, **sides}.items()},
            "is_mirrored": self.box.is_flipped, "operations": list(self.operations),
            "partner": self.partner, "own_share": self.own_share,
            "instead_of": self.instead_of, "shard": self.shard,
            "row_group": self.row_group, "row": self.row,
        }  # fmt: skip


class SeenBatches:
    """The global batches of a run, by step; nothing is read before it is asked for."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._recipe = resolved.recipe
        spec = resolved.streams["train"]
        self._spec, self._size = spec, self._recipe.train.global_batch_size
        job = StreamJob(spec, Partition(1, self._size), 0, True)
        self._reader = BatchReader(job)
        self._num_positions = resolved.total_steps * self._size

    def samples_of_key(self, key: str) -> list[int]:
        """The numbers of the images with a key; reads all keys."""
        whole = self._spec.manifest.whole or self._spec.manifest
        numbered = enumerate(one for some in keys(whole) for one in some)
        return [number for number, one in numbered if one == key]

    def planned(self, step: int) -> NDArray[np.int64]:
        """Samples of a step by the order alone, as in `Rows`, whether or not they are decoded."""
        return self._reader.plan.rows_at(self._positions(step)).samples

    def batch(self, step: int) -> Batch:
        """The global batch as ranks get it, before anything is mixed or masked."""
        start = int(self._positions(step)[0])
        return self._reader.batch(0, start, start + self._size)[0]

    def read(self, step: int, places: range | None = None) -> tuple[UInt8Array, list[SeenImage]]:
        """Images of a step as the model sees them, and their facts, in the order of the batch.

        Args:
            step: 0-based.
            places: of the global batch that are asked for; None for all.

        Returns:
            uint8 (n, H, W, 3): crops, mixed with their partners or with the masked patches grey
            where the recipe does that; and n facts.
        """
        places = range(self._size) if places is None else places
        # Partners stand side by side, so an even number of places holds both.
        first, last = places.start // 2 * 2, min(self._size, -(-places.stop // 2) * 2)
        start = int(self._positions(step)[0])
        batch, _ = self._reader.batch(0, start + first, start + last)
        planned = self._reader.plan.rows_at(self._positions(step)[first:last])
        found = batch["sample"]
        pixels, shares = self._mixed(batch["image"], found, step)
        facts = []
        for i in range(places.start - first, places.stop - first):
            sample, epoch = int(found[i]), int(planned.epochs[i])
            one = self._located(sample, epoch, step, first + i)
            if sample != planned.samples[i]:
                one = replace(one, instead_of=int(planned.samples[i]))
            if shares is not None:
                partner = int(found[i ^ 1])
                one = replace(one, partner=partner, own_share=float(shares[i]))
            facts.append(one)
        return pixels[places.start - first : places.stop - first], facts

    def steps_of(self, sample: int) -> Iterator[tuple[int, int, int]]:
        """(step, epoch, place in the batch) of each time that the run has a sample, by epoch.

        Raises:
            ValueError: the data set has no such sample.
        """
        total = int(self._spec.manifest.first_samples[-1])
        if not 0 <= sample < total:
            raise ValueError(f"sample={sample}: the data set has samples 0 to {total - 1}")
        for epoch in range(self._num_positions // self._reader.plan.num_images + 1):
            span = self._reader.plan.span_of(sample, epoch)
            if span and span.start >= self._num_positions:
                return
            positions = np.arange(span.start, min(span.stop, self._num_positions), dtype=np.int64)
            rows = self._reader.plan.rows_at(positions)
            is_it = (rows.samples == sample) & (rows.epochs == epoch)
            for at in np.flatnonzero(is_it).tolist():
                step, place = divmod(int(positions[at]), self._size)
                yield step, epoch, place

    def _positions(self, step: int) -> NDArray[np.int64]:
        return np.arange(step * self._size, (step + 1) * self._size, dtype=np.int64)

    def _located(self, sample: int, epoch: int, step: int, place: int) -> SeenImage:
        """A sample of the data set, and the box that is cut out of it in an epoch."""
        manifest, rng_key = self._spec.manifest, (self._spec.seed, epoch, sample)
        group, row = manifest.place(sample)
        rows = self._reader.read_group(group)
        augmentation = self._spec.augmentation
        drawn = tuple(map(str, augmentation.operations(rng_key)))
        return SeenImage(
            step, place, sample, epoch, rows.key(row), tuple(rows.labels_of(row).tolist()),
            manifest.files[int(manifest.file_index[group])].path,
            int(manifest.row_group[group]), row, rows.size(row),
            draw_box(rows.size(row), augmentation, rng_key), drawn,
            content=bytes(rows.image(row)),
        )  # fmt: skip

    def _mixed(
        self, images: UInt8Array, samples: NDArray[np.int64], step: int
    ) -> tuple[UInt8Array, NDArray[np.float32] | None]:
        """Mixed with partners, or with masked patches in grey; and each image's own share."""
        train, seed = self._recipe.train, self._recipe.seed
        if not train.mixes and train.loss != "masked_patch":
            return images, None
        import torch  # seconds, of recipes that need it

        from vit_ray.training.mixing import draw_mixing, mix_images
        from vit_ray.training.objective import normalize

        pixels, numbers = torch.from_numpy(images), torch.from_numpy(samples)
        if train.mixes:
            mixing = draw_mixing(numbers, images.shape[1:3], train, seed, step)
            mixed = mix_images(normalize(pixels, torch.float32), mixing.weight)
            shown = ((mixed + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
            return shown.numpy(), mixing.own_share.numpy()
        return self._masked(pixels, numbers, step).numpy(), None

    def _masked(self, pixels: Tensor, samples: Tensor, step: int) -> Tensor:
        """Masked patches grey, and swapped ones as the patch that takes their place."""
        import torch

        from vit_ray.models.masked import draw_corruption

        side = self._recipe.model.patch
        if side is None:  # patches of a map that a ResNet makes have no place in the image
            return pixels
        rows, columns = (length // side for length in self._recipe.model.sides)
        corruption = draw_corruption(samples, rows * columns, self._recipe.seed, step)
        cut = pixels.view(-1, rows, side, columns, side, 3).transpose(2, 3).flatten(1, 2)
        others = cut[torch.arange(len(cut))[:, None], corruption.source]
        shown = torch.where(corruption.is_swapped[..., None, None, None], others, cut)
        shown = torch.where(corruption.is_masked[..., None, None, None], _GREY, shown).byte()
        return shown.view(-1, rows, columns, side, side, 3).transpose(2, 3).reshape(pixels.shape)
