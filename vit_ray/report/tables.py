"""A table once, for the page and for a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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

    def texts(self) -> list[list[tuple[Column, str]]]:
        """For each row, each column with what the page shows in it."""
        return [
            [
                (column, _text(column, value))
                for column, value in zip(self.columns, row, strict=True)
            ]
            for row in self.rows
        ]

    def csv(self) -> str:
        """Comma-separated raw values with a heading line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows([[_cell(value) for value in row] for row in self.rows])
        return text.getvalue()


def _text(column: Column, value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, str) or column.form is None:
        return str(value)
    return column.form(value)


def _cell(value: Value) -> float | str:
    """A text that a spreadsheet would run as a formula gets a quote before it."""
    if value is None:
        return ""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
