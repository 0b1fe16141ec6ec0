"""Made-up JPEG files, some of them damaged, and whether restart markers change their pictures."""

import io
import random
from typing import Any

import numpy as np
from PIL import Image

from vit_ray.data.jpeg import decode_jpeg
from vit_ray.data.restart_index import crop_file
from vit_ray.data.restart_markers import Libjpeg, with_restart_markers

KEPT = ("icc_profile", "exif", "comment")
"""What Pillow finds beside the pixels; JFIF's own fields may be new."""


def _of_pillow(choice: random.Random) -> bytes:
    mode = choice.choice(["L", "RGB", "RGB", "RGB", "CMYK"])
    height, width = choice.randint(1, 50), choice.randint(1, 70)
    random_numbers = np.random.default_rng(choice.getrandbits(32))
    shape = (-(-height // 4), -(-width // 4), len(Image.new(mode, (1, 1)).getbands()))
    pixels = random_numbers.integers(0, 256, shape, np.uint8).repeat(4, 0).repeat(4, 1)
    options: dict[str, Any] = {
        "quality": choice.randint(1, 100),
        "progressive": choice.random() < 0.4,
        "optimize": choice.random() < 0.5,
        "keep_rgb": choice.random() < 0.3,
        "restart_marker_blocks": choice.choice([0, 0, 2]),
        "comment": choice.choice([b"", b"text"]),
    }
    if mode == "RGB" and not options["keep_rgb"]:
        options["subsampling"] = choice.choice([0, 1, 2])
    sink = io.BytesIO()
    squeezed = pixels[:height, :width].squeeze(2) if mode == "L" else pixels[:height, :width]
    Image.fromarray(squeezed, mode).save(sink, "JPEG", **options)
    return sink.getvalue()


def crafted_jpeg(seed: int) -> bytes:
    """A made-up file; equal seeds give equal files."""
    choice = random.Random(seed)  # no secret
    image = bytearray(_of_pillow(choice))
    if choice.random() < 0.35:
        end = image.find(b"\xff\xda") + 12 if choice.random() < 0.7 else len(image) - 2
        for _ in range(choice.randint(1, 2)):
            at = choice.randrange(2, max(3, end))
            image[at] = choice.choice([image[at] ^ 1 << choice.randrange(8), choice.randrange(256)])
    return bytes(image)


def difference(image: bytes, writer: Libjpeg) -> str | None:
    """How the file that is stored differs; empty if it does not, None if it is the original."""
    found = with_restart_markers(image, writer)
    if found is None:
        return None
    before, after = _by_pillow(image), _by_pillow(found.content)
    if before != after:
        return f"Pillow: {before[0]}, rewritten: {after[0]}"
    for scale in (1, 2, 4, 8):
        if not _are_equal(decode_jpeg(image, scale), decode_jpeg(found.content, scale)):
            return f"OpenCV at 1/{scale}"
    part, *_ = crop_file(found.content, found.index, found.size, (0, 0, *found.size))
    if not _are_equal(decode_jpeg(image), decode_jpeg(part)):
        return "its restart index"
    return ""


def _by_pillow(image: bytes) -> tuple[str, Any]:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            beside = {name: opened.info.get(name) for name in KEPT}
            return opened.mode, (opened.size, opened.tobytes(), beside)
    except Exception as error:  # whatever it is, it must be the same
        return type(error).__name__, None


def _are_equal(one: Any, other: Any) -> bool:
    return (one is None) == (other is None) and (one is None or np.array_equal(one, other))
