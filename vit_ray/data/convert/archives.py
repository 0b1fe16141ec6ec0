"""Files in which images lie one after another: WebDataset's tar shards, and TFRecord files.

*Tar.* Members that share a name are one sample. As in WebDataset, a name ends at the first dot, so
`img.0001.jpg` is the file `0001.jpg` of the sample `img`, not its image; such images are rejected
rows. tarfile stops silently at the first header that it cannot read. Here an archive must end with
its end marker and only zeros after it, or it counts as damaged.

*TFRecord*, of `tf.train.Example`, as TensorFlow Datasets (TFDS) writes them; no TensorFlow. A
record is its length (uint64) and that number's checksum, its bytes and their checksum. An Example
is a protocol buffer of named lists of bytes, floats or integers. TFDS stores the encoded image as
`image`, its class as the index `label`, and the class names in `label.labels.txt` next to the
files. `convert.label_field` may choose another feature as the label.

*VTAB.* Labels of some tasks are computed from features of TFDS: Zhai et al., "A Large-scale Study
of Representation Learning with the Visual Task Adaptation Benchmark" (arXiv:1910.04867); thresholds
of google-research/task_adaptation, `data/clevr.py`, `kitti.py`, `dsprites.py` and `smallnorb.py`.
The other tasks have their class as `label`.
"""

import io
import struct
import tarfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, Final

import cv2
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError
from google_crc32c import value as crc32c

from vit_ray.data.convert.labels import (
    IMAGE_FIELDS,
    LABEL_FIELDS,
    MAX_TEXT_BYTES,
    chosen_field,
    json_object,
    labelled,
    row_or_problem,
)
from vit_ray.data.convert.rows import MOST_IMAGE_BYTES, DamagedUnitError, Row, Unit
from vit_ray.data.images import IMAGE_SUFFIXES, decode, is_hidden
from vit_ray.storage import Location, is_of_the_store, locate

_BLOCK: Final = tarfile.BLOCKSIZE
_HEADER: Final = struct.Struct("<QI")
_CHECKSUM: Final = struct.Struct("<I")
_CLEVR_DISTANCES: Final = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
_KITTI_DISTANCES_M: Final = (-100.0, 8.0, 20.0, 999.0)
_NO_VEHICLE_M: Final = 1000.0
# Car, van and truck, by TFDS's names of the types.
_KITTI_VEHICLES: Final = (0, 1, 2)
# An image of CLEVR has at least this many objects.
_MIN_OBJECTS: Final = 3


# The name of a sample, and its files by suffix: where each is, or None if it is no plain file.
_Sample = tuple[str, dict[str, tuple[int, int] | None]]


def tar_rows(unit: Unit) -> Iterator[Row]:
    """Samples of a shard, in the order of their first files.

    Raises:
        DamagedUnitError: the archive is truncated or broken.
        ValueError: the archive has images without any labels, or other archives.
    """
    shard, config = unit.name.removesuffix(".tar"), unit.config
    wanted = {config.image_field} if config.image_field else IMAGE_SUFFIXES
    with unit.opened() as (file, size):  # tarfile reads 512 bytes at a time
        samples = _samples(_members(file, size, unit.path))
        endings = {suffix.rpartition(".")[2] for _, files in samples for suffix in files}
        has_labels = config.label_field is not None or endings & {"cls", "json"}
        if "tar" in endings or (endings & IMAGE_SUFFIXES and not has_labels):
            raise ValueError(
                f"{unit.path!r} has images without labels (.cls, .json), or other archives. If its "
                'folders are classes, unpack it and those in it: "mkdir IMAGES && tar -xf ARCHIVE '
                '-C IMAGES"; if it has the images of one class, as in ImageNet-21k: "mkdir CLASS '
                '&& tar -xf CLASS.tar -C CLASS"; and convert the folder of class folders'
            )
        counts = Counter(name for name, _ in samples)
        for name, files in samples:
            row, images = Row(f"{shard}/{name}"), [suffix for suffix in files if suffix in wanted]
            dotted = [suffix for suffix in files if suffix.rpartition(".")[2] in wanted]
            if counts[name] > 1:  # it is unknown which label belongs to which image
                problem = "a file of its name is in the archive again; give each sample a name"
                yield replace(row, problem=problem)
            elif dotted and not images:
                problem = "its name has several dots; replace all but the last"
                yield from (Row(f"{row.key}.{suffix}", problem=problem) for suffix in dotted)
            else:
                yield row_or_problem(row, _sample_row, unit, images, files, file)


