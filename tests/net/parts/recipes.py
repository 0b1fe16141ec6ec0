"""Steps, batch, parameters and exaFLOPs that `--dry-run` prints for each shipped recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.net.commands import run_commands
from tests.net.trees import ROOT

RECIPES = ROOT / "jobs" / "recipes"
NUMBER = r"([\d,.]+(?:e[+-]?\d+)?)"
FACTS = {
    "images": rf"^images +{NUMBER} of",
    "classes": rf" of {NUMBER} classes",
    "steps": rf"\b{NUMBER} of [\d,]+ images",
    "batch": rf"\b[\d,]+ of {NUMBER} images",
    "epochs": rf"{NUMBER} epochs",
    "parameters, M": rf"{NUMBER} M parameters",
    "multiply-adds, G": rf"{NUMBER} GMAC",
    "exaFLOPs": rf"{NUMBER} exaFLOPs",
}
CELL = re.compile(rf"^(\S*-\S+) +{NUMBER} +{NUMBER} +{NUMBER} ", re.MULTILINE)


def record(folder: Path) -> dict[str, Any]:
    """By recipe, and by cell of a study."""
    names = sorted(
        str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.yaml")
    )
    kinds = {name: _command(RECIPES / f"{name}.yaml") for name in names}
    commands = [[kinds[name], str(RECIPES / f"{name}.yaml"), "--dry-run"] for name in names]
    printed = run_commands(folder, commands)
    return {name: _facts(*result) for name, result in zip(names, printed, strict=True)}


def _command(file: Path) -> str:
    return "scaling_study" if re.search("^study:", file.read_text(), re.MULTILINE) else "pretrain"


def _facts(code: int, printed: str) -> dict[str, Any]:
    if code != 0:
        return {"exit code": code}
    if cells := CELL.findall(printed):
        return {
            name: {"images": images, "steps": steps, "exaFLOPs": exaflops}
            for name, images, steps, exaflops in cells
        }
    matches = {name: re.search(regex, printed, re.MULTILINE) for name, regex in FACTS.items()}
    return {name: match[1] for name, match in matches.items() if match}
