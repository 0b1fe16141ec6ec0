"""A data set with restart indices gives the batches of the same one without, bit by bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from tests.data.converting import convert, run_in_this_process
from tests.data.pictures import encoded
from vit_ray.data import open_dataset
from vit_ray.data.boxes import Augmentation
from vit_ray.data.convert import checks
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.dataset import Manifest
from vit_ray.data.order import Partition
from vit_ray.data.restart_markers import Libjpeg, RewrittenJpeg, with_restart_markers
from vit_ray.data.stream.batches import BatchReader, StreamJob, StreamSpec

CHINA, FLOWER = load_sample_images().images
FILES = {
    "a.jpg": encoded(CHINA, subsampling=2),
    "b.jpg": encoded(FLOWER, subsampling=0),
    "c.jpg": encoded(CHINA[:401, :333], subsampling=1),
    "d.jpg": encoded(FLOWER[:300, :300, 0]),
    "e.jpg": encoded(CHINA[:, :500], progressive=True),
    "f.png": encoded(FLOWER[:64, :80], "PNG"),
    "g.jpg": encoded(CHINA[:20, :30]),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Manifest]:
    folder = tmp_path_factory.mktemp("indexed")
    return tuple(converted(folder / str(on), index_jpeg=on) for on in (True, False))  # type: ignore[return-value]


def converted(folder: Path, *, index_jpeg: bool) -> Manifest:
    (folder / "images" / "one").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / "images" / "one" / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        run_in_this_process(patch)
        options: dict[str, Any] = {"rows_per_row_group": 3, "index_jpeg": index_jpeg}
        convert(str(folder / "images"), str(folder / "set"), **options)
    return open_dataset(str(folder / "set"))


def batch_of(
    manifest: Manifest, augmentation: Augmentation, *, is_training: bool = True, **options: Any
) -> Any:
    spec = StreamSpec(manifest, augmentation, seed=4, **options)
    job = StreamJob(spec, Partition(1, 35), 0, is_training=is_training)
    batch, bad = BatchReader(job).batch(0, 0, 35)
    assert not bad
    return batch


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(size=224, max_area=0.3),
        Augmentation(size=64),  # decoded at 1/2, 1/4 and 1/8 too
        Augmentation("center_crop", size=50, resize=60),
        Augmentation("center_crop", size=224, resize=256, is_exact=True),
        Augmentation("resize_crop", size=(100, 120), resize=130),
        Augmentation("resize", size=100),
    ],
)
def test_batches_are_those_of_a_set_without(sets, augmentation):
    for is_training in (True, False):
        indexed, plain = (batch_of(one, augmentation, is_training=is_training) for one in sets)
        assert indexed.keys() == plain.keys()
        for name, column in plain.items():
            np.testing.assert_array_equal(indexed[name], column)
    assert indexed["weight"].tolist() == [1.0] * 7 + [0.0] * 28


def with_wrong_indices(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> Manifest:
    """A data set in whose indices some numbers are others than those of the files."""

    def wrong(image: bytes, writer: Libjpeg) -> RewrittenJpeg | None:
        found = with_restart_markers(image, writer)
        if found is None:
            return None
        values = {name: change(getattr(found.index, name)) for name, change in changes.items()}
        return replace(found, index=replace(found.index, **values))

    monkeypatch.setattr(checks, "with_restart_markers", wrong)
    return converted(folder, index_jpeg=True)


WRONG: dict[str, dict[str, Any]] = {
    "no columns": {"columns": lambda _: 0},
    "no unit": {"unit_width": lambda _: 0},
    "front behind the tables": {"front": lambda _: 1 << 20},
    "size behind the header": {"size_at": lambda n: n + 10_000},
    "few offsets": {"offsets": lambda o: o[:-1]},
    "no offsets": {"offsets": lambda o: o[:0]},
    "offsets behind the end": {"offsets": lambda o: o + 1},
    "offsets that fall": {"offsets": lambda o: np.array([o[0], *o[-2:0:-1], o[-1]])},
}


@pytest.mark.parametrize("name", list(WRONG))
def test_an_impossible_index_costs_its_image_alone(monkeypatch, tmp_path, name):
    manifest = with_wrong_indices(monkeypatch, tmp_path, **WRONG[name])
    spec = StreamSpec(manifest, Augmentation(size=64), seed=4)
    job = StreamJob(spec, Partition(1, 7), 0, is_training=False)
    batch, bad = BatchReader(job).batch(0, 0, 7)
    assert len(bad) >= 4
    assert all("its restart index" in why for why in bad.values())
    assert batch["image"].any(axis=(1, 2, 3)).sum() == 7 - len(bad)


def test_a_check_finds_a_wrong_index(monkeypatch, tmp_path):
    manifest = with_wrong_indices(monkeypatch, tmp_path, tables_at=lambda at: at + 1)
    found = check_file(0, manifest, decode_fraction=1.0).problems
    assert {problem.key for problem in found} == {f"one/{n}" for n in FILES if n != "f.png"}
    assert all("its restart index" in problem.what for problem in found)


def test_the_report_says_how_many_files_got_markers(sets, monkeypatch, tmp_path):
    indexed, plain = (json.loads((Path(s.path) / "report.json").read_text()) for s in sets)
    assert (indexed["num_indexed"], plain["num_indexed"]) == (6, 0)
    for manifest in sets:
        assert check_file(0, manifest, decode_fraction=1.0).problems == []
    monkeypatch.setattr("vit_ray.data.convert.shards.restart_writer", lambda: None)
    found = converted(tmp_path, index_jpeg=True)
    report = json.loads((Path(found.path) / "report.json").read_text())
    assert report["num_indexed"] == 0
