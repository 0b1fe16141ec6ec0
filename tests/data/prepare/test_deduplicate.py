import shutil
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.pictures import encoded, picture
from tests.data.stream.test_bad_rows import damage
from vit_ray.data import open_dataset
from vit_ray.data.images.perceptual_hash import HASH_BITS, HashIndex, perceptual_hash
from vit_ray.data.prepare.convert import convert
from vit_ray.data.prepare.deduplicate import deduplicate
from vit_ray.data.prepare.verify import verify

EVALUATION = [picture(seed, 120, 160) for seed in range(20)]


def variants(pixels: np.ndarray) -> dict[str, bytes]:
    """The same picture as others may have stored it."""
    height, width = pixels.shape[:2]
    return {
        "exact": encoded(pixels, quality=90),
        "reencoded": encoded(pixels, quality=40),
        "png": encoded(pixels, "PNG"),
        "halved": encoded(cv2.resize(pixels, (width // 2, height // 2))),
        "doubled": encoded(cv2.resize(pixels, (width * 2, height * 2))),
        "cropped": encoded(np.ascontiguousarray(pixels[5:-5, 7:-7])),
        "brighter": encoded(np.clip(pixels * 0.9 + 20, 0, 255).astype(np.uint8)),
    }


@pytest.fixture(scope="module")
def sets(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A pre-training set of 120 pictures and 7 variants of 10 evaluation ones; the other set."""
    folder = tmp_path_factory.mktemp("sets")
    for name in ("train/a", "test/a"):
        (folder / name).mkdir(parents=True)
    for i, pixels in enumerate(EVALUATION):
        (folder / "test/a" / f"{i}.jpg").write_bytes(encoded(pixels, quality=90))
    for i in range(120):
        (folder / "train/a" / f"other_{i}.jpg").write_bytes(encoded(picture(1000 + i, 120, 160)))
    for i, pixels in enumerate(EVALUATION[:10]):
        for name, image in variants(pixels).items():
            (folder / "train/a" / f"{name}_{i}.jpg").write_bytes(image)
    for name in ("train", "test"):
        convert(str(folder / name), str(folder / f"{name}_set"), rows_per_row_group=16)
    return str(folder / "train_set"), str(folder / "test_set")


def test_exact_and_near_duplicates_are_left_out(sets: tuple[str, str], tmp_path: Path) -> None:
    train, test = sets
    report = deduplicate(train, [test], str(tmp_path / "clean"))
    found = {Path(d.key).stem: Path(d.evaluation_key).stem for d in report.duplicates}
    expected = {f"{name}_{i}": str(i) for i in range(10) for name in variants(EVALUATION[i])}
    assert found == expected
    assert (report.num_images, report.num_exact, report.num_near) == (190, 10, 60)
    clean = open_dataset(str(tmp_path / "clean"))
    assert clean.num_images == 120
    assert verify(clean.path).problems == []
    listed = pq.read_table(tmp_path / "clean" / "duplicates.parquet").to_pylist()
    assert len(listed) == 70
    assert {row["distance"] for row in listed if row["is_exact"]} == {0}


def test_a_second_pass_finds_nothing_more(sets: tuple[str, str], tmp_path: Path) -> None:
    train, test = sets
    deduplicate(train, [test], str(tmp_path / "once"))
    report = deduplicate(str(tmp_path / "once"), [test], str(tmp_path / "twice"))
    assert (report.num_images, report.duplicates) == (120, [])
    assert open_dataset(str(tmp_path / "twice")).num_images == 120


def test_what_cannot_be_done_is_refused(sets: tuple[str, str], tmp_path: Path) -> None:
    train, test = sets
    with pytest.raises(ValueError, match="evaluation_sets is empty"):
        deduplicate(train, [], str(tmp_path / "clean"))
    with pytest.raises(ValueError, match="nothing is left"):
        deduplicate(test, [test], str(tmp_path / "clean"))


def test_the_index_finds_what_a_full_search_finds() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 256, (2000, 32), dtype=np.uint8)
    noise = np.packbits(rng.random((300, HASH_BITS)) < 0.06, axis=1)
    queries = hashes[:300] ^ noise
    best, distances = HashIndex(hashes).nearest(queries)
    full = np.bitwise_count(queries[:, None] ^ hashes[None]).sum(axis=2)
    hits = best >= 0
    assert hits.mean() > 0.99
    np.testing.assert_array_equal(best[hits], full.argmin(axis=1)[hits])
    np.testing.assert_array_equal(distances[hits], full.min(axis=1)[hits])


def test_different_pictures_have_hashes_far_apart() -> None:
    hashes = np.stack([perceptual_hash(picture(seed)) for seed in range(100)])
    distances = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2)
    assert distances[~np.eye(100, dtype=bool)].min() > 60


def test_an_image_that_changed_stops_it_by_name(sets: tuple[str, str], tmp_path: Path) -> None:
    train, test = sets
    shutil.copytree(train, tmp_path / "train")
    damage(open_dataset(str(tmp_path / "train")), group=1, rows=[2])
    with pytest.raises(ValueError, match=r"'a/.*\.(jpg|png)' in '.*part-.*' *: the bytes changed"):
        deduplicate(str(tmp_path / "train"), [test], str(tmp_path / "clean"))
