"""Data sets for several parts, converted once in a process by `vit-ray convert`."""

from __future__ import annotations

import atexit
import functools
import hashlib
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.net.commands import must_run

NUM_SMALL, NUM_LARGE, NUM_PHOTOS = 300, 4_500, 64


def digest(*parts: bytes) -> str:
    """Of the parts in turn, in 12 digits."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@functools.cache
def converted() -> Path:
    """A folder of the sets `small` and `large` (8 pixels, 3 and 10 classes), `photos` and `plain`.

    The last two have the same photographs and odd images, the last without restart markers.
    """
    folder = Path(tempfile.mkdtemp(prefix="net-sets-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write(folder / "small-images", _squares(NUM_SMALL), 3)
    _write(folder / "large-images", _squares(NUM_LARGE), 10)
    _write(folder / "photos-images", {**photographs(), **odd_images()}, 3)
    (folder / "recipe.yaml").write_text("name: net\nseed: 3\n")
    conversions = [
        _conversion("small", "small", 4, "shard_mib=0.01"),
        _conversion("large", "large", 64),
        _conversion("photos", "photos", 8),
        _conversion("photos", "plain", 8, "index_jpeg=false"),
    ]
    must_run(folder, conversions)
    return folder


def _conversion(source: str, name: str, rows: int, *more: str) -> list[str]:
    keys = [f"source={source}-images", f"destination={name}", f"rows_per_row_group={rows}", *more]
    return ["convert", "recipe.yaml", *(f"convert.{key}" for key in keys)]


def _write(folder: Path, images: dict[str, bytes], num_classes: int) -> None:
    for number, (name, content) in enumerate(images.items()):
        file = folder / f"class_{number % num_classes}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _squares(count: int) -> dict[str, bytes]:
    random = np.random.default_rng(5)
    pixels = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return {f"{k:05d}.png": _encoded(Image.fromarray(pixels[k]), "PNG") for k in range(count)}


def photographs() -> dict[str, bytes]:
    """64 JPEG files of several sizes, qualities and subsamplings, some progressive."""
    sources = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random, found = np.random.default_rng(7), {}
    for number in range(NUM_PHOTOS):
        source = sources[number % 2]
        width, height = (int(side * random.uniform(0.2, 1.0)) for side in source.size)
        left = random.integers(0, source.width - width)
        top = random.integers(0, source.height - height)
        cut = source.crop((left, top, left + width, top + height))
        scale = float(random.uniform(0.3, 3.0))
        sides = [max(1, int(side * scale)) for side in cut.size]
        resized = cut.resize(sides, Image.Resampling.BICUBIC)
        options = {"subsampling": number % 3, "progressive": number % 8 == 7}
        quality = int(random.integers(30, 100))
        found[f"{number:02d}.jpg"] = _encoded(resized, "JPEG", quality=quality, **options)
    return found


def odd_images() -> dict[str, bytes]:
    """Of other modes, formats and sizes, and one that EXIF turns."""
    photo = Image.fromarray(load_sample_images().images[1]).resize((320, 213))
    alpha = photo.convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(alpha.size))
    turned = Image.Exif()
    turned[0x0112] = 6
    deep = np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 21
    return {
        "alpha.png": _encoded(alpha, "PNG"),
        "cmyk.jpg": _encoded(photo.convert("CMYK"), "JPEG"),
        "deep.png": _encoded(Image.fromarray(deep), "PNG"),
        "gray.jpg": _encoded(photo.convert("L"), "JPEG"),
        "narrow.png": _encoded(photo.resize((1, 40)), "PNG"),
        "palette.png": _encoded(photo.quantize(32), "PNG"),
        "progressive.jpg": _encoded(photo, "JPEG", progressive=True),
        "tiny.png": _encoded(photo.resize((1, 1)), "PNG"),
        "turned.jpg": _encoded(photo, "JPEG", exif=turned),
    }


def _encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()
