"""JPEG files: lost data, restart markers that lose nothing, bit-equal crops of a part."""

import io
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.made_up import crafted_jpeg, difference
from tests.data.pictures import encoded, picture, saved
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import libjpeg_process, restart_markers
from vit_ray.data.convert.checks import checked
from vit_ray.data.jpeg import header_segments, read_frame
from vit_ray.data.libjpeg_process import WARNINGS
from vit_ray.data.restart_index import Box, StoredImage, crop_file
from vit_ray.data.restart_markers import (
    Libjpeg,
    restart_writer,
    with_restart_markers,
)

NUM_CRAFTED = int(os.environ.get("FUZZ_ROUNDS", "200"))
CHINA, FLOWER = load_sample_images().images


def without(image: bytes, marker: int) -> bytes:
    for found, at, length in reversed(list(header_segments(image))):
        if found == marker:
            image = image[: at - 2] + image[at + length :]
    return image


def of_red_green_blue(image: bytes) -> bytes:
    """A file of YCbCr as one of red, green and blue, by the names of its components."""
    changed = bytearray(without(image, 0xE0))
    for marker, first, step in ((0xC0, 8, 3), (0xDA, 3, 2)):
        ((at, _),) = [segment[1:] for segment in header_segments(changed) if segment[0] == marker]
        changed[at + first : at + first + 3 * step : step] = b"RGB"
    return bytes(changed)


def with_metadata() -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a caption"
    profile = bytes(range(256)) * 300  # longer than one segment
    return encoded(CHINA[:100, :160], exif=exif, icc_profile=profile, comment=b"\xff\xd9 mine")


PLAIN = encoded(CHINA[:96, :160], subsampling=0)
FILES = {
    "4:2:0": encoded(CHINA, subsampling=2),
    "4:2:2 of odd size": encoded(FLOWER[:203, :173], subsampling=1),
    "4:4:4": encoded(FLOWER[:111, :320], subsampling=0),
    "grey": encoded(FLOWER[:150, :160, 0]),
    "of optimised tables": encoded(CHINA[:200, :320], optimize=True),
    "of few grey levels": encoded(np.full((64, 200), 128, np.uint8), optimize=True),
    "of rough DC": encoded(picture(1, 8, 6).repeat(40, 0).repeat(40, 1), optimize=True, quality=99),
    "progressive": encoded(CHINA[:200], progressive=True),
    "with other markers": encoded(CHINA[:160, :200], restart_marker_blocks=3),
    "red, green and blue by Adobe's marker": encoded(CHINA[:100, :160], keep_rgb=True),
    "red, green and blue by name": of_red_green_blue(PLAIN),
    "of one pixel": encoded(picture(0, 1, 1)),
    "with a profile, EXIF and a comment": with_metadata(),
}


def by_opencv(image: Any, flag: int = cv2.IMREAD_COLOR_RGB) -> NDArray[np.uint8]:
    flags = flag | cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)


def by_pillow(image: Any) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(bytes(image))).convert("RGB"))


DECODED = {name: (by_opencv(image), by_pillow(image)) for name, image in FILES.items()}


@pytest.fixture(scope="module")
def writer() -> Iterator[Libjpeg]:
    library = next(restart_markers._writers())
    yield library
    library.close()


@pytest.mark.parametrize("name", list(FILES))
def test_a_rewritten_file_has_the_pixels_and_the_metadata_of_the_original(name, writer):
    """By Pillow, and by OpenCV at all scales."""
    assert difference(FILES[name], writer) == ""


