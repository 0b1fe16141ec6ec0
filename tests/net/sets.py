"""Images, the data sets that `vit-ray convert` makes of them, and a recipe that trains on one."""

import atexit
import functools
import hashlib
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images

from tests.net.commands import RECIPE, must_run, words

NUM_SMALL, NUM_LARGE, NUM_PHOTOS = 300, 4_500, 64


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


@functools.cache
def converted() -> Path:
    """A folder of the sets `small` and `large` (8 pixels, 3 and 10 classes), `photos` and `plain`.

    The last two have the same photographs and odd images, the last without restart markers.
    """
    folder = Path(tempfile.mkdtemp(prefix="net-sets-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_files(folder / "small-images", in_classes(_squares(NUM_SMALL), 3))
    write_files(folder / "large-images", in_classes(_squares(NUM_LARGE), 10))
    write_files(folder / "photos-images", in_classes({**photographs(), **odd_images()}, 3))
    small = _conversion("small", "small", 4, shard_mib=0.01)
    large = _conversion("large", "large", 64)
    photos = _conversion("photos", "photos", 8)
    plain = _conversion("photos", "plain", 8, index_jpeg="false")
    must_run(folder, [small, large, photos, plain])
    return folder


def _conversion(images: str, name: str, rows: int, **keys: Any) -> list[str]:
    places = {"source": f"{images}-images", "destination": name}
    return words("convert", "seed=3", **places, rows_per_row_group=rows, **keys)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def in_classes(images: dict[str, bytes], num_classes: int) -> dict[str, bytes]:
    """Images in folders of classes, in turn."""
    named = enumerate(images.items())
    return {f"class_{k % num_classes}/{name}": content for k, (name, content) in named}


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


def convert_digits(folder: Path, own: dict[str, str]) -> None:
    """The digits of scikit-learn as the data sets `folder/train` and `folder/test`, each sixth."""
    found, files = load_digits(), {}
    for number, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        pixels = np.repeat(np.repeat(np.uint8(image * 255 / 16), 4, axis=0), 4, axis=1)
        name = f"{'train' if number % 6 else 'test'}-images/{label}/{number:04d}.png"
        files[name] = _encoded(Image.fromarray(pixels), "PNG")
    write_files(folder, files)
    must_run(folder, [_conversion(split, split, 32) for split in ("train", "test")], own)


def write_recipe(folder: Path, name: str, **sections: dict[str, Any]) -> Path:
    """Two workers, ZeRO 2, a tiny ViT, 24 steps (`recipe.yaml`), with changes by section.

    `folder` holds the data sets, the runs and MLflow's file.
    """
    text = RECIPE.read_text().replace("FOLDER", str(folder)).replace("NAME", name)
    recipe: dict[str, Any] = json.loads(text)  # which is YAML, too
    for section, changes in sections.items():
        recipe[section] = {**recipe.get(section, {}), **changes}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    return path
