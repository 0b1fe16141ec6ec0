"""The order in which a run reads its data: chosen once, and recorded in its checkpoints."""

from __future__ import annotations

from typing import Final

import numpy as np

from vit_ray.config.training_sections import DataConfig
from vit_ray.data.format.joined_datasets import JoinedManifest
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.order.shuffle import ShuffleWindow

_MOST_ROWS: Final = 2048
"""Of a window by default: tasks of twice the usual length, a few seconds of one CPU."""
_LARGE_ROWS: Final = 16_384
"""Of a window by default where `_MOST_ROWS` are less than two batches: images of a row group then
share batches hardly more often than by chance (benchmarks/data_shuffle.py)."""
_LARGE_STORE_MIB: Final = 8192
"""Of the object store for such a window, where the recipe gives no limit."""
_LEAST_RUN: Final = 4
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
    most = max(_MOST_READS * batch, _rows_that_fit(memory_mib, manifest))
    if _is_large(batch) and _holds_runs(memory_mib, manifest):
        most = max(most, _LARGE_ROWS)
    if rows > most:
        needed = (rows + _cut_rows(manifest)) * _image_bytes(manifest) / 2**20
        raise ValueError(
            f"data.shuffle_window={rows} images take about {needed:.0f} MiB of each reading task, "
            f"and data.task_memory_mib={memory_mib}; lower the one or raise the other"
        )
    return rows


def shuffle_window(rows: int, batch: int, manifest: Manifest) -> ShuffleWindow | None:
    """The window of so many images, if it is more than a batch.

    Several data sets have one of a single batch at least, so that each batch has their proportions.
    """
    has_window = rows > batch or manifest.num_sets > 1
    return ShuffleWindow(batch, max(1, rows // batch)) if has_window else None


def rows_per_task(
    memory_mib: int, manifest: Manifest, window: ShuffleWindow, usual: int
) -> tuple[int, int | None]:
    """Rows of a reading task, and of a window that it keeps in memory (`BlockShape`).

    A whole window of all ranks, as far as they fit into its memory. A window of large batches is
    made by many tasks, by its ranks' parts, where these lie side by side: not of several sets.
    """
    if _is_large(window.batch_size) and manifest.num_sets == 1:
        return _MOST_ROWS, min(_MOST_ROWS, max(0, _rows_held(memory_mib, manifest)))
    fits = max(window.batch_size, _rows_that_fit(memory_mib, manifest))
    rows = max(usual, window.num_rows if window.num_rows <= fits else min(fits, _MOST_ROWS))
    return rows, None


def most_rows(data: DataConfig, batch: int) -> int:
    """Images of the window, at least a batch; by default of the largest that memory may allow."""
    if data.shuffle_window != "auto":
        return max(batch, data.shuffle_window)
    return max(1, (_LARGE_ROWS if _is_large(batch) else _MOST_ROWS) // batch) * batch


def _is_large(batch: int) -> bool:
    """Whether no task makes two batches of so many images."""
    return 2 * batch > _MOST_ROWS


def _best_window(data: DataConfig, batch: int, sides: tuple[int, int], manifest: Manifest) -> int:
    """Images of the largest window of negligible cost; 0 if that is a single batch."""
    held, store_mib = _rows_held(data.task_memory_mib, manifest), data.object_store_mib
    most = min(_MOST_ROWS, held)
    if _is_large(batch):
        is_dealt = manifest.num_sets == 1 and not data.sample_weights
        if not is_dealt or not _holds_runs(data.task_memory_mib, manifest):
            # Rows of several sets are not dealt slot by slot, and those that are drawn by weight
            # lie in many row groups: each task would read all row groups of the window.
            return 0
        most, store_mib = _LARGE_ROWS, store_mib or _LARGE_STORE_MIB
    if store_mib is not None:
        # Rows whose pixels take half of it. A window is made by one task, and blocks of the next
        # task wait at the same time as those of the one that is in turn: with tasks of 64 blocks,
        # 33 MiB more than the limit of 24 were in use (measured).
        most = min(most, (store_mib << 19) // (3 * sides[0] * sides[1]))
    batches = 1
    while 2 * batches * batch <= most:
        batches *= 2
    return batches * batch if batches > 1 else 0


def _holds_runs(memory_mib: int, manifest: Manifest) -> bool:
    """Whether a task can hold enough of a large window that few row groups are cut."""
    return _rows_held(memory_mib, manifest) >= _LEAST_RUN * _cut_rows(manifest)


def _rows_held(memory_mib: int, manifest: Manifest) -> int:
    """As `_rows_that_fit`, of the share of a task's memory that is taken by default."""
    return _rows_that_fit(_MEMORY_SHARE * memory_mib, manifest)


def _rows_that_fit(memory_mib: float, manifest: Manifest) -> int:
    """Rows of a window for which a task can keep all row groups."""
    return int(memory_mib * 2**20 / max(_image_bytes(manifest), 1.0)) - _cut_rows(manifest)


def _cut_rows(manifest: Manifest) -> int:
    """Rows that are read in addition: the ends of a window cut two row groups of each set."""
    return manifest.num_sets * int(manifest.rows.max())


def _image_bytes(manifest: Manifest) -> float:
    """Of an image that a run reads, on average: each data set has the share that it is given."""
    if isinstance(manifest, JoinedManifest):
        return float(np.average(list(map(_image_bytes, manifest.parts)), weights=manifest.weights))
    return float(manifest.bytes.sum()) / manifest.num_images
