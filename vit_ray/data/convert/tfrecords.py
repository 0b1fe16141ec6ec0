"""TFRecord files of `tf.train.Example`, as TensorFlow Datasets (TFDS) writes them; no TensorFlow.

A record is its length (uint64) and that number's checksum, its bytes and their checksum. An Example
is a protocol buffer of named lists of bytes, floats or integers. TFDS stores the encoded image as
`image`, its class as the index `label`, and the names in `label.labels.txt` next to the files; the
label may also be another feature, or computed from features for a task of VTAB.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from PIL import Image

from vit_ray.data.convert.labels import (
    MOST_TEXT_BYTES,
    checked_names,
    chosen_field,
    labels_of_value,
    stored_text,
)
from vit_ray.data.convert.rows import MOST_IMAGE_BYTES, DamagedUnitError, Row, Unit
from vit_ray.data.convert.vtab_labels import VTAB_LABELS, vtab_label
from vit_ray.data.crops import open_image
from vit_ray.storage import Location, locate

_IMAGE_FIELDS: Final = ("image", "image/encoded")
_LABEL_FIELDS: Final = ("label", "labels")
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")
# Most bytes of all records of a compressed file, which is held in memory.
_MOST_INFLATED_BYTES: Final = 1 << 31
# The first bytes of a zlib stream (RFC 1950); the length of a record may have them, too.
_ZLIB: Final = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


def _example_class() -> Any:
    """The message `tf.train.Example` (tensorflow/core/example/example.proto and feature.proto).

    The map from names to features is read as the list of entries that it is on the wire, so that a
    name may be any bytes.
    """
    messages = """
        message_type { name: "Texts" field { name: "value" number: 1 type: TYPE_BYTES label: R } }
        message_type { name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: R } }
        message_type { name: "Numbers" field { name: "value" number: 1 type: TYPE_INT64 label: R } }
        message_type { name: "Feature"
            field { name: "texts" number: 1 type: TYPE_MESSAGE type_name: "Texts" }
            field { name: "floats" number: 2 type: TYPE_MESSAGE type_name: "Floats" }
            field { name: "numbers" number: 3 type: TYPE_MESSAGE type_name: "Numbers" } }
        message_type { name: "Entry" field { name: "name" number: 1 type: TYPE_BYTES }
            field { name: "feature" number: 2 type: TYPE_MESSAGE type_name: "Feature" } }
        message_type { name: "Features"
            field { name: "entry" number: 1 type: TYPE_MESSAGE type_name: "Entry" label: R } }
        message_type { name: "Example"
            field { name: "features" number: 1 type: TYPE_MESSAGE type_name: "Features" } }
    """.replace("label: R", "label: LABEL_REPEATED")
    file = descriptor_pb2.FileDescriptorProto(name="vit_ray_example.proto", package="vit_ray")
    text_format.Merge(messages, file)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("vit_ray.Example"))


_Example: Final = _example_class()
Value = int | float | bytes


def tfrecord_rows(unit: Unit) -> Iterator[Row]:
    """The records of a file, in its order; of a compressed one with their images.

    Raises:
        DamagedUnitError: the file is truncated or broken; all records before that have been
            yielded.
    """
    stem, task = unit.name.replace(".tfrecord", ""), VTAB_LABELS.get(unit.label_field or "")
    with unit.opened() as (file, size):
        head = file.peek(_HEADER.size)[: _HEADER.size]
        is_record = head[8:] == _CHECKSUM.pack(masked_crc32c(head[:8]))
        is_packed = head[:2] in _ZLIB and not is_record
        records: Any = file
        if is_packed:
            records = _inflated(file, unit.path)
            size = len(records.getbuffer())
        for number, (offset, record) in enumerate(_records(records, size, unit.path)):
            key = f"{stem}/{number:08d}"
            if isinstance(record, str):
                yield Row(key, problem=record)
                continue
            row = _row(unit, key, offset, record)
            if row.problem is None and (is_packed or (task and task.is_binary)):
                first = row.offset - offset
                image = record[first : first + row.length]
                row = _brighter(row, image) if task and task.is_binary else _held(row, image)
            yield row


def _inflated(file: IO[bytes], path: str) -> io.BytesIO:
    """What a zlib stream holds.

    Raises:
        DamagedUnitError: the stream is broken or cut short.
        ValueError: it holds more than a process should.
    """
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(file.read(), _MOST_INFLATED_BYTES)
    except zlib.error as error:
        raise DamagedUnitError(path, 0, f"zlib: {error}") from error
    if len(content) == _MOST_INFLATED_BYTES:
        raise ValueError(
            f"{path!r} is compressed with zlib and holds {_MOST_INFLATED_BYTES >> 30} GiB or more; "
            "decompress it first, or write smaller files"
        )
    if not stream.eof:
        raise DamagedUnitError(path, len(content), "the zlib stream ends early")
    return io.BytesIO(content)


def _held(row: Row, image: bytes) -> Row:
    return replace(row, path="", offset=-1, image=image, length=len(image))


def _brighter(row: Row, image: bytes) -> Row:
    """The row with its image of ones and zeros as one of 255 and 0."""
    try:
        pixels = np.asarray(open_image(image))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return row.rejected(f"it cannot be read as an image: {error}")
    if pixels.max() > 1:
        return _held(row, image)
    brighter = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8) * np.uint8(255)).save(brighter, "PNG")
    return _held(row, brighter.getvalue())


def names_beside(unit: Unit) -> Location:
    """Where the names of the classes may be."""
    name = f"{unit.label_field or _LABEL_FIELDS[0]}.labels.txt"
    return locate(unit.path.rpartition("/")[0]).child(name)


def declared_classes(unit: Unit) -> list[str] | None:
    """The names of a task of VTAB, or those next to a file; None if there are none."""
    if unit.label_field in VTAB_LABELS:
        return [str(label) for label in range(VTAB_LABELS[unit.label_field].num_classes)]
    location = names_beside(unit)
    if not location.exists():
        return None
    return checked_names(location.read().decode().splitlines(), location.uri)


def _records(file: IO[bytes], size: int, path: str) -> Iterator[tuple[int, bytes | str]]:
    """Offset and bytes of each record; instead of the bytes, why they cannot be used."""
    at = 0
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise DamagedUnitError(path, at, "the file ends inside the head of a record")
        length, checksum = _HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise DamagedUnitError(path, at, "the length of a record has another checksum")
        start = at + _HEADER.size
        at = start + length + _CHECKSUM.size
        if at > size:
            what = f"a record of {length:,} bytes, which are missing"
            raise DamagedUnitError(path, start - _HEADER.size, what)
        if length > MOST_IMAGE_BYTES:
            file.seek(at)
            what = f"the record has {length:,} bytes; an image has at most {MOST_IMAGE_BYTES:,}"
            yield start, what
            continue
        record = file.read(length)
        is_whole = file.read(_CHECKSUM.size) == _CHECKSUM.pack(masked_crc32c(record))
        problem = "the record is damaged: its bytes have another checksum"
        yield start, record if is_whole else problem


def _row(unit: Unit, key: str, offset: int, record: bytes) -> Row:
    try:
        features = features_of(record)
        names = sorted(features)
        field = chosen_field("image", unit.image_field, _IMAGE_FIELDS, names, "it")
        image = features[field]
        if len(image) != 1 or not isinstance(image[0], bytes):
            raise ValueError(f"its {field!r} is not an encoded image")
        labels, kind = labels_of_value(_label(unit, features))
        fields: dict[str, Any] = {}
        for name in filter(features.__contains__, unit.columns):
            values = list(map(_plain, features[name]))
            fields[name] = values[0] if len(values) == 1 else values
        extra = tuple(stored_text(fields.get(name)) for name in unit.columns)
    except ValueError as error:
        return Row(key, problem=str(error))
    at = offset + record.index(image[0])  # or where the same bytes appear before it
    return Row(key, labels, unit.path, at, len(image[0]), kind=kind, extra=extra)


def _label(unit: Unit, features: dict[str, list[Value]]) -> Any:
    """The label for `labels_of_value`.

    Raises:
        ValueError: the features do not include what it is made from, or a text is not UTF-8.
    """
    if unit.label_field in VTAB_LABELS:
        return vtab_label(unit.label_field, features)
    field = chosen_field("label", unit.label_field, _LABEL_FIELDS, [*features], "it")
    return list(map(_plain, features[field]))


def _plain(value: Value) -> float | str:
    """A number, or bytes as text; raises ValueError if they are not text."""
    if not isinstance(value, bytes):
        return value
    if len(value) > MOST_TEXT_BYTES:
        raise ValueError(f"a text of {len(value):,} bytes; at most {MOST_TEXT_BYTES:,} are allowed")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its label or a field of convert.columns is not text: {error}") from None


def features_of(record: bytes) -> dict[str, list[Value]]:
    """The values of each feature of a `tf.train.Example`; raises ValueError if it is not one."""
    try:
        entries = _Example.FromString(record).features.entry
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from None
    return {
        entry.name.decode("utf-8", "backslashreplace"): [
            *entry.feature.texts.value, *entry.feature.floats.value, *entry.feature.numbers.value,
        ]
        for entry in entries
    }  # fmt: skip


def masked_crc32c(content: bytes) -> int:
    """As in TFRecord files (tensorflow/core/lib/hash/crc32c.h)."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
