"""The Python interface: its names, what importing it costs, and its page."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import Digits

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python.md"


def test_every_name_is_the_rooms_own():
    for name in vit_ray._ROOMS:
        room = importlib.import_module(f"vit_ray.{vit_ray._ROOMS[name]}")
        assert getattr(vit_ray, name) is getattr(room, name)
    assert set(vit_ray.__all__) == {*vit_ray._ROOMS}
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = vit_ray.trian  # type: ignore[attr-defined]


def test_what_is_offered_is_in_the_api_with_a_docstring_and_on_the_reference_page():
    api = importlib.import_module("vit_ray.api")
    assert set(vit_ray.__all__) < set(api.__all__)
    assert set(api_names()) == set(api.__all__)
    page = api_page()
    for name, module in api_names().items():
        offered = getattr(api, name)
        assert offered is getattr(importlib.import_module(module), name)
        assert len(offered.__doc__) > 15, name
        assert f"\n::: {module}.{name}\n" in page, name


def test_importing_the_package_imports_nothing_heavy():
    script = (
        "import sys, vit_ray; vit_ray.load_recipe('digits');"
        "print({'torch', 'ray', 'mlflow', 'pyarrow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.fixture
def quickstart_data(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits where `make quickstart` puts them, in the current folder."""
    data = tmp_path / "quickstart" / "data"
    data.mkdir(parents=True)
    for split, path in (("train", digits.train), ("test", digits.test)):
        (data / split).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "quickstart_data")
def test_the_pages_python_trains_predicts_and_reads_the_batches_of_a_run():
    lines = PAGE.read_text().partition("## Custom parts")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", lines, re.DOTALL):
        exec(block, names)  # noqa: S102
    assert names["result"].steps == 120
    assert len(names["predictions"]) == 5
    assert names["logits"].shape == (1, 10)
    assert names["accuracy"] > 0.6  # 0.1 is chance
