"""Parquet files as on the Hugging Face hub: `image` = {bytes, path}, `label` or `labels`.

The type that a file declares for its labels decides their meaning: a `ClassLabel` is an index into
its names, text is a name, a plain integer is an index into names that must be given.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.convert.labels import (
    Labels,
    SourceFacts,
    checked_names,
    chosen_field,
    labels_of_value,
    stored_text,
)
from vit_ray.data.convert.rows import MOST_IMAGE_BYTES, DamagedUnitError, Row, Unit
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import is_of_the_store, locate

IMAGE_COLUMNS: Final = ("image", "img", "jpg", "picture")
_LABEL_COLUMNS: Final = ("label", "labels", "fine_label", "cls")
_ROWS_AT_A_TIME: Final = 64
# Most rows of a row group; a footer that says more is damaged.
MOST_ROWS: Final = 10_000_000


class _Columns(NamedTuple):
    """Which columns hold images and labels, and the kind of the labels.

    Attributes:
        image_path: the column of encoded bytes, without the file names next to them.
        class_names: of a `ClassLabel`.
    """

    image: str
    image_path: str
    label: str
    class_names: list[str] | None


def parquet_rows(unit: Unit) -> Iterator[Row]:
    """Rows of a file, with their images.

    Raises:
        DamagedUnitError: the file cannot be opened.
        ValueError: it has no columns of images and labels.
    """
    return (row for _, row in rows_of_groups(unit))


def rows_of_groups(unit: Unit) -> Iterator[tuple[int, Row]]:
    """Row group and row; errors as `parquet_rows`."""
    stem, first = unit.name.removesuffix(".parquet"), 0
    with _opened(unit) as (source, columns):
        for group in range(source.metadata.num_row_groups):
            for number, image, read in _images(source, group, columns, unit):
                key = f"{stem}/{first + number:08d}"
                if isinstance(image, Exception):
                    yield group, Row(key, problem=f"row group {group} is damaged: {image}")
                else:
                    yield group, _row(Row(key, length=len(image), image=image), read, columns, unit)
            first += source.metadata.row_group(group).num_rows


def facts_of_file(
    unit: Unit, *, with_labels: bool = True
) -> tuple[SourceFacts, list[tuple[int, int]], str]:
    """What is known about a file from its footer and, if wanted, its labels.

    Returns:
        The facts; rows and bytes of images of each row group; and the column of the encoded
        images, by its name in parquet.
    """
    facts = SourceFacts()
    with _opened(unit) as (source, columns):
        groups = []
        for group in map(source.metadata.row_group, range(source.metadata.num_row_groups)):
            chunks = map(group.column, range(group.num_columns))
            sizes = [c.total_uncompressed_size for c in chunks
                     if c.path_in_schema == columns.image_path]  # fmt: skip
            groups.append((group.num_rows, sum(sizes)))
        for batch in source.iter_batches(columns=[columns.label]) if with_labels else ():
            for value in batch.column(0).to_pylist():
                with contextlib.suppress(ValueError):  # its row says so when it is read
                    labels, kind = _labels_of(value, columns)
                    facts.add(Row("", labels, length=0, kind=kind))
    facts.rows, facts.bytes = map(sum, zip(*groups, strict=True)) if groups else (0, 0)
    facts.digest = f"{unit.name} {facts.rows}\n"
    facts.fields = {("image", columns.image), ("label", columns.label)}
    facts.declared = {tuple(columns.class_names)} if columns.class_names is not None else set()
    return facts, groups, columns.image_path


def declared_classes(unit: Unit) -> list[str] | None:
    """The names of its `ClassLabel`; None if its labels are something else."""
    with _opened(unit) as (_, columns):
        return columns.class_names


def fields_of_file(unit: Unit) -> dict[str, str]:
    """The columns that images and labels are read from."""
    with _opened(unit) as (_, columns):
        return {"image": columns.image, "label": columns.label}


def check_in_place_bytes(unit: Unit, group: int, image_bytes: int) -> None:
    """Raises ValueError for a row group whose images have too many bytes to be read at once."""
    if image_bytes > MOST_ROW_GROUP_BYTES:
        raise ValueError(
            f"{unit.path!r}: row group {group} has {image_bytes >> 20:,} MiB of images, but in "
            f"place at most {MOST_ROW_GROUP_BYTES >> 20:,} MiB can be read; convert to another "
            "folder with convert.in_place=false"
        )


@contextlib.contextmanager
def _opened(unit: Unit) -> Iterator[tuple[pq.ParquetFile, _Columns]]:
    """A file, and the columns that it is read by; errors as `parquet_rows`."""
    with locate(unit.path).open() as file:
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


def _columns_of(schema: pa.Schema, unit: Unit) -> _Columns:
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
    is_text = str(element) in ("string", "large_string", "string_view")
    if num_lists > 1 or not (is_text or pa.types.is_integer(element)):
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
        names = checked_names(names, whose)
    return _Columns(image, image_path, label, names)


def path_of_images(schema: pa.Schema, column: str, whose: str) -> str:
    """The column of encoded images, or that inside it, without the file names next to them.

    Raises:
        ValueError: its type is another.
    """
    kind, path = schema.field(column).type, column
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, path = kind.field("bytes").type, f"{column}.bytes"
    if not (_is_binary(kind) or pa.types.is_null(kind)):  # null where no image is embedded
        raise ValueError(
            f"{whose}: its column {column!r} is {schema.field(column).type}; expected encoded "
            "images, as binary or as a struct with `bytes`"
        )
    return path


def _is_binary(kind: pa.DataType) -> bool:
    element = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(element).startswith(("binary", "large_binary", "fixed_size_binary"))


def _has_binary(kind: pa.DataType) -> bool:
    """Whether it contains bytes, at any depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return _has_binary(kind.storage_type)
    if kind.num_fields and not pa.types.is_dictionary(kind):
        return any(_has_binary(kind.field(i).type) for i in range(kind.num_fields))
    return _is_binary(kind)


