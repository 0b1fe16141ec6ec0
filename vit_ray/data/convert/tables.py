"""Tables of images and labels: parquet files as on the Hugging Face hub, CSV and JSONL lists.

A parquet file has `image` = {bytes, path}, and `label` or `labels`. The declared type of the labels
decides their meaning: a `ClassLabel` is an index into its names, text is a name, a plain integer is
an index into `convert.classes`.
"""

import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.convert.labels import (
    IMAGE_FIELDS,
    LABEL_FIELDS,
    checked_names,
    chosen_field,
    json_object,
    labelled,
    row_or_problem,
)
from vit_ray.data.convert.rows import DamagedUnitError, LabelKind, Row, Unit
from vit_ray.data.images import is_image_name
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import is_of_the_store, locate

_PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
_ABSOLUTE: Final = "/", "s3://"
# Rows of a batch: with images, and without.
_BATCH_ROWS: Final = {True: 64, False: 4096}
# Maximum number of rows of a row group; a footer with more is damaged.
_MAX_ROWS: Final = 10_000_000
# Arrow's types of labels.
_LABEL_TYPE: Final = re.compile(
    r"(\w*list(_view)?<\w+: )?(dictionary<values=)?(u?int\d+|(large_)?string(_view)?)\b"
)
# Labels of Kaggle's ImageNet: for each box of an image its class and corners.
_CLASS: Final = r"n[0-9]{8}"
_BOXES: Final = re.compile(rf"(?:{_CLASS}(?: -?[0-9]+){{4}} *)+")


class Columns(NamedTuple):
    """The columns with images and labels.

    Attributes:
        image_path: parquet's name of the column of encoded bytes, such as `image.bytes`.
        class_names: names of a `ClassLabel`; None for other labels.
    """

    image: str
    image_path: str
    label: str
    class_names: list[str] | None


