"""Two runs, or two studies, against each other on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vit_ray.report.compare import Comparison
from vit_ray.report.document import named_apart, render, replace_file, write_figures

ONE_SEED: Final = (
    "one seed on a side: nothing tells a difference from the spread between seeds; train more "
    "seeds of both"
)


def write_comparison(found: Comparison, page: Path) -> None:
    """Write the page, and its figures as SVG and PNG beside it.

    Args:
        page: the `.html` file; its folder is made.
    """
    page.parent.mkdir(parents=True, exist_ok=True)
    curves = named_apart({"curves": found.curves()})["curves"]
    sides = [
        {
            "letter": letter,
            "name": side.root.name,
            "told": description,
            "link": side.archive.link(side.root),
        }
        for letter, side, description in found.described()
    ]
    text = render(
        "compare.html",
        curves,
        title=f"{found.a.root.name} and {found.b.root.name}",
        opening=found.a.archive.opening,
        sides=sides,
        notes=notes(found),
        differences=found.difference_table(),
        keys=found.key_table(),
        curves=curves,
    )
    replace_file(page, text.encode())
    write_figures(page.parent, curves)


def notes(found: Comparison) -> list[str]:
    """What a reader has to know: single seeds, and cells that only one side has."""
    told = [ONE_SEED] if all(one.standard_error is None for one in found.differences) else []
    for side, cells in ((found.a, found.only_a), (found.b, found.only_b)):
        if cells:
            told.append(f"only in {side.root.name}, not compared: {'; '.join(cells)}")
    return told
