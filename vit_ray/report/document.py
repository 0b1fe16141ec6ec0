"""A page as one file that stands alone: its style, its scripts, its figures and its rules.

The rules (a Content-Security-Policy) let the browser run the two scripts of the page by their
hashes, and nothing else: it asks nothing of the network, and no text becomes code.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vit_ray.report import charts
from vit_ray.report.charts import Chart
from vit_ray.report.tables import Column, Table
from vit_ray.storage import locate

# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)
FIGURES_LIST: Final = "figures.csv"
"""Lies with the figures: the name of each file and its title."""


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures and tables."""

    title: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def write_page(path: Path, title: str, sections: Sequence[Section], **parts: Any) -> None:
    """Write a page, and its figures as SVG and PNG into `figures_folder(path)`.

    Args:
        path: the `.html` file; its folder is made.
        sections: those that have anything to show are shown.
        parts: as in `render`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = with_content(sections)
    replace_file(path, render(title, shown, **parts).encode())
    write_figures(figures_folder(path), [chart for one in shown for chart in one.charts])


def figures_folder(page: Path) -> Path:
    """Where the figures of a page lie as files."""
    return page.with_name(f"{page.stem}-figures")


def with_content(sections: Sequence[Section]) -> list[Section]:
    """Sections that show anything, with charts of names that no other has.

    Titles of charts may differ in signs alone, which names have not.
    """
    taken: set[str] = set()
    found = []
    for section in sections:
        charts = []
        for chart in section.charts:
            if chart.rows:
                numbered = (replace(chart, number=number) for number in itertools.count(1))
                charts.append(next(one for one in numbered if one.name not in taken))
                taken.add(charts[-1].name)
        tables = [table for table in section.tables if table.rows]
        if section.texts or charts or tables:
            found.append(replace(section, charts=charts, tables=tables))
    return found


def render(
    title: str,
    sections: Sequence[Section],
    *,
    origin: str = "Made from MLflow",
    opening: str = "",
    notices: Mapping[str, Sequence[str]] | None = None,
    tiles: Mapping[str, str] | None = None,
    refresh_s: float | None = None,
) -> str:
    """A page as HTML.

    Args:
        sections: as `with_content` gives them.
        origin: what it is made of.
        opening: where a reader finds more.
        notices: lists of sentences by the words that lead them.
        tiles: single values by name.
        refresh_s: an open page reloads itself so often.
    """
    style = _TEMPLATES.get_template("style.css").render(light=charts.LIGHT, dark=charts.DARK)
    scripts = [charts.scripts(), _source("page.js")]
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        sections=sections,
        origin=origin,
        opening=opening,
        notices={lead: lines for lead, lines in (notices or {}).items() if lines},
        tiles=tiles or {},
        refresh_s=refresh_s,
        still=lambda chart: Markup(charts.still(chart)),
        style=Markup(style),
        # Code of our own and of libraries, without any text of a run.
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; "
        "img-src data:; form-action 'none'; base-uri 'none'",
        licences=_source("licences.txt"),
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def write_figures(folder: Path, drawn: Sequence[Chart]) -> None:
    """Each chart as SVG and PNG, by its name, and a list of them.

    Those that an earlier list has and this one has not are deleted.
    """
    listed = folder / FIGURES_LIST
    if not drawn and not listed.exists():
        return
    folder.mkdir(exist_ok=True)
    old = []
    if listed.exists():
        with listed.open(newline="") as file:
            old = [row["name"] for row in csv.DictReader(file)]

    def write(chart: Chart) -> None:
        drawing = charts.svg(chart)
        replace_file(folder / f"{chart.name}.svg", drawing.encode())
        replace_file(folder / f"{chart.name}.png", charts.png(drawing))

    with ThreadPoolExecutor(2) as drawing:  # pixels of one chart while the next is drawn
        list(drawing.map(write, drawn))
    rows = [[chart.name, chart.title] for chart in drawn]
    replace_file(listed, Table("", [Column("name"), Column("title")], rows).csv().encode())
    for name in {*old} - {chart.name for chart in drawn}:
        if re.fullmatch(r"[a-z0-9_]+", name):  # else it is none of ours
            for ending in ("svg", "png"):
                (folder / f"{name}.{ending}").unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """In one step: a reader or another writer meets the old file or the new one, and no part."""
    locate(str(path)).write(content)
