"""The manifest: one small parquet file that says what a data set holds, and that it is whole.

It has a row per row group (file, index in the file, rows, bytes, dropped rows); the file names and
sizes, class names and totals are JSON in its metadata. A start reads this one file and no footers.
A subset or a de-duplicated set is a manifest alone, whose files lie in another folder.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from vit_ray.data.format.schema import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    ROW_GROUP_SCHEMA,
    STAGING_FOLDER,
)
from vit_ray.storage import Location, locate

_METADATA_KEY = b"vit_ray"


@dataclass(frozen=True)
class ShardFile:
    """One parquet file of a data set; `path` is relative to the manifest's `root`."""

    path: str
    rows: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a data set holds.

    Attributes:
        path: where it was opened from.
        root: the folder that holds the shards; `path` itself unless this is a subset.
        num_images: rows in all row groups, without those that a subset leaves out.
        classes: class names; a label is an index into them.
        max_labels: the longest label list; 1 for single-label data.
        fingerprint: hex digest of the content; equal content has an equal fingerprint.
        file_index: int32 per row group, index into `files`.
        row_group: int32 per row group, its index in that file.
        rows: int32 per row group, the rows that count.
        bytes: int64 per row group, compressed size in the file.
        dropped: for a row group index, the rows of it that are left out, sorted.
    """

    path: str
    root: str
    num_images: int
    classes: list[str]
    max_labels: int
    fingerprint: str
    format_version: int
    files: list[ShardFile]
    file_index: NDArray[np.int32]
    row_group: NDArray[np.int32]
    rows: NDArray[np.int32]
    bytes: NDArray[np.int64]
    dropped: dict[int, NDArray[np.int32]]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def num_row_groups(self) -> int:
        """Number of row groups."""
        return len(self.rows)

    @cached_property
    def first_samples(self) -> NDArray[np.int64]:
        """Sample number of the first row of each row group, and the total at the end."""
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    def shard_location(self, group: int) -> Location:
        """Where the file that holds a row group lies."""
        return locate(self.root).child(self.files[int(self.file_index[group])].path)

    def stored_row(self, group: int, row: int) -> int:
        """Where in the stored row group a row of this manifest's row group lies."""
        for dropped in self.dropped.get(group, ()):
            row += int(dropped) <= row
        return row


def open_dataset(path: str) -> Manifest:
    """Open a data set: a folder with a manifest, local or `s3://`.

    Raises:
        ValueError: if there is no data set, its conversion never finished, it is empty, or its
            format is newer than this code.
    """
    folder = locate(path)
    file = folder.child(MANIFEST_FILE)
    if not file.exists():
        raise ValueError(_why_missing(path, folder))
    return _parse(path, file.read())


def _why_missing(path: str, folder: Location) -> str:
    if folder.child(STAGING_FOLDER).exists():
        return (
            f"data set {path!r} is not finished: its conversion stopped before the manifest "
            f"was written; run the same convert command again, it continues where it stopped."
        )
    if folder.info().type == fs.FileType.NotFound:
        return (
            f"no data set at {path!r}: the folder does not exist; check the path or convert first."
        )
    return (
        f"no data set at {path!r}: the folder has no {MANIFEST_FILE}; "
        f"give a folder that jobs/convert.py wrote."
    )


def _parse(path: str, content: bytes) -> Manifest:
    try:
        table = pq.read_table(pa.BufferReader(content))
        header: dict[str, Any] = json.loads(table.schema.metadata[_METADATA_KEY])
    except (pa.ArrowException, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}/{MANIFEST_FILE} is not a manifest of vit_ray or is damaged ({error}); "
            f"convert the data set again."
        ) from error
    _check_version(path, header["format_version"])
    if table.num_rows == 0 or header["num_images"] == 0:
        raise ValueError(
            f"data set {path!r} is empty: its manifest lists 0 images; convert it again."
        )
    return _from_table(path, table, header, hashlib.sha256(content).hexdigest())


def _check_version(path: str, version: int) -> None:
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}/{MANIFEST_FILE} has format version {version}; this code reads up to "
            f"{FORMAT_VERSION}; upgrade vit_ray."
        )


def _from_table(path: str, table: pa.Table, header: dict[str, Any], digest: str) -> Manifest:
    return Manifest(
        path=path,
        root=header["root"] or path,
        num_images=header["num_images"],
        classes=header["classes"],
        max_labels=header["max_labels"],
        fingerprint=header.get("fingerprint") or digest[:16],
        format_version=header["format_version"],
        files=[ShardFile(*entry) for entry in header["files"]],
        file_index=table["file_index"].to_numpy(),
        row_group=table["row_group"].to_numpy(),
        rows=table["rows"].to_numpy(),
        bytes=table["bytes"].to_numpy(),
        dropped=_dropped(table["dropped"]),
    )


def _dropped(column: pa.ChunkedArray) -> dict[int, NDArray[np.int32]]:
    if column.null_count == len(column):
        return {}
    present = np.flatnonzero(column.is_valid().to_numpy())
    return {int(i): np.asarray(column[int(i)].as_py(), np.int32) for i in present}


@dataclass(frozen=True)
class RowGroupColumns:
    """The table of a manifest that is about to be written, one entry per row group."""

    file_index: NDArray[np.integer]
    row_group: NDArray[np.integer]
    rows: NDArray[np.integer]
    bytes: NDArray[np.integer]
    dropped: dict[int, NDArray[np.int32]]


def write_manifest(
    folder: Location,
    columns: RowGroupColumns,
    *,
    files: list[ShardFile],
    classes: list[str],
    max_labels: int,
    root: str = "",
    origin: dict[str, Any],
) -> str:
    """Write the manifest, which makes the data set visible, and return its fingerprint.

    Args:
        root: folder of the shards when they are not in `folder`.
        origin: how the data set was made (seed, source); kept, and part of the fingerprint.
    """
    header = {
        "format_version": FORMAT_VERSION,
        "num_images": int(np.sum(columns.rows, dtype=np.int64)),
        "classes": classes,
        "max_labels": max_labels,
        "root": root,
        "origin": origin,
        "files": [[f.path, f.rows, f.bytes] for f in files],
    }
    header["fingerprint"] = _fingerprint(header, columns)
    sink = pa.BufferOutputStream()
    schema = ROW_GROUP_SCHEMA.with_metadata({_METADATA_KEY: json.dumps(header).encode()})
    pq.write_table(_to_table(columns, schema), sink, compression="zstd")
    folder.child(MANIFEST_FILE).write(sink.getvalue().to_pybytes())
    return str(header["fingerprint"])


def _fingerprint(header: dict[str, Any], columns: RowGroupColumns) -> str:
    described = {k: v for k, v in header.items() if k not in ("root", "format_version")}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for column in (columns.file_index, columns.row_group, columns.rows, columns.bytes):
        digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
    for group, rows in sorted(columns.dropped.items()):
        digest.update(np.asarray([group, *rows], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def _to_table(columns: RowGroupColumns, schema: pa.Schema) -> pa.Table:
    dropped = pa.nulls(len(columns.rows), pa.list_(pa.int32()))
    if columns.dropped:
        lists = [columns.dropped.get(i) for i in range(len(columns.rows))]
        dropped = pa.array(lists, type=pa.list_(pa.int32()))
    arrays = [columns.file_index, columns.row_group, columns.rows, columns.bytes, dropped]
    cast = [pa.array(a, type=f.type) for a, f in zip(arrays, schema, strict=True)]
    return pa.Table.from_arrays(cast, schema=schema)
