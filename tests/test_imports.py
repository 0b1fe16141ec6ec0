"""The house's import directions, read from the code itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vit_ray"

# A room may import itself, what stands in its row, and what everyone may.
EVERYONE = {"config", "storage", "retry"}
ALLOWED = {
    "launch": {"train", "evaluate", "data", "report", "models", "measure"},
    "train": {"evaluate", "models", "measure"},
    "evaluate": {"models", "measure"},
    "data": {"measure"},
    "report": {"measure"},
    "models": set(),
    "measure": set(),
    "config": set(),
    "storage": set(),
    "retry": set(),
}
FOREIGN = {
    "models": {"ray", "deepspeed", "mlflow"},
    "data": {"torch", "deepspeed", "mlflow"},
    "measure": {"ray", "deepspeed", "mlflow"},
    "report": {"ray", "torch", "deepspeed"},
    "evaluate": {"ray", "deepspeed", "mlflow"},
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""
            if node.module == "vit_ray":
                yield from (f"vit_ray.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_the_house(path: Path) -> None:
    room = room_of(path)
    allowed = ALLOWED[room] | EVERYONE | {room}
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "vit_ray" and len(parts) > 1:
            assert parts[1] in allowed, f"{room} must not import {name}"
        assert parts[0] not in FOREIGN.get(room, set()), f"{room} must not import {name}"


def test_only_the_worker_knows_ray_in_the_train_room() -> None:
    for path in (PACKAGE / "train").glob("*.py"):
        knows_ray = any(name.split(".")[0] == "ray" for name in imported(path))
        assert knows_ray == (path.name == "worker.py"), path.name


def test_nothing_imports_torchvision_or_timm() -> None:
    for path in [*MODULES, *(ROOT / "jobs").glob("*.py")]:
        assert not {"torchvision", "timm"} & {name.split(".")[0] for name in imported(path)}, path


def test_jobs_are_thin() -> None:
    for path in (ROOT / "jobs").glob("*.py"):
        rooms = {n.split(".")[1] for n in imported(path) if n.startswith("vit_ray.")}
        assert rooms <= {"launch"}, f"{path.name} imports {rooms - {'launch'}}"
        kinds = [type(node) for node in ast.parse(path.read_text()).body]
        assert ast.FunctionDef not in kinds, f"{path.name}: logic belongs in launch"
