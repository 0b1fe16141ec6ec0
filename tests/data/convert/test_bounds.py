"""What one image, or one row group, may take: bytes, pixels, passes of a decoder."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.converting import convert
from tests.data.pictures import encoded, jpeg, picture, write_class_folders
from tests.data.s3_server import serve_s3, this_process_uses
from vit_ray.data import open_dataset, shard_writer
from vit_ray.data.convert import checks, rows
from vit_ray.data.convert.finished_sets import check_file
from vit_ray.data.convert.rows import Row
from vit_ray.data.jpeg import num_scans
from vit_ray.storage import Location

pytestmark = pytest.mark.usefixtures("serial")


def source_with(folder: Path, name: str, content: bytes) -> Path:
    write_class_folders(folder, num_classes=1, per_class=9)
    (folder / "class_0" / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF"])
@pytest.mark.parametrize("options", [{}, {"index_jpeg": False}, {"shrink_to": 10}])
def test_an_image_of_too_many_pixels_is_rejected_before_it_is_decoded(
    tmp_path, monkeypatch, kind, options
):
    content = encoded(np.zeros((300, 400, 3), np.uint8), kind)
    source = source_with(tmp_path / "source", "large.img", content)
    decode, shapes = checks.decode, []

    def noted(image: bytes) -> Any:
        shapes.append(decode(image).shape)
        return decode(image)

    monkeypatch.setattr(checks, "decode", noted)
    limits = {"max_rejected_fraction": 0.2, **options}
    report = convert(source, tmp_path / "set", max_pixels=119_999, **limits)
    why = "it has 400 x 300 pixels, more than convert.max_pixels=119999"
    assert report.rejected == {"class_0/large.img": why}
    assert (300, 400, 3) not in shapes
    assert convert(source, tmp_path / "whole", max_pixels=120_000, **limits).num_rejected == 0


def scans_repeated(count: int) -> bytes:
    """A progressive file whose last scan stands there many times."""
    image = encoded(picture(0, 40, 60), progressive=True)
    last = image.rindex(b"\xff\xda")
    return image[:last] + image[last:-2] * count + b"\xff\xd9"


def test_scans_are_those_that_are_there():
    assert num_scans(jpeg(0)) == 1
    assert num_scans(encoded(picture(0, 40, 60), progressive=True)) == 10
    assert num_scans(encoded(picture(0, 40, 60), progressive=True, exif=b"Exif\0\0\xff\xda")) == 10
    assert num_scans(scans_repeated(91)) == 100
    assert num_scans(jpeg(0) + b"\xff\xda" * 1000) == 1  # behind its end, as in a motion photo
    assert num_scans(encoded(picture(0, 40, 60), comment=b"\xff\xd9\xff\xda")) == 1
    assert [num_scans(image) for image in (b"", b"\xff\xd8", b"\x89PNG", jpeg(0)[:50])] == [0] * 4


def test_a_jpeg_of_very_many_scans_is_rejected(tmp_path):
    source = source_with(tmp_path / "source", "many.jpg", scans_repeated(92))
    report = convert(source, tmp_path / "set", max_rejected_fraction=0.2, damaged="keep")
    assert report.rejected == {"class_0/many.jpg": "it is a JPEG of 101 scans; the most are 100"}


def test_a_row_group_ends_where_its_images_have_enough_bytes(tmp_path, monkeypatch):
    write_class_folders(tmp_path / "source", num_classes=2, per_class=20)
    sizes = [file.stat().st_size for file in (tmp_path / "source").rglob("*.*")]
    monkeypatch.setattr(shard_writer, "MOST_ROW_GROUP_BYTES", 3 * max(sizes))
    convert(tmp_path / "source", tmp_path / "set", rows_per_row_group=8, index_jpeg=False)
    manifest = open_dataset(str(tmp_path / "set"))
    assert manifest.num_images == 40
    assert 3 <= manifest.rows.max() < 8
    for file in manifest.files:
        metadata = pq.ParquetFile(tmp_path / "set" / file.path).metadata
        for group in range(metadata.num_row_groups):
            assert metadata.row_group(group).column(0).total_uncompressed_size < 4 * max(sizes)
    assert check_file(0, manifest, 1.0).problems == []


@pytest.mark.parametrize(("length", "most_held"), [(100 << 20, 3), (rows.WHOLE_FILE, 10)])
def test_few_large_files_are_read_ahead(tmp_path, monkeypatch, length, most_held):
    """Also those of a list, whose lengths nobody has said: they are files of holes here."""
    entries = []
    for i in range(40):
        path = tmp_path / f"{i}.mp4"
        with path.open("wb") as file:
            file.truncate(100 << 20)
        entries.append(Row(str(i), path=str(path), length=length))
    lock, held, most = threading.Lock(), [0], [0]

    def read(location: Location) -> bytes:
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        return bytes(100 << 20)  # memory that nobody has written takes none

    monkeypatch.setattr(Location, "read", read)
    for _, image in checks.read_ahead(entries):
        assert len(image.result()) == 100 << 20
        with lock:
            held[0] -= 1
    assert most[0] <= most_held  # those that wait, and the one that is looked at


def test_a_file_that_is_too_large_for_an_image_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_IMAGE_BYTES", 10)
    (tmp_path / "b").mkdir()
    for name, size in {"0": 10, "1": 11, "2": 0}.items():
        (tmp_path / "b" / name).write_bytes(name.encode() * size)
    with serve_s3(tmp_path) as port, this_process_uses(port):
        for place in ("s3://b", str(tmp_path / "b")):
            assert Row("0", path=f"{place}/0").read() == b"0" * 10
            assert Row("2", path=f"{place}/2").read() == b""
            for row in (Row("1", path=f"{place}/1"), Row("3", path="none", length=11)):
                with pytest.raises(ValueError, match="it has 11 bytes, and an image at most 10"):
                    row.read()
