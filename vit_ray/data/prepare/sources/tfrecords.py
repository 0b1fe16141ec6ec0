"""TFRecord files of `tf.train.Example`, as TensorFlow Datasets (TFDS) keeps them; no TensorFlow.

A record is its length (uint64) and that number's checksum, its bytes and their checksum. An Example
is a protocol buffer of named lists of bytes, floats or integers. TFDS keeps the encoded image as
`image`, its class as the index `label`, and the names in `label.labels.txt` beside the files; other
features may be the label in its place, or what a task of VTAB computes from them.
"""

import io
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, Final

import numpy as np
from google_crc32c import value as crc32c
from PIL import Image

from vit_ray.data.images.crops import open_image
from vit_ray.data.prepare.label_map import check_unique
from vit_ray.data.prepare.sources.columns import extra_of
from vit_ray.data.prepare.sources.entries import (
    MOST_IMAGE_BYTES,
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    rejected,
    with_problem,
)
from vit_ray.data.prepare.sources.label_values import MOST_TEXT_BYTES, labels_of_value
from vit_ray.data.prepare.sources.vtab_labels import VTAB_LABELS, vtab_label
from vit_ray.storage import Location, closed_after, locate

_IMAGE_FIELDS: Final = ("image", "image/encoded")
_LABEL_FIELDS: Final = ("label", "labels")
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")
_CHECKSUM_BYTES: Final = _CHECKSUM.size
_BUFFER: Final = 1 << 20
_FLOAT_BYTES: Final = 4
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

Span = tuple[int, int]
"""First byte, and the one behind the last, in a record."""
Value = int | float | Span


def index_tfrecord(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """The records of a file, in its order.

    Raises:
        DamagedUnitError: the file is cut or broken; all records before that have been yielded.
    """
    entries = _entries(unit)
    if unit.label_field in VTAB_LABELS and VTAB_LABELS[unit.label_field].is_binary:
        yield from _packed_brighter(entries, pack)
    else:
        yield from (entry for entry, _ in entries)


def _packed_brighter(
    entries: Iterator[tuple[IndexEntry, bytes]], pack: Location
) -> Iterator[IndexEntry]:
    """Images of ones and zeros as images of 255 and 0, in a plain file.

    Raises:
        DamagedUnitError: as `index_tfrecord`; the file has what was before the damage.
    """
    offset = 0
    damage: DamagedUnitError | None = None
    with (
        pack.atomic_output() as target,
        closed_after(target.filesystem.open_output_stream(target.path)) as output,
    ):
        try:
            for entry, image in entries:
                if entry.problem is None:
                    entry, image = _made_brighter(entry, image)
                if entry.problem is None:
                    entry = replace(entry, path=pack.uri, offset=offset, length=len(image))
                    output.write(image)
                    offset += len(image)
                yield entry
        except DamagedUnitError as error:
            damage = error
    if damage is not None:
        raise damage


def _made_brighter(entry: IndexEntry, image: bytes) -> tuple[IndexEntry, bytes]:
    try:
        return entry, _brighter(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's
        return with_problem(entry, f"it cannot be read as an image: {error}"), b""


def _brighter(image: bytes) -> bytes:
    pixels = np.asarray(open_image(image))
    if pixels.max() > 1:
        return image
    brighter = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8) * np.uint8(255)).save(brighter, "PNG")
    return brighter.getvalue()


def _entries(unit: SourceUnit) -> Iterator[tuple[IndexEntry, bytes]]:
    """Each record's entry, and its image."""
    stem = unit.name.replace(".tfrecord", "")
    location = locate(unit.path)
    with location.filesystem.open_input_file(location.path) as opened:
        file = io.BufferedReader(opened, _BUFFER)
        for number, (offset, record) in enumerate(_records(file, opened.size(), unit.path)):
            key = f"{stem}/{number:08d}"
            if isinstance(record, str):
                yield rejected(unit.path, key, record), b""
                continue
            entry = _entry(unit, key, offset, record)
            first = entry.offset - offset
            yield entry, record[first : first + entry.length]


def names_beside(unit: SourceUnit) -> Location:
    """Where the names of the classes may be."""
    name = f"{unit.label_field or _LABEL_FIELDS[0]}.labels.txt"
    return locate(unit.path.rpartition("/")[0]).child(name)


def declared_classes(unit: SourceUnit) -> list[str] | None:
    """The names of a task of VTAB, or those beside a file; None where there are none."""
    if unit.label_field in VTAB_LABELS:
        return [str(label) for label in range(VTAB_LABELS[unit.label_field].num_classes)]
    location = names_beside(unit)
    if not location.exists():
        return None
    names = location.read().decode().splitlines()
    check_unique(names, location.uri)
    return names


def _records(file: IO[bytes], size: int, path: str) -> Iterator[tuple[int, bytes | str]]:
    """Offset and bytes of each record; in place of the bytes, why they cannot be used."""
    at = 0
    while at < size:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise DamagedUnitError(path, at, "the file ends inside the head of a record")
        length, checksum = _HEADER.unpack(header)
        if checksum != masked_crc32c(header[:8]):
            raise DamagedUnitError(path, at, "the length of a record has another checksum")
        start = at + _HEADER.size
        if start + length + _CHECKSUM_BYTES > size:
            raise DamagedUnitError(path, at, f"a record of {length:,} bytes, which are not there")
        yield start, _checked_record(file, length)
        at = start + length + _CHECKSUM_BYTES
        file.seek(at)


def _checked_record(file: IO[bytes], length: int) -> bytes | str:
    if length > MOST_IMAGE_BYTES:
        return f"the record has {length:,} bytes; an image has at most {MOST_IMAGE_BYTES:,}"
    record = file.read(length)
    (checksum,) = _CHECKSUM.unpack(file.read(_CHECKSUM_BYTES))
    if checksum != masked_crc32c(record):
        return "the record is damaged: its bytes have another checksum"
    return record


