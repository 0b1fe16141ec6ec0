"""Data sets written without Ray, from rows that a test spells out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit_ray.data import open_dataset
from vit_ray.data.format.manifest import Manifest, RowGroupColumns, ShardFile, write_manifest
from vit_ray.data.format.shard_writer import EncodedImage, ShardWriter
from vit_ray.storage import locate

ROWS_PER_GROUP = 4


def write_set(
    folder: Path,
    rows: Sequence[tuple[str, Sequence[int]]],
    classes: Sequence[str],
    image: bytes = b"not an image",
) -> Manifest:
    """A set of one shard, with (key, labels) of each image."""
    location = locate(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(location.child("part.parquet"), ROWS_PER_GROUP) as writer:
        for key, labels in rows:
            writer.add(EncodedImage(image, tuple(labels), key, 8, 8))
    facts = writer.facts()
    count = len(facts.rows)
    columns = RowGroupColumns(
        np.zeros(count, np.int32),
        np.arange(count),
        np.array(facts.rows),
        np.array(facts.row_group_bytes),
        {},
        np.array(facts.row_group_crc32, np.uint32),
    )
    file = ShardFile("part.parquet", len(rows), facts.bytes, facts.footer_crc32)
    most = max(len(labels) for _, labels in rows)
    write_manifest(
        location, columns, files=[file], classes=list(classes), max_labels=most, origin={}
    )
    return open_dataset(str(folder))
