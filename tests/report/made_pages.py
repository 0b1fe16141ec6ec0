"""A page with what it was made of: its text, its charts, its tables and all columns of its runs."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vit_ray.report import document
from vit_ray.report.document import with_content
from vit_ray.report.figures import chart_list
from vit_ray.report.figures.charts import Chart
from vit_ray.report.page import write_report
from vit_ray.report.tables import Table


@dataclass
class Made:
    """A page that was written."""

    page: Path
    text: str
    charts: dict[str, Chart]
    """By the names of their places."""
    tables: dict[str, list[dict[str, str]]]
    rows: list[dict[str, str]]
    """Each training, with the columns that the page leaves out because all rows share them."""


def made_page(*arguments: Any, **options: Any) -> Made:
    """As `write_report`."""
    sections: list[Any] = []
    runs: list[Table] = []
    write, cells = document.write_page, chart_list.cells

    def keep_sections(path: Path, title: str, given: Any, **parts: Any) -> None:
        sections.extend(with_content(given))
        write(path, title, given, **parts)

    def keep_runs(*given: Any) -> Table:
        runs.append(cells(*given))
        return runs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "write_page", keep_sections)
        patch.setattr(chart_list, "cells", keep_runs)
        page = write_report(*arguments, **options).page
    return Made(
        page,
        page.read_text(),
        {chart.name: chart for one in sections for chart in one.charts},
        {table.name: rows_of(table) for one in sections for table in one.tables},
        rows_of(runs[-1]),
    )


def rows_of(table: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table.csv())))
