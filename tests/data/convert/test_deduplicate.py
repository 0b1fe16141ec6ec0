import shutil
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits, load_sample_images

from tests.data.converting import convert, in_this_process
from tests.data.damage import damage
from tests.data.pictures import encoded, picture
from vit_ray.data import open_dataset
from vit_ray.data.convert import finished_sets as module
from vit_ray.data.convert.finished_sets import (
    Known,
    deduplicate,
    describe,
    nearest,
    perceptual_hash,
    verify,
)

pytestmark = pytest.mark.usefixtures("serial")
EVALUATION = [picture(seed, 120, 160) for seed in range(20)]
GOOD = encoded(EVALUATION[0])


def variants(pixels: np.ndarray) -> dict[str, bytes]:
    """The same picture as others may have stored it."""
    height, width = pixels.shape[:2]
    return {
        "exact": encoded(pixels, quality=90),
        "reencoded": encoded(pixels, quality=40),
        "png": encoded(pixels, "PNG"),
        "halved": encoded(cv2.resize(pixels, (width // 2, height // 2))),
        "doubled": encoded(cv2.resize(pixels, (width * 2, height * 2))),
        "brighter": encoded(np.clip(pixels * 0.9 + 20, 0, 255).astype(np.uint8)),
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A pre-training set of 120 pictures and 6 variants of 10 evaluation ones; the other set."""
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
    with in_this_process():
        for name in ("train", "test"):
            convert(str(folder / name), str(folder / f"{name}_set"), rows_per_row_group=16)
    return str(folder / "train_set"), str(folder / "test_set")


def test_exact_and_near_duplicates_are_left_out(sets, tmp_path):
    train, test = sets
    report = deduplicate(train, [test], str(tmp_path / "clean"))
    found = {Path(d.key).stem: Path(d.evaluation_key).stem for d in report.duplicates}
    expected = {f"{name}_{i}": str(i) for i in range(10) for name in variants(EVALUATION[i])}
    assert found == expected
    assert (report.num_images, report.num_exact, report.num_near) == (180, 10, 50)
    clean = open_dataset(str(tmp_path / "clean"))
    assert clean.num_images == 120
    assert verify(clean.path).problems == []
    listed = pq.read_table(tmp_path / "clean" / "duplicates.parquet").to_pylist()
    assert len(listed) == 60
    assert {row["distance"] for row in listed if row["is_exact"]} == {0}


@pytest.mark.slow
def test_a_second_pass_finds_nothing_more(sets, tmp_path):
    train, test = sets
    deduplicate(train, [test], str(tmp_path / "once"))
    report = deduplicate(str(tmp_path / "once"), [test], str(tmp_path / "twice"))
    assert (report.num_images, report.duplicates) == (120, [])
    assert open_dataset(str(tmp_path / "twice")).num_images == 120


def test_each_image_is_reported_when_it_is_read_or_compared(sets, tmp_path, monkeypatch):
    reports = list[tuple[int, ...]]()
    monkeypatch.setattr(module, "report_done", lambda *counts: reports.append(counts))
    train, test = sets
    deduplicate(train, [test], str(tmp_path / "clean"))
    assert reports[:20] == [(number,) for number in range(1, 21)]
    assert [number for number, _ in reports[20:]] == list(range(1, 181))
    assert {found for _, found in reports[20:]} >= set(range(1, 61))


def test_what_cannot_be_done_is_refused(sets, tmp_path):
    _, test = sets
    with pytest.raises(ValueError, match="nothing is left"):
        deduplicate(test, [test], str(tmp_path / "clean"))


def test_an_existing_destination_is_refused_before_anything_is_replaced(sets, tmp_path):
    train, test = sets
    for name in ("duplicates.parquet", "manifest.parquet"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(b"kept")
        with pytest.raises(ValueError, match=f"already holds .*{name}.*choose another folder"):
            deduplicate(train, [test], str(folder))
        assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [(name, b"kept")]


def test_it_can_be_run_again_after_a_crash_at_its_end(sets, tmp_path, monkeypatch):
    train, test = sets

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "derive", crash)
        with pytest.raises(KeyboardInterrupt):
            deduplicate(train, [test], str(tmp_path / "clean"))
    assert [file.name for file in (tmp_path / "clean").iterdir()] == ["duplicates.parquet"]
    deduplicate(train, [test], str(tmp_path / "clean"))
    assert open_dataset(str(tmp_path / "clean")).num_images == 120


def test_undecodable_images_are_compared_by_bytes():
    known = Known([("set", "bad", describe(b"junk")), ("set", "good", describe(GOOD))])
    matches = [known.find(describe(image)) for image in (b"junk", b"other junk", GOOD)]
    equal = [("set", name, 0, True) for name in ("bad", "good")]
    assert matches == [equal[0], None, equal[1]]


def parts_of_photographs() -> list[np.ndarray]:
    """16 pictures of 213 x 160 that share nothing, cut from two photographs."""
    return [
        np.ascontiguousarray(photograph[213 * i : 213 * (i + 1), 160 * j : 160 * (j + 1)])
        for photograph in load_sample_images().images
        for i in range(2)
        for j in range(4)
    ]


def greyed(pixels: np.ndarray) -> np.ndarray:
    return np.dstack([cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)] * 3)


TRANSFORMS = {
    "resized": lambda p: encoded(cv2.resize(p, (112, 150), interpolation=cv2.INTER_AREA)),
    "quality 50": lambda p: encoded(p, quality=50),
    "darker": lambda p: encoded((p * 0.7).astype(np.uint8)),
    "brighter": lambda p: encoded(np.clip(p * 1.15, 0, 255).astype(np.uint8)),
    "grey": lambda p: encoded(greyed(p)),
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_transformed_parts_of_photographs_are_found_as_themselves(name):
    parts = parts_of_photographs()
    known = Known([("set", str(i), describe(encoded(p))) for i, p in enumerate(parts[::2])])
    matches = [known.find(describe(TRANSFORMS[name](part))) for part in parts]
    found = [match and int(match[1]) for match in matches]
    assert found[::2] == list(range(8))
    assert found[1::2] == [None] * 8


def test_a_flat_picture_is_left_out_only_if_its_bytes_are_equal():
    green, red = (
        encoded(np.full((50, 50, 3), colour, np.uint8), "PNG")
        for colour in ((0, 255, 0), (9, 0, 0))
    )
    known = Known([("set", "green", describe(green))])
    assert known.find(describe(red)) is None
    assert known.find(describe(green)) == ("set", "green", 0, True)


def test_few_of_distinct_digits_are_taken_for_each_other():
    """Digits are as alike as pictures get."""
    digits = load_digits().images[:600]
    files = [encoded(np.dstack([digit * 15.9] * 3).astype(np.uint8), "PNG") for digit in digits]
    known = Known([("set", str(i), describe(file)) for i, file in enumerate(files[:400])])
    matches = [known.find(describe(file)) for file in files[400:]]
    assert sum(match is not None for match in matches) <= 15


def test_the_closest_hash_is_found():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 256, (2000, 16), dtype=np.uint8)
    noise = np.packbits(rng.random((300, 128)) < 0.08, axis=1)
    for number, query in enumerate(hashes[:300] ^ noise):
        distances = np.bitwise_count(query ^ hashes).sum(axis=1)
        found = nearest(hashes.view(np.uint64).T, query.tobytes())
        assert found == (number, distances[number])


def test_different_pictures_have_hashes_far_apart():
    hashes = np.stack([perceptual_hash(picture(seed)) for seed in range(100)])
    distances = np.bitwise_count(hashes[:, None] ^ hashes[None]).sum(axis=2)
    assert distances[~np.eye(100, dtype=bool)].min() > 24


def test_an_image_that_changed_stops_it_by_name(sets, tmp_path):
    train, test = sets
    shutil.copytree(train, tmp_path / "train")
    damage(open_dataset(str(tmp_path / "train")), group=1, rows=[2])
    with pytest.raises(ValueError, match=r"'a/.*\.(jpg|png)' in '.*part-.*' *: the bytes changed"):
        deduplicate(str(tmp_path / "train"), [test], str(tmp_path / "clean"))
