"""Parquet files as on the Hugging Face hub: `image` = {bytes, path}, `label` or `labels`.

The type that a file declares for its labels decides their meaning: a `ClassLabel` is an index into
its names, text is a name, a plain integer is an index into names that must be given.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.convert.labels import (
    Labels,
    SourceFacts,
    checked_names,
    chosen_field,
    labelled,
    labels_of_value,
)
from vit_ray.data.convert.rows import DamagedUnitError, Row, Unit
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import is_of_the_store, locate

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "picture")
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
    """Row group and row, of every row that the footer declares; errors as `parquet_rows`."""
    stem, first = unit.name.removesuffix(".parquet"), 0
    with opened(unit) as (source, columns):
        # With the names of files that are not embedded.
        wanted = [columns.image, columns.label, *unit.config.columns]
        for group in range(source.metadata.num_row_groups):
            number, end = first, first + source.metadata.row_group(group).num_rows
            problem: object = "it ends early"
            try:
                batches = source.iter_batches(_ROWS_AT_A_TIME, [group], wanted)
                places = ((batch, i) for batch in batches for i in range(len(batch)))
                for batch, i in islice(places, end - number):
                    yield group, _row(f"{stem}/{number:08d}", batch.slice(i, 1), columns, unit)
                    number += 1
            except (pa.ArrowException, OSError) as error:
                if is_of_the_store(error):
                    raise
                problem = error
            for missing in range(number, end):
                problem_of = f"row group {group} is damaged: {problem}"
                yield group, Row(f"{stem}/{missing:08d}", problem=problem_of)
            first = end


def _row(key: str, batch: pa.RecordBatch, columns: _Columns, unit: Unit) -> Row:
    images = batch.column(columns.image)
    if pa.types.is_struct(images.type):
        images = pa.compute.struct_field(images, "bytes")
    image = images.cast(pa.large_binary())[0].as_py() or b""
    row = Row(key, length=len(image), image=image)
    return labelled(row, unit, functools.partial(_described, batch, columns, unit, row))


def _described(
    batch: pa.RecordBatch, columns: _Columns, unit: Unit, row: Row
) -> tuple[Labels, Mapping[str, Any]]:
    """The labels of the only row of a batch, and its fields for `convert.columns`."""
    if not row.image:
        value = batch.column(columns.image)[0].as_py()
        if isinstance(value, dict) and value.get("path"):
            raise ValueError(
                f"its image has no bytes, only the path {value['path']!r}: it is not embedded; "
                "save the set with datasets' push_to_hub or save_to_disk after "
                "embed_table_storage, or convert the image files"
            )
        raise ValueError("its image has no bytes")
    labels = _labels_of(batch.column(columns.label)[0].as_py(), columns)
    return labels, {name: batch.column(name)[0].as_py() for name in unit.config.columns}


def facts_of_file(unit: Unit) -> SourceFacts:
    """What is known about a file from its footer and its labels.

    Raises:
        ValueError: as `parquet_rows`, or a row group cannot be read in place, where it is to be.
    """
    facts = SourceFacts()
    with opened(unit) as (source, columns):
        for batch in source.iter_batches(columns=[columns.label]):
            for value in batch.column(0).to_pylist():
                with contextlib.suppress(ValueError):  # its row says so when it is read
                    labels, kind = _labels_of(value, columns)
                    facts.add(Row("", labels, length=0, kind=kind))
        groups = map(source.metadata.row_group, range(source.metadata.num_row_groups))
        for number, group in enumerate(groups):
            chunks = [group.column(i) for i in range(group.num_columns)]
            sizes = [c.total_uncompressed_size for c in chunks
                     if c.path_in_schema == columns.image_path]  # fmt: skip
            if unit.config.in_place:
                check_in_place(unit.path, number, group.num_rows, sum(sizes))
            facts.bytes += sum(sizes)
        facts.rows = source.metadata.num_rows
    facts.digest = f"{unit.name} {facts.rows}\n"
    facts.declared = {tuple(columns.class_names)} if columns.class_names is not None else set()
    return facts


def check_in_place(path: str, group: int, rows: int, image_bytes: int) -> None:
    """Raises ValueError for a row group that has no rows, or too many bytes to be read at once."""
    if rows and image_bytes <= MOST_ROW_GROUP_BYTES:
        return
    found = f"{image_bytes >> 20:,} MiB of images" if rows else "no rows"
    raise ValueError(
        f"{path!r}: row group {group} has {found}; in place it needs rows, of at most "
        f"{MOST_ROW_GROUP_BYTES >> 20:,} MiB; convert to another folder with convert.in_place=false"
    )


def declared_classes(unit: Unit) -> list[str] | None:
    """The names of its `ClassLabel`; None if its labels are something else."""
    with opened(unit) as (_, columns):
        return columns.class_names


@contextlib.contextmanager
def opened(unit: Unit) -> Iterator[tuple[pq.ParquetFile, _Columns]]:
    """A file, and the columns that it is read by; errors as `parquet_rows`."""
    with locate(unit.path).open() as file:
        try:
            source = pq.ParquetFile(file)
            metadata = source.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            if any(not 0 <= count <= MOST_ROWS for count in rows):
                raise ValueError(f"a row group has more than {MOST_ROWS:,} rows")
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
    whose, config = repr(unit.path), unit.config
    declared = _declared(schema, whose)
    usual = (*_LABEL_COLUMNS, *(name for name, names in declared.items() if names is not None))
    image = chosen_field("image", config.image_field, _IMAGE_COLUMNS, schema.names, whose)
    label = chosen_field("label", config.label_field, usual, schema.names, whose)
    for name in (image, label, *config.columns):
        if schema.names.count(name) != 1:
            how_many = schema.names.count(name) or "no"
            raise ValueError(f"{whose} has {how_many} columns {name!r}; it has {schema.names}")
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
    names = declared.get(label)
    if names is not None:
        if not isinstance(names, list) or any(type(name) is not str for name in names):
            raise ValueError(
                f"{whose}: the names of its ClassLabel are not a list of texts: {str(names)[:80]}"
            )
        names = checked_names(names, whose)
    return _Columns(image, _path_of_images(schema, image, whose), label, names)


def _declared(schema: pa.Schema, whose: str) -> dict[str, Any]:
    """What the file declares as names of classes, by column; None where a column has none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features") or {}
        return {name: _names(features.get(name)) for name in schema.names}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{whose}: its huggingface metadata is damaged") from error


def _names(feature: Any) -> Any:
    """The names of a `ClassLabel`, or of a list of them, unchanged."""
    if isinstance(feature, list) and len(feature) == 1:
        return _names(feature[0])
    if not isinstance(feature, dict):
        return None
    return feature.get("names") or _names(feature.get("feature"))


def _path_of_images(schema: pa.Schema, column: str, whose: str) -> str:
    """The column of encoded images, or that inside it, without the file names next to them.

    Raises:
        ValueError: its type is another.
    """
    kind, path = schema.field(column).type, column
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, path = kind.field("bytes").type, f"{column}.bytes"
    element = kind.value_type if pa.types.is_dictionary(kind) else kind
    # Null where no image is embedded.
    if not str(element).startswith(("binary", "large_binary", "fixed_size_binary", "null")):
        raise ValueError(
            f"{whose}: its column {column!r} is {schema.field(column).type}; expected encoded "
            "images, as binary or as a struct with `bytes`"
        )
    return path


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
