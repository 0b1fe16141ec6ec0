"""Layouts in which people keep images, each turned into the same index.

A source is cut into units (a class folder, a tar shard, a parquet or text file). The index has
a row per image: where its bytes lie (path, offset, length), key, and labels as text. Layouts
whose rows cannot be reached one by one are first packed into plain files of concatenated images.
"""

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from vit_ray.storage import Location, locate

Format = Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl"]

WHOLE_FILE: Final = -1
"""Offset of an image that is a file of its own."""

INDEX_SCHEMA: Final = pa.schema(
    [
        ("path", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("key", pa.string()),
        ("labels", pa.list_(pa.string())),
        ("problem", pa.string()),
    ]
)

IMAGE_SUFFIXES: Final = frozenset(
    {"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "img", "image"}
)
_LABEL_SUFFIXES: Final = ("cls", "json")


@dataclass(frozen=True)
class IndexEntry:
    """One image of a source. `problem` says why it cannot be used, before it is even read."""

    path: str
    offset: int
    length: int
    key: str
    labels: tuple[str, ...]
    problem: str | None = None

    def read(self) -> bytes:
        """The encoded image.

        Raises:
            ValueError: if the source says that this is no usable image, or it is missing.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        location = locate(self.path)
        try:
            if self.offset == WHOLE_FILE:
                return location.read()
            return location.read_range(self.offset, self.length)
        except FileNotFoundError as error:
            raise ValueError(f"no such file: {self.path}") from error


@dataclass(frozen=True)
class SourceUnit:
    """A part of a source that one task indexes; `folder` is the root that keys are relative to."""

    format: str
    path: str
    folder: str


def detect_format(source: str) -> str:
    """Name of the layout of a source, by what lies there.

    Raises:
        ValueError: if nothing is there.
    """
    location = locate(source)
    kind = location.info().type
    if kind == fs.FileType.NotFound:
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path.")
    if kind == fs.FileType.File:
        return _format_of_name(source) or "folder"
    names = [info.base_name for info in location.list_files(recursive=False)]
    formats = [found for found in map(_format_of_name, names) if found]
    return formats[0] if formats else "folder"


def _format_of_name(name: str) -> str | None:
    suffix = name.rsplit(".", 1)[-1].lower()
    known = {"tar": "webdataset", "parquet": "huggingface", "csv": "csv", "jsonl": "jsonl"}
    return known.get(suffix)


_SUFFIX_OF: Final = {"webdataset": "tar", "huggingface": "parquet", "csv": "csv", "jsonl": "jsonl"}


def list_units(source: str, format: Format) -> list[SourceUnit]:
    """The units of a source, in a fixed order.

    Raises:
        ValueError: if the source is missing, or holds nothing of its layout.
    """
    detected = detect_format(source)
    layout = detected if format == "auto" else format
    location = locate(source)
    scheme = "s3://" if source.startswith("s3://") else ""
    root = scheme + location.path
    if location.info().type == fs.FileType.File:
        return [SourceUnit(layout, root, root.rsplit("/", 1)[0])]
    if layout == "folder":
        names = [name for name in location.list_folders() if not name.startswith(".")]
        expected = f"{root}/CLASS/IMAGE"
    else:
        files = [info.base_name for info in location.list_files(recursive=False)]
        names = [name for name in files if name.lower().endswith("." + _SUFFIX_OF[layout])]
        expected = f"{root}/*.{_SUFFIX_OF[layout]}"
    if not names:
        raise ValueError(
            f"convert.source={source!r} holds nothing of the layout {layout!r}; "
            f"expected {expected}."
        )
    return [SourceUnit(layout, f"{root}/{name}", root) for name in names]


def index_unit(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """The images of one unit. `pack` is written only by layouts that need packing."""
    yield from _INDEXERS[unit.format](unit, pack)


def class_names_in_file(unit: SourceUnit) -> list[str] | None:
    """Class names that a file of the Hugging Face layout declares; None where there are none."""
    if unit.format != "huggingface":
        return None
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as file:
        metadata = pq.ParquetFile(file).schema_arrow.metadata or {}
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    for name in ("label", "labels"):
        feature = features.get(name, {})
        names = feature.get("names") or feature.get("feature", {}).get("names")
        if names:
            return [str(name) for name in names]
    return None


def _index_folder(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Files below a class folder, at any depth; hidden ones are passed over."""
    scheme = "s3://" if unit.path.startswith("s3://") else ""
    label = unit.path.rsplit("/", 1)[-1]
    for info in locate(unit.path).list_files():
        path = scheme + info.path
        key = _relative(path, unit.folder)
        if not any(part.startswith(".") for part in key.split("/")):
            yield IndexEntry(path, WHOLE_FILE, info.size, key, (label,))


def _relative(path: str, folder: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def _index_tar(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Samples of a WebDataset shard: members that share a name up to the first dot of its file."""
    shard = unit.path.rsplit("/", 1)[-1].removesuffix(".tar")
    location = locate(unit.path)
    with (
        location.filesystem.open_input_file(location.path) as file,
        tarfile.open(fileobj=_buffered(file), mode="r:") as tar,
    ):
        for name, members in _samples(tar):
            yield _tar_entry(unit.path, f"{shard}/{name}", members, tar)


def _buffered(file: Any) -> IO[bytes]:
    """In pieces of a MiB: tarfile reads 512 bytes at a time, each a request to an object store."""
    return io.BufferedReader(file, 1 << 20)


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Neighbouring members with one name, by suffix; WebDataset keeps a sample's files together."""
    current: str | None = None
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        if not member.isfile():
            continue
        folder, _, file = member.name.rpartition("/")
        stem, _, suffix = file.partition(".")
        name = f"{folder}/{stem}" if folder else stem
        if name != current and members:
            yield str(current), members
            members = {}
        current = name
        members[suffix.lower()] = member
    if members:
        yield str(current), members


def _tar_entry(
    path: str, key: str, members: dict[str, tarfile.TarInfo], tar: tarfile.TarFile
) -> IndexEntry:
    image = next((m for suffix, m in members.items() if suffix in IMAGE_SUFFIXES), None)
    if image is None:
        found = sorted(members)
        return IndexEntry(path, 0, 0, key, (), f"the sample has no image, only {found}")
    entry = IndexEntry(path, image.offset_data, image.size, key, ())
    label = next((members[s] for s in _LABEL_SUFFIXES if s in members), None)
    if label is None:
        return replace(entry, problem="the sample has no .cls or .json label")
    content = tar.extractfile(label)
    assert content is not None  # a regular file always opens
    return _with_labels(entry, content.read().decode("utf-8", "replace"), label.name)


def _with_labels(entry: IndexEntry, text: str, name: str) -> IndexEntry:
    if not name.endswith(".json"):
        return replace(entry, labels=_split_labels(text))
    try:
        fields = json.loads(text)
        return replace(entry, labels=_labels_of_fields(fields))
    except (ValueError, KeyError, AttributeError) as error:
        return replace(entry, problem=f"its .json has no usable label ({error})")


def _labels_of_fields(fields: dict[str, Any]) -> tuple[str, ...]:
    """Labels of a record: a list under `labels`, or one under `label`, `cls` or `class`."""
    for name in ("labels", "label", "cls", "class"):
        if fields.get(name) is not None:
            value = fields[name]
            if isinstance(value, list):
                return tuple(str(v) for v in value)
            return _split_labels(str(value)) if name == "labels" else (str(value).strip(),)
    raise KeyError("label")


def _split_labels(text: str) -> tuple[str, ...]:
    """Labels in one text field: separated by `;` or `,`, otherwise one."""
    return tuple(part.strip() for part in text.replace(";", ",").split(",") if part.strip())


def _index_parquet(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Rows of a Hugging Face parquet file: `image` = {bytes, path}, `label` or `labels`."""
    location = locate(unit.path)
    stem = unit.path.rsplit("/", 1)[-1].removesuffix(".parquet")
    offset, row = 0, 0
    with (
        location.filesystem.open_input_file(location.path) as file,
        pack.atomic_output() as target,
        target.filesystem.open_output_stream(target.path) as output,
    ):
        source = pq.ParquetFile(file)
        image, label = _hub_columns(source.schema_arrow, unit.path)
        for batch in source.iter_batches(batch_size=64, columns=[image, label]):
            for fields in batch.to_pylist():
                key = f"{stem}/{row:08d}"
                row += 1
                content, problem = _hub_image(fields[image])
                labels = _labels_or_none({"labels": fields[label]})
                if labels is None:
                    problem = problem or "its label is null"
                output.write(content)
                yield IndexEntry(pack.uri, offset, len(content), key, labels or (), problem)
                offset += len(content)


def _labels_or_none(fields: dict[str, Any]) -> tuple[str, ...] | None:
    try:
        return _labels_of_fields(fields)
    except KeyError:
        return None


def _hub_columns(schema: pa.Schema, path: str) -> tuple[str, str]:
    images = [n for n in ("image", "img", "jpg", "picture") if n in schema.names]
    labels = [n for n in ("label", "labels", "fine_label", "cls") if n in schema.names]
    if not images or not labels:
        raise ValueError(
            f"{path!r} is no Hugging Face image data set: its columns are {schema.names}; "
            f"expected an image column (image, img) and a label column (label, labels)."
        )
    return images[0], labels[0]


def _hub_image(value: Any) -> tuple[bytes, str | None]:
    content = value.get("bytes") if isinstance(value, dict) else value
    if content is None:
        return b"", "its image has no bytes"
    return bytes(content), None


def _index_csv(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Rows of a CSV file with a header: `path` and `label` or `labels`."""
    location = locate(unit.path)
    with location.filesystem.open_input_stream(location.path) as file:
        text = (line.decode("utf-8-sig") + "\n" for line in _lines(file))
        for fields in csv.DictReader(text):
            yield _listed(unit, fields)


def _index_jsonl(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Lines of JSON objects with `path` and `label` or `labels`."""
    location = locate(unit.path)
    with location.filesystem.open_input_stream(location.path) as stream:
        for number, line in enumerate(_lines(stream)):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError as error:
                problem = f"line {number + 1} is not JSON ({error})"
                yield IndexEntry(unit.path, 0, 0, f"{unit.path}#{number + 1}", (), problem)
                continue
            yield _listed(unit, fields)


def _lines(stream: Any) -> Iterator[bytes]:
    rest = b""
    while chunk := stream.read(1 << 20):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


_PATH_FIELDS: Final = ("path", "file", "file_name", "image", "image_path", "filepath")


def _listed(unit: SourceUnit, fields: dict[str, Any]) -> IndexEntry:
    """A row of a list of paths; a relative path is relative to the list's folder."""
    name = next((str(fields[n]) for n in _PATH_FIELDS if fields.get(n)), None)
    if name is None:
        raise ValueError(
            f"{unit.path!r}: no column of {list(_PATH_FIELDS)} holds the image's path; "
            f"found {sorted(fields)}."
        )
    path = name if name.startswith(("/", "s3://")) else f"{unit.folder}/{name}"
    labels = _labels_or_none(fields)
    problem = "it has no label" if not labels else None
    return IndexEntry(path, WHOLE_FILE, WHOLE_FILE, name, labels or (), problem)


_INDEXERS: Final[dict[str, Callable[[SourceUnit, Location], Iterable[IndexEntry]]]] = {
    "folder": _index_folder,
    "webdataset": _index_tar,
    "huggingface": _index_parquet,
    "csv": _index_csv,
    "jsonl": _index_jsonl,
}
