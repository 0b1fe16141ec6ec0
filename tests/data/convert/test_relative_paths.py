"""Relative paths are the driver's, wherever the workers of a cluster were started; no Ray."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data import converting
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.finished_sets import deduplicate, verify
from vit_ray.data.parts import subset
from vit_ray.data.shards import RowGroupReader
from vit_ray.storage import absolute


def test_tasks_in_another_working_directory_find_what_the_driver_names(
    monkeypatch, image_folder, tmp_path
):
    (elsewhere := tmp_path / "elsewhere").mkdir()

    def one_by_one(work: Callable[..., Any], items: Sequence[Any], *rest: Any, **shown: Any) -> Any:
        before = os.getcwd()
        os.chdir(elsewhere)
        try:
            return converting.one_by_one(work, items, *rest, **shown)
        finally:
            os.chdir(before)

    converting.run_in_this_process(monkeypatch, one_by_one)
    monkeypatch.chdir(tmp_path)
    source = os.path.relpath(image_folder)
    report = convert(ConvertConfig(source=source, destination="set"))
    assert report.num_images == open_dataset("set").num_images
    assert not verify("set", decode_fraction=1.0).problems
    keys = RowGroupReader(open_dataset("set")).keys(0)
    Path("keys.txt").write_text("\n".join(keys))
    part = subset("set", "part", keys="keys.txt")
    assert 0 < part.num_images < report.num_images
    found = deduplicate("set", ["part"], "clean")
    assert found.num_exact >= part.num_images
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("path", "found"),
    [("a/b", "{here}/a/b"), ("file://a/b", "{here}/a/b"), ("file:///a", "/a"), ("~/a", "{home}/a"),
     ("s3://bucket/a", "s3://bucket/a"), ("hf://a/b", "hf://a/b")],
)  # fmt: skip
def test_local_paths_become_absolute_and_addresses_stay(monkeypatch, tmp_path, path, found):
    monkeypatch.chdir(tmp_path)
    assert absolute(path) == found.format(here=tmp_path, home=Path.home())
