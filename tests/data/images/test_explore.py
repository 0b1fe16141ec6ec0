"""A data set to look at: numbers, slices and subsets give the rows that were written."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import jpeg
from tests.data.small_sets import CLASSES, SHARD, write_encoded
from vit_ray.data.format.shard_writer import EncodedImage
from vit_ray.data.images import explore

COUNT = 10
Rows = list[tuple[bytes, list[int], str]]


def write(folder: Path, rows: Rows) -> None:
    folder.mkdir(exist_ok=True)
    images = [EncodedImage(image, tuple(labels), key, 8, 8) for image, labels, key in rows]
    write_encoded(folder, SHARD, images, CLASSES, rows=4)


@pytest.fixture
def rows() -> Rows:
    labels = [[number % 3] for number in range(COUNT)]
    labels[4], labels[5] = [0, 2], []
    return [(jpeg(number), labels[number], f"<key {number}>") for number in range(COUNT)]


def test_numbers_and_slices_give_the_rows_as_they_were_written(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    found = explore.open_dataset(str(tmp_path))
    assert len(found) == COUNT
    assert [(list(one.labels), one.key) for one in found] == [row[1:] for row in rows]
    for number in (3, -1):
        expected = np.asarray(Image.open(io.BytesIO(rows[number][0])))
        assert np.array_equal(np.asarray(found[number].image), expected)
    assert [one.key for one in found[-2:1:-3]] == [row[2] for row in rows[-2:1:-3]]
    with pytest.raises(IndexError):
        found[COUNT]
    assert [found.names(found[number]) for number in (0, 4, 5)] == ["cat", "cat, emu", "no label"]


def test_rows_that_a_set_leaves_out_have_no_number(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    whole = explore.open_dataset(str(tmp_path)).manifest
    dropped = {0: np.array([0, 2])}  # as deduplication and a nested part leave them out
    part = explore.Dataset(replace(whole, rows=np.array([2, 4, 2]), num_images=8, dropped=dropped))
    assert [one.key for one in part] == [f"<key {number}>" for number in (1, 3, 4, 5, 6, 7, 8, 9)]


def test_a_notebook_shows_a_grid_and_no_name_is_markup(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    found = explore.open_dataset(str(tmp_path))
    assert re.fullmatch(r"Dataset\('.*': 10 images of 3 classes, fingerprint \w{12}\)", repr(found))
    shown = found._repr_html_()
    assert shown.count("<figure") == COUNT
    assert "&lt;key 3&gt;" in shown
    assert "<key" not in shown