def _members(file: IO[bytes], size: int, path: str) -> Iterator[tuple[tarfile.TarInfo, bool]]:
    """The complete members, and whether each is a plain file, and not sparse, a link or a device.

    Raises:
        DamagedUnitError: after the last complete member, if the archive is damaged.
    """
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps all members
                # The size of a sparse member includes holes.
                is_plain = member.isreg() and not member.issparse()
                last = member.offset_data + member.size if is_plain else tar.offset - _BLOCK + 1
                if tar.offset <= end or last > size:
                    raise tarfile.ReadError(f"the file ends inside {member.name!r}")
                end = tar.offset
                yield member, is_plain
            end = tar.offset
        file.seek(end)
        has_end = file.read(_BLOCK) == bytes(_BLOCK)
        if not has_end or any(map(any, iter(partial(file.read, io.DEFAULT_BUFFER_SIZE), b""))):
            raise tarfile.ReadError(
                "no end marker, a header that cannot be read, or more data after an end marker"
            )
    except Exception as error:  # a broken header makes tarfile raise anything
        if is_of_the_store(error):
            raise
        raise DamagedUnitError(path, end, str(error) or type(error).__name__) from error


def _samples(members: Iterator[tuple[tarfile.TarInfo, bool]]) -> list[_Sample]:
    """The files of each sample, adjacent or not; a suffix that repeats begins another sample."""
    samples: list[_Sample] = []
    newest: dict[str, dict[str, tuple[int, int] | None]] = {}
    for member, is_plain in members:
        if member.isdir() or is_hidden(member.name.removeprefix("./")):
            continue
        folder, slash, file = member.name.rpartition("/")
        stem, _, suffix = file.partition(".")
        name, suffix = f"{folder}{slash}{stem}", suffix.lower()
        if suffix in newest.get(name, {suffix}):
            newest[name] = {}
            samples.append((name, newest[name]))
        newest[name][suffix] = (member.offset_data, member.size) if is_plain else None
    return samples


def _sample_row(
    row: Row,
    unit: Unit,
    images: list[str],
    files: dict[str, tuple[int, int] | None],
    file: IO[bytes],
) -> Row:
    """The row of a sample, with its labels and columns from its JSON and its other files.

    Where both have a field, the file is used.

    Args:
        images: suffixes of the files that may be the image.
    """
    listed = sorted(files)[:20]
    label_field, columns = unit.config.label_field or "cls", unit.config.columns
    if len(images) != 1:
        raise ValueError(
            f"the sample needs one image, and has {listed}; choose it with convert.image_field"
        )
    if (image := files[images[0]]) is None:
        raise ValueError("it is a link, a sparse or a special file in the archive")
    texts = {n: _text(files, n, file) for n in {label_field, *columns} - {"json"} if n in files}
    fields: dict[str, Any] = {}
    if "json" in files and not {label_field, *columns} <= texts.keys():
        fields = json_object(_text(files, "json", file), "its .json")
    row = replace(row, path=unit.path, offset=image[0], length=image[1])
    if label_field in texts:
        return labelled(row, fields | texts, unit.config, label_field, "text")
    return labelled(row, fields | texts, unit.config, unit.config.label_field)


def _text(files: dict[str, tuple[int, int] | None], suffix: str, file: IO[bytes]) -> str:
    """Content of a text file; raises ValueError if it is no plain file, too large or not UTF-8."""
    offset, size = files[suffix] or (0, MAX_TEXT_BYTES + 1)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"its .{suffix} is not a plain file in the archive, or has more than "
            f"{MAX_TEXT_BYTES:,} bytes"
        )
    file.seek(offset)
    return file.read(size).decode("utf-8-sig")


def _example_class() -> Any:
    """The message `tf.train.Example` (tensorflow/core/example/example.proto and feature.proto).

    The map from names to features is declared as a list of entries, which has the same encoding, so
    that a name may be any bytes.
    """
    messages = """
        name: "vit_ray_example.proto"
        package: "vit_ray"
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
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(messages, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("vit_ray.Example"))


_Example: Final = _example_class()
Features = Mapping[str, Sequence[Any]]


def tfrecord_rows(unit: Unit) -> Iterator[Row]:
    """The records of a file, in its order.

    Raises:
        DamagedUnitError: the file is damaged; all records before the damage have been yielded.
    """
    stem = unit.name.replace(".tfrecord", "")
    with unit.opened() as (file, size):
        for number, (offset, record) in enumerate(_records(file, size, unit.path)):
            row = Row(f"{stem}/{number:08d}")
            yield row_or_problem(row, _record_row, unit, offset, record)


def names_beside(unit: Unit) -> Location:
    """The file with the class names, which may not exist."""
    name = f"{unit.config.label_field or 'label'}.labels.txt"
    return locate(unit.path.rpartition("/")[0]).child(name)


def _records(file: IO[bytes], size: int, path: str) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each record; no bytes if the record is damaged or too large."""
    at = 0
    while header := file.read(_HEADER.size):
        length, checksum = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        start, end = at + _HEADER.size, at + _HEADER.size + length + _CHECKSUM.size
        if checksum != masked_crc32c(header[:8]) or end > size:
            raise DamagedUnitError(path, at, "a record is cut, or its head has another checksum")
        record = file.read(length) if length <= MOST_IMAGE_BYTES else b""
        file.seek(start + length)
        is_intact = file.read(_CHECKSUM.size) == _CHECKSUM.pack(masked_crc32c(record))
        yield start, record if is_intact else b""
        at = end


