"""A page as one file that stands alone: its style, its scripts, its figures and its rules.

The rules (a Content-Security-Policy) let the browser run the two scripts of the page by their
hashes, and nothing else: it asks nothing of the network, and no text becomes code. The greater one
is packed, which halves the page; the smaller one unpacks it.
"""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import itertools
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vit_ray.report.figures import charts
from vit_ray.report.figures.charts import Chart
from vit_ray.report.tables import Column, Table
from vit_ray.storage import locate

# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
FILES_LIST: Final = "list.csv"
"""Lies with figures and tables: the name of each and its title."""

T = TypeVar("T", Chart, Table)


@dataclass(frozen=True)
class Gallery:
    """Small images with a text below each."""

    title: str
    strip: bytes
    """JPEG: squares of one size in a row."""
    texts: Sequence[str]
    """One for each square."""
    wrong: Sequence[bool]
    """Which of them are crossed."""
    note: str = ""

    @property
    def data(self) -> str:
        """For an address."""
        return base64.b64encode(self.strip).decode()


@dataclass(frozen=True)
class Section:
    """A heading with sentences, images, figures and tables."""

    title: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    galleries: Sequence[Gallery] = ()


def write_page(path: Path, title: str, sections: Sequence[Section], **parts: Any) -> None:
    """Write a page, and its figures and tables as files into `files_folder(path)`.

    Args:
        path: the `.html` file; its folder is made.
        sections: those that have anything to show are shown.
        parts: as in `render`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shown, folder = with_content(sections), files_folder(path)
    replace_file(path, render(title, shown, files=folder.name, **parts).encode())
    write_files(folder, shown)


def files_folder(page: Path) -> Path:
    """Where the figures and tables of a page lie as files."""
    return page.with_name(f"{page.stem}-figures")


def with_content(sections: Sequence[Section]) -> list[Section]:
    """Sections that show anything, with charts and tables of names that no other has.

    Titles may differ in signs alone, which names have not.
    """
    taken: set[str] = set()

    def own(item: T) -> T:
        numbered = (replace(item, number=number) for number in itertools.count(1))
        chosen = next(one for one in numbered if one.name not in taken)
        taken.add(chosen.name)
        return chosen

    found = []
    for section in sections:
        charts = [own(chart) for chart in section.charts if chart.rows]
        tables = [own(table) for table in section.tables if table.rows]
        if section.texts or charts or tables or section.galleries:
            found.append(replace(section, charts=charts, tables=tables))
    return found


def render(
    title: str,
    sections: Sequence[Section],
    *,
    lead: Sequence[str] = (),
    missing: Sequence[str] = (),
    origin: str = "Made from MLflow",
    opening: str = "",
    files: str = "",
    refresh_s: float | None = None,
) -> str:
    """A page as HTML.

    Args:
        sections: as `with_content` gives them.
        lead: sentences that say the result.
        missing: what it lacks, a sentence for each.
        origin: what it is made of.
        opening: where a reader finds more.
        files: folder of its figures and tables as files, relative to the page.
        refresh_s: an open page reloads itself so often.
    """
    style = _TEMPLATES.get_template("style.css").render(light=charts.LIGHT, dark=charts.DARK)
    # Code of our own and of libraries, without any text of a run.
    has_charts = any(section.charts for section in sections)
    drawing, own = charts.scripts().encode() if has_charts else b"", _source("page.js")
    digests = [base64.b64encode(hashlib.sha256(one).digest()) for one in (drawing, own.encode())]
    allowed = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        sections=sections,
        lead=lead,
        missing=missing,
        origin=origin,
        opening=opening,
        files=files,
        refresh_s=refresh_s,
        still=lambda chart: Markup(charts.still(chart)),
        style=Markup(style),
        packed=base64.b64encode(gzip.compress(drawing, mtime=0)).decode() if drawing else "",
        script=Markup(own),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; "
        "img-src data:; form-action 'none'; base-uri 'none'",
        licences=_source("licences.txt"),
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def write_files(folder: Path, sections: Sequence[Section]) -> None:
    """Each chart as SVG, PNG and CSV, each table as CSV and LaTeX, and a list of them.

    Those that an earlier list has and this one has not are deleted.
    """
    drawn = [chart for section in sections for chart in section.charts]
    tables = [table for section in sections for table in section.tables]
    listed = folder / FILES_LIST
    if not drawn and not tables and not listed.exists():
        return
    folder.mkdir(exist_ok=True)
    old = set()
    if listed.exists():
        with listed.open(newline="") as file:
            old = {row["name"] for row in csv.DictReader(file)}

    def write(chart: Chart) -> None:
        drawing = charts.svg(chart)
        replace_file(folder / f"{chart.name}.svg", drawing.encode())
        replace_file(folder / f"{chart.name}.png", charts.png(drawing))
        replace_file(folder / f"{chart.name}.csv", chart.values.csv().encode())

    with ThreadPoolExecutor(2) as drawing:  # pixels of one chart while the next is drawn
        list(drawing.map(write, drawn))
    for table in tables:
        replace_file(folder / f"{table.name}.csv", table.csv().encode())
        replace_file(folder / f"{table.name}.tex", table.latex().encode())
    rows = [[one.name, one.title] for one in drawn] + [[one.name, one.caption] for one in tables]
    replace_file(listed, Table("", [Column("name"), Column("title")], rows).csv().encode())
    for name in old - {str(row[0]) for row in rows}:
        if re.fullmatch(r"[a-z0-9_]+", name):  # else it is none of ours
            for ending in ("svg", "png", "csv", "tex"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """In one step: a reader or another writer meets the old file or the new one, and no part."""
    locate(str(path)).write(content)
