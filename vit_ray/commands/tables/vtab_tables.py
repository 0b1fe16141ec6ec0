"""What is printed for VTAB-1k's tasks."""

from __future__ import annotations

from vit_ray.commands.tables.printed_tables import print_link, print_table
from vit_ray.experiments.vtab import VtabResult, vtab_table


def print_vtab(result: VtabResult) -> None:
    """Every task and every mean, ours and the paper's."""
    print_table(vtab_table(result.rows, result.is_papers_model))
    print_link(result.hint, result.parent_run_id)
