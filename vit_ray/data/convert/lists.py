"""CSV and JSONL lists of paths and labels."""

import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Final, NamedTuple

from vit_ray.data.convert.labels import (
    LABEL_FIELDS,
    MOST_JSON_BYTES,
    check_no_places,
    checked_label,
    chosen_field,
    json_object,
    labels_of_record,
    stored_text,
)
from vit_ray.data.convert.rows import Row, Unit

PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
_DELIMITERS: Final = ",;\t"
# As in RFC 4180: quotes enclose a whole field, and are doubled inside one.
_STRICT_ROW: Final = r'(?:"(?:[^"]|"")*+"|[^"{0}]*+)(?:{0}(?:"(?:[^"]|"")*+"|[^"{0}]*+))*+\r?\n?'


def _lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The lines of a list, over-long ones cut short; raises ValueError if it is UTF-16."""
    if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path!r} is UTF-16; save it as UTF-8")
    file.seek(0)
    mark = b"\xef\xbb\xbf"
    while line := file.readline(MOST_JSON_BYTES):
        piece = line
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MOST_JSON_BYTES)
        yield line.removeprefix(mark)
        mark = b""


class _Record(NamedTuple):
    """A row of a CSV file, or the error in it; after an error the next line begins another.

    Attributes:
        line: number of its first line, from 1 on.
        text: its lines, as in the file.
    """

    line: int
    text: list[str]
    row: list[str] | csv.Error


def _records(lines: Iterator[str], delimiter: str) -> Iterator[_Record]:
    text: list[str] = []

    def noted() -> Iterator[str]:
        for line in lines:
            text.append(line)
            yield line

    rows = csv.reader(noted(), strict=True, delimiter=delimiter)
    first = 1
    while True:
        text.clear()
        row: list[str] | csv.Error | None
        try:
            row = next(rows, None)
        except csv.Error as error:
            row = error
        if row is None:
            return
        yield _Record(first, [*text], row)
        first += len(text)


def jsonl_rows(unit: Unit) -> Iterator[Row]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    with unit.opened() as (file, _):
        for number, line in enumerate(_lines(file, unit.path), 1):
            if not line.strip():
                continue
            try:
                if len(line) >= MOST_JSON_BYTES:
                    raise ValueError(f"it has {MOST_JSON_BYTES:,} bytes or more")
                fields = json_object(line)
                given = [name for name, value in fields.items() if value not in (None, "")]
                name = fields[chosen_field("image", unit.image_field, PATH_FIELDS, given, "it")]
                if not isinstance(name, str | int) or isinstance(name, bool):
                    raise ValueError(f"its path is a {type(name).__name__}")
                if isinstance(name, int) and unit.image_pattern == "{}":
                    raise ValueError("its path is a int; set convert.image_pattern")
            except ValueError as error:
                yield Row(f"{unit.path}#{number}", problem=f"line {number}: {error}")
                continue
            row = _row(unit, str(name))
            try:
                labels, kind = labels_of_record(fields, unit.label_field)
                extra = tuple(stored_text(fields.get(name)) for name in unit.columns)
                yield replace(row, labels=labels, kind=kind, extra=extra)
            except ValueError as error:
                yield row.rejected(str(error))


def csv_rows(unit: Unit) -> Iterator[Row]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    with unit.opened() as (file, _):
        header, records = _opened(unit, file)
        for record in records:
            if str(record.row) == "unexpected end of data":
                raise ValueError(
                    f"{unit.path!r}: a quote in line {record.line} is never closed, so the "
                    f"{len(record.text)} lines from there to the end are one row; close it, or "
                    'write "" for a quote inside quotes'
                )
            if not record.row:
                continue
            problem = _csv_problem(header, record)
            if problem is None and isinstance(record.row, list):
                yield _csv_row(unit, header, dict(zip(header.names, record.row, strict=True)))
            else:
                for line in range(record.line, record.line + len(record.text)):
                    yield Row(f"{unit.path}#{line}", problem=f"line {line}: {problem}")


def fields_of_csv(unit: Unit) -> dict[str, str]:
    """The columns that paths and labels are read from."""
    with unit.opened() as (file, _):
        header, _ = _opened(unit, file)
    return {"image": header.path, "label": header.label}


def _opened(unit: Unit, file: IO[bytes]) -> tuple["_Header", Iterator[_Record]]:
    # Bytes that are not UTF-8 are kept as surrogates, so that a row is rejected, not the file.
    lines = (line.decode("utf-8", "surrogateescape") for line in _lines(file, unit.path))
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count)
    records = _records(itertools.chain([first], lines), delimiter)
    return _header(unit, next(records).row, delimiter), records


class _Header(NamedTuple):
    """Names of the columns, in lower case, and which of them have the path and the label."""

    names: list[str]
    path: str
    label: str
    delimiter: str


def _header(unit: Unit, row: list[str] | csv.Error, delimiter: str) -> _Header:
    if isinstance(row, csv.Error):
        raise ValueError(f"{unit.path!r}: its header cannot be read ({row})")
    names = [name.strip().lower() for name in row]
    whose, image, label = repr(unit.path), unit.image_field, unit.label_field
    path = chosen_field("image", image and image.lower(), PATH_FIELDS, names, whose)
    label = chosen_field("label", label and label.lower(), LABEL_FIELDS, names, whose)
    if missing := [name for name in unit.columns if name.lower() not in names]:
        raise ValueError(
            f"{unit.path!r} has no column {missing[0]!r} of convert.columns; it has {names[:20]}"
        )
    used = (path, label, *map(str.lower, unit.columns))
    if repeated := [name for name in used if names.count(name) > 1]:
        raise ValueError(f"{unit.path!r} has two columns {repeated[0]!r}; rename one")
    return _Header(names, path, label, delimiter)


def _csv_problem(header: _Header, record: _Record) -> str | None:
    row = record.row
    if isinstance(row, csv.Error):
        return f"{row}; check for an open quote"
    if len(row) != len(header.names):
        return f"it has {len(row)} fields, the header {len(header.names)}"
    for name in (header.path, header.label):
        text = row[header.names.index(name)]
        what = "path" if name == header.path else "label"
        if "\n" in text or "\r" in text:
            return f"its {what} has a line break; check for an open quote"
        strict = _STRICT_ROW.replace("{0}", header.delimiter)
        if '"' in text and not re.fullmatch(strict, "".join(record.text)):
            return (
                f'its {what} has a quote inside but none around it; write "" for it, and put '
                "quotes around the field"
            )
    place = header.names.index(header.path)
    # A line inside a quoted text looks like a row that an open quote has swallowed if it has as
    # many fields as the header, and another path that ends as the row's own does.
    for fields in (line.split(header.delimiter) for line in record.text[1:]):
        if len(fields) == len(row):
            path = fields[place].strip(' "')
            endings = {text.rpartition(".")[2].lower() for text in (path, row[place])}
            if path != row[place] and len(endings) == 1:
                return "one of its lines is itself a row; check for an open quote"
    return None if row[place].strip() else "it has no path"


def _csv_row(unit: Unit, header: _Header, fields: dict[str, str]) -> Row:
    extra = tuple(fields[name.lower()] for name in unit.columns)
    row = replace(_row(unit, fields[header.path]), extra=extra)
    text = fields[header.label]
    texts = text.split(";") if header.label == "labels" else [text]
    try:
        check_no_places([one.strip() for one in text.split(";")])
        if header.label == "labels" and not (texts := [one for one in texts if one.strip()]):
            raise ValueError("it has no label")
        return replace(row, labels=tuple(dict.fromkeys(map(checked_label, texts))))
    except ValueError as error:
        return row.rejected(str(error))


def _row(unit: Unit, text: str) -> Row:
    """An image of a list, without its labels; a relative path is relative to the list's folder."""
    name = unit.image_pattern.replace("{}", text)
    if name.startswith(("http://", "https://")):
        return Row(name, problem="it is a URL; download the images first, and list their paths")
    return Row(name, path=name if name.startswith(("/", "s3://")) else f"{unit.folder}/{name}")
