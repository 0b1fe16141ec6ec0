"""The Python interface: its names, and its page."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import ROOT, Digits

PAGE = ROOT / "docs" / "python.md"


def test_what_is_offered_is_the_rooms_own_and_is_on_the_reference_page():
    api = importlib.import_module("vit_ray.api")
    assert set(vit_ray.__all__) < set(api.__all__)
    assert set(api_names()) == set(api.__all__)
    page = api_page()
    for name, module in api_names().items():
        assert getattr(api, name) is getattr(importlib.import_module(module), name)
        assert f"\n::: {module}.{name}\n" in page, name
    for name in vit_ray.__all__:
        assert getattr(vit_ray, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = vit_ray.trian  # type: ignore[attr-defined]


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
