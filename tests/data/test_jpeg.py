"""What the headers of JPEG files say of the size and of the coded data."""

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from tests.data.pictures import encoded, picture
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import checked
from vit_ray.data.images import decode
from vit_ray.data.jpeg import has_zeroed_data, read_frame, size_of_jpeg
from vit_ray.data.libjpeg_process import WARNINGS
from vit_ray.data.restart_markers import restart_writer

CONFIG = ConvertConfig(source="a", destination="b")
PIXELS = picture(1, 203, 161)


def test_the_header_tells_the_size_that_is_decoded():
    for height, width in [(1, 1), (8, 9), (300, 17)]:
        image = encoded(picture(0, height, width))
        assert size_of_jpeg(image) == decode(image).shape[:2] == (height, width)
    for image in (b"", b"\xff\xd8\xff\xc0\xff\xd9", encoded(PIXELS)[:-1], encoded(PIXELS, "PNG")):
        assert size_of_jpeg(image) is None


def with_lost_sector(image: bytes) -> bytes:
    """512 zeros in its coded data, at the first place where libjpeg sees nothing of them."""
    libjpeg, frame = restart_writer(), read_frame(image)
    for at in range(frame.scan_at + 1000, len(image) - 1000, 97):
        damaged = image[:at] + bytes(512) + image[at + 512 :]
        if libjpeg.ask(WARNINGS, damaged) == b"":
            return damaged
    raise AssertionError("libjpeg sees them everywhere")


def test_a_lost_sector_that_libjpeg_does_not_see_is_counted():
    whole = encoded(load_sample_images().images[0], quality=90)
    assert not has_zeroed_data(whole)
    damaged = with_lost_sector(whole)
    row = checked(damaged, "key", (0,), CONFIG, restart_writer())
    assert (row.image, row.damage) == (damaged, "zeros stand in the place of coded data")
    strict = CONFIG.model_copy(update={"damaged": "reject"})
    with pytest.raises(ValueError, match="it is damaged: zeros stand in the place of coded data"):
        checked(damaged, "key", (0,), strict, restart_writer())


def test_a_picture_of_one_colour_is_no_damage_though_its_data_are_zeros():
    image = encoded(np.full((3000, 4000, 3), (10, 200, 30), np.uint8), optimize=True)
    assert bytes(64) in image
    assert checked(image, "key", (0,), CONFIG, restart_writer()).damage == ""
