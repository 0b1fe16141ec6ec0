"""The wheel beside a logged model is one that pip installs, with all of the code."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vit_ray
from vit_ray.tracking import own_wheel
from vit_ray.tracking.own_wheel import write_wheel

PACKAGE = Path(vit_ray.__file__).parent


def test_pip_installs_it_and_the_installed_package_is_this_one(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheels")
    assert wheel is not None
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*pip, str(target), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in PACKAGE.rglob("*.py"):
        installed = target / "vit_ray" / path.relative_to(PACKAGE)
        assert installed.read_bytes() == path.read_bytes()
    script = (
        "import vit_ray, importlib.metadata as m; from vit_ray.config.shipped_recipes import *;"
        "print(vit_ray.__file__, m.version('vit-ray'), recipes_folder(), len(recipe_names()) > 9)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=target, capture_output=True, text=True,
        env={"PYTHONPATH": str(target)},
    )  # fmt: skip
    version = distribution("vit-ray").version
    package = target / "vit_ray"
    assert shown.stdout.split() == [
        str(package / "__init__.py"), version, str(package / "recipes"), "True",
    ], shown.stderr  # fmt: skip
    requirements = distribution("vit-ray").requires or []
    assert {Requirement(one).name for one in requirements} >= {"torch", "pyarrow", "mlflow"}
    found = (target / f"vit_ray-{version}.dist-info" / "METADATA").read_text()
    assert all(f"Requires-Dist: {one}" in found for one in requirements)


def test_it_has_nothing_that_lies_beside_the_code_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / ".env").write_text("TOKEN=secret-pw")
    (recipes / "weights.pt").write_bytes(b"secret-pw")
    (recipes / "mine.yaml").write_text(
        "name: mine\ntracking: {uri: 'https://me:secret-pw@host/x'}\n"
    )
    monkeypatch.setattr(own_wheel, "recipes_folder", lambda: recipes)
    file = write_wheel(tmp_path / "wheels")
    assert file is not None
    with zipfile.ZipFile(file) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    recipe = contents["vit_ray/recipes/mine.yaml"].decode()
    assert recipe == "name: mine\ntracking: {uri: 'https://host/x'}\n"
    assert not [name for name, content in contents.items() if b"secret-pw" in content]


def test_equal_code_is_an_equal_wheel(tmp_path: Path) -> None:
    first, second = write_wheel(tmp_path / "a"), write_wheel(tmp_path / "b")
    assert first is not None
    assert second is not None
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 2_000_000
