"""WebDataset tar shards: members that share a name are one sample.

The name ends at the first dot of the file's, as in WebDataset, so that `img.0001.jpg` is the file
`0001.jpg` of the sample `img`, not an image of it. Each such image is a rejected row.

tarfile stops silently at the first header that it cannot read. Here an archive must end at its end
marker, with only zeros after it, or it counts as damaged.
"""

import contextlib
import io
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any, Final, NamedTuple

from vit_ray.data.convert.labels import (
    MOST_JSON_BYTES,
    MOST_TEXT_BYTES,
    Labels,
    checked_label,
    json_object,
    labels_of_record,
    stored_text,
)
from vit_ray.data.convert.rows import MOST_IMAGE_BYTES, DamagedUnitError, Row, Unit
from vit_ray.data.file_names import IMAGE_SUFFIXES, is_hidden
from vit_ray.storage import is_of_the_store

_BLOCK: Final = tarfile.BLOCKSIZE
# Most bytes of a name or other property of a member, which tarfile reads into memory at once.
_MOST_HEADER_BYTES: Final = 1 << 20
_LABELS: Final = {"cls", "json"}
_AGAIN: Final = "a file of its name and suffix stands in the archive again; give each sample a name"


class _File(NamedTuple):
    """Where a member lies."""

    offset: int
    size: int
    is_plain: bool


# Name, and the files by suffix.
_Sample = tuple[str, dict[str, _File]]


def tar_rows(unit: Unit) -> Iterator[Row]:
    """Samples of a shard, in the order of their first files.

    Raises:
        DamagedUnitError: the archive is truncated or broken.
        ValueError: it has images without any labels, or other archives.
    """
    shard = unit.name.removesuffix(".tar")
    with unit.opened() as (file, size):  # tarfile reads 512 bytes at a time
        samples = _samples(_members(file, size, unit.path))
        _check_layout(unit, samples)
        counts = Counter(name for name, _ in samples)
        for name, files in samples:
            if counts[name] > 1:  # which label is whose is not known
                yield Row(f"{shard}/{name}", problem=_AGAIN)
                continue
            yield from _rows(unit, f"{shard}/{name}", files, file)


