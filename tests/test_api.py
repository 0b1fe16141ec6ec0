"""The Python interface: its names, what importing it costs, and the example of its page."""

from __future__ import annotations

import importlib
import pickle
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import Digits

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "python_api.md"


def test_every_name_is_the_rooms_own() -> None:
    for name in vit_ray._ROOMS:
        room = importlib.import_module(f"vit_ray.{vit_ray._ROOMS[name]}")
        assert getattr(vit_ray, name) is getattr(room, name)
    assert set(vit_ray.__all__) == {*vit_ray._ROOMS, "train", "evaluate"}


@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_a_package_is_called_as_the_function_of_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after modules of it are imported, which sets the package's attribute."""
    called: list[object] = []
    monkeypatch.setattr(f"vit_ray.launch.run.{name}", lambda *words, **more: (words, more))
    monkeypatch.delattr(vit_ray, name, raising=False)
    for module in ("objective", "optim") if name == "train" else ("accuracy",):
        called.append(getattr(vit_ray, name)("recipe", until_step=5))
        importlib.import_module(f"vit_ray.{name}.{module}")
    called.append(getattr(vit_ray, name)("recipe", until_step=5))
    assert called == [(("recipe",), {"until_step": 5})] * len(called)
    received = pickle.loads(cloudpickle.dumps(getattr(vit_ray, name)))  # as in a user's task
    assert received is getattr(vit_ray, name)


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


def examples(word: str) -> str:
    """The one example of the page that has the word."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (example,) = (text for text in found if word in text)
    return str(example)


@pytest.mark.parametrize("library", ["torch", "lightning"])
def test_the_examples_of_loops_of_ones_own_run(
    library: str, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And learn: the loss of the last step is well below that of the first."""
    pytest.importorskip(library)
    example = examples("optimizer.step()" if library == "torch" else "LightningModule")
    for place, path in (("data/digits/train", digits.train), ("num_workers=8", "num_workers=0")):
        assert place in example
        example = example.replace(place, path)
    (tmp_path / "loop.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    losses = runpy.run_path("loop.py")["losses"]
    assert len(losses) == 60
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]


@pytest.mark.usefixtures("worker_pool")
def test_the_example_of_the_page_runs(
    digits: Digits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = examples("vit_ray.train(")
    assert '"data.train": "data/digits/train"' in example
    example = example.replace("data/digits/train", digits.train)
    example = example.replace("data/digits/test", digits.test)
    (tmp_path / "example.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path("example.py")
    printed = capsys.readouterr().out
    assert re.search(r"^60 steps, top-1 0\.\d+$", printed, re.MULTILINE), printed
    assert len(re.findall(r"^\d: \d \(\d+\.\d%\)$", printed, re.MULTILINE)) == 5, printed
    assert found["logits"].shape == (1, 10)
