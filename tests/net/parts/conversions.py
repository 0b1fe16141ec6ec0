"""What `convert` makes of the same images in each kind of source, and which it rejects."""

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

import vit_ray
from tests.net.commands import run_commands, words
from tests.net.sets import digest, odd_images, photographs, write_files

CLASSES = ["bird", "cat", "dog"]
Item = tuple[str, str, bytes]  # number as text, class, encoded image or what claims to be one
Writer = Callable[[Path, list[Item]], Path]


def record(folder: Path) -> dict[str, Any]:
    """Rows in their order, classes and rejections, by source."""
    sources: dict[str, tuple[Writer, dict[str, Any]]] = {
        "class folders": (_folders, {}),
        "shrunk and turned": (_folders, {"shrink_to": 48, "apply_orientation": "true"}),
        "too much rejected": (_folders, {"max_rejected_fraction": 0.01}),
        "tar": (_tars, {}),
        "damaged tar": (_damaged_tar, {}),
        "parquet": (_parquet, {}),
        "parquet in place": (_parquet, {"in_place": "true"}),
        "csv": (_csv, {}),
        "jsonl": (_jsonl, {}),
        "tfrecord": (_tfrecord, {}),
    }
    common = {"rows_per_row_group": 4, "max_rejected_fraction": 0.5}
    commands = []
    for name, (write, keys) in sources.items():
        (folder / name).mkdir()
        places = {"source": write(folder / name / "source", _items()), "destination": f"{name}/set"}
        commands.append(words("convert", **places, **{**common, **keys}))
    results = run_commands(folder, commands)
    return {
        name: _converted(folder / name / "set", code)
        for name, (code, _) in zip(sources, results, strict=True)
    }


def _converted(target: Path, code: int) -> dict[str, Any]:
    if code != 0:
        return {"exit code": code, "is committed": any(target.glob("manifest*"))}
    data, rows = vit_ray.open_dataset(str(target)), []
    for sample in data:
        pixels = digest(np.asarray(sample.image.convert("RGB")).tobytes())
        rows.append(f"{sample.key} {list(sample.labels)} {sample.image.size} {pixels}")
    rejected = pq.read_table(target / "rejected.parquet").to_pylist()
    kinds = {row["key"]: _kind(row["reason"]) for row in rejected}
    return {"classes": data.classes, "rows": rows, "rejected": kinds}


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
    images = [*list(photographs().values())[:21], *odd_images().values()]
    images[4], images[9], images[14] = b"", b"no image", images[14][:900]
    return [(f"{n:03d}", CLASSES[n % 3], image) for n, image in enumerate(images)]


def _folders(source: Path, items: list[Item]) -> Path:
    write_files(source, {f"{label}/{key}.jpg": content for key, label, content in items})
    (source / "empty-class").mkdir()
    return source


def _tars(source: Path, items: list[Item]) -> Path:
    source.mkdir()
    for part in (0, 1):
        with tarfile.open(source / f"part-{part}.tar", "w") as tar:
            for key, label, content in items[part::2]:
                for name, value in ((f"{key}.jpg", content), (f"{key}.cls", label.encode())):
                    if name != "016.cls":
                        info = tarfile.TarInfo(name)
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
            values = {"image": _field(1, _field(1, content))}
            values["label"] = _field(3, _field(1, bytes([CLASSES.index(label)])))
            entries = [_field(1, _field(1, k.encode()) + _field(2, v)) for k, v in values.items()]
            example = _field(1, b"".join(entries))
            length = struct.pack("<Q", len(example))
            file.write(length + _masked_crc32c(length) + example + _masked_crc32c(example))
    return source


def _field(number: int, content: bytes) -> bytes:
    """Of a protocol buffer: its length has four digits of base 128, of which all but one go on."""
    length = [len(content) >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)]
    length[-1] &= 0x7F
    return bytes([number << 3 | 2, *length]) + content


def _masked_crc32c(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
