"""A page as one self-contained file: its style, its figures and its security policy.

The policy (a Content-Security-Policy) lets the browser run nothing: the page loads nothing from the
network, and no text becomes code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from vit_ray.report.tables import number

# Names, labels and values come from recipes and folders of any origin: all are escaped.
TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)


@dataclass(frozen=True)
class Gallery:
    """Small images with a text below each, and which of them are crossed out; the strip is a JPEG
    of squares of one size in a row.
    """

    title: str
    strip: bytes
    texts: Sequence[str]
    wrong: Sequence[bool]


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures, tables and images; titles say how to read them."""

    title: str
    texts: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    galleries: Sequence[Gallery] = ()


def html(table: pd.DataFrame) -> Markup:
    """Escaped by pandas; numbers in short, missing values as a dash."""
    table = table.rename_axis(columns=None)  # pandas would write it as one more column
    if not isinstance(table.index, pd.RangeIndex):
        names = [name or "name" for name in table.index.names]
        table = table.rename_axis(names).reset_index(allow_duplicates=True)
    texts = table.iloc[:, 1:].map(lambda value: len(str(value)) > 16).any(axis=None)
    shown = table.astype(object).where(table.notna(), "-")
    shown = shown.map(lambda value: number(value) if isinstance(value, (int, float)) else value)
    return Markup(shown.to_html(border=0, classes=["texts"] if texts else None, index=False))
