"""EXIF orientation, applied at conversion where that is asked for; Pillow says what it means."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.convert.archives import stored_rows, write_files
from tests.data.converting import convert
from tests.data.pictures import picture
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import verify
from vit_ray.data.images import decode

pytestmark = pytest.mark.usefixtures("serial")


def turned(kind: str, orientation: int) -> bytes:
    exif, sink = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    pixels = np.kron(picture(3, 12, 20), np.ones((8, 8, 1), np.uint8))  # smooth, for JPEG
    Image.fromarray(pixels).save(sink, kind, exif=exif, quality=95)
    return sink.getvalue()


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
