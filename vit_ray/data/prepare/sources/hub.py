"""Parquet files as on the Hugging Face hub: `image` = {bytes, path}, `label` or `labels`.

The type that a file declares for its labels decides their meaning: a `ClassLabel` is an index into
its names, text is a name, a plain integer is an index into names that must be given.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.prepare.sources.columns import stored_text
from vit_ray.data.prepare.sources.entries import (
    MOST_IMAGE_BYTES,
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    rejected,
    with_problem,
)
from vit_ray.data.prepare.sources.label_map import check_names
from vit_ray.data.prepare.sources.label_values import Labels, chosen_field, labels_of_value
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import Location, is_of_the_store, locate

IMAGE_COLUMNS: Final = ("image", "img", "jpg", "picture")
_LABEL_COLUMNS: Final = ("label", "labels", "fine_label", "cls")
_ROWS_AT_A_TIME: Final = 64
MOST_ROWS: Final = 10_000_000
"""Most rows of a row group; a footer that says more is damaged."""


def index_parquet(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Rows of a file, whose images are packed into a plain file that can be read at any offset.

    Raises:
        DamagedUnitError: the file cannot be opened.
        ValueError: it has no columns of images and labels.
    """
    offset = 0
    with pack.output() as output:
        for _, entry, image in rows_of(unit):
            if entry.path == unit.path:
                yield entry
                continue
            yield replace(entry, path=pack.uri, offset=offset)
            output.write(image)
            offset += len(image)


def rows_of(unit: SourceUnit) -> Iterator[tuple[int, IndexEntry, bytes]]:
    """Row group, entry and image of each row of a file; errors as `index_parquet`.

    The path of an entry is empty if there is an image, and else that of the file.
    """
    stem, first = unit.name.removesuffix(".parquet"), 0
    with _opened(unit) as (source, columns):
        for group in range(source.metadata.num_row_groups):
            for row, image, read in _rows(source, group, columns, unit.columns):
                key = f"{stem}/{first + row:08d}"
                if isinstance(image, Exception):
                    what = f"row group {group} is damaged: {image}"
                    yield group, rejected(unit.path, key, what), b""
                    continue
                entry = IndexEntry("", 0, len(image), key, ())
                yield group, _labelled(entry, read, columns, unit.columns), image
            first += source.metadata.row_group(group).num_rows


class InPlace(NamedTuple):
    """What a file's metadata says before its images are read.

    Attributes:
        column: of the encoded images, by its name in parquet.
        groups: rows of each row group, and bytes of its images when they are read.
        labels: of all rows, and their `kinds`, as `IndexEntry.label_kind`.
        declared, fields: as `declared_classes` and `fields_of`.
    """

    column: str
    groups: list[tuple[int, int]]
    labels: set[str]
    kinds: set[str]
    declared: list[str] | None
    fields: dict[str, str]


def facts_in_place(unit: SourceUnit, *, with_labels: bool = True) -> InPlace:
    """What is known about a file before its images are read, from its footer and its labels."""
    labels: set[str] = set()
    kinds: set[str] = set()
    with _opened(unit) as (source, columns):
        groups = [source.metadata.row_group(i) for i in range(source.metadata.num_row_groups)]
        sizes = [
            sum(
                chunk.total_uncompressed_size
                for chunk in map(group.column, range(group.num_columns))
                if chunk.path_in_schema == columns.image_path
            )
            for group in groups
        ]
        for batch in source.iter_batches(columns=[columns.label]) if with_labels else ():
            values = batch.column(0).to_pylist()
            for value in {tuple(v) if isinstance(v, list) else v for v in values}:
                with contextlib.suppress(ValueError):  # its row says so when it is read
                    label = list(value) if isinstance(value, tuple) else value
                    found, kind = _labels_of(label, columns)
                    labels.update(found)
                    kinds.add(kind)
    facts = list(zip((group.num_rows for group in groups), sizes, strict=True))
    names, fields = columns.class_names, columns.fields
    return InPlace(columns.image_path, facts, labels, kinds, names, fields)


