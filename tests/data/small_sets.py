"""Data sets written without Ray, from rows that a test spells out."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from vit_ray.data import open_dataset
from vit_ray.data.dataset import MANIFEST_FILE, Manifest, ShardFile, write_manifest
from vit_ray.data.order import Order
from vit_ray.data.shard_writer import EncodedImage, row_groups, write_row_groups
from vit_ray.data.shards import RowGroupReader, keys
from vit_ray.storage import locate

ROWS_PER_GROUP = 4
CLASSES = ["cat", "dog", "emu"]
SHARD = "part-00000-of-00001.parquet"
Row = tuple[bytes, list[int], str]


def write_encoded(
    folder: Path | str, shard: str, images: list[EncodedImage], classes: Sequence[str], rows: int
) -> Manifest:
    location = locate(str(folder))
    facts = write_row_groups(location.child(shard), row_groups(images, rows))
    numbers = np.arange(len(facts.rows))
    manifest = Manifest(
        *(numbers * 0, numbers, np.array(facts.rows), np.array(facts.row_group_bytes)),
        files=[ShardFile(shard, len(images), facts.bytes, facts.crc32)],
        classes=list(classes),
        max_labels=max(len(image.labels) for image in images),
    )
    write_manifest(location, manifest)
    return open_dataset(str(folder))


def samples_at(order: Order, start: int, stop: int) -> np.ndarray:
    """Samples at positions [start, stop) of a run."""
    _, groups, rows = order.places(np.arange(start, stop, dtype=np.int64))
    return np.cumsum([0, *order.rows])[groups] + rows


def write_set(
    folder: Path,
    rows: Sequence[tuple[str, Sequence[int]]],
    classes: Sequence[str],
    image: bytes = b"not an image",
) -> Manifest:
    """A set of one shard, with (key, labels) of each image."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [EncodedImage(image, tuple(labels), key, 8, 8) for key, labels in rows]
    return write_encoded(folder, "part.parquet", images, classes, ROWS_PER_GROUP)


def write_rows(
    folder: Path | str, labels: list[tuple[int, ...]], image_bytes: int = 40
) -> Manifest:
    random = np.random.default_rng(5)
    images = [
        EncodedImage(random.bytes(image_bytes), one, f"key {i}", 10, 20)
        for i, one in enumerate(labels)
    ]
    return write_encoded(folder, SHARD, images, CLASSES, rows=3)


def flips(file: Path, bits_per_byte: int) -> Iterator[str]:
    """Flips bits of a file one at a time, and names the flip; the file is whole again after it."""
    whole = file.read_bytes()
    random = np.random.default_rng(7)
    for byte in range(len(whole)):
        for bit in random.choice(8, bits_per_byte, replace=False):
            changed = bytearray(whole)
            changed[byte] ^= 1 << bit
            file.write_bytes(changed)
            yield f"bit {bit} of byte {byte} of {len(whole)} in {file.name}"
    file.write_bytes(whole)


def used_rows(manifest: Manifest) -> tuple[dict[int, Row], bool]:
    """Rows that a stream would use, by their number, and whether anything was refused."""
    reader = RowGroupReader(manifest)
    rows: dict[int, Row] = {}
    is_refused = False
    for group in range(manifest.num_row_groups):
        try:
            encoded = reader.read(group)
        except ValueError:
            is_refused = True
            continue
        for row in range(len(encoded.keys)):
            number = int(manifest.first_samples[group]) + row
            try:
                image = encoded.image(row)
            except ValueError:
                is_refused = True
                continue
            rows[number] = (image, encoded.labels_of(row).tolist(), encoded.key(row))
    return rows, is_refused


def keys_of(manifest: Manifest) -> list[str]:
    """Keys of all rows in the order of their sample numbers."""
    return [key for of_file in keys(manifest) for key in of_file]


def with_header(folder: Path, **header: object) -> None:
    """Write a manifest again with pyarrow alone, some of its header changed."""
    file = folder / MANIFEST_FILE
    table = pq.read_table(file)
    before = json.loads(table.schema.metadata[b"vit_ray"])
    metadata = {"vit_ray": json.dumps(before | header)}
    pq.write_table(table.replace_schema_metadata(metadata), file)
