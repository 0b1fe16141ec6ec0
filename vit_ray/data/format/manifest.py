"""The manifest: one small parquet file that says what a data set holds, and that it is whole.

It has a row per row group (file, index in the file, rows, bytes, dropped rows, checksum); the file
names, sizes and checksums of footers, class names and totals are JSON in its metadata, with a
checksum of the manifest itself. A start reads this one file and no footers. A subset or a
de-duplicated set is a manifest alone, whose files lie in another folder.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

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
from vit_ray.retry import read_again
from vit_ray.storage import Location, locate, other_format

_METADATA_KEY: Final = b"vit_ray"
_CHECKSUM: Final = b'"manifest_sha256": "'
"""Stands before the hex digest of the file's content, taken with zeros in the digest's place."""
_NO_DIGEST: Final = b"0" * 64


@dataclass(frozen=True)
class ShardFile:
    """One parquet file of a data set; `path` is relative to the manifest's `root`.

    `footer_crc32` is that of everything behind the last row group.
    """

    path: str
    rows: int
    bytes: int
    footer_crc32: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a data set holds.

    Attributes:
        path: where it was opened from.
        root: the folder that holds the shards; `path` itself unless this is a subset.
        num_images: rows in all row groups, without those that a subset leaves out.
        classes: class names; a label is an index into them.
        max_labels: the longest label list; 1 for single-label data.
        text_columns: those of the shards that came from the source, such as captions.
        fingerprint: hex digest of the content; equal content has an equal fingerprint.
        file_index: int32 per row group, index into `files`.
        row_group: int32 per row group, its index in that file.
        rows: int32 per row group, the rows that count.
        bytes: int64 per row group, compressed size in the file.
        dropped: for a row group index, the rows of it that are left out, sorted.
        crc32: uint32 per row group, of its bytes in the file.
    """

    path: str
    root: str
    num_images: int
    classes: list[str]
    max_labels: int
    fingerprint: str
    files: list[ShardFile]
    file_index: NDArray[np.int32]
    row_group: NDArray[np.int32]
    rows: NDArray[np.int32]
    bytes: NDArray[np.int64]
    dropped: dict[int, NDArray[np.int32]]
    crc32: NDArray[np.uint32]
    text_columns: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def num_sets(self) -> int:
        """Data sets that are read together."""
        return 1

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
        path = self.files[int(self.file_index[group])].path
        return locate(self.root).child(path) if self.root else locate(path)

    def stored_row(self, group: int, row: int) -> int:
        """Where in the stored row group a row of this manifest's row group lies."""
        for dropped in self.dropped.get(group, ()):
            row += int(dropped) <= row
        return row


def open_dataset(path: str) -> Manifest:
    """Open a data set: a folder with a manifest, local or `s3://`.

    Raises:
        ValueError: if there is no data set, its conversion never finished, it is empty, or it
            has another format.
    """
    folder = locate(path)
    file = folder.child(MANIFEST_FILE)
    if not file.exists():
        raise ValueError(_why_missing(path, folder))
    manifest = read_again(lambda: _parse(path, file.read()), ValueError)
    if manifest.num_images == 0:
        raise ValueError(
            f"data set {path!r} is empty: its manifest lists 0 images; convert it again."
        )
    return manifest


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
        file = pq.ParquetFile(pa.BufferReader(content))
        header: dict[str, Any] = json.loads(file.metadata.metadata[_METADATA_KEY])
        version = int(header["format_version"])
        if version == FORMAT_VERSION:
            _check_digest(content)
            return _from_table(path, file.read(), header)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path}/{MANIFEST_FILE} is not a manifest of vit_ray or is damaged ({error}); "
            f"restore it from a copy, or convert the data set again."
        ) from error
    raise ValueError(other_format(f"data set {path!r}", version, FORMAT_VERSION))


def _check_digest(content: bytes) -> None:
    """Compare the manifest with its own checksum.

    Raises:
        ValueError: it has none, or the content is another.
    """
    start = content.index(_CHECKSUM) + len(_CHECKSUM)
    stop = start + len(_NO_DIGEST)
    digest = hashlib.sha256(content[:start])
    digest.update(_NO_DIGEST)
    digest.update(content[stop:])
    if digest.hexdigest().encode() != content[start:stop]:
        raise ValueError("its checksum differs")


def _from_table(path: str, table: pa.Table, header: dict[str, Any]) -> Manifest:
    columns = _columns(table)
    if header["fingerprint"] != _fingerprint(header, columns):
        raise ValueError("its fingerprint differs from its content")
    return Manifest(
        path=path,
        root=header["root"] or path,
        num_images=header["num_images"],
        classes=header["classes"],
        max_labels=header["max_labels"],
        fingerprint=header["fingerprint"],
        files=[ShardFile(*entry) for entry in header["files"]],
        text_columns=tuple(header.get("text_columns", ())),
        **vars(columns),
    )


