"""What pyproject.toml declares and what constraints.txt pins must fit together."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [
    Requirement(text)
    for part in (PROJECT["dependencies"], PROJECT["optional-dependencies"]["dev"])
    for text in part
]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines]
    return {canonicalize_name(m[1]): m[2] for m in found if m}


@pytest.mark.parametrize("requirement", DECLARED, ids=[r.name for r in DECLARED])
def test_every_requirement_is_pinned_within_its_range(requirement):
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


def test_the_wheel_has_recipes_and_types_and_runs_by_itself(tmp_path):
    build = f"import hatchling.build; hatchling.build.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("vit_ray-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "vit_ray"
    assert (package / "py.typed").is_file()
    recipes = {p.relative_to(ROOT / "jobs") for p in (ROOT / "jobs/recipes").rglob("*.yaml")}
    assert recipes
    assert {p.relative_to(package) for p in (package / "recipes").rglob("*.yaml")} == recipes
    (metadata,) = (tmp_path / "installed").glob("*.dist-info/METADATA")
    assert "Classifier: Typing :: Typed" in metadata.read_text()
    (entries,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "vit-ray = vit_ray.commands.cli:main" in entries.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "vit_ray", "export", "digits_sweep", "--dry-run"],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.startswith("name: digits-sweep\n"), done.stderr
