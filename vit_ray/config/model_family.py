"""The paper's families of models, by the names of the catalog."""

from __future__ import annotations

import re
from typing import Final

_FAMILIES: Final = {"Axial": "Axial", "Hybrid": r".*\+", "ViT": "ViT", "ResNet": r"R\d|ResNet"}


def model_family(name: str) -> str:
    """`ViT`, `Hybrid`, `ResNet`, `Axial` or `Other`."""
    return next((family for family, test in _FAMILIES.items() if re.match(test, name)), "Other")
