"""CSV and JSONL lists of paths and labels."""

import csv
import functools
import itertools
import re
from collections.abc import Iterator
from typing import IO, Any, Final, NamedTuple

from vit_ray.data.convert.labels import (
    LABEL_FIELDS,
    MOST_TEXT_BYTES,
    Labels,
    check_columns,
    check_no_places,
    checked_label,
    chosen_field,
    json_object,
    labelled,
    labels_of_record,
)
from vit_ray.data.convert.rows import Row, Unit

PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
_DELIMITERS: Final = ",;\t"
# Of Kaggle's ImageNet: a class, and the corners of a box in it, for each box of an image.
_CLASS: Final = r"n[0-9]{8}"
_BOXES: Final = re.compile(rf"(?:{_CLASS}(?: -?[0-9]+){{4}} *)+")
# As in RFC 4180: quotes enclose a whole field, and are doubled inside one.
_STRICT_ROW: Final = r'(?:"(?:[^"]|"")*+"|[^"{0}]*+)(?:{0}(?:"(?:[^"]|"")*+"|[^"{0}]*+))*+\r?\n?'


def _lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The lines of a list, over-long ones cut short; raises ValueError if it is UTF-16."""
    if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path!r} is UTF-16; save it as UTF-8")
    file.seek(0)
    mark = b"\xef\xbb\xbf"
    while line := file.readline(MOST_TEXT_BYTES):
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MOST_TEXT_BYTES)
        yield line.removeprefix(mark)
        mark = b""


def jsonl_rows(unit: Unit) -> Iterator[Row]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    with unit.opened() as (file, _):
        for number, line in enumerate(_lines(file, unit.path), 1):
            if not line.strip():
                continue
            try:
                if len(line) >= MOST_TEXT_BYTES:
                    raise ValueError(f"it has {MOST_TEXT_BYTES:,} bytes or more")
                fields = json_object(line)
                row = _row(unit, _path_in(unit, fields))
            except ValueError as error:
                yield Row(f"{unit.path}#{number}", problem=f"line {number}: {error}")
                continue
            yield labelled(row, unit, functools.partial(_labels_of_line, unit, fields))


def _labels_of_line(unit: Unit, fields: dict[str, Any]) -> tuple[Labels, dict[str, Any]]:
    return labels_of_record(fields, unit.config.label_field), fields


def _path_in(unit: Unit, fields: dict[str, Any]) -> str:
    given = [name for name, value in fields.items() if value not in (None, "")]
    path = fields[chosen_field("image", unit.config.image_field, PATH_FIELDS, given, "it")]
    if type(path) not in (str, int):
        raise ValueError(f"its path is of type {type(path).__name__}, not text or an id")
    return str(path)


def csv_rows(unit: Unit) -> Iterator[Row]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    with unit.opened() as (file, _):
        # Bytes that are not UTF-8 are kept as surrogates, so that a row is rejected, not the file.
        lines = (line.decode("utf-8", "surrogateescape") for line in _lines(file, unit.path))
        first = next(lines, "")
        delimiter = max(_DELIMITERS, key=first.count)
        records = _records(itertools.chain([first], lines), delimiter)
        header = _header(unit, next(records)[2], delimiter)
        for line, text, row in records:
            if row == "unexpected end of data":
                raise ValueError(
                    f"{unit.path!r}: a quote in line {line} is never closed, so the {len(text)} "
                    'lines from there to the end are one row; close it, or write "" for a quote '
                    "inside quotes"
                )
            if problem := _csv_problem(header, row, text):
                for number in range(line, line + len(text)):
                    yield Row(f"{unit.path}#{number}", problem=f"line {number}: {problem}")
            elif row:
                fields = dict(zip(header.names, row, strict=True))
                fields |= {name: fields[name.lower()] for name in unit.config.columns}
                read = functools.partial(_labels_of_row, header, fields)
                yield labelled(_row(unit, fields[header.path]), unit, read)


def _records(
    lines: Iterator[str], delimiter: str
) -> Iterator[tuple[int, list[str], list[str] | str]]:
    """Number of the first line, all lines, and the row or the error in it, which ends there."""
    text: list[str] = []

    def noted() -> Iterator[str]:
        for line in lines:
            text.append(line)
            yield line

    rows, first = csv.reader(noted(), strict=True, delimiter=delimiter), 1
    row: list[str] | str | None = []
    while row is not None:
        text.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            row = str(error)
        if row is not None:
            yield first, [*text], row
        first += len(text)


class _Header(NamedTuple):
    """Names of the columns, in lower case, and which of them have the path and the label."""

    names: list[str]
    path: str
    label: str
    delimiter: str


def _header(unit: Unit, row: list[str] | str, delimiter: str) -> _Header:
    names = [name.strip().lower() for name in row] if isinstance(row, list) else []
    whose, image, label = repr(unit.path), unit.config.image_field, unit.config.label_field
    path = chosen_field("image", image and image.lower(), PATH_FIELDS, names, whose)
    label = chosen_field("label", label and label.lower(), LABEL_FIELDS, names, whose)
    check_columns((path, label, *map(str.lower, unit.config.columns)), names, whose)
    return _Header(names, path, label, delimiter)


def _csv_problem(header: _Header, row: list[str] | str, text: list[str]) -> str | None:
    """Why a record is none, or probably not the one that was meant; None for nothing."""
    if isinstance(row, str):
        return f"{row}; check for an open quote"
    if len(row) != len(header.names):
        return f"it has {len(row)} fields, the header {len(header.names)}" if row else None
    place = header.names.index(header.path)
    for what, value in (("path", row[place]), ("label", row[header.names.index(header.label)])):
        if "\n" in value or "\r" in value:
            return f"its {what} has a line break; check for an open quote"
        strict = _STRICT_ROW.replace("{0}", header.delimiter)
        if '"' in value and not re.fullmatch(strict, "".join(text)):
            return (
                f'its {what} has a quote inside but none around it; write "" for it, and put '
                "quotes around the field"
            )
    # A line inside a quoted text looks like a row that an open quote has swallowed if it has as
    # many fields as the header, and another path that ends as the row's own does.
    for parts in (line.split(header.delimiter) for line in text[1:]):
        path = parts[place].strip(' "') if len(parts) == len(row) else row[place]
        endings = {one.rpartition(".")[2].lower() for one in (path, row[place])}
        if path != row[place] and len(endings) == 1:
            return "one of its lines is itself a row; check for an open quote"
    return None if row[place].strip() else "it has no path"


def _labels_of_row(header: _Header, fields: dict[str, str]) -> tuple[Labels, dict[str, str]]:
    text = fields[header.label]
    check_no_places([part.strip() for part in text.split(";")])
    texts = [text]
    if _BOXES.fullmatch(text):
        texts = re.findall(_CLASS, text)
    if header.label == "labels":
        texts = list(filter(str.strip, text.split(";")))
    if not texts:
        raise ValueError("it has no label")
    return (tuple(dict.fromkeys(map(checked_label, texts))), "text"), fields


def _row(unit: Unit, text: str) -> Row:
    """An image of a list, without its labels; a relative path is relative to the list's folder."""
    name = (unit.config.image_pattern or "{}").replace("{}", text)
    if name.startswith(("http://", "https://")):
        return Row(name, problem="it is a URL; download the images first, and list their paths")
    return Row(name, path=name if name.startswith(("/", "s3://")) else f"{unit.folder}/{name}")
