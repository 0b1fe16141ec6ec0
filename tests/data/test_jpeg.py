import io

import pytest
from PIL import Image

from tests.data.pictures import encoded, picture
from vit_ray.data.boxes import Augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.images import decode
from vit_ray.data.jpeg import size_of_jpeg

PIXELS = picture(1, 203, 161)


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
def test_a_crop_says_nothing_on_standard_error(image, capfd):
    for i in range(20):
        crop_of(image, Augmentation(size=32, max_area=0.2), (0, 0, i))
    assert capfd.readouterr().err == ""


def test_the_header_tells_the_size_that_is_decoded():
    for height, width in [(1, 1), (8, 9), (300, 17)]:
        image = encoded(picture(0, height, width))
        assert size_of_jpeg(image) == decode(image).shape[:2] == (height, width)
        assert size_of_jpeg(memoryview(image)) == (height, width)
    for image in (b"", b"\xff\xd8\xff\xc0\xff\xd9", encoded(PIXELS)[:-1], encoded(PIXELS, "PNG")):
        assert size_of_jpeg(image) is None
