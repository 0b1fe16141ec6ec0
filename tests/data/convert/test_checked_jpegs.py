"""JPEG files that libjpeg alone has checked are those that the decoder of training takes."""

import os
import random
from typing import Any

from tests.data.convert.test_damage import DAMAGES
from tests.data.converting import config_of
from tests.data.jpeg_index.made_up import crafted_jpeg
from tests.data.pictures import encoded, picture
from vit_ray.data.convert import checks
from vit_ray.data.images import BadImageError, decode
from vit_ray.data.restart_markers import restart_writer

NUM_FILES = int(os.environ.get("FUZZ_ROUNDS", "250"))


def mutated_jpeg(seed: int) -> bytes:
    """A made-up file, or Pillow's, as it is or with damage; half of the damage leaves its end."""
    choice = random.Random(seed)
    pixels = picture(seed, choice.randint(1, 70), choice.randint(1, 90))
    image = choice.choice([
        lambda: crafted_jpeg(seed),
        lambda: encoded(pixels, quality=choice.randint(5, 100), progressive=choice.random() < 0.5),
        lambda: encoded(pixels[..., 0], restart_marker_blocks=choice.choice([0, 2])),
    ])()  # fmt: skip
    for _ in range(choice.choice([0, 1, 1, 2])):
        if len(image) < 4:
            break
        kept = choice.choice([0, 2])
        damaged = DAMAGES[choice.choice(list(DAMAGES))](image[: len(image) - kept], choice)
        image = damaged + image[len(image) - kept :]
    return image


def test_what_is_accepted_without_being_decoded_decodes_to_its_size(monkeypatch):
    libjpeg, config = restart_writer(), config_of("a", "b", index_jpeg=False, damaged="keep")
    decoded: list[bytes] = []

    def noted(image: bytes) -> Any:
        decoded.append(image)
        return decode(image)

    monkeypatch.setattr(checks, "decode", noted)
    undecoded = rejected = 0
    for seed in range(NUM_FILES):
        image = mutated_jpeg(seed)
        decoded.clear()
        try:
            row = checks.checked(image, "key", (0,), config, libjpeg)
            found = row.height, row.width
        except ValueError as error:
            if not isinstance(error, BadImageError):
                continue  # for its number of pixels or of scans
            found = None
        try:
            expected = decode(image).shape[:2]
        except BadImageError:
            expected = None
        assert found == expected, seed
        undecoded += found is not None and not decoded
        rejected += found is None
    assert undecoded > NUM_FILES / 4
    assert rejected > NUM_FILES / 10
