"""Features of a data set from all workers, each writing what it computes.

A file is written in a thread while the next one is computed.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_ray.evaluate.feature_files import FeatureRows, part_name, whole_parts, write_part
from vit_ray.metric_names import (
    EXTRACT_FILE_WAIT_FRACTION,
    EXTRACT_IMAGE_WAIT_FRACTION,
    EXTRACT_IMAGES,
    EXTRACT_IMAGES_PER_S,
)
from vit_ray.storage import locate
from vit_ray.train.loop import Batch
from vit_ray.worker.job import Extraction

Prediction = tuple[Mapping[str, Any], Tensor, Tensor]
"""A batch, head inputs (B, D) and logits (B, K)."""


@dataclass
class Waits:
    """How long one rank's extraction has waited, since its first batch came."""

    begun_s: float | None = None
    """`time.monotonic` of the first batch; the start of the stream is not counted."""
    images_s: float = 0.0
    """Waited for batches."""
    files_s: float = 0.0
    """Waited for files that were still being written."""

    def for_images(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches."""
        asked_s = time.monotonic()
        for batch in batches:
            now_s = time.monotonic()
            if self.begun_s is None:
                self.begun_s = now_s
            else:
                self.images_s += now_s - asked_s
            yield batch
            asked_s = time.monotonic()

    def for_file(self, written: Future[None]) -> None:
        """Wait until it is written; raises its error."""
        asked_s = time.monotonic()
        written.result()  # no limit: one file, whose storage has its own limits
        self.files_s += time.monotonic() - asked_s

    def seconds(self) -> list[float]:
        """Of waiting for images, of waiting for files, and of everything."""
        total_s = 0.0 if self.begun_s is None else time.monotonic() - self.begun_s
        return [self.images_s, self.files_s, total_s]


def extraction_metrics(
    images: float, images_s: float, files_s: float, total_s: float, *, world_size: int
) -> dict[str, float]:
    """`extract/...` from the numbers and `Waits.seconds` of all ranks, added up."""
    if not total_s:  # nothing was left to compute
        return {EXTRACT_IMAGES: images}
    return {
        EXTRACT_IMAGES: images,
        EXTRACT_IMAGES_PER_S: images * world_size / total_s,
        EXTRACT_IMAGE_WAIT_FRACTION: images_s / total_s,
        EXTRACT_FILE_WAIT_FRACTION: files_s / total_s,
    }


def begin_extraction(folder: str) -> int:
    """The position to continue from; removes files of positions that are incomplete.

    An extraction of the same features into the same folder wrote them; their images are computed
    again, perhaps by another number of workers.
    """
    _, others, end = whole_parts(locate(folder))
    for name in others:
        locate(folder).child(name).delete()
    return end


def write_features(
    predictions: Iterable[Prediction],
    extraction: Extraction,
    *,
    start: int,
    batch_size: int,
    rank: int,
    world_size: int,
    waits: Waits,
) -> int:
    """Write this rank's files; returns the number of its images.

    At most one file waits while another one is filled; after an error or a stop it is completed.

    Args:
        predictions: of this rank's batches from position `start` on, with the images' keys.
        batch_size: images of a batch.
        waits: gets the time in which computing waited for a file.
    """
    folder = locate(extraction.folder)
    passes_per_file = max(1, extraction.rows_per_file // batch_size)
    first, count = start, 0
    parts: list[FeatureRows] = []
    written: Future[None] | None = None

    with ThreadPoolExecutor(1, "features") as writer:

        def write() -> None:
            nonlocal first, count, parts, written
            last = first + len(parts) * batch_size * world_size
            name = part_name(first, last, rank, world_size)
            if written is not None:
                waits.for_file(written)
            written = writer.submit(write_part, folder, name, parts)
            first, count = last, count + sum(len(part.samples) for part in parts)
            parts = []

        for batch, features, logits in predictions:
            real = batch["weight"] > 0
            kept = [rows.to(torch.float32).cpu().numpy()[real] for rows in (features, logits)]
            parts.append(
                FeatureRows(
                    [bytes(key).rstrip(b"\0").decode() for key in batch["key"][real]],
                    batch["labels"][real, 0],
                    batch["sample"][real].astype(np.int64),
                    kept[0],
                    kept[1] if extraction.with_logits else None,
                )
            )
            if len(parts) == passes_per_file:
                write()
        if parts:
            write()
        if written is not None:
            waits.for_file(written)
    return count
