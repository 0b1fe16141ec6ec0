"""A finished set is verified, and what it shares with evaluation sets is left out."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import load_digits, load_sample_images

from tests.data.convert.archives import write_files
from tests.data.converting import convert, in_this_process
from tests.data.damage import broken_copy, damage
from tests.data.pictures import encoded, picture
from vit_ray.data import open_dataset
from vit_ray.data.convert import finished_sets
from vit_ray.data.convert.finished_sets import Known, deduplicate, describe, verify

pytestmark = pytest.mark.usefixtures("serial")
EVALUATION = [picture(seed, 120, 160) for seed in range(20)]


def test_a_whole_data_set_has_no_problems(dataset, tmp_path):
    report = verify(dataset.path, decode_fraction=1.0)
    assert (report.num_images, report.num_decoded, report.problems) == (300, 300, [])
    assert report.num_files == len(dataset.files)
    assert 30 < verify(dataset.path, decode_fraction=0.2).num_decoded < 90
    with pytest.raises(ValueError, match="no data set at"):
        verify(str(tmp_path))


def flipped(content: bytes) -> bytes:
    at = len(content) // 3
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a flipped byte": (flipped, "checksum"),
    "cut": (lambda content: content[:1000], "1000 bytes and the manifest says"),
    "a torn footer": (lambda content: content[:-100] + bytes(100), "cannot be opened: .* footer"),
    "gone": (lambda _: b"", "cannot be opened: the file is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_its_file_named(dataset, tmp_path, name):
    _, shard = broken_copy(dataset, tmp_path)
    change, message = DAMAGES[name]
    content = change(shard.read_bytes())
    shard.unlink()
    if content:
        shard.write_bytes(content)
    (problem,) = verify(str(tmp_path), decode_fraction=0.0).problems
    assert problem.startswith(f"{shard.name} class_" if name == "a flipped byte" else shard.name)
    assert re.search(message, problem)


def variants(pixels: np.ndarray) -> dict[str, bytes]:
    """The same picture as others may have stored it."""
    return {
        "exact": encoded(pixels, quality=90),
        "png": encoded(pixels, "PNG"),
        "doubled": encoded(cv2.resize(pixels, (320, 240))),
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A pre-training set of 120 pictures and 3 variants of 10 evaluation ones; the other set."""
    folder = tmp_path_factory.mktemp("sets")
    test = {f"a/{i}.jpg": encoded(pixels, quality=90) for i, pixels in enumerate(EVALUATION)}
    train = {f"a/other_{i}.jpg": encoded(picture(1000 + i, 120, 160)) for i in range(120)}
    for i, pixels in enumerate(EVALUATION[:10]):
        train |= {f"a/{name}_{i}.jpg": image for name, image in variants(pixels).items()}
    with in_this_process():
        for name, files in (("train", train), ("test", test)):
            source = write_files(folder / name, files)
            convert(source, folder / f"{name}_set", rows_per_row_group=16)
    return str(folder / "train_set"), str(folder / "test_set")


def test_exact_and_near_duplicates_are_left_out(sets, tmp_path):
    train, test = sets
    duplicates = deduplicate(train, [test], str(tmp_path / "clean")).to_pylist()
    found = {Path(row["key"]).stem: Path(row["evaluation_key"]).stem for row in duplicates}
    expected = {f"{name}_{i}": str(i) for i in range(10) for name in variants(EVALUATION[i])}
    assert found == expected
    assert sum(row["is_exact"] for row in duplicates) == 10
    clean = open_dataset(str(tmp_path / "clean"))
    assert clean.num_images == 120
    assert verify(clean.path).problems == []
    listed = pq.read_table(tmp_path / "clean" / "duplicates.parquet").to_pylist()
    assert listed == duplicates
    assert {row["distance"] for row in listed if row["is_exact"]} == {0}


def test_an_existing_destination_is_refused_before_anything_is_replaced(sets, tmp_path):
    train, test = sets
    with pytest.raises(ValueError, match="nothing is left"):
        deduplicate(test, [test], str(tmp_path / "clean"))
    for name in ("duplicates.parquet", "manifest.parquet"):
        folder = write_files(tmp_path / name.split(".")[0], {name: b"kept"})
        with pytest.raises(ValueError, match=f"already holds .*{name}.*choose another folder"):
            deduplicate(train, [test], str(folder))
        assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == [(name, b"kept")]


def test_it_can_be_run_again_after_a_crash_at_its_end(sets, tmp_path, monkeypatch):
    train, test = sets

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finished_sets, "derive", crash)
        with pytest.raises(KeyboardInterrupt):
            deduplicate(train, [test], str(tmp_path / "clean"))
    assert [file.name for file in (tmp_path / "clean").iterdir()] == ["duplicates.parquet"]
    deduplicate(train, [test], str(tmp_path / "clean"))
    assert open_dataset(str(tmp_path / "clean")).num_images == 120


def test_an_image_that_changed_stops_it_by_name(sets, tmp_path):
    train, test = sets
    shutil.copytree(train, tmp_path / "train")
    damage(open_dataset(str(tmp_path / "train")), group=1, rows=[2])
    with pytest.raises(ValueError, match=r"'a/.*\.(jpg|png)' in '.*part-.*' *: the bytes changed"):
        deduplicate(str(tmp_path / "train"), [test], str(tmp_path / "clean"))


TRANSFORMS: dict[str, Callable[[Any], bytes]] = {
    "resized": lambda p: encoded(cv2.resize(p, (112, 150), interpolation=cv2.INTER_AREA)),
    "quality 50": lambda p: encoded(p, quality=50),
    "darker": lambda p: encoded((p * 0.7).astype(np.uint8)),
    "brighter": lambda p: encoded(np.clip(p * 1.15, 0, 255).astype(np.uint8)),
    "grey": lambda p: encoded(np.dstack([cv2.cvtColor(p, cv2.COLOR_RGB2GRAY)] * 3)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformed_parts_of_photographs_are_found_as_themselves(name):
    """16 pictures of 213 x 160 that share nothing, cut from two photographs; half are known."""
    parts = [
        np.ascontiguousarray(photograph[213 * i : 213 * (i + 1), 160 * j : 160 * (j + 1)])
        for photograph in load_sample_images().images
        for i in range(2)
        for j in range(4)
    ]
    known = Known([("set", str(i), describe(encoded(p))) for i, p in enumerate(parts[::2])])
    matches = [known.find(describe(TRANSFORMS[name](part))) for part in parts]
    found = [match and int(match[1]) for match in matches]
    assert found[::2] == list(range(8))
    assert found[1::2] == [None] * 8


def test_few_of_distinct_digits_are_taken_for_each_other():
    """Digits are as alike as pictures get."""
    digits = load_digits().images[:600]
    files = [encoded(np.dstack([digit * 15.9] * 3).astype(np.uint8), "PNG") for digit in digits]
    known = Known([("set", str(i), describe(file)) for i, file in enumerate(files[:400])])
    matches = [known.find(describe(file)) for file in files[400:]]
    assert sum(match is not None for match in matches) <= 15


def test_flat_and_undecodable_images_are_compared_by_their_bytes():
    good = encoded(EVALUATION[0])
    green, red = (
        encoded(np.full((50, 50, 3), colour, np.uint8), "PNG")
        for colour in ((0, 255, 0), (9, 0, 0))
    )
    images = {"bad": b"junk", "good": good, "green": green}
    known = Known([("set", name, describe(image)) for name, image in images.items()])
    for name, image in images.items():
        assert known.find(describe(image)) == ("set", name, 0, True)
    assert [known.find(describe(image)) for image in (b"other junk", red)] == [None, None]
