"""The Python interface: its names, what importing it costs, and the example of its page."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import Digits

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python_api.md"


def test_every_name_is_the_rooms_own() -> None:
    for name in vit_ray.__all__:
        room = importlib.import_module(f"vit_ray.{vit_ray._ROOMS[name]}")
        assert getattr(vit_ray, name) is getattr(room, name)
    assert set(vit_ray.__all__) == set(vit_ray._ROOMS)


def test_what_is_offered_is_in_the_api_with_a_docstring_and_on_the_reference_page() -> None:
    api = importlib.import_module("vit_ray.api")
    assert set(vit_ray.__all__) < set(api.__all__)
    assert set(api_names()) == set(api.__all__)
    page = api_page()
    for name, module in api_names().items():
        offered = getattr(api, name)
        assert offered is getattr(importlib.import_module(module), name)
        assert len(offered.__doc__) > 15, name
        assert f"\n::: {module}.{name}\n" in page, name


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = vit_ray.trian  # type: ignore[attr-defined]


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = (
        "import sys, vit_ray; vit_ray.load_recipe('digits');"
        "print({'torch', 'ray', 'mlflow', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.usefixtures("worker_pool")
def test_the_example_of_the_page_runs(
    digits: Digits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert "data.train=data/digits/train" in example
    example = example.replace("data/digits/train", digits.train)
    example = example.replace("data/digits/test", digits.test)
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("example.py")
    printed = capsys.readouterr().out
    assert re.search(r"^60 steps, top-1 0\.\d+$", printed, re.MULTILINE), printed
    assert (tmp_path / "digits.npz").is_file()
