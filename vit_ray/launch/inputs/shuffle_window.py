"""The shuffle window of a run: its size, chosen once and recorded in checkpoints."""

import math
from typing import Final

from vit_ray.config.training_sections import DataConfig
from vit_ray.data.dataset import Manifest
from vit_ray.data.stream.batches import TASK_MEMORY_MIB

_MOST_ROWS: Final = 2048
"""Of a window by default: tasks of twice the usual length, a few seconds of one CPU."""
_MEMORY_SHARE: Final = 0.75
"""Of a task's memory that a window takes on average by default; images differ in size."""


def window_rows(
    data: DataConfig,
    batch: int,
    sides: tuple[int, int],
    manifest: Manifest,
    begun: int | None = None,
) -> int:
    """Images of the shuffle window, with `auto` made definite: as the run began, or as is best.

    Args:
        batch: images of a global batch.
        sides: pixels of a crop.
        begun: the window of the run that is continued; None for a new one.

    Raises:
        ValueError: the window is no whole number of batches, or too large for a task's memory.
    """
    rows = data.shuffle_window
    if rows == "auto":
        held = _rows_that_fit(_MEMORY_SHARE * TASK_MEMORY_MIB, manifest)
        rows = _best(data, batch, sides, held) if begun is None else begun
    if rows % batch:
        nearest = max(1, round(rows / batch)) * batch
        raise ValueError(
            f"data.shuffle_window={rows} is no whole number of train.global_batch_size={batch}; "
            f"the nearest is {nearest}, and 0 is none"
        )
    fits = _rows_that_fit(TASK_MEMORY_MIB, manifest)
    if rows > max(batch, fits):
        mib = math.ceil((rows + int(manifest.rows.max())) * _image_bytes(manifest) / 2**20)
        lower = fits // batch * batch
        raise ValueError(
            f"data.shuffle_window={rows} images take about {mib} MiB of each reading task, which "
            f"holds {TASK_MEMORY_MIB}; lower it to {lower if lower > batch else 0}"
        )
    return rows


def _best(data: DataConfig, batch: int, sides: tuple[int, int], held: int) -> int:
    """Images of 2, 4, 8, ... batches that one task makes; 0 for fewer than two."""
    most = min(_MOST_ROWS, held)
    if data.object_store_mib is not None:
        # Half of it: blocks of the next task wait at the same time as those of the one in turn.
        most = min(most, (data.object_store_mib << 19) // (3 * sides[0] * sides[1]))
    return batch << (most // batch).bit_length() - 1 if most >= 2 * batch else 0


def _rows_that_fit(memory_mib: float, manifest: Manifest) -> int:
    """Rows of a window for which a task can keep all row groups."""
    fits = int(memory_mib * 2**20 / max(_image_bytes(manifest), 1.0))
    return fits - int(manifest.rows.max())  # the ends of a window cut two row groups


def _image_bytes(manifest: Manifest) -> float:
    """Of an image, on average."""
    return float(manifest.bytes.sum()) / manifest.num_images
