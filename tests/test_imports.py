"""The house's import directions, read from the code itself."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.modules import MODULES, PACKAGE, ROOT, imported

# A room may import itself, what stands in its row, and what everyone may.
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
    "api": BELOW | {"experiments", "launch"},
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
    "report": {"measure"},
    **{room: set() for room in ("models", "measure", "deepspeed_internals", *EVERYONE)},
}
FOREIGN = {
    "config": {"ray", "torch", "deepspeed", "mlflow"},
    "models": {"ray", "deepspeed", "mlflow"},
    "data": {"torch", "deepspeed", "mlflow"},
    "measure": {"ray", "deepspeed", "mlflow"},
    "report": {"ray", "torch", "deepspeed"},
    "tracking": {"torch", "deepspeed"},
    "evaluation": {"ray", "deepspeed", "mlflow"},
    "checkpoints": {"ray", "mlflow"},
    "training": {"ray", "mlflow"},
}
# Rooms inside the data room, likewise.
DATA_ROOMS: dict[str, set[str]] = {"convert": set(), "stream": set()}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_down_the_house():
    for path in MODULES:
        room = room_of(path)
        allowed = ALLOWED[room] | EVERYONE | {room}
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "vit_ray" and len(parts) > 1:
                assert parts[1] in allowed, f"{path} must not import {name}"
                has_torch_alone = room in {"models", "measure"}  # as where a GPU is measured
                assert not (has_torch_alone and parts[1] == "config"), f"{path} imports {name}"
            assert parts[0] not in FOREIGN.get(room, set()), f"{path} must not import {name}"


def test_imports_inside_the_data_room_go_down_too():
    shared = {path.stem for path in (PACKAGE / "data").glob("*.py")}
    for path in [*(PACKAGE / "data").glob("*.py"), *(PACKAGE / "data").glob("*/*.py")]:
        allowed = shared | DATA_ROOMS.get(path.parent.name, set()) | {path.parent.name}
        for name in imported(path):
            if name.startswith("vit_ray.data."):
                assert name.split(".")[2] in allowed, f"{path} must not import {name}"


def test_private_names_of_ray_come_by_one_door():
    for path in MODULES:
        private = [name for name in imported(path) if name.startswith("ray.") and "._" in name]
        assert not private or path.name == "ray_internals.py", path


def test_no_module_imports_itself_through_others():
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): {
            name for name in imported(path) if name.startswith("vit_ray")
        }
        for path in MODULES
        if path.name != "__init__.py"
    }
    TopologicalSorter({name: below & graph.keys() for name, below in graph.items()}).prepare()


def test_only_the_worker_and_its_links_know_ray_in_the_worker_room():
    """And of these only the worker knows Ray Train."""
    for path in (PACKAGE / "worker").glob("*.py"):
        names = {name for name in imported(path) if name.split(".")[0] == "ray"}
        knows = {"entry.py", "worker.py"}
        assert not names or path.name in {*knows, "run_link.py"}, path.name
        knows_ray_train = any(name.startswith("ray.train") for name in names)
        assert knows_ray_train == (path.name in knows), path.name


def test_jobs_are_thin():
    for path in (ROOT / "jobs").glob("*.py"):
        rooms = {n.split(".")[1] for n in imported(path) if n.startswith("vit_ray.")}
        assert rooms <= {"commands"}, f"{path.name} imports {rooms - {'commands'}}"
        kinds = [type(node) for node in ast.parse(path.read_text()).body]
        assert ast.FunctionDef not in kinds, f"{path.name}: logic belongs in commands"
