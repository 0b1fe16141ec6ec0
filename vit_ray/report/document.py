"""A page as one self-contained file: its style, its figures and its security policy.

The policy (a Content-Security-Policy) lets the browser run nothing: the page loads nothing from the
network, and no text becomes code.
"""

import base64
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vit_ray.report.figures import charts
from vit_ray.report.figures.charts import Chart
from vit_ray.report.tables import Table
from vit_ray.storage import locate

# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)

T = TypeVar("T", Chart, Table)


@dataclass(frozen=True)
class Gallery:
    """Small images with a text below each."""

    title: str
    strip: bytes
    """JPEG: squares of one size in a row."""
    texts: Sequence[str]
    """One text for each square."""
    wrong: Sequence[bool]
    """Which of them are crossed out."""
    note: str = ""

    @property
    def data(self) -> str:
        """Base64 for an address."""
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
    """Write a page, and its figures as files into `files_folder(path)`.

    Args:
        page: the `.html` file; its folder is created.
        sections: those with content are shown.
        parts: as in `render`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = with_content(sections)
    replace_file(path, render(title, shown, **parts).encode())
    write_files(files_folder(path), shown)


def files_folder(page: Path) -> Path:
    """Folder of a page's figures as files."""
    return page.with_name(f"{page.stem}-figures")


def with_content(sections: Sequence[Section]) -> list[Section]:
    """Sections with content, in which the names of charts and tables are unique.

    Titles may differ only in signs, which names do not have.
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
) -> str:
    """A page as HTML.

    Args:
        sections: as `with_content` gives them.
        lead: sentences with the result.
        missing: what it lacks, a sentence for each.
        origin: the source of the page.
        opening: where a reader finds more; an address at its end becomes a link.
    """
    style = _TEMPLATES.get_template("style.css").render(colours=charts.COLOURS)
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        sections=sections,
        lead=lead,
        missing=missing,
        origin=origin,
        opening=_with_address(opening),
        linked=partial(_linked, places=_places(sections)),
        drawn=lambda chart: Markup(charts.svg(chart)),
        style=Markup(style),
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; "
        "base-uri 'none'",
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _places(sections: Sequence[Section]) -> dict[str, str]:
    """Where in the page a name is, for first cells that are unique in a table with places."""
    found: dict[str, str] = {}
    for table in (table for section in sections for table in section.tables if table.has_places):
        names = [str(row[0]) for row in table.rows]
        places = {name: table.place_of(number) for number, name in enumerate(names, 1)}
        found |= {name: place for name, place in places.items() if names.count(name) == 1}
    return found


def _linked(text: str, places: Mapping[str, str]) -> Markup:
    """A text in which names in brackets are links to their places."""

    def link(name: str) -> Markup:
        place = places.get(name)
        return Markup('<a href="#{}">{}</a>').format(place, name) if place else escape(name)

    parts = re.split(r"(?<=\()([^()]+)(?=\))", text)  # what is in brackets has odd numbers
    return Markup("").join(
        Markup(", ").join(map(link, part.split(", "))) if number % 2 else part
        for number, part in enumerate(parts)
    )


def _with_address(text: str) -> Markup:
    """A text whose last word is a link if it is a web address.

    Jinja's `urlize` knows no host without a dot whose name has digits, such as `http://gpu01:5000`.
    """
    before, gap, last = text.rpartition(" ")
    if not last.startswith(("http://", "https://")):
        return escape(text)
    return Markup('{}{}<a href="{}" rel="noopener">{}</a>').format(before, gap, last, last)


def write_files(folder: Path, sections: Sequence[Section]) -> None:
    """Each chart as SVG; other files of the folder stay."""
    for chart in (chart for section in sections for chart in section.charts):
        folder.mkdir(exist_ok=True)
        replace_file(folder / f"{chart.name}.svg", charts.svg(chart).encode())


def replace_file(path: Path, content: bytes) -> None:
    """In one step: a reader or another writer sees the old file or the new one, never a part."""
    locate(str(path)).write(content)