def parquet_rows(unit: Unit, *, with_images: bool = True) -> Iterator[Row]:
    """Every row that the footer of a file declares; rows that cannot be read have a problem.

    Args:
        with_images: False reads no images; each row has the mean length of its row group.

    Raises:
        DamagedUnitError: the file cannot be opened.
        ValueError: the file has no columns of images and labels, or a row group cannot be read in
            place.
    """
    stem, first = unit.name.removesuffix(".parquet"), 0
    with opened(unit) as (source, columns):
        # The whole image column: its file names are for errors about images that are not embedded.
        image_columns = [columns.image] if with_images else []
        names = [*image_columns, columns.label, *unit.config.columns]
        for group in range(source.num_row_groups):
            metadata = source.metadata.row_group(group)
            chunks = map(metadata.column, range(metadata.num_columns))
            size = sum(
                chunk.total_uncompressed_size
                for chunk in chunks
                if chunk.path_in_schema == columns.image_path
            )
            if unit.config.in_place:
                check_in_place(unit.path, group, metadata.num_rows, size)
            numbers, problem = iter(range(first, first + metadata.num_rows)), "it ends early"
            try:
                for batch in source.iter_batches(_BATCH_ROWS[with_images], [group], names):
                    for at, number in zip(range(len(batch)), numbers, strict=False):
                        row = Row(f"{stem}/{number:08d}", length=size // metadata.num_rows)
                        yield row_or_problem(row, _parquet_row, unit, columns, batch, at)
            except (pa.ArrowException, OSError) as error:
                if is_of_the_store(error):
                    raise
                problem = str(error)
            for lost in numbers:
                yield Row(f"{stem}/{lost:08d}", problem=f"row group {group} is damaged: {problem}")
            first += metadata.num_rows


def _parquet_row(row: Row, unit: Unit, columns: Columns, batch: pa.RecordBatch, at: int) -> Row:
    """A row of a batch with its image, if it was read; its labels may be the row's problem.

    Raises:
        ValueError: the image is not embedded.
    """
    if columns.image in batch.schema.names:
        value = batch.column(columns.image)[at].as_py()
        stored = value if isinstance(value, dict) else {"bytes": value}
        image, path = stored.get("bytes"), stored.get("path")
        if not isinstance(image, bytes) or not image:
            content = f"is {type(image).__name__}, not encoded" if image else "has no"
            raise ValueError(
                f"its image {content} bytes, and its path is {path!r}; if it is not embedded, "
                "save the set with datasets' push_to_hub or save_to_disk after "
                "embed_table_storage, or convert the image files"
            )
        row = replace(row, image=image, length=len(image))
    return row_or_problem(row, _with_labels, unit, columns, batch, at)


def _with_labels(row: Row, unit: Unit, columns: Columns, batch: pa.RecordBatch, at: int) -> Row:
    """The row with its labels (names for a `ClassLabel`) and columns.

    Raises:
        ValueError: they are invalid.
    """
    wanted = columns.label, *unit.config.columns
    names = [name for name in wanted if batch.schema.names.count(name) == 1]
    fields = {name: batch.column(name)[at].as_py() for name in names}
    row = labelled(row, fields, unit.config, columns.label)
    classes = columns.class_names
    if classes is None or row.kind != "index":
        return row
    indices = list(map(int, row.labels))
    if min(indices) < 0 or max(indices) >= len(classes):
        hint = " (-1 by convention: not labelled)" if -1 in indices else ""
        raise ValueError(f"its labels {indices}{hint} are not all of the {len(classes)} classes")
    return replace(row, labels=tuple(classes[index] for index in indices), kind="name")


def check_in_place(path: str, group: int, rows: int, image_bytes: int) -> None:
    """Raises ValueError for a row group that has no rows, or too many bytes to be read at once."""
    if not rows or image_bytes > MOST_ROW_GROUP_BYTES:
        content = f"{image_bytes >> 20:,} MiB of images" if rows else "no rows"
        raise ValueError(
            f"{path!r}: row group {group} has {content}; in place it needs rows, of at most "
            f"{MOST_ROW_GROUP_BYTES >> 20:,} MiB; convert to another folder with "
            "convert.in_place=false"
        )


@contextlib.contextmanager
def opened(unit: Unit) -> Iterator[tuple[pq.ParquetFile, Columns]]:
    """Open a parquet file, and choose its columns; errors as `parquet_rows`."""
    with locate(unit.path).open() as file:
        try:
            source = pq.ParquetFile(file)
            groups = map(source.metadata.row_group, range(source.metadata.num_row_groups))
            if any(not 0 <= group.num_rows <= _MAX_ROWS for group in groups):
                raise ValueError(f"a row group has more than {_MAX_ROWS:,} rows")
        except (pa.ArrowException, OSError, ValueError) as error:
            if is_of_the_store(error):
                raise
            problem = f"its footer cannot be read ({error})"
            raise DamagedUnitError(unit.path, file.size(), problem) from error
        yield source, _columns_of(source.schema_arrow, unit)


def _columns_of(schema: pa.Schema, unit: Unit) -> Columns:
    """The columns of images and labels.

    Raises:
        ValueError: they are missing, duplicated or ambiguous, or labels are of another type.
    """
    file, config = repr(unit.path), unit.config
    try:  # class names by column, as the datasets library declares them
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features") or {}
        declared = {c: names for c in schema.names if (names := _names(features.get(c)))}
    except (ValueError, AttributeError, LookupError, RecursionError) as error:
        raise ValueError(f"{file}: its huggingface metadata is damaged") from error
    label_fields = (*LABEL_FIELDS, *declared)
    image = chosen_field("image", config.image_field, IMAGE_FIELDS, schema.names, file)
    label = chosen_field("label", config.label_field, label_fields, schema.names, file)
    if not _LABEL_TYPE.match(str(schema.field(label).type)):
        raise ValueError(
            f"{file}: its label column {label!r} is {schema.field(label).type}, not integers, "
            "text, or lists of one of them"
        )
    is_struct = pa.types.is_struct(schema.field(image).type)
    class_names = checked_names(declared[label], file) if label in declared else None
    return Columns(image, f"{image}.bytes" if is_struct else image, label, class_names)


def _names(feature: Any) -> Any:
    # The names of a `ClassLabel`, or of a list of them.
    while isinstance(feature, list):
        feature = feature[0]
    return feature and (feature.get("names") or _names(feature.get("feature")))


def jsonl_rows(unit: Unit) -> Iterator[Row]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    for number, line in enumerate(_lines(unit), 1):
        if line.strip():
            yield row_or_problem(Row(f"{unit.path}#{number}"), _json_row, unit, line)


def _json_row(row: Row, unit: Unit, line: str) -> Row:
    fields, config = json_object(line), unit.config
    names = [name for name, value in fields.items() if value is not None]
    path = fields[chosen_field("image", config.image_field, _PATH_FIELDS, names, "it")]
    return _list_row(row, unit, fields, path, config.label_field, "name")


def _lines(unit: Unit) -> Iterator[str]:
    """The lines of a list; raises ValueError if it is UTF-16.

    Bytes that are not UTF-8 become surrogates, so that only their row is rejected.
    """
    with unit.opened() as (file, _):
        if file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{unit.path!r} is UTF-16; save it as UTF-8")
        yield from io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="\n")


