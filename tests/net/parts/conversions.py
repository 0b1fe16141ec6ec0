"""What `convert` makes of the same images in each kind of source, and which it rejects."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from google_crc32c import value as crc32c
from PIL import Image

import vit_ray
from tests.net.commands import run_commands
from tests.net.sets import digest, odd_images, photographs

CLASSES = ["bird", "cat", "dog"]
Item = tuple[str, str, bytes]  # number as text, class, encoded image or what claims to be one


def record(folder: Path) -> dict[str, Any]:
    """Rows in their order, classes and rejections, by source."""
    sources: dict[str, tuple[Callable[[Path, list[Item]], Path], list[str]]] = {
        "class folders": (_folders, []),
        "shrunk and turned": (_folders, ["convert.shrink_to=48", "convert.apply_orientation=true"]),
        "too much rejected": (_folders, ["convert.max_rejected_fraction=0.01"]),
        "tar": (_tars, []),
        "damaged tar": (_damaged_tar, []),
        "parquet": (_parquet, []),
        "parquet in place": (_parquet, ["convert.in_place=true"]),
        "csv": (_csv, []),
        "jsonl": (_jsonl, []),
        "tfrecord": (_tfrecord, []),
    }
    (folder / "recipe.yaml").write_text("name: net\n")
    common = ["convert.rows_per_row_group=4", "convert.max_rejected_fraction=0.5"]
    commands = []
    for name, (write, words) in sources.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        source = f"convert.source={write(place / 'source', _items())}"
        target = f"convert.destination={place}/set"
        commands.append(["convert", "recipe.yaml", source, target, *common, *words])
    results = run_commands(folder, commands)
    return {
        name: _converted(folder / name.replace(" ", "-") / "set", result.code)
        for name, result in zip(sources, results, strict=True)
    }


def _converted(target: Path, code: int) -> dict[str, Any]:
    if code != 0:
        return {"exit code": code, "is committed": any(target.glob("manifest*"))}
    rejected = pq.read_table(target / "rejected.parquet").to_pylist()
    return {
        "classes": vit_ray.open_dataset(str(target)).classes,
        "rows": _opened(target) if "in-place" in target.parent.name else _stored(target),
        "rejected": {row["key"]: _kind(row["reason"]) for row in rejected},
    }


def _stored(target: Path) -> list[str]:
    files = [file for file in sorted(target.glob("*.parquet")) if _has_images(file)]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    images = [Image.open(io.BytesIO(row["image"])) for row in rows]
    sizes = [(row["width"], row["height"]) for row in rows]
    assert sizes == [image.size for image in images]
    named = zip(rows, images, strict=True)
    return [_row(row["key"], row["labels"], image) for row, image in named]


def _has_images(file: Path) -> bool:
    return "image" in pq.read_schema(file).names


def _opened(target: Path) -> list[str]:
    samples = vit_ray.open_dataset(str(target))
    return [_row(one.key, one.labels, one.image) for one in samples]


def _row(key: str, labels: Any, image: Image.Image) -> str:
    pixels = np.asarray(image.convert("RGB")).tobytes()
    return f"{key} {list(labels)} {image.size} {digest(pixels)}"


def _kind(reason: str) -> str:
    """A word for why an image is rejected, whatever the sentence."""
    words = {
        "empty": "empty|no bytes",
        "no image": "not decodable|no image|cannot identify",
        "damaged": "damaged|truncated|premature",
        "no label": "label",
        "absent": "no such|not exist|missing|not found",
    }
    kinds = (kind for kind, pattern in words.items() if re.search(pattern, reason, re.IGNORECASE))
    return next(kinds, reason)


def _items() -> list[Item]:
    """Thirty images, three of which are no usable ones."""
    images = [*list(photographs().values())[:21], *odd_images().values()]
    images[4], images[9], images[14] = b"", b"no image", images[14][:900]
    return [(f"{n:03d}", CLASSES[n % 3], image) for n, image in enumerate(images)]


def _folders(source: Path, items: list[Item]) -> Path:
    for key, label, content in items:
        place = source / label / f"{key}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    (source / "empty-class").mkdir()
    return source


def _tars(source: Path, items: list[Item]) -> Path:
    source.mkdir()
    for part in (0, 1):
        with tarfile.open(source / f"part-{part}.tar", "w") as tar:
            for key, label, content in items[part::2]:
                files = {"jpg": content, "cls": label.encode()}
                if key == "016":
                    del files["cls"]
                for suffix, value in files.items():
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(value)
                    tar.addfile(info, io.BytesIO(value))
    return source


def _damaged_tar(source: Path, items: list[Item]) -> Path:
    tar = _tars(source, items) / "part-1.tar"
    tar.write_bytes(tar.read_bytes()[:20_000])
    return source


def _parquet(source: Path, items: list[Item]) -> Path:
    images = [{"bytes": content, "path": f"{key}.jpg"} for key, _, content in items]
    labels = [CLASSES.index(label) for _, label, _ in items]
    label = {"_type": "ClassLabel", "names": CLASSES}
    features = {"image": {"_type": "Image"}, "label": label}
    table = pa.table({"image": images, "label": labels}).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )
    source.mkdir()
    pq.write_table(table, source / "train-00000-of-00001.parquet", row_group_size=5)
    return source


def _csv(source: Path, items: list[Item]) -> Path:
    _folders(source, items)
    with open(source / "list.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["path", "label"])
        lines.writerows([f"{label}/{key}.jpg", f"{label}, small"] for key, label, _ in items)
        lines.writerow(["cat/absent.jpg", "cat, small"])
    return source / "list.csv"


def _jsonl(source: Path, items: list[Item]) -> Path:
    _folders(source, items)
    rows = [{"path": f"{label}/{key}.jpg", "label": [label, "animal"]} for key, label, _ in items]
    del rows[16]["label"]
    (source / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return source / "list.jsonl"


def _tfrecord(source: Path, items: list[Item]) -> Path:
    source.mkdir()
    (source / "label.labels.txt").write_text("\n".join(CLASSES) + "\n")
    with open(source / "pets-train.tfrecord-00000-of-00001", "wb") as file:
        for _, label, content in items:
            image = _message(1, b"image") + _message(2, _message(1, _message(1, content)))
            number = _message(3, _message(1, bytes([CLASSES.index(label)])))
            entries = _message(1, image) + _message(1, _message(1, b"label") + _message(2, number))
            example = _message(1, entries)
            length = struct.pack("<Q", len(example))
            file.write(length + _masked_crc32c(length) + example + _masked_crc32c(example))
    return source


def _message(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def _masked_crc32c(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
