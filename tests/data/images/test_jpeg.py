import os
import threading

import numpy as np
import pytest

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


def test_an_early_stop_says_nothing_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    for i in range(20):
        training_crop(encoded(PIXELS), Augmentation(size=32, max_area=0.2), (0, 0, i))
    os.write(2, b"still open\n")
    assert capfd.readouterr().err == "still open\n"


def test_standard_error_survives_many_threads(capfd: pytest.CaptureFixture[str]) -> None:
    image = encoded(PIXELS)

    def crop_often() -> None:
        for i in range(100):
            training_crop(image, Augmentation(size=32, max_area=0.2), (0, 0, i))

    threads = [threading.Thread(target=crop_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"still open\n")
    assert capfd.readouterr().err == "still open\n"


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
