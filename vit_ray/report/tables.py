"""A table once, for the page and for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Value = float | str | None


def percent(value: float) -> str:
    """A share as percent with two digits, as the paper prints accuracy."""
    return f"{100 * value:.2f}"


def duration(seconds: float) -> str:
    """Seconds as `12 s`, `3:05 min` or `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


@dataclass(frozen=True)
class Column:
    """A heading, and how its values are written on the page."""

    title: str
    form: Callable[[float], str] | None = None
    """For numbers; None for text."""


@dataclass(frozen=True)
class Table:
    """Rows of raw values; None is what is not known, and is never shown as 0."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]

    def used(self) -> Table:
        """Without the columns that no row has a value for."""
        kept = [
            i
            for i in range(len(self.columns))
            if any(row[i] not in (None, "") for row in self.rows)
        ]
        return Table(
            self.caption,
            [self.columns[i] for i in kept],
            [[row[i] for i in kept] for row in self.rows],
        )

    def html(self) -> str:
        """A `<table>` with a caption and headings that a screen reader can follow."""
        head = "".join(
            f'<th scope="col"{_number_class(column)}>{escape(column.title)}</th>'
            for column in self.columns
        )
        body = "".join(f"<tr>{self._row(row)}</tr>" for row in self.rows)
        return (
            f'<div class="scroll"><table><caption>{escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def csv(self) -> str:
        """Comma-separated raw values with a heading line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows([["" if value is None else value for value in row] for row in self.rows])
        return text.getvalue()

    def _row(self, row: Sequence[Value]) -> str:
        cells = []
        for i, (column, value) in enumerate(zip(self.columns, row, strict=True)):
            text = escape(_text(column, value))
            if i == 0:
                cells.append(f'<th scope="row"{_number_class(column)}>{text}</th>')
            else:
                cells.append(f"<td{_number_class(column)}>{text}</td>")
        return "".join(cells)


def _text(column: Column, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) or column.form is None:
        return str(value)
    return column.form(value)


def _number_class(column: Column) -> str:
    return ' class="number"' if column.form else ""