def check_in_place_bytes(unit: SourceUnit, group: int, image_bytes: int) -> None:
    """Raises ValueError for a row group whose images have too many bytes to be read at once."""
    if image_bytes > MOST_ROW_GROUP_BYTES:
        raise ValueError(
            f"{unit.path!r}: row group {group} has {image_bytes >> 20:,} MiB of images, but in "
            f"place at most {MOST_ROW_GROUP_BYTES >> 20:,} MiB can be read; convert to another "
            "folder with convert.in_place=false"
        )


def declared_classes(unit: SourceUnit) -> list[str] | None:
    """The names of a file's `ClassLabel`; None if it declares none."""
    with _opened(unit) as (_, columns):
        return columns.class_names


def fields_of(unit: SourceUnit) -> dict[str, str]:
    """The columns that a file's images and labels are read from."""
    with _opened(unit) as (_, columns):
        return columns.fields


@contextlib.contextmanager
def _opened(unit: SourceUnit) -> Iterator[tuple[pq.ParquetFile, "_Columns"]]:
    """A file, and the columns that it is read by; errors as `index_parquet`."""
    location = locate(unit.path)
    with location.open() as file:
        try:
            source = pq.ParquetFile(file)
            metadata = source.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            if any(not 0 <= count <= MOST_ROWS for count in rows):
                raise ValueError(
                    f"a row group of {max(rows):,} rows; at most {MOST_ROWS:,} are allowed"
                )
        except (pa.ArrowException, OSError, ValueError) as error:
            if is_of_the_store(error):
                raise
            what = f"its footer cannot be read ({error})"
            raise DamagedUnitError(unit.path, file.size(), what) from error
        yield source, _columns_of(source.schema_arrow, unit)


class _Columns(NamedTuple):
    """Which columns hold images and labels, and the kind of the labels."""

    image: str
    image_path: str
    """The column of encoded bytes, without the file names next to them."""
    label: str
    class_names: list[str] | None

    @property
    def fields(self) -> dict[str, str]:
        return {"image": self.image, "label": self.label}


def _columns_of(schema: pa.Schema, unit: SourceUnit) -> _Columns:
    """The columns that a file is read by.

    Raises:
        ValueError: they are missing, duplicated, ambiguous, or of types that cannot be read.
    """
    whose = repr(unit.path)
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{whose}: its huggingface metadata is damaged") from error
    found = {n: _names(features.get(n)) for n in schema.names} if isinstance(features, dict) else {}
    class_labels = [name for name, names in found.items() if names is not None]
    image = chosen_field("image", unit.image_field, IMAGE_COLUMNS, schema.names, whose)
    usual = (*_LABEL_COLUMNS, *class_labels)
    label = chosen_field("label", unit.label_field, usual, schema.names, whose)
    for name in (image, label, *unit.columns):
        if schema.names.count(name) > 1:
            raise ValueError(f"{whose} has two columns {name!r}; rename one")
    for name in unit.columns:
        if name not in schema.names or _has_binary(schema.field(name).type):
            lacks = "no text in its column" if name in schema.names else "no column"
            raise ValueError(
                f"{whose} has {lacks} {name!r} of convert.columns; it has {schema.names}"
            )
    image_path = path_of_images(schema, image, whose)
    element, num_lists = schema.field(label).type, 0
    while hasattr(element, "value_type"):  # of a list, or of a dictionary
        num_lists += not pa.types.is_dictionary(element)
        element = element.value_type
    if num_lists > 1 or not (
        pa.types.is_string(element)
        or pa.types.is_large_string(element)
        or pa.types.is_integer(element)
    ):
        raise ValueError(
            f"{whose}: its label column {label!r} is {schema.field(label).type}; expected "
            "integers, text, or lists of one of them"
        )
    names = found.get(label)
    if names is not None:
        if not isinstance(names, list) or any(type(name) is not str for name in names):
            raise ValueError(
                f"{whose}: the names of its ClassLabel are not a list of texts: {str(names)[:80]}"
            )
        check_names(names, whose)
    return _Columns(image, image_path, label, names)


