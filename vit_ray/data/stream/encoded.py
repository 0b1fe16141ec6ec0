"""Images that are sent encoded, to be decoded by the training workers.

A block is then one row, so that Ray Data neither joins nor splits it, however its bytes vary:
column `packed` is an Arrow IPC stream of a table with a row per image:

* `encoded`: a JPEG file, with only what the crop touches if the stored file has restart markers;
  or, for images of any other kind, the pixels of the finished crop.
* `box`: int32 (4,), the crop in pixels of that file: top, left, bottom, right; zeros if `encoded`
  is pixels.
* `is_flipped`: whether to mirror the crop. * `where`: names the image in errors. * `labels`: int32
(max_labels,), and `sample`: int64, as in a batch of pixels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vit_ray.data.format.stored_image import StoredImage
from vit_ray.data.images.crop_boxes import Augmentation, CropBox
from vit_ray.data.images.crops import cut_crop, jpeg_region


@dataclass(frozen=True, eq=False)
class DrawnCrop:
    """An image, and its crop for a batch.

    Attributes:
        rng_key: (seed, epoch, sample), for the random operations on the finished crop.
        name: of the image, for errors.
    """

    image: StoredImage
    box: CropBox
    rng_key: tuple[int, int, int]
    name: Callable[[], str]


class EncodedColumns:
    """The encoded images of a batch, and the boxes of their crops."""

    def __init__(self, augmentation: Augmentation, size: int) -> None:
        self._augmentation = augmentation
        self._encoded: NDArray[Any] = np.full(size, b"", object)
        self._where: NDArray[Any] = np.full(size, "", object)
        self._boxes = np.zeros((size, 4), np.int32)
        self._is_flipped = np.zeros(size, np.bool_)

    def set(self, i: int, crop: DrawnCrop) -> None:
        """Write one image.

        Raises:
            BadImageError: it is not a plain JPEG and cannot be decoded.
        """
        assert self._augmentation.only_cuts, "a device only crops"
        image, box = crop.image, crop.box
        region = None if self._augmentation.border else jpeg_region(image, box)
        if region is None:
            pixels = np.empty(self._augmentation.shape, np.uint8)
            self._encoded[i] = cut_crop(image, box, self._augmentation, pixels).tobytes()
        else:
            content, self._boxes[i] = region
            self._encoded[i], self._is_flipped[i] = bytes(content), box.is_flipped
        self._where[i] = crop.name()

    def columns(self) -> dict[str, NDArray[Any]]:
        """Everything as columns of a batch."""
        return {
            "encoded": self._encoded,
            "box": self._boxes,
            "is_flipped": self._is_flipped,
            "where": self._where,
        }


def packed(batch: dict[str, NDArray[Any]]) -> pa.Table:
    """A batch as the one row in which it is sent."""
    columns = {
        name: pa.array(column)
        if column.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(column.ravel()), column.shape[1])
        for name, column in batch.items()
    }
    return packed_table(pa.table(columns))


def packed_table(table: pa.Table) -> pa.Table:
    """A table as one row of another."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    ends = pa.py_buffer(np.array([0, content.size], np.int64))
    row = pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, content])
    return pa.table({"packed": row})
