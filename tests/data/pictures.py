"""Pictures for tests: smooth random images, so that codecs and crops behave as on photographs."""

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(seed: int, height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """Smooth coloured noise: uint8 (height, width, 3)."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.uint8)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format, **options)
    return sink.getvalue()


def encoded(pixels: NDArray[Any], format: str = "JPEG", **options: Any) -> bytes:
    return saved(Image.fromarray(pixels), format, **options)


def jpeg(seed: int, height: int = 60, width: int = 80) -> bytes:
    return encoded(picture(seed, height, width), quality=90)


def turned(kind: str, orientation: int) -> bytes:
    """A smooth picture, enlarged 8 times, with an orientation in EXIF."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.kron(picture(3, 12, 20), np.ones((8, 8, 1), np.uint8))
    return encoded(pixels, kind, exif=exif, quality=95)


def write_class_folders(folder: Path, num_classes: int, per_class: int) -> None:
    """Files CLASS/IMAGE.jpg with distinct content."""
    for label in range(num_classes):
        (folder / f"class_{label}").mkdir(parents=True)
        for i in range(per_class):
            name = folder / f"class_{label}" / f"{i:04d}.jpg"
            name.write_bytes(jpeg(1000 * label + i, 40 + i % 30, 50 + i % 20))