def path_of_images(schema: pa.Schema, column: str, whose: str) -> str:
    """The column of encoded images, or that inside it, without the file names next to them.

    Raises:
        ValueError: its type is another.
    """
    kind, path = schema.field(column).type, column
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, path = kind.field("bytes").type, f"{column}.bytes"
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise ValueError(
            f"{whose}: its column {column!r} is {schema.field(column).type}; expected encoded "
            "images, as binary or as a struct with `bytes`"
        )
    return path


def _has_binary(kind: pa.DataType) -> bool:
    """Whether it contains bytes, at any depth."""
    if isinstance(kind, pa.DictionaryType | pa.BaseExtensionType):
        return _has_binary(
            kind.value_type if isinstance(kind, pa.DictionaryType) else kind.storage_type
        )
    if kind.num_fields:
        return any(_has_binary(kind.field(i).type) for i in range(kind.num_fields))
    return str(kind).startswith(("binary", "large_binary", "fixed_size_binary"))


def _names(feature: Any) -> Any:
    """The names of a `ClassLabel`, or of a list of them, unchanged."""
    if isinstance(feature, list) and len(feature) == 1:
        return _names(feature[0])
    if not isinstance(feature, dict):
        return None
    return feature.get("names") or _names(feature.get("feature"))


_Row = tuple[int, bytes | Exception, Callable[[str], Any]]
"""Number in the row group, encoded image or why there is none, and its columns on request."""


def _rows(
    source: pq.ParquetFile, group: int, columns: _Columns, extra: Sequence[str]
) -> Iterator[_Row]:
    """Every row that the footer declares, readable or not."""
    expected, row = source.metadata.row_group(group).num_rows, 0
    problem: Exception = ValueError("it ends early")
    wanted = [columns.image_path, columns.label, *extra]
    try:
        for batch in source.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=wanted):
            images = batch.column(columns.image)
            if pa.types.is_struct(images.type):
                images = pa.compute.struct_field(images, "bytes")
            for i in range(min(len(batch), expected - row)):
                yield row, images[i].as_py() or b"", functools.partial(_value, batch, i)
                row += 1
    except (pa.ArrowException, OSError) as error:
        if is_of_the_store(error):
            raise
        problem = error
    for missing in range(row, expected):
        yield missing, problem, lambda _: None


def _value(batch: pa.RecordBatch, row: int, column: str) -> Any:
    return batch.column(column)[row].as_py()


def _labelled(
    entry: IndexEntry, read: Callable[[str], Any], columns: _Columns, extra: Sequence[str]
) -> IndexEntry:
    try:
        if entry.length > MOST_IMAGE_BYTES:
            raise ValueError(f"it has {entry.length:,} bytes, more than {MOST_IMAGE_BYTES:,}")
        if not entry.length:
            raise ValueError("its image has no bytes")
        labels, kind = _labels_of(read(columns.label), columns)
        values = tuple(stored_text(read(name)) for name in extra)
    except ValueError as error:
        return with_problem(entry, str(error))
    return replace(entry, labels=labels, label_kind=kind, extra=values)


def _labels_of(value: Any, columns: _Columns) -> Labels:
    """Labels of a value of the label column; indices of a `ClassLabel` as its names.

    Raises:
        ValueError: as `labels_of_value`, or an index is not one of the names.
    """
    labels, kind = labels_of_value(value)
    names = columns.class_names
    if names is None or kind != "index":
        return labels, kind
    indices = [int(text) for text in labels]
    if unknown := [index for index in indices if not 0 <= index < len(names)]:
        none = " (by convention: not labelled)" if unknown == [-1] else ""
        raise ValueError(f"its label is {unknown[0]}{none}, of {len(names)} classes")
    return tuple(names[index] for index in indices), "name"
