"""Features of a data set from all workers, each writing what it computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit_ray.evaluate.feature_files import FeatureRows, part_name, whole_parts, write_part
from vit_ray.storage import locate
from vit_ray.worker.job import Extraction

Prediction = tuple[Mapping[str, Any], Tensor, Tensor]
"""A batch, head inputs (B, D) and logits (B, K)."""


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
) -> int:
    """Write this rank's files; returns the number of its images.

    Args:
        predictions: of this rank's batches from position `start` on, with the images' keys.
        batch_size: images of a batch.
    """
    folder = locate(extraction.folder)
    passes_per_file = max(1, extraction.rows_per_file // batch_size)
    first, count = start, 0
    parts: list[FeatureRows] = []

    def write() -> None:
        nonlocal first, count
        last = first + len(parts) * batch_size * world_size
        write_part(folder, part_name(first, last, rank, world_size), parts)
        first, count = last, count + sum(len(part.samples) for part in parts)
        parts.clear()

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
    return count
