"""The images of a global batch as ranks get them, and where each of them comes from."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.boxes import draw_box
from vit_ray.data.images import UInt8Array
from vit_ray.data.order import Partition
from vit_ray.data.stream.batches import Batch, BatchReader, StreamJob
from vit_ray.launch.resolved_run import ResolvedRun


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
        """Images of a step, and their facts, in the order of the batch.

        Returns:
            uint8 (n, H, W, 3): crops, before anything is mixed or masked; and n rows of a table.
        """
        batch, rows = self.batch(step), self._reader.plan.rows_at(self._positions(step))
        columns = batch["sample"].tolist(), rows.samples.tolist(), rows.epochs.tolist()
        facts = [
            {
                "step": step,
                "place": place,
                **self._located(sample, epoch),
                "instead_of": planned if sample != planned else None,  # it cannot be decoded
            }
            for place, (sample, planned, epoch) in enumerate(zip(*columns, strict=True))
        ]
        return batch["image"], facts

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
