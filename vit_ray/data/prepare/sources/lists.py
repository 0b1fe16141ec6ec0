"""CSV and JSONL lists of paths and labels, cut into parts of whole rows that tasks index."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, Any, Final

from vit_ray.data.prepare.sources.columns import extra_of
from vit_ray.data.prepare.sources.entries import (
    WHOLE_FILE,
    IndexEntry,
    SourceUnit,
    rejected,
    with_problem,
)
from vit_ray.data.prepare.sources.label_values import (
    LABEL_FIELDS,
    MOST_JSON_BYTES,
    Labels,
    checked_label,
    json_object,
    labels_of_record,
    labels_of_text,
)
from vit_ray.storage import Location, locate

PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")
PART_BYTES: Final = 1 << 24
"""Of a list that one task indexes: some 200,000 rows, seconds."""
_BUFFER: Final = 1 << 20
_STRICT_FIELD: Final = r'(?:"(?:[^"]|"")*+"|[^",]*+)'
_STRICT_ROW: Final = re.compile(f"{_STRICT_FIELD}(?:,{_STRICT_FIELD})*+\r?\n?")
"""As RFC 4180 has it: quotes stand around a whole field, and are doubled inside one."""


def cut_list(unit: SourceUnit) -> list[SourceUnit]:
    """The unit as parts of about `PART_BYTES`, each of whole rows.

    Raises:
        ValueError: it is UTF-16.
    """
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as opened:
        size = opened.size()
        file = io.BufferedReader(opened, _BUFFER)
        _check_encoding(file, unit)
        starts = [(0, 1)] if size <= PART_BYTES else list(_starts(file, unit))
    stops = [start for start, _ in starts[1:]] + [size]
    return [
        replace(unit, start=start, stop=stop, first_line=line)
        for (start, line), stop in zip(starts, stops, strict=True)
    ]


def _check_encoding(file: IO[bytes], unit: SourceUnit) -> None:
    begin = file.read(2)
    file.seek(0)
    if begin in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{unit.path!r} is UTF-16; save it as UTF-8.")


def _starts(file: IO[bytes], unit: SourceUnit) -> Iterator[tuple[int, int]]:
    """Offset and line of the first row of each part: a row may span lines where it is quoted."""
    lines = _Lines(file, unit)
    rows: Iterable[Any] = _CsvRows(lines) if unit.format == "csv" else lines
    last = 0
    yield 0, 1
    for _ in rows:
        if lines.position - last >= PART_BYTES and not lines.is_at_end:
            last = lines.position
            yield last, lines.number + 1


class _Lines:
    """The lines of a unit, one that is too long cut short; knows where it stands."""

    def __init__(self, file: IO[bytes], unit: SourceUnit) -> None:
        self._file, self._stop = file, unit.stop
        self.position = unit.start
        self.number = unit.first_line - 1
        file.seek(unit.start)

    @property
    def is_at_end(self) -> bool:
        """Whether no line follows."""
        return not self._file.peek(1)  # type: ignore[attr-defined]  # a BufferedReader

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
    """The rows of a CSV file, or why there is none; after an error it continues on the next line.

    Attributes:
        text: of the current row, as it stands in the file.
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
            # What is not UTF-8 is kept as surrogates, so that a row is rejected and not the file.
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
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as opened:
        lines = _Lines(io.BufferedReader(opened, _BUFFER), unit)
        for line in lines:
            content = line.removeprefix(b"\xef\xbb\xbf") if lines.number == 1 else line
            if content.strip():
                yield _json_row(unit, content, lines.number)


def _json_row(unit: SourceUnit, line: bytes, number: int) -> IndexEntry:
    key = f"{unit.path}#{number}"
    if len(line) >= MOST_JSON_BYTES:
        return rejected(unit.path, key, f"line {number} has {MOST_JSON_BYTES:,} bytes or more")
    try:
        fields = json_object(line)
    except ValueError as error:
        return rejected(unit.path, key, f"line {number}: {error}")
    name = next((fields[field] for field in PATH_FIELDS if fields.get(field)), None)
    if not isinstance(name, str):
        found = sorted(fields)[:20]
        return rejected(
            unit.path,
            key,
            f"line {number} has no path in any of {list(PATH_FIELDS)}; it has {found}",
        )
    try:
        return _entry(unit, name, labels_of_record(fields), extra_of(fields, unit.columns))
    except ValueError as error:
        return with_problem(_entry(unit, name, ((), "text")), str(error))


