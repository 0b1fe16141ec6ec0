"""The images of a global batch as a training sees them, and where each of them comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.boxes import draw_box
from vit_ray.data.crops import UInt8Array
from vit_ray.data.partition import Partition
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob
from vit_ray.launch.inputs.streams import ResolvedRun

if TYPE_CHECKING:
    from torch import Tensor

_GREY: Final = 128


class SeenBatches:
    """The global batches of a run by step, 0-based; nothing is read before it is asked for."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._recipe, self._classes = resolved.recipe, resolved.manifest.classes
        self._spec, self._size = resolved.streams["train"], resolved.recipe.train.global_batch_size
        self._reader = BatchReader(StreamJob(self._spec, Partition(1, self._size), 0, True))

    def planned(self, step: int) -> NDArray[np.int64]:
        """Samples of a step by the order alone, as in `Rows`, whether or not they are decoded."""
        return self._reader.plan.rows_at(self._positions(step)).samples

    def batch(self, step: int) -> Batch:
        """The global batch as ranks get it, before anything is mixed or masked."""
        start = step * self._size
        return self._reader.batch(0, start, start + self._size)[0]

    def read(self, step: int) -> tuple[UInt8Array, list[dict[str, Any]]]:
        """Images of a step as the model sees them, and their facts, in the order of the batch.

        Returns:
            uint8 (n, H, W, 3): crops, mixed with their partners or with the masked patches grey
            where the recipe does that; and n rows of a table.
        """
        batch, rows = self.batch(step), self._reader.plan.rows_at(self._positions(step))
        samples = batch["sample"]
        pixels, shares = self._mixed(batch["image"], samples, step)
        facts = []
        for place, (sample, planned, epoch) in enumerate(
            zip(samples.tolist(), rows.samples.tolist(), rows.epochs.tolist(), strict=True)
        ):
            is_mixed, is_replaced = shares is not None, sample != planned
            facts.append(
                {
                    "step": step,
                    "place": place,
                    **self._located(sample, epoch),
                    # Partners stand side by side; the rest of the label is the partner's.
                    "partner": int(samples[place ^ 1]) if is_mixed else None,
                    "own_share": float(shares[place]) if shares is not None else None,
                    "instead_of": planned if is_replaced else None,  # it cannot be decoded
                }
            )
        return pixels, facts

    def _positions(self, step: int) -> NDArray[np.int64]:
        return np.arange(step * self._size, (step + 1) * self._size, dtype=np.int64)

    def _located(self, sample: int, epoch: int) -> dict[str, Any]:
        """A sample of the data set, and the box that is cut out of it in an epoch."""
        manifest, rng_key = self._spec.manifest, (self._spec.seed, epoch, sample)
        group, row = manifest.place(sample)
        rows, augmentation = self._reader.read_group(group), self._spec.augmentation
        box, labels = draw_box(rows.size(row), augmentation, rng_key), rows.labels_of(row).tolist()
        return {
            "sample": sample, "epoch": epoch, "key": rows.key(row), "labels": labels,
            "classes": [self._classes[label] for label in labels],
            "height": rows.size(row)[0], "width": rows.size(row)[1],
            "top": float(box.top), "left": float(box.left),
            "crop_height": float(box.height), "crop_width": float(box.width),
            "is_mirrored": box.is_flipped,
            "operations": [*map(str, augmentation.operations(rng_key))],  # in this order
            "shard": manifest.files[int(manifest.file_index[group])].path,
            "row_group": int(manifest.row_group[group]), "row": row,
        }  # fmt: skip

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
