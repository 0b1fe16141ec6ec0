"""Every crop of an indexed file must have the pixels of the whole file, bit by bit."""

import io

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.pictures import encoded, picture
from vit_ray.data.restart_index import Box, CropFile, crop_file, index_segments

CHINA, FLOWER = load_sample_images().images
PLAIN = encoded(FLOWER[:111, :320], subsampling=0, restart_marker_blocks=4)
ADOBE = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0"
FILES = {
    "4:2:0": encoded(CHINA, subsampling=2, restart_marker_blocks=8),
    "4:2:0 of odd size": encoded(CHINA[:203, :173], subsampling=2, restart_marker_blocks=11),
    "4:2:2": encoded(FLOWER[:200], subsampling=1, restart_marker_blocks=5),
    "4:4:4": PLAIN,
    "red, green and blue": PLAIN[:2] + ADOBE + PLAIN[20:],
    "grey": encoded(FLOWER[:150, :160, 0], restart_marker_blocks=2),
    "every row": encoded(CHINA[:160, :100], restart_marker_rows=1),
    "every unit": encoded(CHINA[:80, :90], restart_marker_blocks=1),
    "with a profile and a comment": encoded(
        CHINA[:100, :160], restart_marker_blocks=5, icc_profile=bytes(5000), comment=b"\xff\xd0"
    ),
    "of optimized tables": encoded(CHINA[:100, :160], restart_marker_blocks=5, optimize=True),
    "smaller than a unit": encoded(picture(0, 5, 7), restart_marker_blocks=1),
}


def by_opencv(image: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)


def by_pillow(image: bytes | NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(bytes(image))).convert("RGB"))


DECODED = {name: (by_opencv(image), by_pillow(image)) for name, image in FILES.items()}
INDICES = {name: index_segments(image) for name, image in FILES.items()}


def crop_of(name: str, box: Box) -> CropFile:
    index = INDICES[name]
    assert index is not None
    height, width = DECODED[name][0].shape[:2]
    return crop_file(FILES[name], index, (height, width), box)


def assert_equal_crop(name: str, box: Box) -> None:
    crop = crop_of(name, box)
    top, left, bottom, right = box
    rows = slice(top - crop.top, bottom - crop.top)
    columns = slice(left - crop.left, right - crop.left)
    for decode, whole in zip((by_opencv, by_pillow), DECODED[name], strict=True):
        np.testing.assert_array_equal(
            decode(crop.image)[rows, columns], whole[top:bottom, left:right]
        )


@pytest.mark.parametrize("name", list(FILES))
@given(data=st.data())
@settings(max_examples=30)
def test_random_crops_are_bit_equal(name, data):
    height, width = DECODED[name][0].shape[:2]
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    bottom = data.draw(st.integers(top + 1, height))
    right = data.draw(st.integers(left + 1, width))
    assert_equal_crop(name, (top, left, bottom, right))


@pytest.mark.parametrize("name", ["4:2:0 of odd size", "4:4:4"])
def test_every_small_crop_is_bit_equal(name):
    """All offsets within and around two units, where smooth chroma looks over the edge."""
    height, width = DECODED[name][0].shape[:2]
    for top in range(14, 50):
        for left in range(14, 50):
            assert_equal_crop(name, (top, left, top + 1, left + 1))
            if height - top >= 20 and width - left >= 20:
                assert_equal_crop(name, (height - top, width - left, height - 13, width - 13))


@pytest.mark.parametrize("name", ["4:2:0 of odd size", "4:2:2", "grey"])
@pytest.mark.parametrize("scale", [2, 4, 8])
def test_a_crop_is_bit_equal_at_every_scale_of_the_decoder(name, scale):
    image = FILES[name]
    flags = getattr(cv2, f"IMREAD_REDUCED_COLOR_{scale}") | cv2.IMREAD_IGNORE_ORIENTATION
    whole = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    height, width = DECODED[name][0].shape[:2]
    for share in range(5):
        top, left = height * share // 8 // scale, width * share // 8 // scale
        bottom, right = (
            -(-height * (8 - share) // 8 // scale),
            -(-width * (9 - share) // 9 // scale),
        )
        box = (top * scale, left * scale, min(height, bottom * scale), min(width, right * scale))
        crop = crop_of(name, box)
        part = cv2.imdecode(np.frombuffer(crop.image, np.uint8), flags)
        rows = slice(top - crop.top // scale, bottom - crop.top // scale)
        columns = slice(left - crop.left // scale, right - crop.left // scale)
        np.testing.assert_array_equal(part[rows, columns], whole[top:bottom, left:right])


def cmyk() -> bytes:
    sink = io.BytesIO()
    Image.fromarray(CHINA[:64, :64]).convert("CMYK").save(sink, "JPEG", restart_marker_blocks=2)
    return sink.getvalue()


UNFIT = {
    "no restart markers": encoded(CHINA[:64, :64]),
    "progressive": encoded(CHINA[:64, :64], progressive=True, restart_marker_blocks=2),
    "segments across rows": encoded(CHINA[:64, :80], restart_marker_blocks=4),
    "several rows a segment": encoded(CHINA[:64, :64], restart_marker_rows=2),
    "png": encoded(CHINA[:64, :64], "PNG"),
    "empty": b"",
    "cmyk": cmyk(),
    "followed by padding": FILES["4:2:2"] + bytes(10),
    "followed by another": FILES["4:2:2"] + encoded(CHINA[:64, :64]),
    "one marker missing": FILES["4:2:2"].replace(b"\xff\xd3", b"\xff\x00", 1),
    "one marker out of turn": FILES["4:2:2"].replace(b"\xff\xd3", b"\xff\xd4", 1),
    # A crop has the first marker alone.
    "colour space that stands late": PLAIN[:2] + b"\xff\xfe\0\x03x" + ADOBE + PLAIN[20:],
}


@pytest.mark.parametrize("name", list(UNFIT))
def test_what_cannot_be_taken_apart_has_no_index(name):
    assert index_segments(UNFIT[name]) is None
