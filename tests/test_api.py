"""The Python interface: its names, what importing it costs, and its page and notebook."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import Digits
from tests.newcomer.notebook import run_notebook

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python_api.md"


def test_every_name_is_the_rooms_own() -> None:
    for name in vit_ray._ROOMS:
        room = importlib.import_module(f"vit_ray.{vit_ray._ROOMS[name]}")
        assert getattr(vit_ray, name) is getattr(room, name)
    assert set(vit_ray.__all__) == {*vit_ray._ROOMS}


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


@pytest.fixture
def quickstart_data(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits where `make quickstart` puts them, in the current folder."""
    data = tmp_path / "quickstart" / "data"
    data.mkdir(parents=True)
    for split, path in (("train", digits.train), ("test", digits.test)):
        (data / split).symlink_to(path)
    monkeypatch.chdir(tmp_path)


class LightningModule(torch.nn.Module):
    """As much of Lightning's as the example uses, on one rank."""

    global_rank, global_step = 0, 0
    trainer: Any = None


class Trainer:
    """As much of Lightning's as the example uses; it is there where Lightning is not installed."""

    world_size = 1

    def __init__(self, **options: Any) -> None:
        assert options["max_epochs"] == 1

    def fit(self, module: Any) -> None:
        module.trainer, optimizer = self, module.configure_optimizers()
        for index, batch in enumerate(module.train_dataloader()):
            optimizer.zero_grad()
            module.training_step(batch, index).backward()
            optimizer.step()


@pytest.mark.usefixtures("quickstart_data")
def test_the_example_in_lightning_runs_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lightning") is None:
        shim = types.ModuleType("lightning")
        shim.LightningModule, shim.Trainer = LightningModule, Trainer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lightning", shim)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102
    losses = names["losses"]
    assert len(losses) == round(6 * 1497 / 128)
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "quickstart_data")
def test_the_notebook_runs_and_shows_what_it_says() -> None:
    notebook, names = run_notebook(ROOT / "docs" / "notebook.ipynb")
    assert names["result"].steps == 120
    assert names["is_equal"] == {"image": True, "labels": True, "sample": True}
    assert names["accuracy"] > 0.6  # 0.1 is chance
    kept = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    for cell, other in zip(notebook["cells"], kept["cells"], strict=True):
        if cell["cell_type"] == "code":
            assert forms(cell) == forms(other), other["source"]


def forms(cell: dict[str, Any]) -> list[list[str]]:
    """In which forms a cell shows things: text on stdout, or those of a value."""
    return [sorted(output.get("data", ["stdout"])) for output in cell["outputs"]]
