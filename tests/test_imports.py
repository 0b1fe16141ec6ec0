"""The house's import directions, read from the code itself."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "vit_ray"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")

# A package may import itself, what stands in its row, and what everyone may.
EVERYONE = {
    "config", "storage", "lock", "outcomes", "addresses", "own_parts", "metric_names",
    "paper", "internals", "ray_internals", "mlflow_internals",
}  # fmt: skip
BELOW = {
    "worker", "training", "checkpoints", "evaluation", "data", "report", "tracking", "models",
    "measure",
}  # fmt: skip
ALLOWED = {
    "__main__": {"commands"},
    "commands": BELOW | {"experiments", "launch"},
    "experiments": BELOW | {"launch"},
    "launch": BELOW - {"report"},
    "worker": {"training", "checkpoints", "evaluation", "models", "measure", "tracking"}
    | {"deepspeed_internals"},
    "training": {"checkpoints", "evaluation", "models", "measure", "deepspeed_internals"},
    "checkpoints": {"models", "measure", "deepspeed_internals"},
    "evaluation": {"models", "measure"},
    "data": {"measure"},
    "tracking": {"measure"},
    "report": {"measure", "tracking"},
    **{package: set() for package in ("models", "measure", "deepspeed_internals", *EVERYONE)},
}
FOREIGN = {
    "config": {"ray", "torch", "mlflow"}, "models": {"ray", "mlflow"}, "data": {"torch", "mlflow"},
    "measure": {"ray", "mlflow"}, "report": {"ray", "torch"}, "tracking": {"torch"},
    "evaluation": {"ray", "mlflow"}, "checkpoints": {"ray", "mlflow"},
    "training": {"ray", "mlflow"},
}  # fmt: skip
"""What is not ours; DeepSpeed comes by its door alone."""


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names, also of what is taken out of a module of ours."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            if node.module == "vit_ray" or (node.module or "").startswith("ray."):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def test_imports_go_down_the_house():
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        allowed = ALLOWED[package] | EVERYONE | {package}
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "vit_ray" and len(parts) > 1:
                assert parts[1] in allowed, f"{path} must not import {name}"
                has_torch_alone = package in {"models", "measure"}  # as where a GPU is measured
                assert not (has_torch_alone and parts[1] == "config"), f"{path} imports {name}"
            assert parts[0] not in FOREIGN.get(package, set()), f"{path} must not import {name}"


def test_private_modules_of_ray_and_all_of_deepspeed_come_by_one_door_and_ray_by_few_modules():
    """Private attributes are found by ruff (SLF001)."""
    for path in MODULES:
        if path.name != "ray_internals.py":
            assert not [n for n in imported(path) if n.startswith("ray.") and "._" in n], path
        if path.name != "deepspeed_internals.py":
            assert not [n for n in imported(path) if n.split(".")[0] == "deepspeed"], path
        if path.parent.name == "worker" and path.stem not in ("entry", "worker", "run_link"):
            assert not [n for n in imported(path) if n.split(".")[0] == "ray"], path


def test_no_module_imports_itself_through_others():
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            name for name in imported(path) if name.startswith("vit_ray")
        }
        for path in MODULES
        if path.name != "__init__.py"
    }
    TopologicalSorter({name: below & graph.keys() for name, below in graph.items()}).prepare()