@pytest.fixture(scope="module", params=[1, 1024, 1 << 20])
def rewritten(request: pytest.FixtureRequest, writer: Libjpeg) -> dict[str, StoredImage]:
    """The files with segments of one unit, of some, and of a whole row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restart_markers, "_SEGMENT_PIXELS", request.param)
        return {name: with_restart_markers(image, writer) for name, image in FILES.items()}


def assert_equal_crop(file: StoredImage, name: str, box: Box) -> None:
    crop, crop_top, crop_left = crop_file(file.content, file.index, file.size, box)
    top, left, bottom, right = box
    rows = slice(top - crop_top, bottom - crop_top)
    columns = slice(left - crop_left, right - crop_left)
    for decoded_by, whole in zip((by_opencv, by_pillow), DECODED[name], strict=True):
        part = decoded_by(crop)[rows, columns]
        np.testing.assert_array_equal(part, whole[top:bottom, left:right])


@pytest.mark.parametrize("name", list(FILES))
@given(data=st.data())
@settings(max_examples=20)
def test_a_crop_that_reads_some_segments_is_bit_equal(rewritten, name, data):
    height, width = rewritten[name].size
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom = data.draw(st.integers(top + 1, height))
    right = data.draw(st.integers(left + 1, width))
    assert_equal_crop(rewritten[name], name, (top, left, bottom, right))


def damaged() -> bytes:
    image = bytearray(FILES["4:2:0"])
    image[len(image) // 2 : len(image) // 2 + 40] = bytes(40)
    return bytes(image)


def without_its_last_scans() -> bytes:
    """A progressive file cut where a scan ends; libjpeg smooths what it shows of one."""
    image = FILES["progressive"]
    scans = [match.start() for match in re.finditer(rb"\xff\xda", image)]
    tables = image.rindex(b"\xff\xc4", 0, scans[2])
    return image[:tables] + b"\xff\xd9"


def with_a_thumbnail() -> bytes:
    """One pixel, in the segment of JFIF."""
    image = FILES["4:2:0"]
    return image[:4] + b"\0\x13" + image[6:18] + b"\1\1abc" + image[20:]


ODD = {
    "several pictures": saved(
        Image.fromarray(CHINA[:80, :90]),
        "MPO",
        save_all=True,
        append_images=[Image.fromarray(FLOWER[:80, :90])],
    ),
    "cmyk": saved(Image.fromarray(CHINA[:64, :64]).convert("CMYK"), "JPEG"),
    "damaged": damaged(),
    "cut, with an end": FILES["4:2:0"][:20000] + b"\xff\xd9",
    "followed by padding": FILES["4:2:0"] + bytes(10) + b"\xff\xd9",
    "png": encoded(CHINA[:64, :64], "PNG"),
    "empty": b"",
    "progressive without its last scans": without_its_last_scans(),
    "with a comment behind its scan": FILES["grey"][:-2] + b"\xff\xfe\0\6mine\xff\xd9",
    "with a thumbnail": with_a_thumbnail(),
    "arithmetic": FILES["4:2:0"].replace(b"\xff\xc0", b"\xff\xc9", 1),
    "of impossible sampling": FILES["4:2:0"].replace(b"\x01\x22\0\x02", b"\x01\x2f\0\x02"),
}


@pytest.mark.parametrize("name", list(ODD))
def test_what_is_odd_stays_as_it_came(name, writer):
    assert with_restart_markers(ODD[name], writer) is None


def test_a_file_is_not_given_the_tables_of_the_file_before(writer):
    before = encoded(FLOWER[:64, :64], optimize=True, quality=30)
    assert with_restart_markers(before, writer) is not None
    assert with_restart_markers(without(FILES["4:2:0"], 0xDB), writer) is None
    assert with_restart_markers(before, writer) is not None
    of_standard_codes = without(FILES["4:2:0"], 0xC4)  # as a frame of motion JPEG
    found = with_restart_markers(of_standard_codes, writer)
    np.testing.assert_array_equal(by_opencv(found.content), by_opencv(FILES["4:2:0"]))


OTHERS = {
    "a picture with one other pixel": encoded(
        np.where(np.arange(96 * 160).reshape(96, 160, 1) == 9999, 0, CHINA[:96, :160]),
        subsampling=0,
    ),
    "other quantization": encoded(CHINA[:96, :160], subsampling=0, quality=74),
    "other colours": of_red_green_blue(PLAIN),
    "another height": encoded(CHINA[:95, :160], subsampling=0),
    "stray bytes": PLAIN[:-2] + bytes(40) + PLAIN[-2:],
}


@pytest.mark.parametrize("name", [*OTHERS, ""])
def test_only_what_has_the_coefficients_of_the_original_is_an_answer(name, monkeypatch):
    library = libjpeg_process.Libjpeg(next(restart_markers._writers())._command[-1])
    other = OTHERS.get(name, PLAIN)
    monkeypatch.setattr(library, "_written", lambda *_: other)
    assert library.rewritten(PLAIN, 1, True) == (b"" if name else PLAIN)


def test_a_library_with_other_structures_is_passed_over(monkeypatch, caplog, tmp_path):
    (tmp_path / "libjpeg.so").write_bytes(b"no library")
    foreign = Libjpeg(str(tmp_path / "libjpeg.so"))
    monkeypatch.setattr(restart_markers, "_writers", lambda: iter([foreign]))
    restart_writer.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert restart_writer() is None
    restart_writer.cache_clear()
    assert "install Pillow from PyPI" in caplog.text


def test_no_made_up_file_changes_its_picture(writer):
    found = [difference(crafted_jpeg(seed), writer) for seed in range(NUM_CRAFTED)]
    assert [(seed, what) for seed, what in enumerate(found) if what] == []
    assert found.count("") > 0.4 * NUM_CRAFTED


def test_a_helper_that_is_killed_is_no_fault_of_the_file(writer, monkeypatch, tmp_path):
    image = FILES["4:2:0"]
    undisturbed = with_restart_markers(image, writer)
    writer._process.kill()
    assert with_restart_markers(image, writer).content == undisturbed.content
    helper = tmp_path / "killed.py"
    monkeypatch.setattr(restart_markers, "_HELPER", helper)
    helper.write_text("import os\nos.kill(os.getpid(), 11)\n")  # as libjpeg, by a bad pointer
    assert with_restart_markers(image, Libjpeg("")) is None
    endless = "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0.1)\nwhile True:\n    pass\n"
    helper.write_text(endless)  # as the helper itself limits its CPU time
    assert with_restart_markers(image, Libjpeg("")) is None
    monkeypatch.setattr(restart_markers, "_ANSWER_WITHIN_S", 0.5)
    for others in ("import os\nos.kill(os.getpid(), 9)\n", "import time\ntime.sleep(300)\n"):
        helper.write_text(others)
        with pytest.raises(OSError, match=r"killed 3 times, or did not answer"):
            with_restart_markers(image, Libjpeg(""))


def with_lost_sector(image: bytes) -> bytes:
    """512 zeros in its coded data, at the first place where libjpeg sees nothing of them."""
    libjpeg, frame = restart_writer(), read_frame(image)
    for at in range(frame.scan_at + 1000, len(image) - 1000, 97):
        damaged = image[:at] + bytes(512) + image[at + 512 :]
        if libjpeg.ask(WARNINGS, damaged) == b"":
            return damaged
    raise AssertionError("libjpeg sees them everywhere")


def test_a_lost_sector_that_libjpeg_does_not_see_is_damage():
    """And zeros that are coded data of one colour are none."""
    flat = encoded(np.full((3000, 4000, 3), (10, 200, 30), np.uint8), optimize=True)
    assert bytes(64) in flat
    whole = encoded(CHINA, quality=90)
    config, zeros = ConvertConfig(source="a", destination="b"), "zeros stand in the place of coded"
    for image, damage in ((flat, ""), (whole, ""), (with_lost_sector(whole), f"{zeros} data")):
        assert checked(image, "key", (0,), config, restart_writer()).damage == damage
