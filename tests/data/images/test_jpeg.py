import io

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.data.pictures import encoded, picture
from vit_ray.data.images.crops import Augmentation, decode, training_crop
from vit_ray.data.images.jpeg import decode_jpeg, read_header

PIXELS = picture(1, 203, 161)


@pytest.mark.parametrize(
    "image",
    [
        encoded(PIXELS, quality=95),
        encoded(PIXELS, subsampling=0),
        encoded(PIXELS, subsampling=1),
        encoded(PIXELS[:, :, 0]),
        encoded(PIXELS, restart_marker_rows=1),
        encoded(PIXELS, progressive=True),
        encoded(PIXELS, comment=b"\xff\xd9" * 100),
    ],
)
@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_rows_of_an_early_stop_are_those_of_a_full_decode(image: bytes, scale: int) -> None:
    header = read_header(image)
    assert header is not None
    whole = decode_jpeg(image, header, scale)
    assert whole is not None
    for rows in range(1, 204, 7):
        early = decode_jpeg(image, header, scale, rows)
        assert early is not None
        needed = min(-(-rows // scale), len(whole))
        np.testing.assert_array_equal(early[:needed], whole[:needed])


def test_an_early_stop_decodes_less() -> None:
    image = encoded(PIXELS)
    header = read_header(image)
    assert header is not None
    early = decode_jpeg(image, header, 1, rows=50)
    assert early is not None
    assert early.shape == (64, 161, 3)


def test_a_progressive_file_is_decoded_whole() -> None:
    image = encoded(PIXELS, progressive=True)
    header = read_header(image)
    assert header is not None
    decoded = decode_jpeg(image, header, 1, rows=20)
    assert decoded is not None
    assert decoded.shape == (203, 161, 3)


def of_several_pictures() -> bytes:
    """A file as telephones write it: the second picture lies behind the end of the first."""
    sink = io.BytesIO()
    first, second = Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1])
    first.save(sink, "MPO", save_all=True, append_images=[second])
    return sink.getvalue()


@pytest.mark.parametrize(
    "image",
    [encoded(PIXELS), encoded(PIXELS, restart_marker_rows=1), of_several_pictures()],
    ids=["plain", "with restart markers", "of several pictures"],
)
def test_a_crop_says_nothing_on_standard_error(
    image: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    for i in range(20):
        training_crop(image, Augmentation(size=32, max_area=0.2), (0, 0, i))
    assert capfd.readouterr().err == ""


def test_libjpeg_complains_where_the_end_marker_stays(capfd: pytest.CaptureFixture[str]) -> None:
    """So that the silence of the test above means something."""
    image = bytearray(encoded(PIXELS))
    header = read_header(bytes(image))
    assert header is not None
    image[header.height_at : header.height_at + 2] = divmod(64, 256)
    cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
    assert "extraneous bytes before marker 0xd9" in capfd.readouterr().err


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xc0\xff\xd9",
        encoded(PIXELS)[:-1],
        encoded(PIXELS, "PNG"),
        encoded(np.dstack([PIXELS, PIXELS[:, :, :1]]), "WEBP"),
    ],
)
def test_what_is_no_whole_jpeg_has_no_header(image: bytes) -> None:
    assert read_header(image) is None


def test_the_header_tells_the_size_that_is_decoded() -> None:
    for height, width in [(1, 1), (8, 9), (300, 17)]:
        image = encoded(picture(0, height, width))
        header = read_header(image)
        assert header is not None
        assert (header.height, header.width) == decode(image).shape[:2] == (height, width)
