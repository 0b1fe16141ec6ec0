"""The modules of the package, and what they import."""

import ast
import functools
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "vit_ray"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names, also of what is taken out of a module of ours."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            if node.module == "vit_ray":
                names |= {f"vit_ray.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