def _record_row(row: Row, unit: Unit, offset: int, record: bytes) -> Row:
    """The row of a record, with its labels and columns.

    Raises:
        ValueError: the record is damaged, is not one image, or lacks a label; or a text is not
            UTF-8.
    """
    if not record:
        raise ValueError(
            "the record is damaged, as its bytes have another checksum, or has more than "
            f"{MOST_IMAGE_BYTES:,} bytes"
        )
    features, config = features_of(record), unit.config
    field = chosen_field("image", config.image_field, IMAGE_FIELDS, [*features], "it")
    image = features[field]
    if len(image) != 1 or not isinstance(image[0], bytes):
        raise ValueError(f"its {field!r} is not an encoded image")
    if config.label_field in _BINARY and (pixels := decode(image[0])[..., 0]).max() <= 1:
        content = cv2.imencode(".png", pixels * 255)[1].tobytes()
        row = replace(row, image=content, length=len(content))
    else:
        at = offset + record.index(image[0])  # or an earlier place with the same bytes
        row = replace(row, path=unit.path, offset=at, length=len(image[0]))
    used = (*config.columns, *LABEL_FIELDS, config.label_field)
    fields: dict[str, Any] = {
        name: _plain(v) if name in used else v for name, v in features.items()
    }
    if config.label_field in VTAB_LABELS:
        fields[config.label_field] = vtab_label(config.label_field, features)
    return labelled(row, fields, config, config.label_field)


def _plain(values: list[Any]) -> Any:
    """The values of a feature, with text decoded; a single value by itself."""
    texts = [value.decode() if isinstance(value, bytes) else value for value in values]
    return texts[0] if len(texts) == 1 else texts


def features_of(record: bytes) -> dict[str, list[Any]]:
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
    """The checksum of TFRecord files (tensorflow/core/lib/hash/crc32c.h)."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _closest_object(features: Features) -> int:
    depths = features["objects/pixel_coords"][2::3]
    return bisect_left(_CLEVR_DISTANCES, min(depths)) - 1


def _closest_vehicle(features: Features) -> int:
    depths_m = features["objects/location"][2::3]
    kinds = features["objects/type"]
    vehicles = [d for d, kind in zip(depths_m, kinds, strict=True) if kind in _KITTI_VEHICLES]
    return bisect_left(_KITTI_DISTANCES_M, min([*vehicles, _NO_VEHICLE_M])) - 1


# By names in Table 9 of the paper: the number of classes, which are named by their numbers, and the
# label of an image from its features.
VTAB_LABELS: Final[dict[str, tuple[int, Callable[[Features], int]]]] = {
    "clevr-count": (8, lambda features: len(features["objects/size"]) - _MIN_OBJECTS),
    "clevr-dist": (6, _closest_object),
    "dspr-loc": (16, lambda features: int(features["label_x_position"][0]) * 16 // 32),
    "dspr-ori": (16, lambda features: int(features["label_orientation"][0]) * 16 // 40),
    "kitti-dist": (4, _closest_vehicle),
    "snorb-azim": (18, lambda features: int(features["label_azimuth"][0])),
    "snorb-elev": (9, lambda features: int(features["label_elevation"][0])),
}
# Tasks whose images have pixels 0 and 1; they are stored with 0 and 255.
_BINARY: Final = ("dspr-loc", "dspr-ori")


def vtab_label(task: str, features: Features) -> int:
    """The label of an image in a task of VTAB; raises ValueError if the image has none."""
    num_classes, computed = VTAB_LABELS[task]
    try:
        label = computed(features)
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"its label of {task} cannot be computed of its features {sorted(features)[:20]}: "
            f"{type(error).__name__} {error}"
        ) from error
    if not 0 <= label < num_classes:
        raise ValueError(f"its label of {task} is {label}, not one of 0 to {num_classes - 1}")
    return label
