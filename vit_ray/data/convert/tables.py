"""Tables of images and labels: parquet files as on the Hugging Face hub, CSV and JSONL lists.

A parquet file has `image` = {bytes, path}, and `label` or `labels`. The declared type of the labels
decides their meaning: a `ClassLabel` is an index into its names, text is a name, a plain integer is
an index into `convert.classes`.
"""

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.convert.labels import (
    LABEL_FIELDS,
    MAX_TEXT_BYTES,
    Labels,
    check_columns,
    checked_label,
    checked_names,
    chosen_field,
    json_object,
    labelled,
    labels_of_record,
    labels_of_value,
    refuse_one_hot,
    row_or_problem,
)
from vit_ray.data.convert.rows import DamagedUnitError, Row, Unit
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import is_of_the_store, locate

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "picture")
_LABEL_COLUMNS: Final = ("label", "labels", "fine_label", "cls")
# Rows of a batch: with images, and without.
_BATCH_ROWS: Final = {True: 64, False: 4096}
# Maximum number of rows of a row group; a footer with more is damaged.
MAX_ROWS: Final = 10_000_000
_PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
# Labels of Kaggle's ImageNet: for each box of an image its class and corners.
_CLASS: Final = r"n[0-9]{8}"
_BOXES: Final = re.compile(rf"(?:{_CLASS}(?: -?[0-9]+){{4}} *)+")
# Arrow's types of labels, and of images; a column without an embedded image has the type null.
_LABEL_TYPE: Final = re.compile(
    r"(\w*list(_view)?<\w+: )?(dictionary<values=)?(u?int\d+|(large_)?string(_view)?)\b"
)
_IMAGE_TYPE: Final = re.compile(r"(dictionary<values=)?((large_|fixed_size_)?binary|null)")
# As in RFC 4180: quotes enclose a whole field, and are doubled inside one.
_STRICT_ROW: Final = r'(?:"(?:[^"]|"")*+"|[^"{0}]*+)(?:{0}(?:"(?:[^"]|"")*+"|[^"{0}]*+))*+\r?\n?'


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
            size = sum(
                chunk.total_uncompressed_size
                for chunk in map(metadata.column, range(metadata.num_columns))
                if chunk.path_in_schema == columns.image_path
            )
            if unit.config.in_place:
                check_in_place(unit.path, group, metadata.num_rows, size)
            number, end, problem = first, first + metadata.num_rows, "it ends early"
            try:
                for batch in source.iter_batches(_BATCH_ROWS[with_images], [group], names):
                    for i in range(min(len(batch), end - number)):
                        row = Row(f"{stem}/{number:08d}", length=size // metadata.num_rows)
                        yield row_or_problem(row, _parquet_row, unit, columns, batch, i)
                        number += 1
            except (pa.ArrowException, OSError) as error:
                if is_of_the_store(error):
                    raise
                problem = str(error)
            for lost in range(number, end):
                yield Row(f"{stem}/{lost:08d}", problem=f"row group {group} is damaged: {problem}")
            first = end


def _parquet_row(row: Row, unit: Unit, columns: Columns, batch: pa.RecordBatch, at: int) -> Row:
    """A row of a batch with its image, if it was read; its labels may be the row's problem.

    Raises:
        ValueError: the image is not embedded.
    """
    if columns.image in batch.schema.names:
        value = batch.column(columns.image)[at].as_py()
        stored = value if isinstance(value, dict) else {"bytes": value}
        if not stored["bytes"] and stored.get("path"):
            raise ValueError(
                f"its image has no bytes, only the path {stored['path']!r}: it is not embedded; "
                "save the set with datasets' push_to_hub or save_to_disk after "
                "embed_table_storage, or convert the image files"
            )
        if not stored["bytes"]:
            raise ValueError("its image has no bytes")
        row = replace(row, image=stored["bytes"], length=len(stored["bytes"]))
    return row_or_problem(row, _with_labels, unit, columns, batch, at)


def _with_labels(row: Row, unit: Unit, columns: Columns, batch: pa.RecordBatch, at: int) -> Row:
    """The row with its labels (names for a `ClassLabel`) and columns.

    Raises:
        ValueError: they are invalid.
    """
    labels, kind = labels_of_value(batch.column(columns.label)[at].as_py())
    if (names := columns.class_names) is not None and kind == "index":
        indices = [int(text) for text in labels]
        if unknown := [index for index in indices if not 0 <= index < len(names)]:
            hint = " (by convention: not labelled)" if unknown == [-1] else ""
            raise ValueError(f"its label is {unknown[0]}{hint}, of {len(names)} classes")
        labels, kind = tuple(names[index] for index in indices), "name"
    fields = {name: batch.column(name)[at].as_py() for name in unit.config.columns}
    return labelled(row, (labels, kind), fields, unit.config.columns)


def check_in_place(path: str, group: int, rows: int, image_bytes: int) -> None:
    """Raises ValueError for a row group that has no rows, or too many bytes to be read at once."""
    if not rows or image_bytes > MOST_ROW_GROUP_BYTES:
        content = f"{image_bytes >> 20:,} MiB of images" if rows else "no rows"
        raise ValueError(
            f"{path!r}: row group {group} has {content}; in place it needs rows, of at most "
            f"{MOST_ROW_GROUP_BYTES >> 20:,} MiB; convert to another folder with "
            "convert.in_place=false"
        )


def declared_classes(unit: Unit) -> list[str] | None:
    """The class names of a `ClassLabel`; None if the labels have another type."""
    with opened(unit) as (_, columns):
        return columns.class_names


@contextlib.contextmanager
def opened(unit: Unit) -> Iterator[tuple[pq.ParquetFile, Columns]]:
    """Open a parquet file, and choose its columns; errors as `parquet_rows`."""
    with locate(unit.path).open() as file:
        try:
            source = pq.ParquetFile(file)
            groups = map(source.metadata.row_group, range(source.metadata.num_row_groups))
            if any(not 0 <= group.num_rows <= MAX_ROWS for group in groups):
                raise ValueError(f"a row group has more than {MAX_ROWS:,} rows")
        except (pa.ArrowException, OSError, ValueError) as error:
            if is_of_the_store(error):
                raise
            problem = f"its footer cannot be read ({error})"
            raise DamagedUnitError(unit.path, file.size(), problem) from error
        yield source, _columns_of(source.schema_arrow, unit)


def _columns_of(schema: pa.Schema, unit: Unit) -> Columns:
    """The columns of images and labels.

    Raises:
        ValueError: they are missing, duplicated, ambiguous, or of types that cannot be read.
    """
    file, config = repr(unit.path), unit.config
    declared = _declared(schema, file)
    image = chosen_field("image", config.image_field, _IMAGE_COLUMNS, schema.names, file)
    label = chosen_field(
        "label", config.label_field, (*_LABEL_COLUMNS, *declared), schema.names, file
    )
    check_columns((image, label, *config.columns), schema.names, file)
    if not _LABEL_TYPE.match(str(schema.field(label).type)):
        raise ValueError(
            f"{file}: its label column {label!r} is {schema.field(label).type}; expected "
            "integers, text, or lists of one of them"
        )
    kind, image_path = schema.field(image).type, image
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, image_path = kind.field("bytes").type, f"{image}.bytes"
    if not _IMAGE_TYPE.match(str(kind)):
        raise ValueError(
            f"{file}: its column {image!r} is {schema.field(image).type}; expected encoded "
            "images, as binary or as a struct with `bytes`"
        )
    names = declared.get(label)
    return Columns(image, image_path, label, names and checked_names(names, file))


def _declared(schema: pa.Schema, file: str) -> dict[str, list[str]]:
    # Class names by column, as the datasets library declares them.
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features") or {}
        return {c: names for c in schema.names if (names := _names(features.get(c)))}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: its huggingface metadata is damaged") from error


def _names(feature: Any) -> Any:
    # The names of a `ClassLabel`, or of a list of them.
    if isinstance(feature, list) and len(feature) == 1:
        return _names(feature[0])
    if not isinstance(feature, dict):
        return None
    return feature.get("names") or _names(feature.get("feature"))


def _lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The lines of a list, cut to `MAX_TEXT_BYTES`; raises ValueError if the list is UTF-16."""
    head = file.read(3)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError(f"{path!r} is UTF-16; save it as UTF-8")
    file.seek(3 if head == b"\xef\xbb\xbf" else 0)  # after UTF-8's byte order mark
    while line := file.readline(MAX_TEXT_BYTES):
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_TEXT_BYTES)
        yield line


def jsonl_rows(unit: Unit) -> Iterator[Row]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    with unit.opened() as (file, _):
        for number, line in enumerate(_lines(file, unit.path), 1):
            if line.strip():
                yield row_or_problem(Row(f"{unit.path}#{number}"), _jsonl_row, unit, line)


def _jsonl_row(row: Row, unit: Unit, line: bytes) -> Row:
    if len(line) >= MAX_TEXT_BYTES:
        raise ValueError(f"it has {MAX_TEXT_BYTES:,} bytes or more")
    fields = json_object(line)
    names = [name for name, value in fields.items() if value not in (None, "")]
    path = fields[chosen_field("image", unit.config.image_field, _PATH_FIELDS, names, "it")]
    if type(path) not in (str, int):
        raise ValueError(f"its path is of type {type(path).__name__}, not text or an id")
    row = replace(row, key=(unit.config.image_pattern or "{}").replace("{}", str(path)))
    return row_or_problem(row, _located, unit, labels_of_record, fields, unit.config.label_field)


def csv_rows(unit: Unit) -> Iterator[Row]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    with unit.opened() as (file, _):
        # Bytes that are not UTF-8 become surrogates, so that only their row is rejected.
        lines = (line.decode("utf-8", "surrogateescape") for line in _lines(file, unit.path))
        first = next(lines, "")
        delimiter = max(",;\t", key=first.count)
        records = _records(itertools.chain([first], lines), delimiter)
        first_row = next(records)[2]
        names = [name.strip().lower() for name in first_row] if isinstance(first_row, list) else []
        path, image, label = repr(unit.path), unit.config.image_field, unit.config.label_field
        image = chosen_field("image", image and image.lower(), _PATH_FIELDS, names, path)
        label = chosen_field("label", label and label.lower(), LABEL_FIELDS, names, path)
        check_columns((image, label, *map(str.lower, unit.config.columns)), names, path)
        indices = {"path": names.index(image), "label": names.index(label)}
        for line, text, row in records:
            if row == "unexpected end of data":
                raise ValueError(
                    f"{path}: a quote in line {line} is never closed, so the {len(text)} "
                    'lines from there to the end are one row; close it, or write "" for a quote '
                    "inside quotes"
                )
            if problem := _csv_problem(row, text, indices, len(names), delimiter):
                for number in range(line, line + len(text)):
                    yield Row(f"{unit.path}#{number}", problem=problem)
            elif row:
                fields = dict(zip(names, row, strict=True))
                fields |= {name: fields[name.lower()] for name in unit.config.columns}
                entry = Row((unit.config.image_pattern or "{}").replace("{}", fields[image]))
                yield row_or_problem(entry, _located, unit, _csv_labels, fields, label)


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
    row: list[str] | str, text: list[str], indices: dict[str, int], num_fields: int, delimiter: str
) -> str | None:
    """What is wrong, or probably wrong, with a record; None for nothing.

    Args:
        text: the lines of the record.
        indices: positions of `path` and `label` in a row.
    """
    if isinstance(row, str):
        return f"{row}; check for an open quote"
    if len(row) != num_fields:
        return f"it has {len(row)} fields, the header {num_fields}" if row else None
    strict = _STRICT_ROW.replace("{0}", delimiter)
    for name, index in indices.items():
        if "\n" in row[index] or "\r" in row[index]:
            return f"its {name} has a line break; check for an open quote"
        if '"' in row[index] and not re.fullmatch(strict, "".join(text)):
            return (
                f'its {name} has a quote inside but none around it; write "" for it, and put '
                "quotes around the field"
            )
    index = indices["path"]
    # A line inside a quoted text is probably a row behind an open quote if it has as many fields as
    # the header, and another path with the same suffix.
    for fields in (line.split(delimiter) for line in text[1:]):
        path = fields[index].strip(' "') if len(fields) == len(row) else row[index]
        suffixes = {name.rpartition(".")[2].lower() for name in (path, row[index])}
        if path != row[index] and len(suffixes) == 1:
            return "one of its lines is itself a row; check for an open quote"
    return None if row[index].strip() else "it has no path"


def _csv_labels(fields: dict[str, str], label: str) -> Labels:
    text = fields[label]
    refuse_one_hot([part.strip() for part in text.split(";")])
    texts = re.findall(_CLASS, text) if _BOXES.fullmatch(text) else [text]
    if label == "labels":
        texts = list(filter(str.strip, text.split(";")))
    if not texts:
        raise ValueError("it has no label")
    return tuple(dict.fromkeys(map(checked_label, texts))), "text"


def _located(
    row: Row,
    unit: Unit,
    labels_of: Callable[[Any, Any], Labels],
    fields: Mapping[str, Any],
    label: str | None,
) -> Row:
    """A row of a list with its path, which is its key or below the list's folder, and labels."""
    if row.key.startswith(("http://", "https://")):
        raise ValueError("it is a URL; download the images first, and list their paths")
    is_absolute = row.key.startswith(("/", "s3://"))
    path = row.key if is_absolute else f"{unit.folder}/{row.key}"
    labels = labels_of(fields, label)
    return labelled(replace(row, path=path), labels, fields, unit.config.columns)
