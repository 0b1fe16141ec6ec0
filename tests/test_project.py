"""What is declared fits together: pins within their ranges, the wheel, and the paths of CI."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [
    Requirement(text)
    for part in (PROJECT["dependencies"], PROJECT["optional-dependencies"]["dev"])
    for text in part
]


def test_every_requirement_is_pinned_within_its_range():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line) for line in lines]
    pins = {canonicalize_name(m[1]): m[2] for m in found if m}
    for requirement in DECLARED:
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


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
    (entries,) = (tmp_path / "installed").glob("*.dist-info/entry_points.txt")
    assert "vit-ray = vit_ray.commands.cli:main" in entries.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "vit_ray", "export", "digits_sweep", "--dry-run"],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.stdout.startswith("name: digits-sweep\n"), done.stderr


def test_each_path_that_continuous_integration_or_the_makefile_lists_exists():
    """One that has moved would no longer be tested, in silence."""
    text = (ROOT / ".ci/run").read_text()
    lists = re.findall(r"^decides_\w+=\([^)]*\)", text, re.MULTILINE)
    shown = "; ".join(f"{one}; echo ${{{one.split('=')[0]}[@]}}" for one in lists)
    rule = "print-lists: ; @echo $(NUMERIC) $(PUBLISHED)"
    for command, least in (
        (["bash", "-c", f"set -f; {shown}"], 30),
        (["make", "--silent", f"--eval={rule}", "print-lists"], 10),
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = done.stdout.split()
        assert len(paths) > least
        assert [path for path in paths if not (ROOT / path).exists()] == []