def index_csv(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Rows of a CSV file with a header: `path` and `label`, or `labels` with `;` between them.

    Raises:
        ValueError: the header lacks a path or a label, or a quote is never closed.
    """
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as opened:
        file = io.BufferedReader(opened, _BUFFER)
        names = _names(file, unit)
        header = _header(names, unit)
        rows = _CsvRows(_Lines(file, unit))
        for place, row in enumerate(rows):
            if rows.is_open:
                raise ValueError(
                    f"{unit.path!r}: a quote in line {rows.lines.start} is never closed, so the "
                    f"{len(rows.lines)} lines from there to the end are one row; close it, or "
                    'write "" for a quote inside quotes'
                )
            is_header = place == 0 and unit.start == 0
            if row and not is_header:
                yield from _csv_row(unit, header, row, rows, names)


def _names(file: IO[bytes], unit: SourceUnit) -> list[str]:
    """Names of the columns, in small letters."""
    lines = _Lines(file, replace(unit, start=0, stop=None))
    texts = (line.decode("utf-8-sig", "replace") for line in lines)
    try:
        return [name.strip().lower() for name in next(csv.reader(texts), [])]
    except csv.Error as error:
        raise ValueError(f"{unit.path!r}: its header cannot be read ({error})") from error


def _header(names: list[str], unit: SourceUnit) -> list[str]:
    """Names of the columns, the path's as `path` and the labels' as `label` or `labels`."""
    path = next((name for name in PATH_FIELDS if name in names), None)
    label = next((name for name in LABEL_FIELDS if name in names), None)
    if path is None or label is None:
        what, expected = ("path", PATH_FIELDS) if path is None else ("label", LABEL_FIELDS)
        raise ValueError(
            f"{unit.path!r}: no column of {list(expected)} holds the image's {what}; "
            f"found {names[:20]}."
        )
    if missing := [name for name in unit.columns if name.lower() not in names]:
        raise ValueError(
            f"{unit.path!r} has no column {missing[0]!r} of convert.columns; it has {names[:20]}."
        )
    used = (path, label, *map(str.lower, unit.columns))
    if repeated := [name for name in used if names.count(name) > 1]:
        raise ValueError(f"{unit.path!r} has two columns {repeated[0]!r}; name one otherwise.")
    renamed: dict[str, str] = {path: "path", label: "labels" if label == "labels" else "label"}
    return [renamed.get(name, "") for name in names]


def _csv_row(
    unit: SourceUnit, header: list[str], row: list[str] | csv.Error, at: _CsvRows, names: list[str]
) -> Iterator[IndexEntry]:
    """The entry of a row, or a rejected one for each of the lines that were taken for it."""
    problem = _csv_problem(header, row, at)
    if problem is None and isinstance(row, list):
        fields = dict(zip(names, row, strict=True))
        extra = tuple(fields[name.lower()] for name in unit.columns)
        yield replace(_csv_entry(unit, row[header.index("path")], header, row), extra=extra)
        return
    for line in at.lines:
        yield rejected(unit.path, f"{unit.path}#{line}", f"line {line}: {problem}")


def _csv_problem(header: list[str], row: list[str] | csv.Error, at: _CsvRows) -> str | None:
    if isinstance(row, csv.Error):
        return f"{row}; is a quote never closed?"
    if len(row) != len(header):
        return f"it has {len(row)} fields, the header {len(header)}"
    path = row[header.index("path")]
    for name in ("path", "label", "labels"):
        text = row[header.index(name)] if name in header else ""
        if "\n" in text or "\r" in text:
            return f"its {name} has a line break; is a quote never closed?"
        if '"' in text and not _STRICT_ROW.fullmatch("".join(at.text)):
            return f'its {name} has a quote in it and none around it; write "" for it, and quotes'
    if any(_is_row_like(line, header, path) for line in at.text[1:]):
        return "one of its lines is a row itself; is a quote never closed?"
    return None if path.strip() else "it has no path"


def _is_row_like(line: str, header: list[str], path: str) -> bool:
    """Whether a line inside a quoted text seems to be a row that an open quote has taken in.

    It has as many fields as the header, and another path that ends as the row's own does.
    """
    fields = line.split(",")
    name = fields[header.index("path")].strip(' "') if len(fields) == len(header) else path
    return name != path and name.rpartition(".")[2].lower() == path.rpartition(".")[2].lower()


def _csv_entry(unit: SourceUnit, name: str, header: list[str], row: list[str]) -> IndexEntry:
    try:
        return _entry(unit, name, _csv_labels(header, row))
    except ValueError as error:
        return with_problem(_entry(unit, name, ((), "text")), str(error))


def _csv_labels(header: list[str], row: list[str]) -> Labels:
    if "labels" not in header:
        return labels_of_text(row[header.index("label")])
    texts = [text for text in row[header.index("labels")].split(";") if text.strip()]
    if not texts:
        raise ValueError("it has no label")
    return tuple(dict.fromkeys(map(checked_label, texts))), "text"


def _entry(
    unit: SourceUnit, name: str, labels: Labels, extra: tuple[str | None, ...] = ()
) -> IndexEntry:
    """A row of a list; a relative path is relative to the list's folder."""
    path = name if name.startswith(("/", "s3://")) else f"{unit.folder}/{name}"
    texts, kind = labels
    return IndexEntry(path, WHOLE_FILE, WHOLE_FILE, name, texts, None, kind, extra)
