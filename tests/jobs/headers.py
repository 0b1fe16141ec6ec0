"""Shipped recipes, what their headers say, and the paper's Table 6."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.conftest import ROOT

RECIPES = sorted((ROOT / "jobs" / "recipes").rglob("*.yaml"))
PAPER = ROOT / "jobs" / "recipes" / "paper"
# Table 6: exaFLOPs. The 859 of R50x1+ViT-L/16 is not half of its own 14-epoch row; 834 is.
TABLE_6 = {
    "vit_b32_jft": 55, "vit_b16_jft": 224, "vit_l32_jft": 196, "vit_l16_jft": 783,
    "vit_l16_jft_14ep": 1567, "vit_h14_jft": 4262, "r50x1_jft": 50, "r50x2_jft": 199,
    "r101x1_jft": 96, "r152x1_jft": 141, "r152x2_jft": 563, "r152x2_jft_14ep": 1126,
    "r200x3_jft_14ep": 3306, "r50x1_vit_b32_jft": 106, "r50x1_vit_b16_jft": 274,
    "r50x1_vit_l32_jft": 246, "r50x1_vit_l16_jft": 834, "r50x1_vit_l16_jft_14ep": 1668,
}  # fmt: skip


def header(path: Path) -> str:
    """The comment that a recipe begins with, its lines joined."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def commands(path: Path) -> list[list[str]]:
    """Command, recipe and overrides of every command line in the header."""
    found = re.findall(
        r"(?:python jobs/|vit-ray )(\w+)(?:\.py)? (\S+\.yaml)((?: [\w.]+=\S+)*)",
        header(path).replace("\\ ", ""),
    )
    return [[name, recipe, *shlex.split(overrides)] for name, recipe, overrides in found]


def stated_cost(path: Path) -> tuple[float, float]:
    """exaFLOPs and H200-hours of the header."""
    match = re.search(r"Cost: ([\d.,]+) exaFLOPs, ([\d.,]+) H200-hours at 40 % MFU", header(path))
    assert match, path
    exaflops, hours = (float(number.replace(",", "")) for number in match.groups())
    return exaflops, hours
