"""What one image may be, and what a dry run says of all: damaged, turned, of any format."""

import io
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_images

from tests.commands.command_line import run_cli
from tests.data.convert.archives import (
    converted,
    rejections,
    samples,
    stored_rows,
    tar_of,
    write_files,
)
from tests.data.converting import config_of, convert
from tests.data.pictures import encoded, jpeg, picture, turned, write_class_folders
from vit_ray.commands import predict
from vit_ray.data import open_dataset, shard_writer
from vit_ray.data.convert import checks, rows
from vit_ray.data.convert.checks import estimate_conversion
from vit_ray.data.convert.finished_sets import check_file, verify
from vit_ray.data.convert.rows import Row
from vit_ray.data.images import FORMAT_SUFFIXES, decode, is_image_name
from vit_ray.data.jpeg import num_scans
from vit_ray.data.shards import RowGroupReader
from vit_ray.storage import Location

pytestmark = pytest.mark.usefixtures("serial")


def source_with(folder: Path, files: dict[str, bytes]) -> Path:
    """Nine good images, and these."""
    write_class_folders(folder, num_classes=1, per_class=9)
    return write_files(folder, {f"class_0/{name}": content for name, content in files.items()})


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Images that the decoder of training was asked for."""
    found = set[bytes]()

    def noted(image: bytes) -> Any:
        found.add(image)
        return decode(image)

    monkeypatch.setattr(checks, "decode", noted)
    return found


WHOLE = encoded(load_sample_images().images[0], quality=90)
HALF = len(WHOLE) // 2


def header_of_13000_x_13000() -> bytes:
    """A grey file that ends where its coded data begin; decoded it would take a gigabyte."""
    image = bytearray(encoded(np.full((8, 8), 128, np.uint8)))
    at = image.index(b"\xff\xc0")
    image[at + 5 : at + 9] = (13_000).to_bytes(2) * 2
    scan = image.index(b"\xff\xda")
    return bytes(image[: scan + 2 + int.from_bytes(image[scan + 2 : scan + 4])]) + b"\xff\xd9"


ENDS_EARLY = {
    "half of zeros": WHOLE[:HALF] + bytes(len(WHOLE) - HALF),
    "cut, with an end": WHOLE[:HALF] + b"\xff\xd9",
    "cut, with an end and more": WHOLE[:HALF] + b"\xff\xd9 behind",
    "without data": header_of_13000_x_13000(),
}
DAMAGED = {
    "half of zeros and an end": WHOLE[:HALF] + bytes(len(WHOLE) - HALF - 2) + b"\xff\xd9",
    "4 KiB of zeros": WHOLE[:HALF] + bytes(4096) + WHOLE[HALF + 4096 :],
    "stray bytes": WHOLE[:-2] + bytes(40) + b"\xff\xd9",
}
PHOTOGRAPHS = {"whole": WHOLE, **ENDS_EARLY, **DAMAGED}


def write_damaged(folder: Path, *names: str) -> Path:
    return write_files(folder, {f"cat/{name}.jpg": PHOTOGRAPHS[name] for name in names})


@pytest.mark.parametrize(("damaged", "counts"), [("reject", (1, 3, 0)), ("keep", (4, 0, 3))])
def test_damaged_photographs_are_all_rejected_or_all_kept(tmp_path, damaged, counts):
    source = write_damaged(tmp_path / "source", "whole", *DAMAGED)
    report = convert(source, tmp_path / "set", damaged=damaged, max_rejected_fraction=0.9)
    assert (report.num_images, report.num_rejected, report.num_damaged) == counts


@pytest.mark.parametrize("options", [{}, {"index_jpeg": False}, {"shrink_to": 100}])
def test_photographs_that_end_early_are_rejected_and_other_damage_is_counted(tmp_path, options):
    source = write_damaged(tmp_path / "source", "whole", *DAMAGED, *ENDS_EARLY)
    report = convert(source, tmp_path / "set", max_rejected_fraction=0.9, **options)
    assert (report.num_images, report.num_damaged) == (4, 3)
    reasons = rejections(tmp_path / "set")
    assert set(reasons) == {f"cat/{name}.jpg" for name in ENDS_EARLY}
    assert all("remature end" in reason for reason in reasons.values()), reasons
    damaged = pq.read_table(tmp_path / "set" / "damaged.parquet").to_pylist()
    assert {row["key"] for row in damaged} == {f"cat/{name}.jpg" for name in DAMAGED}
    assert all("extraneous bytes" in row["reason"] for row in damaged)
    assert json.loads((tmp_path / "set" / "report.json").read_text())["num_damaged"] == 3
    assert verify(str(tmp_path / "set")).problems == []


@pytest.mark.parametrize("index_jpeg", [True, False])
def test_a_whole_jpeg_is_not_decoded_twice_and_a_header_alone_never(tmp_path, decoded, index_jpeg):
    source = write_damaged(tmp_path / "source", "whole", "stray bytes", "without data")
    (source / "cat" / "other.png").write_bytes(encoded(picture(0, 30, 40), "PNG"))
    options = {"index_jpeg": index_jpeg, "max_rejected_fraction": 0.5}
    report = convert(source, tmp_path / "set", **options)
    assert (report.num_images, report.num_damaged) == (3, 1)
    png = (source / "cat" / "other.png").read_bytes()
    assert decoded == {PHOTOGRAPHS["stray bytes"], png}


@pytest.mark.parametrize("options", [{}, {"index_jpeg": False}, {"shrink_to": 10}])
def test_an_image_of_too_many_pixels_is_rejected_before_it_is_decoded(tmp_path, decoded, options):
    pixels = np.zeros((300, 400, 3), np.uint8)
    large = {f"large.{kind}": encoded(pixels, kind) for kind in ("PNG", "JPEG", "GIF")}
    source = source_with(tmp_path / "source", large)
    limits = {"max_rejected_fraction": 0.5, **options}
    convert(source, tmp_path / "set", max_pixels=119_999, **limits)
    why = "it has 400 x 300 pixels, more than convert.max_pixels=119999"
    assert rejections(tmp_path / "set") == {f"class_0/{name}": why for name in large}
    assert not decoded & {*large.values()}
    assert convert(source, tmp_path / "whole", max_pixels=120_000, **limits).num_rejected == 0


def scans_repeated(count: int) -> bytes:
    """A progressive file whose last scan stands there many times."""
    image = encoded(picture(0, 40, 60), progressive=True)
    last = image.rindex(b"\xff\xda")
    return image[:last] + image[last:-2] * count + b"\xff\xd9"


def test_scans_are_counted_up_to_the_end_of_the_picture():
    assert num_scans(jpeg(0) + b"\xff\xda" * 1000) == 1  # behind its end, as in a motion photo
    assert num_scans(encoded(picture(0, 40, 60), comment=b"\xff\xd9\xff\xda")) == 1
    assert num_scans(scans_repeated(91)) == 100


@pytest.mark.parametrize(
    ("image", "options", "reason"),
    [
        (scans_repeated(92), {"damaged": "keep"}, "it is a JPEG of 101 scans; the most are 100"),
        (encoded(np.zeros((20, 70_000, 3), np.uint8), "PNG"), {"shrink_to": 19}, "66500 x 19 pix"),
    ],
)
def test_an_image_that_cannot_be_stored_is_rejected(tmp_path, image, options, reason):
    source = source_with(tmp_path / "source", {"odd": image})
    assert convert(source, tmp_path / "set", max_rejected_fraction=0.1, **options).num_images == 9
    assert reason in rejections(tmp_path / "set")["class_0/odd"]


@pytest.mark.parametrize("index_jpeg", [True, False])
def test_large_images_are_shrunk_only_when_asked(tmp_path, index_jpeg):
    files = {"cat/large.jpg": jpeg(1, 300, 400), "cat/small.jpg": jpeg(2, 50, 40)}
    source = write_files(tmp_path / "source", files)
    convert(source, tmp_path / "set", shrink_to=60, index_jpeg=index_jpeg)
    group = RowGroupReader(open_dataset(str(tmp_path / "set"))).read(0)
    stored = {group.key(i): group.stored(i) for i in range(2)}
    large, small = stored["cat/large.jpg"], stored["cat/small.jpg"]
    assert (large.size, small.size) == ((60, 80), (50, 40))
    assert decode(bytes(large.content)).shape == (60, 80, 3)
    assert (large.index is not None) == index_jpeg
    if not index_jpeg:
        assert bytes(small.content) == files["cat/small.jpg"]


@pytest.mark.parametrize("options", [{}, {"index_jpeg": False}])
def test_images_are_turned_as_exif_says(tmp_path, options):
    files = {
        f"cat/{orientation}.{kind.lower()}": turned(kind, orientation)
        for kind in ("JPEG", "PNG", "WEBP")
        for orientation in range(10)  # 0 and 9 mean nothing
    }
    source = write_files(tmp_path / "source", files)
    convert(source, tmp_path / "set", apply_orientation=True, **options)
    rows = stored_rows(tmp_path / "set")
    for key, content in files.items():
        expected = np.asarray(
            ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        )
        found = decode(rows[key]["image"])
        assert found.shape == expected.shape == (rows[key]["height"], rows[key]["width"], 3), key
        difference = np.abs(found.astype(int) - expected).mean()
        assert difference < 6, key  # the least of another turn is 20
        if key[4] in "019":
            assert difference == 0
        else:
            assert rows[key]["image"][:2] == b"\xff\xd8"
    report = verify(str(tmp_path / "set"), decode_fraction=1.0)
    assert report.problems == []


def test_a_turned_image_is_shrunk_too_and_what_is_done_is_said(tmp_path):
    files = {f"cat/{number}.jpg": turned("JPEG", 6 if number < 3 else 1) for number in range(10)}
    source = write_files(tmp_path / "source", files)
    report = convert(source, tmp_path / "plain")
    assert report.notes[0].startswith("3 images have an orientation in EXIF and are kept as they")
    assert "convert.apply_orientation=true turns them" in report.notes[0]
    assert "there is one class only: 'cat'" in report.notes
    row = stored_rows(tmp_path / "plain")["cat/0.jpg"]
    np.testing.assert_array_equal(decode(row["image"]), decode(files["cat/0.jpg"]))
    report = convert(source, tmp_path / "set", apply_orientation=True, shrink_to=48)
    assert report.notes[0] == "3 images were turned as their EXIF says"
    assert open_dataset(str(tmp_path / "set")).origin["apply_orientation"] is True
    row = stored_rows(tmp_path / "set")["cat/0.jpg"]
    assert (row["height"], row["width"]) == (80, 48)


def test_shards_of_shrunk_images_have_the_size_that_is_asked_for(tmp_path):
    """400 x 300 pixels shrink to a small part of their bytes; a shard holds many more."""
    files = {f"cat/{i}.jpg": jpeg(i, 300, 400) for i in range(60)}
    source = write_files(tmp_path / "source", files)
    options = {"rows_per_row_group": 4, "index_jpeg": False, "shrink_to": 60, "shard_mib": 0.01}
    convert(source, tmp_path / "set", **options)
    sizes = [file.bytes for file in open_dataset(str(tmp_path / "set")).files]
    assert len(sizes) > 1
    assert sum(sizes) / len(sizes) == pytest.approx(0.01 * 2**20, rel=0.35)


def test_a_row_group_ends_where_its_images_have_enough_bytes(tmp_path, monkeypatch):
    write_class_folders(tmp_path / "source", num_classes=2, per_class=20)
    sizes = [file.stat().st_size for file in (tmp_path / "source").rglob("*.*")]
    monkeypatch.setattr(shard_writer, "MOST_ROW_GROUP_BYTES", 3 * max(sizes))
    convert(tmp_path / "source", tmp_path / "set", rows_per_row_group=8, index_jpeg=False)
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.num_images == 40
    assert 3 <= manifest.rows.max() < 8
    assert manifest.bytes.max() < 4 * max(sizes)
    assert check_file(0, manifest, 1.0).problems == []


def test_a_file_that_is_too_large_for_an_image_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_IMAGE_BYTES", 10)
    write_files(tmp_path, {"0": b"0" * 10, "1": b"1" * 11})
    assert Row("0", path=f"{tmp_path}/0").read() == b"0" * 10
    monkeypatch.setattr(Location, "read_range", lambda _, first, length: bytes(length))
    places: list[dict[str, Any]] = [
        {"path": f"{tmp_path}/1"}, {"path": "s3://b/2"}, {"path": "none", "length": 11},
    ]  # fmt: skip
    for place in places:
        with pytest.raises(ValueError, match="it has 11 bytes, and an image at most 10"):
            Row("1", **place).read()


def test_every_format_that_is_decoded_is_found(tmp_path):
    suffixes = sorted(suffix for each in FORMAT_SUFFIXES.values() for suffix in each)
    assert all(is_image_name(f"a.{suffix}") for suffix in suffixes)
    kinds = {"avif": "AVIF", "jp2": "JPEG2000", "jfif": "JPEG", "jpe": "JPEG", "pgm": "PPM"}
    assert kinds.keys() < {*suffixes}
    images = {f"{suffix}.{suffix}": encoded(picture(1, 20, 24), kinds[suffix]) for suffix in kinds}
    source = write_files(tmp_path / "s", images | {f"x/{name}": images[name] for name in images})
    report = convert(source, tmp_path / "set", max_rejected_fraction=0.9)
    assert report.num_images == 5
    assert rejections(tmp_path / "set") == dict.fromkeys(images, "it is not in a class folder")
    assert estimate_conversion(config_of(source, "unused")).num_images == 10
    assert len(list(predict._images_at(str(source)))) == 10
    labels = [(f"{suffix}.cls", b"x") for suffix in kinds]
    (tmp_path / "a.tar").write_bytes(tar_of([*images.items(), *labels]))
    assert len(converted(tmp_path / "a.tar", tmp_path / "of a tar")) == 5


def run_plan(source: Path) -> list[str]:
    keys = f"convert.source={source}", "convert.destination=nowhere"
    done = run_cli("convert", "digits", *keys, "--dry-run")
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_what_is_said_before_is_what_comes(image_folder, tmp_path):
    settings = {"rows_per_row_group": 8, "shard_mib": 0.02}
    said = estimate_conversion(config_of(image_folder, tmp_path / "set", **settings))
    assert not (tmp_path / "set").exists()
    made = convert(image_folder, tmp_path / "set", **settings)
    assert (said.num_images, said.num_classes) == (made.num_images, len(made.label_histogram))
    files = [file for file in image_folder.rglob("*") if file.is_file()]
    assert said.source_bytes == sum(file.stat().st_size for file in files)
    assert said.num_shards == pytest.approx(made.num_shards, abs=1)
    assert (said.num_sampled, said.num_rejected, said.reason) == (128, 0, "")
    assert said.seconds > 0


@pytest.mark.parametrize(
    ("num_tars", "counted", "classes"), [(0, (1, 3, 3), 3), (1, (0, 1, 1), 1), (3, (0, 3, 1), 1)]
)
def test_what_takes_long_is_counted_in_part(
    image_folder, tmp_path, monkeypatch, num_tars, counted, classes
):
    """The time is over within the first of three folders, or of some tars, of 300 images."""
    files = samples([jpeg(i) for i in range(300)], [b"%d" % (i // 150) for i in range(300)])
    write_files(tmp_path, {f"{number}.tar": tar_of(files) for number in range(num_tars)})
    source = tmp_path if num_tars else image_folder
    monkeypatch.setattr(checks, "COUNTED_S", -1.0)
    estimate = estimate_conversion(config_of(source, "set"))
    assert (estimate.num_counted, estimate.num_parts, estimate.num_classes) == counted
    assert estimate.num_images == pytest.approx(300 * max(1, num_tars), rel=0.2)
    text = f"about {estimate.num_images} images of at least {classes} classes ({counted[0]} of"
    assert run_plan(source)[0].startswith(f"images      {text}")


def test_rejected_images_and_the_machine_are_named(tmp_path):
    files = {f"{label}/{i}.jpg": jpeg(i) for label in ("cat", "dog") for i in range(12)}
    lines = run_plan(write_files(tmp_path / "some", files | {"cat/0.jpg": b"no image"}))
    assert lines[0] == "images      24 images of 2 classes (2 of 2 parts counted)"
    assert lines[3].startswith("rejected    1 of 24 sampled images; the first: ")
    assert f"cores of this machine ({platform.node()}), " in lines[4]
    write_files(tmp_path / "none", {"cat/1.jpg": "a text"})
    with pytest.raises(ValueError, match="none of 1 sampled images can be used; the first: "):
        estimate_conversion(config_of(tmp_path / "none", "set"))
