"""The shuffle window of a run: its size, chosen once and recorded in checkpoints, and its tasks."""

import math
from typing import Final

from vit_ray.config.training_sections import DataConfig
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import ShuffleWindow
from vit_ray.data.partition import largest_piece

_MOST_ROWS: Final = 2048
"""Of a window by default: tasks of twice the usual length, a few seconds of one CPU."""
_LARGE_ROWS: Final = 16_384
"""Of a window that many tasks make: images of a row group then share batches hardly more often than
by chance."""
_LARGE_MIB: Final = 1200
"""Of the pixels of such a window by default, all of which may wait on one host before a batch of it
is whole: a quarter of the object store that Ray gives a host of 16 GiB."""
_LEAST_RUN: Final = 8
"""Row groups that a task must be able to hold of such a window: it reads one more, cut in two."""
_MOST_READS: Final = 4
"""Of a row group in a window that is larger than a task's memory: each of its batches reads it."""
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
        rows = _best_window(data, batch, sides, manifest) if begun is None else begun
    if rows % batch:
        nearest = max(1, round(rows / batch)) * batch
        raise ValueError(
            f"data.shuffle_window={rows} is no whole number of train.global_batch_size={batch}; "
            f"the nearest is {nearest}, and 0 is none"
        )
    memory_mib = data.task_memory_mib
    fits = _rows_that_fit(memory_mib, manifest)
    if rows <= max(_MOST_READS * batch, fits):
        return rows
    mib = _mib_of(rows, manifest)
    if rows <= _LARGE_ROWS and _can_be_parted(batch, rows // batch):
        least = max(_parted_rows(batch, rows // batch), _LEAST_RUN * int(manifest.rows.max()))
        if least <= _rows_held(memory_mib, manifest):
            return rows
        mib = min(mib, _mib_of(least, manifest) / _MEMORY_SHARE)
    lower = min(fits, _MOST_ROWS) // batch * batch
    lower = max(lower if lower > batch else 0, _best_window(data, batch, sides, manifest))
    raise ValueError(
        f"data.shuffle_window={rows} images take about {math.ceil(mib)} MiB of each reading task, "
        f"and data.task_memory_mib={memory_mib}; lower the one to {lower}, or raise the other"
    )


def shuffle_window(rows: int, batch: int) -> ShuffleWindow | None:
    """The window of so many images, if it is more than a batch."""
    return ShuffleWindow(batch, rows // batch) if rows > batch else None


def rows_per_task(
    data: DataConfig, manifest: Manifest, window: ShuffleWindow, usual: int
) -> tuple[int, int | None]:
    """Rows of a reading task, and of a window that it keeps in memory (`BlockShape`).

    A whole window of all ranks, as far as they fit into its memory. A window of large batches is
    made by many tasks, each of which has a part of every batch.
    """
    batch, num_batches = window.batch_size, window.num_batches
    if _can_be_parted(batch, num_batches):
        held = min(_MOST_ROWS, _rows_held(data.task_memory_mib, manifest))
        if _parted_rows(batch, num_batches) <= held:
            return _MOST_ROWS, held
    fits = max(batch, _rows_that_fit(data.task_memory_mib, manifest))
    rows = max(usual, window.num_rows if window.num_rows <= fits else min(fits, _MOST_ROWS))
    return rows, None


def most_rows(data: DataConfig, batch: int, sides: tuple[int, int]) -> int:
    """Images of the window, at least a batch; by default of the largest that memory may allow."""
    if data.shuffle_window != "auto":
        return max(batch, data.shuffle_window)
    most = _MOST_ROWS
    if is_large(batch):
        most = _LARGE_ROWS
    return max(batch, _doubled(batch, min(most, _rows_stored(data, batch, sides))))


def is_large(batch: int) -> bool:
    """Whether no task makes two batches of so many images."""
    return 2 * batch > _MOST_ROWS


def _can_be_parted(batch: int, num_batches: int) -> bool:
    """Whether tasks can each make a part of every batch of a window, and read little twice.

    Not where a share of the batch has no parts small enough for a task.
    """
    return is_large(batch) and _parted_rows(batch, num_batches) <= _MOST_ROWS


def _parted_rows(batch: int, num_batches: int) -> int:
    """Rows that a task must hold to make a part of every batch, on any number of GPUs."""
    return num_batches * largest_piece(batch)


def _best_window(data: DataConfig, batch: int, sides: tuple[int, int], manifest: Manifest) -> int:
    """Images of the largest window of negligible cost; 0 if that is a single batch."""
    held, stored = _rows_held(data.task_memory_mib, manifest), _rows_stored(data, batch, sides)
    if not is_large(batch):
        return _doubled(batch, min(_MOST_ROWS, held, stored))
    if held < _LEAST_RUN * int(manifest.rows.max()):
        return 0
    num_batches = _doubled(batch, min(_LARGE_ROWS, stored)) // batch
    while num_batches > 1 and not (
        _can_be_parted(batch, num_batches) and _parted_rows(batch, num_batches) <= held
    ):
        num_batches //= 2
    return num_batches * batch if num_batches > 1 else 0


def _rows_stored(data: DataConfig, batch: int, sides: tuple[int, int]) -> int:
    """Rows of a window whose pixels may wait in the object store."""
    store_mib = data.object_store_mib
    if is_large(batch):
        stored_bytes = (store_mib << 20) // 3 if store_mib else _LARGE_MIB << 20
    elif store_mib is None:
        return _MOST_ROWS
    else:
        # Half of it. A window is made by one task, and blocks of the next task wait at the same
        # time as those of the one that is in turn: with tasks of 64 blocks, 33 MiB more than the
        # limit of 24 were in use (measured).
        stored_bytes = store_mib << 19
    return stored_bytes // (3 * sides[0] * sides[1])


def _doubled(batch: int, most: int) -> int:
    """Images of 2, 4, 8, ... batches, as many as there may be; 0 for fewer than two."""
    batches = 1
    while 2 * batches * batch <= most:
        batches *= 2
    return batches * batch if batches > 1 else 0


def _mib_of(rows: int, manifest: Manifest) -> float:
    """Encoded images of so many rows, and of the row groups that are cut at their ends."""
    return (rows + int(manifest.rows.max())) * _image_bytes(manifest) / 2**20


def _rows_held(memory_mib: int, manifest: Manifest) -> int:
    """As `_rows_that_fit`, of the share of a task's memory that is taken by default."""
    return _rows_that_fit(_MEMORY_SHARE * memory_mib, manifest)


def _rows_that_fit(memory_mib: float, manifest: Manifest) -> int:
    """Rows of a window for which a task can keep all row groups."""
    fits = int(memory_mib * 2**20 / max(_image_bytes(manifest), 1.0))
    return fits - int(manifest.rows.max())  # the ends of a window cut two row groups


def _image_bytes(manifest: Manifest) -> float:
    """Of an image, on average."""
    return float(manifest.bytes.sum()) / manifest.num_images
