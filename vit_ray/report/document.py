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
from dataclasses import replace
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
"""Beside figures: the name of each file and its title."""


def render(
    template: str, drawn: Sequence[Chart], *, refresh_s: float | None = None, **parts: Any
) -> str:
    """A page of one of the templates.

    Args:
        template: one that extends `base.html`.
        drawn: its charts, of names of their own.
        refresh_s: an open page reloads itself so often.
        parts: what the template shows; `title` is one of them.
    """
    style = _TEMPLATES.get_template("style.css").render(light=charts.LIGHT, dark=charts.DARK)
    scripts = [charts.scripts(), _source("page.js")]
    return _TEMPLATES.get_template(template).render(
        **parts,
        stills={chart.name: Markup(charts.still(chart)) for chart in drawn},
        style=Markup(style),
        # Code of our own and of libraries, without any text of a run.
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        licences=_source("licences.txt"),
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        refresh_s=refresh_s,
    )


def _policy(scripts: Sequence[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:; "
        "form-action 'none'; base-uri 'none'"
    )


def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def named_apart(parts: Mapping[str, Sequence[Chart]]) -> dict[str, list[Chart]]:
    """The charts of each part, of names that no other has: titles may differ in signs alone."""
    taken: set[str] = set()

    def own(chart: Chart) -> Chart:
        numbered = (replace(chart, number=number) for number in itertools.count(1))
        chosen = next(one for one in numbered if one.name not in taken)
        taken.add(chosen.name)
        return chosen

    return {part: [own(chart) for chart in drawn] for part, drawn in parts.items()}


def write_figures(folder: Path, drawn: Sequence[Chart]) -> None:
    """Each chart as SVG and PNG, by its name, and a list of them.

    Those that an earlier list has and this one has not are deleted.
    """
    listed = folder / FIGURES_LIST
    if not drawn and not listed.exists():
        return
    folder.mkdir(exist_ok=True)
    old = _listed(listed)
    with ThreadPoolExecutor(2) as drawing:  # pixels of the one beside the lines of the next
        list(drawing.map(lambda chart: _write_figure(folder, chart), drawn))
    rows = [[chart.name, chart.title] for chart in drawn]
    replace_file(listed, Table("", [Column("name"), Column("title")], rows).csv().encode())
    for name in old - {chart.name for chart in drawn}:
        for ending in ("svg", "png"):
            (folder / f"{name}.{ending}").unlink(missing_ok=True)


def _write_figure(folder: Path, chart: Chart) -> None:
    drawing = charts.svg(chart)
    replace_file(folder / f"{chart.name}.svg", drawing.encode())
    replace_file(folder / f"{chart.name}.png", charts.png(drawing))


def _listed(path: Path) -> set[str]:
    """Names of an earlier list, without what could be none of ours."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        names = {row[0] for row in csv.reader(file) if row}
    return {name for name in names if re.fullmatch(r"[a-z0-9_]+", name)} - {"name"}


def replace_file(path: Path, content: bytes) -> None:
    """In one step: who opens the file meanwhile, or writes it too, gets the one or the other."""
    locate(str(path)).write(content)
