"""Steps, batch, parameters and exaFLOPs that `--dry-run` prints for each shipped recipe."""

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
    files = {str(file.relative_to(RECIPES))[:-5]: file for file in sorted(RECIPES.rglob("*.yaml"))}
    commands = []
    for file in files.values():
        is_study = re.search("^study:", file.read_text(), re.MULTILINE)
        commands.append(["scaling_study" if is_study else "pretrain", str(file), "--dry-run"])
    printed = run_commands(folder, commands)
    return {name: _facts(*result) for name, result in zip(files, printed, strict=True)}


def _facts(code: int, printed: str) -> dict[str, Any]:
    if code != 0:
        return {"exit code": code}
    if cells := CELL.findall(printed):
        columns = ("images", "steps", "exaFLOPs")
        return {name: dict(zip(columns, cell, strict=True)) for name, *cell in cells}
    matches = {name: re.search(regex, printed, re.MULTILINE) for name, regex in FACTS.items()}
    return {name: match[1] for name, match in matches.items() if match}
