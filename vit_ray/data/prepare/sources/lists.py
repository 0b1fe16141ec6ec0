"""CSV and JSONL lists of paths and labels, cut into parts of whole rows that tasks index."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, Any, Final, NamedTuple

from vit_ray.data.prepare.sources.columns import extra_of
from vit_ray.data.prepare.sources.entries import (
    WHOLE_FILE,
    IndexEntry,
    SourceUnit,
    opened,
    rejected,
    with_problem,
)
from vit_ray.data.prepare.sources.label_values import (
    LABEL_FIELDS,
    MOST_JSON_BYTES,
    checked_label,
    chosen_field,
    json_object,
    labels_of_record,
)
from vit_ray.storage import Location

PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
PART_BYTES: Final = 1 << 24
"""Bytes of a list that one task indexes: some 200,000 rows, seconds."""
_STRICT_FIELD: Final = r'(?:"(?:[^"]|"")*+"|[^",]*+)'
_STRICT_ROW: Final = re.compile(f"{_STRICT_FIELD}(?:,{_STRICT_FIELD})*+\r?\n?")
"""As in RFC 4180: quotes enclose a whole field, and are doubled inside one."""


def cut_list(unit: SourceUnit) -> list[SourceUnit]:
    """The unit as parts of about `PART_BYTES`, each of whole rows.

    Raises:
        ValueError: it is UTF-16.
    """
    with opened(unit) as (file, size):
        if file.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{unit.path!r} is UTF-16; save it as UTF-8")
        starts = [(0, 1)] if size <= PART_BYTES else list(_starts(file, unit))
    stops = [start for start, _ in starts[1:]] + [size]
    return [
        replace(unit, start=start, stop=stop, first_line=line)
        for (start, line), stop in zip(starts, stops, strict=True)
    ]


def _starts(file: io.BufferedReader, unit: SourceUnit) -> Iterator[tuple[int, int]]:
    """Offset and line of the first row of each part: a quoted row may span lines."""
    lines = _Lines(file, unit)
    rows: Iterable[Any] = _CsvRows(lines) if unit.format == "csv" else lines
    last = 0
    yield 0, 1
    for _ in rows:
        if lines.position - last >= PART_BYTES and file.peek(1):
            last = lines.position
            yield last, lines.number + 1


class _Lines:
    """The lines of a unit, with over-long lines truncated; knows its position."""

    def __init__(self, file: IO[bytes], unit: SourceUnit) -> None:
        self._file, self._stop = file, unit.stop
        self.position = unit.start
        self.number = unit.first_line - 1
        file.seek(unit.start)

    def __iter__(self) -> Iterator[bytes]:
        while self._stop is None or self.position < self._stop:
            line = piece = self._file.readline(MOST_JSON_BYTES)
            if not line:
                return
            self.number += 1
            while piece and not piece.endswith(b"\n"):
                self.position += len(piece)
                piece = self._file.readline(MOST_JSON_BYTES)
            self.position += len(piece)
            yield line


class _CsvRows:
    """The rows of a CSV file, or the error in one; after an error it continues on the next line.

    Attributes:
        text: of the current row, as in the file.
        lines: their numbers, 1-based.
        is_open: whether the data ended inside quotes, so that `text` is all that follows them.
    """

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self.text: list[str] = []
        self.lines = range(lines.number + 1, lines.number + 1)
        self.is_open = False

    def _read(self) -> Iterator[str]:
        for line in self._lines:
            # Bytes that are not UTF-8 are kept as surrogates, so that a row is rejected, not the
            # file.
            self.text.append(line.decode("utf-8", "surrogateescape"))
            yield self.text[-1]
        self.is_open = bool(self.text)

    def __iter__(self) -> Iterator[list[str] | csv.Error]:
        rows = csv.reader(self._read(), strict=True)
        while True:
            self.text = []
            row: list[str] | csv.Error
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                row = error
            self.lines = range(self.lines.stop, self._lines.number + 1)
            yield row


def index_jsonl(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    with opened(unit) as (file, _):
        lines = _Lines(file, unit)
        for line in lines:
            content = line.removeprefix(b"\xef\xbb\xbf") if lines.number == 1 else line
            if not content.strip():
                continue
            try:
                if len(content) >= MOST_JSON_BYTES:
                    raise ValueError(f"it has {MOST_JSON_BYTES:,} bytes or more")
                fields = json_object(content)
                given = [name for name, value in fields.items() if value]
                usual = PATH_FIELDS
                name = fields[chosen_field("image", unit.image_field, usual, given, "it")]
                if not isinstance(name, str):
                    raise ValueError(f"its path is a {type(name).__name__}")
            except ValueError as error:
                key = f"{unit.path}#{lines.number}"
                yield rejected(unit.path, key, f"line {lines.number}: {error}")
                continue
            entry = _entry(unit, name)
            try:
                labels, kind = labels_of_record(fields, unit.label_field)
                extra = extra_of(fields, unit.columns)
                yield replace(entry, labels=labels, label_kind=kind, extra=extra)
            except ValueError as error:
                yield with_problem(entry, str(error))


def index_csv(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    with opened(unit) as (file, _):
        header = _header(file, unit)
        rows = _CsvRows(_Lines(file, unit))
        for place, row in enumerate(rows):
            if rows.is_open:
                raise ValueError(
                    f"{unit.path!r}: a quote in line {rows.lines.start} is never closed, so the "
                    f"{len(rows.lines)} lines from there to the end are one row; close it, or "
                    'write "" for a quote inside quotes'
                )
            if not row or (place == 0 and unit.start == 0):  # blank, or the header
                continue
            problem = _csv_problem(header, row, rows)
            if problem is None and isinstance(row, list):
                yield _csv_entry(unit, header, dict(zip(header.names, row, strict=True)))
            else:
                for line in rows.lines:  # each may have been an image
                    yield rejected(unit.path, f"{unit.path}#{line}", f"line {line}: {problem}")


def fields_of_csv(unit: SourceUnit) -> dict[str, str]:
    """The columns that paths and labels are read from."""
    with opened(unit) as (file, _):
        header = _header(file, unit)
    return {"image": header.path, "label": header.label}


class _Header(NamedTuple):
    """Names of the columns, in lower case, and which of them have the path and the label."""

    names: list[str]
    path: str
    label: str


def _header(file: IO[bytes], unit: SourceUnit) -> _Header:
    lines = _Lines(file, replace(unit, start=0, stop=None))
    texts = (line.decode("utf-8-sig", "replace") for line in lines)
    try:
        names = [name.strip().lower() for name in next(csv.reader(texts), [])]
    except csv.Error as error:
        raise ValueError(f"{unit.path!r}: its header cannot be read ({error})") from error
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
    return _Header(names, path, label)


def _csv_problem(header: _Header, row: list[str] | csv.Error, at: _CsvRows) -> str | None:
    if isinstance(row, csv.Error):
        return f"{row}; check for an open quote"
    if len(row) != len(header.names):
        return f"it has {len(row)} fields, the header {len(header.names)}"
    for name in (header.path, header.label):
        text = row[header.names.index(name)]
        what = "path" if name == header.path else "label"
        if "\n" in text or "\r" in text:
            return f"its {what} has a line break; check for an open quote"
        if '"' in text and not _STRICT_ROW.fullmatch("".join(at.text)):
            return (
                f'its {what} has a quote inside but none around it; write "" for it, and put '
                "quotes around the field"
            )
    place = header.names.index(header.path)
    # A line inside a quoted text looks like a row that an open quote has swallowed if it has as
    # many fields as the header, and another path that ends as the row's own does.
    for fields in (line.split(",") for line in at.text[1:]):
        if len(fields) == len(row):
            path = fields[place].strip(' "')
            endings = {text.rpartition(".")[2].lower() for text in (path, row[place])}
            if path != row[place] and len(endings) == 1:
                return "one of its lines is itself a row; check for an open quote"
    return None if row[place].strip() else "it has no path"


def _csv_entry(unit: SourceUnit, header: _Header, fields: dict[str, str]) -> IndexEntry:
    extra = tuple(fields[name.lower()] for name in unit.columns)
    entry = replace(_entry(unit, fields[header.path]), extra=extra)
    text = fields[header.label]
    texts = text.split(";") if header.label == "labels" else [text]
    try:
        if header.label == "labels" and not (texts := [one for one in texts if one.strip()]):
            raise ValueError("it has no label")
        return replace(entry, labels=tuple(dict.fromkeys(map(checked_label, texts))))
    except ValueError as error:
        return with_problem(entry, str(error))


def _entry(unit: SourceUnit, name: str) -> IndexEntry:
    """An image of a list, without its labels; a relative path is relative to the list's folder."""
    path = name if name.startswith(("/", "s3://")) else f"{unit.folder}/{name}"
    return IndexEntry(path, WHOLE_FILE, WHOLE_FILE, name, ())
