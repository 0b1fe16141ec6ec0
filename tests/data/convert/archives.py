"""Small sources of every format, and what a conversion makes of them."""

import io
import json
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.converting import convert
from vit_ray.data import open_dataset
from vit_ray.data.convert.archives import masked_crc32c


def tar_of(files: list[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive, by Python's own writer."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=format) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def samples(
    images: list[bytes], texts: list[bytes], suffix: str = "cls"
) -> list[tuple[str, bytes]]:
    """Files of an archive: images, named by their numbers, and the text of each."""
    return [
        (f"{i}.{ending}", content)
        for i, (image, text) in enumerate(zip(images, texts, strict=True))
        for ending, content in (("jpg", image), (suffix, text))
    ]


def write_files(root: Path, files: Mapping[str, bytes | str]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def parquet(columns: Any, features: dict[str, Any] | None = None, rows: int | None = None) -> bytes:
    """A file of these columns, and of what the datasets library says of them."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if features is not None:
        metadata = {"info": {"features": features}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows)
    return sink.getvalue()


def write_hub_file(
    path: Path,
    images: list[bytes | None],
    labels: Any,
    features: dict[str, Any] | None = None,
    rows: int = 5,
) -> None:
    """A parquet file as the datasets library writes it, in row groups of so many rows."""
    structs = [{"bytes": image, "path": f"{i}.jpg"} for i, image in enumerate(images)]
    content = parquet({"image": structs, "label": labels}, features, rows)
    write_files(path.parent, {path.name: content})


def stored_rows(target: Path | str) -> dict[str, dict[str, Any]]:
    """Key to all columns of every row, with the names of its classes, in the order of samples."""
    manifest = open_dataset(str(target))
    tables = [pq.read_table(Path(manifest.root) / file.path) for file in manifest.files]
    rows = [row for table in tables for row in table.to_pylist()]
    assert len({row["key"] for row in rows}) == len(rows) == manifest.num_images
    names = [[manifest.classes[label] for label in row["labels"]] for row in rows]
    return {row["key"]: row | {"names": n} for row, n in zip(rows, names, strict=True)}


def converted(source: Path | str, target: Path, **options: Any) -> dict[str, tuple[bytes, Any]]:
    """Key to bytes and class names of every row."""
    options = {"max_rejected_fraction": 0.1} | options
    convert(str(source), str(target), rows_per_row_group=4, index_jpeg=False, **options)
    return {key: (row["image"], row["names"]) for key, row in stored_rows(target).items()}


def labels_of(rows: dict[str, tuple[bytes, Any]]) -> dict[str, Any]:
    """Key to the class name, or to the list of names where there are several."""
    return {k: names[0] if len(names) == 1 else names for k, (_, names) in rows.items()}


def rejections(target: Path) -> dict[str, str]:
    """Key to the reason of each rejected row."""
    rows = pq.read_table(target / "rejected.parquet").to_pylist()
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"]: row["reason"] for row in rows}


def message(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """As protocol buffers have it."""
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def example(**features: list[int] | list[float] | bytes) -> bytes:
    """A tf.train.Example."""
    entries = b""
    for name, values in features.items():
        if isinstance(values, bytes):
            feature = message(1, message(1, values))
        elif values and isinstance(values[0], float):
            feature = message(2, message(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = message(3, message(1, b"".join(varint(v % (1 << 64)) for v in values)))
        entries += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, entries)


def record(content: bytes) -> bytes:
    """Of a TFRecord file."""
    length = struct.pack("<Q", len(content))
    ends = [struct.pack("<I", masked_crc32c(part)) for part in (length, content)]
    return length + ends[0] + content + ends[1]
