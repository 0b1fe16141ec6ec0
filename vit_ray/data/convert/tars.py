"""WebDataset tar shards: members that share a name are one sample.

The name ends at the first dot of the file's, as in WebDataset, so that `img.0001.jpg` is the file
`0001.jpg` of the sample `img`, not an image of it. Each such image is a rejected row.

tarfile stops silently at the first header that it cannot read. Here an archive must end at its end
marker, with only zeros after it, or it counts as damaged.
"""

import functools
import io
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, NamedTuple

from vit_ray.data.convert.labels import (
    MOST_TEXT_BYTES,
    Labels,
    checked_label,
    json_object,
    labelled,
    labels_of_record,
)
from vit_ray.data.convert.rows import DamagedUnitError, Row, Unit
from vit_ray.data.images import IMAGE_SUFFIXES, is_hidden
from vit_ray.storage import is_of_the_store

_BLOCK: Final = tarfile.BLOCKSIZE
# Most bytes of a name or other property of a member, which tarfile reads into memory at once.
_MOST_HEADER_BYTES: Final = 1 << 20
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
            else:
                yield from _rows(unit, f"{shard}/{name}", files, file)


class _BoundedReads:
    """The file object for tarfile, which refuses very large headers."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of more than {_MOST_HEADER_BYTES:,} bytes")
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
                is_plain = _is_plain(member)
                end = member.offset_data + member.size if is_plain else tar.offset - _BLOCK + 1
                if end > size:
                    raise tarfile.ReadError(f"the file ends inside {member.name!r}")
                at = tar.offset
                yield member
            at = tar.offset
        _check_end(file, at)
    except Exception as error:  # a broken header makes tarfile raise anything
        if is_of_the_store(error):
            raise
        raise DamagedUnitError(path, at, str(error) or type(error).__name__) from error


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Whether its bytes lie in the archive; the size of a sparse member includes holes."""
    return member.isreg() and not member.issparse()


def _check_end(file: IO[bytes], at: int) -> None:
    """Raises ReadError if the archive does not end here by its marker and zeros."""
    file.seek(at)
    block = file.read(_BLOCK)
    if len(block) < _BLOCK:
        raise tarfile.ReadError("the file ends without an archive's end marker")
    if any(block):
        raise tarfile.ReadError("a header that cannot be read")
    while piece := file.read(io.DEFAULT_BUFFER_SIZE):
        if any(piece):
            raise tarfile.ReadError("more data after an archive's end marker")


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
        newest[name][suffix] = _File(member.offset_data, member.size, _is_plain(member))
    return samples


def _check_layout(unit: Unit, samples: list[_Sample]) -> None:
    """Raises ValueError for archives of images without labels, with what to do."""
    endings = {suffix.rpartition(".")[2] for _, files in samples for suffix in files}
    line = 'mkdir IMAGES && tar -xf ARCHIVE -C IMAGES", and convert IMAGES'
    if "tar" in endings:
        raise ValueError(
            f'{unit.path!r} holds other archives; unpack it: "{line}, or unpack those in it, too'
        )
    has_labels = unit.config.label_field is not None or endings & {"cls", "json"}
    if endings & IMAGE_SUFFIXES and not has_labels:
        raise ValueError(
            f"{unit.path!r} has images, but no labels (.cls or .json). If its folders are classes, "
            f'unpack it: "{line}; if it has the images of one class, as in ImageNet-21k, unpack '
            'each archive into a folder of its name: "mkdir CLASS && tar -xf CLASS.tar -C CLASS"'
        )


def _rows(unit: Unit, key: str, files: dict[str, _File], file: IO[bytes]) -> Iterator[Row]:
    """The row of a sample; if it has no image but possible image files, one for each."""
    wanted, found = unit.config.image_field, sorted(files)[:20]
    images = [suffix for suffix in files if suffix in (IMAGE_SUFFIXES if not wanted else {wanted})]
    dotted = [s for s in files if not wanted and s.rpartition(".")[2] in IMAGE_SUFFIXES]
    if len(images) == 1:
        image = files[images[0]]
        row = Row(key, path=unit.path, offset=image.offset, length=image.size)
        yield labelled(row, unit, functools.partial(_described, unit, image, files, file))
    elif images:
        several = f"the sample has several images among {found}"
        yield Row(key, problem=f"{several}; choose one with convert.image_field")
    elif not dotted:
        yield Row(key, problem=f"the sample has no image, only {found}")
    else:
        for suffix in dotted:
            what = (
                f"its name has several dots, so that WebDataset takes it for the file {suffix!r} "
                f"of the sample {key!r}; replace all dots but the last"
            )
            yield Row(f"{key}.{suffix}", problem=what)


def _described(
    unit: Unit, image: _File, files: dict[str, _File], file: IO[bytes]
) -> tuple[Labels, Mapping[str, Any]]:
    """The labels of a sample, and its fields: of its JSON, and its other files, which go first."""
    if not image.is_plain:
        raise ValueError("it is a link, a sparse or a special file in the archive")
    wanted, columns = unit.config.label_field or "cls", unit.config.columns
    texts = {n: _text(files, n, file) for n in {wanted, *columns} - {"json"} if n in files}
    fields: dict[str, Any] = {}
    if "json" in files and not {wanted, *columns} <= texts.keys():
        fields = json_object(_text(files, "json", file).encode(), "its .json")
    if wanted in texts:
        return ((checked_label(texts[wanted]),), "text"), fields | texts
    if "json" in files:
        return labels_of_record(fields, unit.config.label_field), fields | texts
    raise ValueError(f"the sample has no .{wanted} or .json label, only {sorted(files)[:20]}")


def _text(files: dict[str, _File], suffix: str, file: IO[bytes]) -> str:
    """Content of a small regular member; a sparse one may have any size.

    Raises:
        ValueError: it is not such a member, or not text.
    """
    member = files[suffix]
    if not member.is_plain:
        raise ValueError(f"its .{suffix} is not a plain file in the archive")
    if member.size > MOST_TEXT_BYTES:
        raise ValueError(f"its .{suffix} has more than {MOST_TEXT_BYTES:,} bytes")
    file.seek(member.offset)
    return file.read(member.size).decode("utf-8-sig")