def _columns(table: pa.Table) -> "RowGroupColumns":
    return RowGroupColumns(
        table["file_index"].to_numpy(),
        table["row_group"].to_numpy(),
        table["rows"].to_numpy(),
        table["bytes"].to_numpy(),
        _dropped(table["dropped"]),
        table["crc32"].to_numpy(),
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
    crc32: NDArray[np.integer]

    @classmethod
    def chosen(
        cls,
        whole: Manifest,
        groups: NDArray[np.integer],
        rows: NDArray[np.integer],
        dropped: dict[int, NDArray[np.int32]],
    ) -> "RowGroupColumns":
        """Some row groups of a data set, with fewer rows that count."""
        return cls(
            whole.file_index[groups],
            whole.row_group[groups],
            rows,
            whole.bytes[groups],
            dropped,
            whole.crc32[groups],
        )

    def after(self, before: Manifest) -> "RowGroupColumns":
        """The row groups of a data set, and then these, of further files."""
        return RowGroupColumns(
            np.concatenate([before.file_index, self.file_index + len(before.files)]),
            np.concatenate([before.row_group, self.row_group]),
            np.concatenate([before.rows, self.rows]),
            np.concatenate([before.bytes, self.bytes]),
            before.dropped | {g + before.num_row_groups: r for g, r in self.dropped.items()},
            np.concatenate([before.crc32, self.crc32]),
        )


def keep_manifest(folder: Location, destination: Location) -> None:
    """Write the manifest of a folder to another one, of the same shards and fingerprint."""
    file = pq.ParquetFile(pa.BufferReader(folder.child(MANIFEST_FILE).read()))
    header = json.loads(file.metadata.metadata[_METADATA_KEY])
    header = header | {"root": header["root"] or folder.uri}
    destination.child(MANIFEST_FILE).write(_encoded(header, _columns(file.read())))


def write_manifest(
    folder: Location,
    columns: RowGroupColumns,
    *,
    files: list[ShardFile],
    classes: list[str],
    max_labels: int,
    root: str = "",
    text_columns: Sequence[str] = (),
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
        **({"text_columns": list(text_columns)} if text_columns else {}),
        "files": [[f.path, f.rows, f.bytes, f.footer_crc32] for f in files],
    }
    header["fingerprint"] = _fingerprint(header, columns)
    folder.child(MANIFEST_FILE).write(_encoded(header, columns))
    return str(header["fingerprint"])


def _encoded(header: dict[str, Any], columns: RowGroupColumns) -> bytes:
    """The file's content. The checksum stands in the parquet metadata, which is not compressed."""
    sealed = header | {"manifest_sha256": _NO_DIGEST.decode()}
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, ROW_GROUP_SCHEMA, compression="zstd", store_schema=False) as writer:
        writer.write_table(_to_table(columns))
        writer.add_key_value_metadata({_METADATA_KEY: json.dumps(sealed).encode()})
    content = bytes(sink.getvalue())
    before, after = content.split(_CHECKSUM + _NO_DIGEST)
    return before + _CHECKSUM + hashlib.sha256(content).hexdigest().encode() + after


def _fingerprint(header: dict[str, Any], columns: RowGroupColumns) -> str:
    """Digest of all but where the data set lies, and what the file says of itself."""
    described = {k: v for k, v in header.items() if k not in _NOT_CONTENT}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for column in (
        columns.file_index, columns.row_group, columns.rows, columns.bytes, columns.crc32,
    ):  # fmt: skip
        digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
    for group, rows in sorted(columns.dropped.items()):
        digest.update(np.asarray([group, *rows], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


_NOT_CONTENT: Final = ("root", "format_version", "fingerprint", "manifest_sha256")


def _to_table(columns: RowGroupColumns) -> pa.Table:
    count = len(columns.rows)
    dropped = pa.nulls(count, pa.list_(pa.int32()))
    if columns.dropped:
        lists = [columns.dropped.get(i) for i in range(count)]
        dropped = pa.array(lists, type=pa.list_(pa.int32()))
    arrays = [
        columns.file_index, columns.row_group, columns.rows, columns.bytes, dropped, columns.crc32,
    ]  # fmt: skip
    cast = [pa.array(a, type=f.type) for a, f in zip(arrays, ROW_GROUP_SCHEMA, strict=True)]
    return pa.Table.from_arrays(cast, schema=ROW_GROUP_SCHEMA)
