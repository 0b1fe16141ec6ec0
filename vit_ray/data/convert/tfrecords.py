"""TFRecord files of `tf.train.Example`, as TensorFlow Datasets (TFDS) writes them; no TensorFlow.

A record is its length (uint64) and that number's checksum, its bytes and their checksum. An Example
is a protocol buffer of named lists of bytes, floats or integers. TFDS stores the encoded image as
`image`, its class as the index `label`, and the names in `label.labels.txt` next to the files; the
label may also be another feature, or computed from features for a task of VTAB.
"""

import functools
import io
import struct
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c
from PIL import Image

from vit_ray.data.convert.archives import VTAB_LABELS, vtab_label
from vit_ray.data.convert.labels import (
    Labels,
    checked_names,
    chosen_field,
    labelled,
    labels_of_value,
)
from vit_ray.data.convert.rows import MOST_IMAGE_BYTES, DamagedUnitError, Row, Unit
from vit_ray.data.images import open_image
from vit_ray.storage import Location, locate

_IMAGE_FIELDS: Final = ("image", "image/encoded")
_LABEL_FIELDS: Final = ("label", "labels")
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")


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
    """The records of a file, in its order.

    Raises:
        DamagedUnitError: the file is truncated or broken; all records before that have been
            yielded.
    """
    stem = unit.name.replace(".tfrecord", "")
    with unit.opened() as (file, size):
        for number, (offset, record) in enumerate(_records(file, size, unit.path)):
            key = f"{stem}/{number:08d}"
            try:
                yield _row(unit, key, offset, record)
            except ValueError as error:
                yield Row(key, problem=str(error))


def names_beside(unit: Unit) -> Location:
    """Where the names of the classes may be."""
    name = f"{unit.config.label_field or _LABEL_FIELDS[0]}.labels.txt"
    return locate(unit.path.rpartition("/")[0]).child(name)


def declared_classes(unit: Unit) -> list[str] | None:
    """The names of a task of VTAB, or those next to a file; None if there are none."""
    if task := VTAB_LABELS.get(unit.config.label_field or ""):
        return [str(label) for label in range(task.num_classes)]
    location = names_beside(unit)
    if not location.exists():
        return None
    return checked_names(location.read().decode().splitlines(), location.uri)


def _records(file: IO[bytes], size: int, path: str) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each record; no bytes if they are damaged, or too many for an image."""
    at = 0
    while header := file.read(_HEADER.size):
        length, checksum = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        start, end = at + _HEADER.size, at + _HEADER.size + length + _CHECKSUM.size
        if checksum != masked_crc32c(header[:8]):
            what = "the head of a record is cut or has another checksum"
            raise DamagedUnitError(path, at, what)
        if end > size:
            raise DamagedUnitError(path, at, f"a record of {length:,} bytes, which are missing")
        record = file.read(length) if length <= MOST_IMAGE_BYTES else b""
        file.seek(start + length)
        is_whole = file.read(_CHECKSUM.size) == _CHECKSUM.pack(masked_crc32c(record))
        yield start, record if is_whole else b""
        at = end


def _row(unit: Unit, key: str, offset: int, record: bytes) -> Row:
    if not record:
        raise ValueError(
            "the record is damaged, as its bytes have another checksum, or has more than "
            f"{MOST_IMAGE_BYTES:,} bytes"
        )
    features = features_of(record)
    field = chosen_field("image", unit.config.image_field, _IMAGE_FIELDS, [*features], "it")
    image = features[field]
    if len(image) != 1 or not isinstance(image[0], bytes):
        raise ValueError(f"its {field!r} is not an encoded image")
    at = offset + record.index(image[0])  # or where the same bytes appear before it
    row = Row(key, path=unit.path, offset=at, length=len(image[0]))
    task = VTAB_LABELS.get(unit.config.label_field or "")
    if task is not None and task.is_binary:
        content = _brighter(image[0])
        row = Row(key, image=content, length=len(content))
    return labelled(row, unit, functools.partial(_described, unit, features))


def _brighter(image: bytes) -> bytes:
    """An image of ones and zeros as one of 255 and 0; raises ValueError if it cannot be read."""
    try:
        pixels = np.asarray(open_image(image))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be read as an image: {error}") from error
    if pixels.max() > 1:
        return image
    brighter = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8) * np.uint8(255)).save(brighter, "PNG")
    return brighter.getvalue()


def _described(unit: Unit, features: dict[str, list[Value]]) -> tuple[Labels, Mapping[str, Any]]:
    """The labels of a record, and its fields for `convert.columns`.

    Raises:
        ValueError: the features do not include what the label is made from, or a text is not UTF-8.
    """
    wanted, fields = unit.config.label_field, dict[str, Any]()
    if wanted in VTAB_LABELS:
        label: Any = vtab_label(wanted, features)
    else:
        label = _plain(features[chosen_field("label", wanted, _LABEL_FIELDS, [*features], "it")])
    for name in filter(features.__contains__, unit.config.columns):
        values = _plain(features[name])
        fields[name] = values[0] if len(values) == 1 else values
    return labels_of_value(label), fields


def _plain(values: list[Value]) -> list[float | str]:
    """Numbers, and bytes as text; raises ValueError if they are not text."""
    return [value.decode() if isinstance(value, bytes) else value for value in values]


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
