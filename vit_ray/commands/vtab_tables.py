"""What is printed of VTAB-1k's tasks."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vit_ray.experiments.vtab import VtabResult, vtab_table


def print_vtab(result: VtabResult) -> None:
    """Every task and every mean, ours and the paper's."""
    shown = vtab_table(result.rows)
    table = Table(title=shown.caption)
    for column in shown.columns:
        table.add_column(column.title, justify="right" if column.form else "left")
    for row in shown.texts():
        table.add_row(*(text for _, text in row))
    Console().print(table)
    print(f"MLflow page: {result.hint}")