def csv_rows(unit: Unit) -> Iterator[Row]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    A row of several lines that is wrong is an error of each of them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    path, config, lines = repr(unit.path), unit.config, _lines(unit)
    first = next(lines, "")
    delimiter = max(",;\t", key=first.count)
    records = _records(itertools.chain([first], lines), delimiter)
    header = next(records)[2]
    names = [name.strip() for name in header] if isinstance(header, list) else []
    image = chosen_field("image", config.image_field, _PATH_FIELDS, names, path)
    label = chosen_field("label", config.label_field, LABEL_FIELDS, names, path)
    indices = names.index(image), names.index(label)
    for line, text, row in records:
        if row == "unexpected end of data":
            raise ValueError(
                f"{path}: a quote in line {line} is never closed, so the {len(text)} lines from "
                'there to the end are one row; close it, or write "" for a quote inside quotes'
            )
        if problem := _csv_problem(row, text, indices, len(names), delimiter):
            for number in range(line, line + len(text)):
                yield Row(f"{unit.path}#{number}", problem=problem)
        elif row:
            fields: dict[str, Any] = dict(zip(names, row, strict=True))
            if label.lower() == "labels":
                fields[label] = list(filter(str.strip, fields[label].split(";")))
            elif _BOXES.fullmatch(fields[label]):
                fields[label] = re.findall(_CLASS, fields[label])
            row_of_file = Row(f"{unit.path}#{line}")
            yield row_or_problem(row_of_file, _list_row, unit, fields, fields[image], label, "text")


def _records(
    lines: Iterator[str], delimiter: str
) -> Iterator[tuple[int, list[str], list[str] | str]]:
    """For each record: number of its first line, its lines, and its fields, or the error in it."""
    lines, copies = itertools.tee(lines)
    rows, num_lines = csv.reader(lines, strict=True, delimiter=delimiter), 0
    while True:
        try:
            row: list[str] | str = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            row = str(error)
        text = list(itertools.islice(copies, rows.line_num - num_lines))
        yield num_lines + 1, text, row
        num_lines = rows.line_num


def _csv_problem(
    row: list[str] | str, text: list[str], indices: tuple[int, int], num_fields: int, delimiter: str
) -> str | None:
    """What is wrong, or probably wrong, with a record; None for nothing.

    Args:
        text: the lines of the record.
        indices: positions of the path and the label in a row.
    """
    if isinstance(row, str):
        return f"{row}; check for an open quote"
    if len(row) != num_fields:
        return f"it has {len(row)} fields, the header {num_fields}" if row else None
    for field in (row[index] for index in indices):
        # As in RFC 4180: quotes enclose a whole field, and are doubled inside one.
        quoted = '"{}"'.format(field.replace('"', '""'))
        if "\n" in field or "\r" in field or ('"' in field and quoted not in "".join(text)):
            return (
                f"{field[:40]!r} has a line break, or a quote inside but none around it; close the "
                'quotes around a field, and write "" for a quote inside'
            )
    # A line inside a quoted text is probably a row behind an open quote if it has as many fields as
    # the header, and the path of another image.
    for fields in (line.split(delimiter) for line in text[1:]):
        other = fields[indices[0]].strip(' "') if len(fields) == len(row) else ""
        if is_image_name(other) and other != row[indices[0]]:
            return "one of its lines is itself a row; check for an open quote"
    return None


def _list_row(
    row: Row,
    unit: Unit,
    fields: dict[str, Any],
    path: Any,
    label_field: str | None,
    text_kind: LabelKind,
) -> Row:
    """The row of a record of a list; paths are below the list's folder unless absolute."""
    if type(path) not in (str, int) or not str(path).strip():
        raise ValueError(f"its path is {path!r}, and must be a text or a number")
    key = (unit.config.image_pattern or "{}").replace("{}", str(path))
    row = replace(row, key=key, path=key if key.startswith(_ABSOLUTE) else f"{unit.folder}/{key}")
    if key.startswith(("http://", "https://")):
        return replace(row, problem="it is a URL; download the images first, and list their paths")
    return row_or_problem(row, labelled, fields, unit.config, label_field, text_kind)