def _names(feature: Any) -> Any:
    """The names of a `ClassLabel`, or of a list of them, unchanged."""
    if isinstance(feature, list) and len(feature) == 1:
        return _names(feature[0])
    if not isinstance(feature, dict):
        return None
    return feature.get("names") or _names(feature.get("feature"))


# Number in the row group, encoded image or why there is none, and its columns on request.
_Image = tuple[int, bytes | Exception, Callable[[str], Any]]


def _images(source: pq.ParquetFile, group: int, columns: _Columns, unit: Unit) -> Iterator[_Image]:
    """Every row that the footer declares, readable or not."""
    expected, row = source.metadata.row_group(group).num_rows, 0
    problem: Exception = ValueError("it ends early")
    # With the names of files that are not embedded.
    wanted = [columns.image, columns.label, *unit.columns]
    try:
        for batch in source.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=wanted):
            images = batch.column(columns.image)
            if pa.types.is_struct(images.type):
                images = pa.compute.struct_field(images, "bytes")
            images = images.cast(pa.large_binary())
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


def _row(row: Row, read: Callable[[str], Any], columns: _Columns, unit: Unit) -> Row:
    try:
        if row.length > MOST_IMAGE_BYTES:
            raise ValueError(f"it has {row.length:,} bytes, more than {MOST_IMAGE_BYTES:,}")
        if not row.length:
            value = read(columns.image)
            if isinstance(value, dict) and value.get("path"):
                raise ValueError(
                    f"its image has no bytes, only the path {value['path']!r}: it is not embedded; "
                    "save the set with datasets' push_to_hub or save_to_disk after "
                    "embed_table_storage, or convert the image files"
                )
            raise ValueError("its image has no bytes")
        labels, kind = _labels_of(read(columns.label), columns)
        extra = tuple(stored_text(read(name)) for name in unit.columns)
    except ValueError as error:
        return row.rejected(str(error))
    return replace(row, labels=labels, kind=kind, extra=extra)


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
