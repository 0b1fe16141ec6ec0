"""The manifest: one small parquet file that lists what a data set holds, written last.

It has a row per row group (file, index in the file, rows, bytes, dropped rows). Its metadata are
JSON: file names, sizes and checksums, class names and totals. The fingerprint is a digest of all
this. Opening a data set reads the manifest alone, no footers of shards. A fraction, a split, a
subset or a de-duplicated set is a part of a data set: another manifest over the same shards.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.keyed_random import keys_of
from vit_ray.storage import Location, check_reachable, locate, read_again

FORMAT_VERSION: Final = 6
"""Manifests of other versions are refused."""
MANIFEST_FILE: Final = "manifest.parquet"
"""Its presence is the commit mark of a data set."""
STAGING_FOLDER: Final = "_staging"
"""Holds the progress of a conversion until the manifest is written."""
REJECTED_FILE: Final = "rejected.parquet"
DAMAGED_FILE: Final = "damaged.parquet"
"""Images of the set that libjpeg warns about; columns as in `REJECTED_FILE`."""
REPORT_FILE: Final = "report.json"
SOURCE_FILE: Final = "source.json"
"""The plan of the conversion: its settings, classes, and the versions of its source files."""
ROW_GROUP_SCHEMA: Final = pa.schema(
    [
        pa.field("file_index", pa.int32(), nullable=False),
        pa.field("row_group", pa.int32(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("dropped", pa.list_(pa.int32())),
    ]
)
# Columns that are arrays of a `Manifest`.
_ARRAYS: Final = ROW_GROUP_SCHEMA.names[:4]
REJECTED_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.string(), nullable=False), pa.field("reason", pa.string(), nullable=False)]
)


def shard_name(index: int, num_shards: int) -> str:
    """File name of shard `index`, such as `part-00003-of-00128.parquet`; names sort by index."""
    return f"part-{index:05d}-of-{num_shards:05d}.parquet"


@dataclass(frozen=True)
class ShardFile:
    """One shard; `path` is relative to the manifest's `root`, `bytes` the size of the file.

    A set that is made in place has its images in parquet files of others, one for each shard, in
    the same row groups.

    Attributes:
        images: address of the file with the images; empty if the shard itself holds them.
        images_bytes, images_version: of that file, as `Location.info` gave them when the data set
            was made.
        images_column: parquet name of the column of encoded images.
    """

    path: str
    rows: int
    bytes: int
    crc32: int
    images: str = ""
    images_bytes: int = 0
    images_version: str = ""
    images_column: str = ""


class ShardFiles(Sequence[ShardFile]):
    """Shards as one array per field: processes can share arrays, but not Python objects."""

    def __init__(self, files: Iterable[ShardFile]) -> None:
        columns = zip(*map(astuple, files), strict=True)
        self._columns = [np.array(column) for column in columns] or [np.empty(0)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: Any) -> Any:
        return ShardFile(*(column[index].item() for column in self._columns))


ABOUT: Final = ("license", "source_url", "evaluation_only", "apply_orientation")
"""Facts that whoever converts a data set may give; in `origin` of the set and of its parts."""
_METADATA_KEY: Final = b"vit_ray"
# Keys of the header that the fingerprint does not depend on.
_NOT_CONTENT: Final = ("root", "root_from_here", "format_version", "fingerprint")
# The first fields of a shard, which the fingerprint depends on.
_CONTENT_FIELDS: Final = 4


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a data set holds. Arrays have one entry per row group.

    Attributes:
        file_index: int32, index into `files`.
        row_group: int32, index in that file.
        rows: int32, rows that are not dropped.
        bytes: int64, compressed size in the file.
        classes: class names; a label is an index into them.
        max_labels: the longest label list; 1 for single-label data.
        dropped: index of a row group (in the arrays) to its dropped rows, sorted.
        origin: how the data set was made, and facts such as its license (`ABOUT`).
        path: where it was opened from; a local path is absolute.
        root: the folder that holds the shards; `path` itself unless this is a subset.
        fingerprint: hex digest of the content; equal content has an equal fingerprint.
        whole: None for a manifest that was opened. For a part made of one in memory, the opened
            manifest: both have the same row groups (in the part, some have no rows), and samples
            keep their numbers.
    """

    file_index: NDArray[np.integer]
    row_group: NDArray[np.integer]
    rows: NDArray[np.integer]
    bytes: NDArray[np.integer]
    files: Sequence[ShardFile]
    classes: list[str]
    max_labels: int = 1
    dropped: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)
    path: str = ""
    root: str = ""
    fingerprint: str = ""
    whole: "Manifest | None" = None

    def __getstate__(self) -> dict[str, Any]:
        """Includes `first_samples`, so that processes that share a pickled manifest share it."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return state | {"first_samples": self.first_samples}

    @property
    def about(self) -> dict[str, Any]:
        """The facts in `origin` that parts of the data set inherit (`ABOUT`)."""
        return {name: self.origin[name] for name in ABOUT if name in self.origin}

    @cached_property
    def num_images(self) -> int:
        """Rows in all row groups, without dropped ones."""
        return int(self.rows.sum(dtype=np.int64))

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def num_row_groups(self) -> int:
        return len(self.rows)

    @cached_property
    def first_samples(self) -> NDArray[np.int64]:
        """Sample number of the first row of each row group, and the total at the end."""
        if self.whole is not None:
            return self.whole.first_samples
        return np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)])

    def shard_location(self, group: int) -> Location:
        return self.file_location(int(self.file_index[group]))

    def file_location(self, index: int) -> Location:
        return locate(self.root).child(self.files[index].path)

    def stored_rows(self, group: int) -> NDArray[np.int64]:
        """Indices, in the stored row group, of the rows that are not dropped."""
        dropped = self.dropped.get(group, np.empty(0, np.int32))
        return np.delete(np.arange(int(self.rows[group]) + len(dropped)), dropped)

    def samples_of(self, group: int) -> NDArray[np.int64]:
        """Numbers of the samples of a row group, ascending."""
        whole = self.whole or self
        is_selected = np.isin(whole.stored_rows(group), self.stored_rows(group))
        return int(whole.first_samples[group]) + np.flatnonzero(is_selected)

    def samples_at(self, groups: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the samples at some rows of row groups; dropped rows do not count."""
        samples = self.first_samples[groups] + rows
        is_cut = self.rows[groups] < (self.whole or self).rows[groups]
        for group in np.unique(groups[is_cut]).tolist():
            in_group = groups == group
            samples[in_group] = self.samples_of(group)[rows[in_group]]
        return samples

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row group of each sample, and its row in the stored row group."""
        groups = np.searchsorted(self.first_samples, samples, side="right") - 1
        rows, whole = samples - self.first_samples[groups], self.whole or self
        for group in whole.dropped.keys() & groups.tolist():
            in_group = groups == group
            rows[in_group] = whole.stored_rows(group)[rows[in_group]]
        return groups, rows

    def place(self, sample: int) -> tuple[int, int]:
        """The row group of a sample, and its row in the stored row group."""
        (group,), (row,) = self.places(np.array([sample]))
        return int(group), int(row)

    def without(self, samples: NDArray[np.integer]) -> "Manifest":
        """The part without these samples, all of which this manifest must have."""
        groups = np.searchsorted(self.first_samples, samples, side="right") - 1
        rows = self.rows - np.bincount(groups, minlength=self.num_row_groups)
        removed = {}
        for group in np.unique(groups[rows[groups] > 0]).tolist():
            is_removed = np.isin(self.samples_of(group), samples[groups == group])
            removed[group] = self.stored_rows(group)[is_removed]
        return self._part(rows, removed)

    def ranked(self, first: int, last: int, key: int) -> "Manifest":
        """The part of the rows whose rank is in [first, last).

        Ranks count the rows of whole row groups, which `key` puts in order. This is a random
        sample, because rows were shuffled at conversion. A small part needs few row groups, and
        [0, n) is contained in every larger [0, m).
        """
        order = np.argsort(keys_of(key, np.arange(self.num_row_groups)), kind="stable")
        begins = np.empty(self.num_row_groups, np.int64)
        begins[order] = np.cumsum(self.rows[order], dtype=np.int64) - self.rows[order]
        low = np.clip(first - begins, 0, self.rows)
        rows = np.clip(last - begins, 0, self.rows) - low
        removed = {}
        for group in np.flatnonzero((rows > 0) & (rows < self.rows)).tolist():
            selected = slice(int(low[group]), int(low[group] + rows[group]))
            removed[group] = np.delete(self.stored_rows(group), selected)
        return self._part(rows, removed)

    # `rows`: the remaining number of each row group; `removed`: stored rows to drop in addition.
    def _part(
        self, rows: NDArray[np.integer], removed: Mapping[int, NDArray[np.integer]]
    ) -> "Manifest":
        dropped = dict(self.dropped)
        for group, stored in removed.items():
            dropped[group] = np.union1d(dropped.get(group, []), stored).astype(np.int32)
        dropped = {group: stored for group, stored in dropped.items() if rows[group]}
        return replace(
            self,
            rows=rows.astype(np.int32),
            dropped=dropped,
            whole=self.whole or self,
        )


def open_dataset(path: str) -> Manifest:
    """Open a data set: a folder with a manifest, local or `s3://`.

    Raises:
        ValueError: there is no data set, its conversion has not finished, or it is damaged or of
            another format.
        OSError: the storage cannot be reached, or denies access.
    """
    folder = locate(path)
    check_reachable(folder)
    file = folder.child(MANIFEST_FILE)
    if not file.exists():
        if folder.child(STAGING_FOLDER).exists():
            raise ValueError(
                f"data set {path!r} is not finished: its conversion stopped before the "
                "manifest was written; run the same convert command again, it continues where "
                "it stopped"
            )
        raise ValueError(
            f"no data set at {path!r}: it has no {MANIFEST_FILE}; check the path, or give the "
            "destination of `vit-ray convert`"
        )
    # The absolute path, because workers have other working directories.
    return read_again(lambda: _parse(folder.uri, file.read()), ValueError)


def _parse(path: str, content: bytes) -> Manifest:
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        header: dict[str, Any] = json.loads(file.metadata.metadata[_METADATA_KEY])
        if (version := header["format_version"]) != FORMAT_VERSION:
            raise ValueError(f"it has format {version}; this code reads format {FORMAT_VERSION}")
        table = file.read()
        dropped = _dropped(table)
        if header["fingerprint"] != _fingerprint(header, table, dropped):
            raise ValueError("its fingerprint differs from its content")
        return Manifest(
            **{name: table[name].to_numpy() for name in _ARRAYS},
            files=ShardFiles(ShardFile(*entry) for entry in header["files"]),
            classes=header["classes"],
            max_labels=header["max_labels"],
            dropped=dropped,
            origin=header["origin"],
            path=path,
            root=_root_of(header, path),
            fingerprint=header["fingerprint"],
        )
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"{path}/{MANIFEST_FILE} is not a manifest of vit_ray or is damaged ({error}); restore "
            "it from a copy, or convert the data set again"
        ) from error


def _root_of(header: dict[str, Any], path: str) -> str:
    """The folder of the shards: by its relative path, in case both folders were copied or moved."""
    if header["root_from_here"]:
        root = os.path.normpath(os.path.join(path, header["root_from_here"]))
        # Another data set may be in that folder now.
        with contextlib.suppress(OSError, pa.ArrowException, KeyError, TypeError, ValueError):
            metadata = pq.read_metadata(os.path.join(root, MANIFEST_FILE)).metadata
            if json.loads(metadata[_METADATA_KEY])["files"] == header["files"]:
                return root
    return header["root"] or path


def _dropped(table: pa.Table) -> dict[int, NDArray[np.int32]]:
    lists = table["dropped"]
    groups = np.flatnonzero(lists.is_valid().to_numpy()).tolist()
    return {group: np.asarray(lists[group].as_py(), np.int32) for group in groups}


def write_manifest(folder: Location, manifest: Manifest) -> str:
    """Write a manifest, which makes the data set visible, and return its fingerprint.

    Row groups of which all rows are dropped are left out.

    Args:
        manifest: without `path` and `fingerprint`; `root` only if that is not `folder`.
    """
    root, root_from_here = manifest.root, ""
    if root and folder.is_local and locate(root).is_local:
        root_from_here = os.path.relpath(root, folder.path)
    header = {
        "format_version": FORMAT_VERSION,
        "root_from_here": root_from_here,
        "num_images": manifest.num_images,
        "classes": manifest.classes,
        "max_labels": manifest.max_labels,
        "root": root,
        "origin": manifest.origin,
        "files": list(map(astuple, manifest.files)),
    }
    dropped = [manifest.dropped.get(group) for group in range(manifest.num_row_groups)]
    columns = [*(getattr(manifest, name) for name in _ARRAYS), dropped]
    arrays = [pa.array(column, f.type) for column, f in zip(columns, ROW_GROUP_SCHEMA, strict=True)]
    table = pa.table(arrays, ROW_GROUP_SCHEMA).take(np.flatnonzero(manifest.rows))
    header["fingerprint"] = _fingerprint(header, table, _dropped(table))
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, ROW_GROUP_SCHEMA, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_METADATA_KEY: json.dumps(header).encode()})
    folder.child(MANIFEST_FILE).write(bytes(sink.getvalue()))
    return str(header["fingerprint"])


def _fingerprint(
    header: dict[str, Any], table: pa.Table, dropped: dict[int, NDArray[np.int32]]
) -> str:
    """Digest of the content, which copying or moving the data set does not change."""
    content = {k: v for k, v in header.items() if k not in _NOT_CONTENT}
    content["files"] = [entry[:_CONTENT_FIELDS] for entry in header["files"]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in _ARRAYS:
        digest.update(np.ascontiguousarray(table[name].to_numpy(), dtype=np.int64).tobytes())
    for group, rows in sorted(dropped.items()):
        digest.update(np.asarray([group, *rows], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
