"""A table for both the page and a spreadsheet."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

Value = float | str | None
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def percent(value: float) -> str:
    """A share as percent with two digits, as the paper prints accuracy."""
    return f"{100 * value:.2f}"


def number(value: float) -> str:
    """Short and readable: 0.00012 -> 1.2e-4, 1234567 -> 1.23M."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e13:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.4g}"


def first_of(names: Sequence[str], most: int, between: str = ", ") -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def file_name(title: str, number: int) -> str:
    """Name of the n-th item of a page with this title."""
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")
    return name if number == 1 else f"{name}_{number}"


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
    is_bar: bool = False
    """Shares of 1, also shown as a bar behind the number."""

    @property
    def is_share(self) -> bool:
        """Whether its values are shares of 1, which readers see in percent."""
        return self.is_bar or self.form is percent


@dataclass(frozen=True)
class Cell:
    """A cell of a table as the page shows it."""

    text: str
    is_number: bool
    link: str = ""
    bar: float | None = None
    """Percent of the width of the cell."""


@dataclass(frozen=True)
class Table:
    """Rows of raw values; None means unknown, and is never shown as 0."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    links: Sequence[str] = ()
    """Link of the first cell of each row."""
    number: int = 1
    """Number among tables and charts of one page whose captions give the same name."""
    has_places: bool = False
    """Sentences at the top of a page link to its rows."""

    @property
    def name(self) -> str:
        return file_name(re.split("[:;,]", self.caption)[0], self.number)

    def used(self) -> "Table":
        """Without the columns that no row has a value for."""
        filled = [
            any(row[i] not in (None, "") for row in self.rows) for i in range(len(self.columns))
        ]
        return Table(
            self.caption,
            list(itertools.compress(self.columns, filled)),
            [list(itertools.compress(row, filled)) for row in self.rows],
            self.links if filled[:1] == [True] else (),
        )

    def without_shared(self, titles: Sequence[str]) -> tuple["Table", str]:
        """Without those of these columns that have one value in all of several rows, and a text
        with these values.
        """
        shared: dict[int, str] = {}
        for index, column in enumerate(self.columns):
            values = {row[index] for row in self.rows}
            if column.title in titles and len(self.rows) > 1 and len(values) == 1:
                shared[index] = next(self.cells())[index].text
        kept = [index not in shared for index in range(len(self.columns))]
        rows = [list(itertools.compress(row, kept)) for row in self.rows]
        columns = list(itertools.compress(self.columns, kept))
        texts = [f"{self.columns[index].title} {text}" for index, text in shared.items()]
        return replace(self, columns=columns, rows=rows), ", ".join(texts)

    def place_of(self, number: int) -> str:
        """Name of a row, by its 1-based number, for links inside a page."""
        return f"{self.name}-{number}" if self.has_places else ""

    def cells(self) -> Iterator[list[Cell]]:
        """Each row as the page shows it."""
        for row, link in itertools.zip_longest(self.rows, self.links, fillvalue=""):
            yield [
                Cell(
                    "-" if value is None
                    else column.form(value) if column.form and not isinstance(value, str)
                    else str(value),
                    column.form is not None,
                    "" if i else str(link),
                    100 * value if column.is_bar and isinstance(value, float) else None,
                )
                for i, (column, value) in enumerate(zip(self.columns, row, strict=True))
            ]  # fmt: skip

    def csv(self) -> str:
        """Comma-separated values with a heading line: numbers unrounded, shares in percent as on
        the page; a mean with its deviation is a text, as on the page.

        A text that a spreadsheet would run as a formula gets a quote before it.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        heads = [column.title for column in self.columns]
        writer.writerow([f"'{head}" if _is_formula(head) else head for head in heads])
        for row in self.rows:
            writer.writerow([
                f"'{value}" if _is_formula(value)
                else value if isinstance(value, str | None) or not column.is_share
                # Of 0.29, not 28.999999999999996.
                else float(f"{100 * value:.14g}")
                for column, value in zip(self.columns, row, strict=True)
            ])  # fmt: skip
        return text.getvalue()


def _is_formula(value: Value) -> bool:
    """Whether a spreadsheet would run a cell; a number with a sign is a number."""
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False
