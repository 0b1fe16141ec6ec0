"""A data set with restart indices gives the batches of the same one without, bit by bit."""

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from tests.data.pictures import encoded
from tests.data.prepare.conftest import one_by_one
from vit_ray.data import open_dataset
from vit_ray.data.format.manifest import Manifest
from vit_ray.data.images.crop_boxes import Augmentation
from vit_ray.data.order.partition import Partition
from vit_ray.data.prepare.convert import convert
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
    """With indices and without."""
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "images" / "one").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / "images" / "one" / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("convert", "source_index"):
            patch.setattr(f"vit_ray.data.prepare.{module}.run_tasks", one_by_one)
        for is_indexed in (True, False):
            target = str(folder / f"set_{is_indexed}")
            options: dict[str, Any] = {"rows_per_row_group": 3, "index_jpeg": is_indexed}
            convert(str(folder / "images"), target, **options)
    return open_dataset(str(folder / "set_True")), open_dataset(str(folder / "set_False"))


def batch_of(manifest: Manifest, augmentation: Augmentation, *, is_training: bool = True) -> Any:
    spec = StreamSpec(manifest, augmentation, seed=4)
    job = StreamJob(spec, Partition(1, 35), 0, is_training=is_training, counts=manifest.rows)
    batch, bad = BatchReader(job).batch(0, 0, 35)
    assert not bad
    return batch


@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(size=224, max_area=0.3),
        Augmentation(size=64),  # decoded at 1/2, 1/4 and 1/8 too
        Augmentation("center_crop", size=50, resize=60),
        Augmentation("resize_crop", size=(100, 120), resize=130),
        Augmentation("resize", size=100),
    ],
)
def test_batches_are_those_of_a_set_without(
    sets: tuple[Manifest, Manifest], augmentation: Augmentation
) -> None:
    indexed, plain = (batch_of(manifest, augmentation) for manifest in sets)
    assert indexed.keys() == plain.keys()
    for name, column in plain.items():
        np.testing.assert_array_equal(indexed[name], column)


def test_evaluation_batches_are_those_of_a_set_without(sets: tuple[Manifest, Manifest]) -> None:
    augmentation = Augmentation("center_crop", size=50, resize=60)
    indexed, plain = (batch_of(manifest, augmentation, is_training=False) for manifest in sets)
    np.testing.assert_array_equal(indexed["image"], plain["image"])
    assert indexed["weight"].tolist() == [1.0] * 7 + [0.0] * 28


def test_a_cache_smaller_than_a_batch_changes_nothing(sets: tuple[Manifest, Manifest]) -> None:
    spec = StreamSpec(sets[0], Augmentation(size=64), seed=4, cache_mib=0)
    job = StreamJob(spec, Partition(1, 35), 0, is_training=True, counts=sets[0].rows)
    batch, _ = BatchReader(job).batch(0, 0, 35)
    expected = batch_of(sets[0], Augmentation(size=64))
    np.testing.assert_array_equal(batch["image"], expected["image"])
    np.testing.assert_array_equal(batch["sample"], expected["sample"])