class _BoundedReads:
    """The file object for tarfile, which refuses very large headers."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header of {size:,} bytes; at most {_MOST_HEADER_BYTES:,} are allowed"
            )
        return self._read(size)


def _members(file: IO[bytes], size: int, path: str) -> Iterator[tarfile.TarInfo]:
    """The members whose bytes are all there.

    Raises:
        DamagedUnitError: after the last of them, if the archive does not end as it should.
    """
    at = 0
    try:
        source: Any = _BoundedReads(file)
        with tarfile.open(fileobj=source, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # or it keeps them all
                if tar.offset <= at:
                    raise tarfile.ReadError("a header that leads backwards")
                # The size of a sparse member includes holes that are not stored.
                is_plain = member.isreg() and not member.issparse()
                end = member.offset_data + member.size if is_plain else tar.offset - _BLOCK + 1
                if end > size:
                    raise tarfile.ReadError(f"the file ends inside {member.name!r}")
                at = tar.offset
                yield member
            at = tar.offset
    except Exception as error:  # a broken header makes tarfile raise anything
        if is_of_the_store(error):
            raise
        what = str(error) or type(error).__name__
        raise DamagedUnitError(path, at, what) from error
    file.seek(at)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise DamagedUnitError(path, at, "the file ends without an archive's end marker")
    if any(block):
        raise DamagedUnitError(path, at, "a header that cannot be read")
    while piece := file.read(io.DEFAULT_BUFFER_SIZE):
        if any(piece):
            what = f"more data up to byte {size:,} after an archive's end marker"
            raise DamagedUnitError(path, at, what)


def _samples(members: Iterator[tarfile.TarInfo]) -> list[_Sample]:
    """Files with one name, wherever they stand; a second file of a suffix begins another sample."""
    samples: list[_Sample] = []
    newest: dict[str, dict[str, _File]] = {}
    for member in members:
        folder, _, file = member.name.rpartition("/")
        if member.isdir() or is_hidden(member.name.removeprefix("./")):
            continue
        stem, _, suffix = file.partition(".")
        name, suffix = f"{folder}/{stem}" if folder else stem, suffix.lower()
        if suffix in newest.get(name, {suffix}):
            newest[name] = {}
            samples.append((name, newest[name]))
        is_plain = member.isreg() and not member.issparse()
        newest[name][suffix] = _File(member.offset_data, member.size, is_plain)
    return samples


def _check_layout(unit: Unit, samples: list[_Sample]) -> None:
    """Raises ValueError for archives of images without labels, with what to do."""
    endings = {suffix.rpartition(".")[2] for _, files in samples for suffix in files}
    line = 'mkdir IMAGES && tar -xf ARCHIVE -C IMAGES", and convert IMAGES'
    if "tar" in endings:
        raise ValueError(
            f'{unit.path!r} holds other archives; unpack it: "{line}, or unpack those in it, too'
        )
    if unit.label_field is None and endings & IMAGE_SUFFIXES and not endings & _LABELS:
        raise ValueError(
            f"{unit.path!r} has images, but no labels (.cls or .json). If its folders are classes, "
            f'unpack it: "{line}; if it has the images of one class, as in ImageNet-21k, unpack '
            'each archive into a folder of its name: "mkdir CLASS && tar -xf CLASS.tar -C CLASS"'
        )


def _rows(unit: Unit, key: str, files: dict[str, _File], file: IO[bytes]) -> Iterator[Row]:
    """The row of a sample; if it has no image but possible image files, one for each."""
    images = [suffix for suffix in files if suffix.rpartition(".")[2] in IMAGE_SUFFIXES]
    if unit.image_field or not images or not IMAGE_SUFFIXES.isdisjoint(files):
        yield _row(unit, key, files, file)
        return
    for suffix in images:
        what = (
            f"its name has several dots, so that WebDataset takes it for the file {suffix!r} of "
            f"the sample {key!r}; replace all dots but the last"
        )
        yield Row(f"{key}.{suffix}", problem=what)


def _row(unit: Unit, key: str, files: dict[str, _File], file: IO[bytes]) -> Row:
    wanted, found = unit.image_field, sorted(files)[:20]
    suffixes = IMAGE_SUFFIXES if wanted is None else {wanted}
    images = [place for suffix, place in files.items() if suffix in suffixes]
    if len(images) != 1:
        how_many = "no image, only" if not images else "several images among"
        advice = "; choose one with convert.image_field" if images else ""
        return Row(key, problem=f"the sample has {how_many} {found}{advice}")
    (image,) = images
    row = Row(key, path=unit.path, offset=image.offset, length=image.size)
    if not image.is_plain:
        return row.rejected("it is a link, a sparse or a special file in the archive")
    if image.size > MOST_IMAGE_BYTES:
        return row.rejected(f"it has {image.size:,} bytes, more than {MOST_IMAGE_BYTES:,}")
    try:
        labels, kind = _labels(files, file, unit.label_field)
        fields: dict[str, Any] = {}
        # A separate file is more specific than a field of the JSON file.
        for name in dict.fromkeys(["json", *unit.columns]) if unit.columns else ():
            if name in files:
                text = _text(files, name, file, "cannot be passed through")
                fields |= json_object(text.encode()) if name == "json" else {name: text}
        extra = tuple(stored_text(fields.get(name)) for name in unit.columns)
    except ValueError as error:
        return row.rejected(str(error))
    return replace(row, labels=labels, kind=kind, extra=extra)


def _labels(files: dict[str, _File], file: IO[bytes], wanted: str | None) -> Labels:
    problem, suffix = "has no usable label", wanted or "cls"
    if suffix in files and suffix != "json":
        text = _text(files, suffix, file, problem)
        with _explained(suffix, problem):
            return (checked_label(text),), "text"
    if "json" in files:
        text = _text(files, "json", file, problem)
        with _explained("json", problem):
            return labels_of_record(json_object(text.encode()), wanted)
    named = ", ".join(f".{one}" for one in sorted(files)[:20])
    raise ValueError(f"the sample has no .{suffix} or .json label, only {named}")


def _text(files: dict[str, _File], suffix: str, file: IO[bytes], problem: str) -> str:
    """Content of a small regular member; a sparse one may have any size.

    Raises:
        ValueError: it is not such a member, or not text.
    """
    member, most = files[suffix], MOST_TEXT_BYTES if suffix == "cls" else MOST_JSON_BYTES
    with _explained(suffix, problem):
        if not member.is_plain:
            raise ValueError("it is not a plain file in the archive")
        if member.size > most:
            raise ValueError(f"it has {member.size:,} bytes; at most {most:,} are allowed")
        file.seek(member.offset)
        return file.read(member.size).decode("utf-8-sig")


@contextlib.contextmanager
def _explained(suffix: str, problem: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"its .{suffix} {problem} ({error})") from error