def _entry(unit: SourceUnit, key: str, offset: int, record: bytes) -> IndexEntry:
    try:
        features = features_of(record)
        image = next((features[name] for name in _IMAGE_FIELDS if name in features), [])
        if len(image) != 1 or not isinstance(image[0], tuple):
            found = ", ".join(sorted(features)[:20])
            raise ValueError(f"it has no encoded image in {_IMAGE_FIELDS}, only {found}")
        start, stop = image[0]
        labels, kind = labels_of_value(_label(unit, features, record))
        fields = {name: _plain(features[name], record) for name in unit.columns if name in features}
        extra = extra_of(fields, unit.columns)
    except ValueError as error:
        return rejected(unit.path, key, str(error))
    return IndexEntry(
        unit.path, offset + start, stop - start, key, labels, label_kind=kind, extra=extra
    )


def _label(unit: SourceUnit, features: dict[str, list[Any]], record: bytes) -> Any:
    """The label as `labels_of_value` takes it.

    Raises:
        ValueError: the features do not have what it is made of, or a text is none.
    """
    field = unit.label_field
    if field in VTAB_LABELS:
        return vtab_label(field, features)
    if field is not None and field not in features:
        found = ", ".join(sorted(features)[:20])
        raise ValueError(f"it has no convert.label_field={field!r}, only {found}")
    names = _LABEL_FIELDS if field is None else (field,)
    label = next((features[name] for name in names if name in features), None)
    return None if label is None else [_value(one, record) for one in label]


def _plain(values: list[Any], record: bytes) -> Any:
    plain = [_value(one, record) for one in values]
    return plain[0] if len(plain) == 1 else plain


def _value(value: Value, record: bytes) -> float | str:
    """A number, or bytes as the text that they are.

    Raises:
        ValueError: they are no text.
    """
    if not isinstance(value, tuple):
        return value
    if value[1] - value[0] > MOST_TEXT_BYTES:
        raise ValueError(f"a text of {value[1] - value[0]:,} bytes; the most are {MOST_TEXT_BYTES}")
    try:
        return record[slice(*value)].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its label or a field of convert.columns is no text: {error}") from None


def features_of(record: bytes) -> dict[str, list[Value]]:
    """Numbers, and places of bytes, of each feature of a `tf.train.Example`.

    Raises:
        ValueError: it is no such message.
    """
    found: dict[str, list[Value]] = {}
    for features in _spans(record, (0, len(record)), 1):
        for entry in _spans(record, features, 1):
            names = _spans(record, entry, 1)
            if len(names) != 1:
                raise ValueError("a feature without a name")
            name = record[slice(*names[0])].decode("utf-8", "backslashreplace")
            found[name] = [
                one for value in _spans(record, entry, 2) for one in _list(record, value)
            ]
    return found


def _list(record: bytes, feature: Span) -> list[Value]:
    """Values of a Feature: a BytesList is its field 1, a FloatList its field 2, an Int64List 3."""
    texts = [one for values in _spans(record, feature, 1) for one in _spans(record, values, 1)]
    floats = [
        number
        for values in _spans(record, feature, 2)
        for packed in _spans(record, values, 1)
        for number in _floats(record[slice(*packed)])
    ]
    numbers: list[int] = []
    for values in _spans(record, feature, 3):
        for number, kind, value in _fields(record, values):
            if number == 1 and kind == _VARINT and isinstance(value, int):
                numbers.append(_signed(value))
            elif number == 1 and isinstance(value, tuple):
                numbers += _packed(record, value)
    return [*texts, *floats, *numbers]


def _floats(packed: bytes) -> list[float]:
    if len(packed) % _FLOAT_BYTES:
        raise ValueError("no tf.train.Example: a list of floats that ends inside of one")
    return list(struct.unpack(f"<{len(packed) // _FLOAT_BYTES}f", packed))


def _packed(record: bytes, span: Span) -> list[int]:
    at, stop = span
    found = []
    while at < stop:
        value, at = _varint(record, at, stop)
        found.append(_signed(value))
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _spans(record: bytes, message: Span, number: int) -> list[Span]:
    """Places of the fields of a number that have bytes or messages."""
    return [
        value
        for field, _, value in _fields(record, message)
        if field == number and isinstance(value, tuple)
    ]


def _fields(record: bytes, message: Span) -> Iterator[tuple[int, int, int | Span]]:
    """Number, wire type, and value or place of each field of a message."""
    at, stop = message
    while at < stop:
        tag, at = _varint(record, at, stop)
        kind = tag & 7
        value: int | Span
        if kind == _VARINT:
            value, at = _varint(record, at, stop)
        elif kind == _BYTES:
            length, at = _varint(record, at, stop)
            value, at = (at, at + length), at + length
        elif kind in (_FIXED_32, _FIXED_64):
            width = 4 if kind == _FIXED_32 else 8
            value, at = (at, at + width), at + width
        else:
            raise ValueError(f"no tf.train.Example: a field of the wire type {kind}")
        if at > stop:
            raise ValueError("no tf.train.Example: a field that goes beyond its message")
        yield tag >> 3, kind, value


def _varint(record: bytes, at: int, stop: int) -> tuple[int, int]:
    """The number at a place, seven bits to a byte, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise ValueError("no tf.train.Example: a number that goes beyond its message")
        byte = record[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("no tf.train.Example: a number of more than ten bytes")


def masked_crc32c(content: bytes) -> int:
    """As TFRecord files have it (tensorflow/core/lib/hash/crc32c.h)."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
