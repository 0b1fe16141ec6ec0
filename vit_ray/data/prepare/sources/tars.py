"""WebDataset tar shards: consecutive members that share a name are one sample.

The name ends at the first dot of the file's, as in WebDataset, so that `img.0001.jpg` is the file
`0001.jpg` of the sample `img`, not an image of it. Each such image is a rejected row.

tarfile stops silently at the first header that it cannot read. Here an archive must end at its end
marker, with only zeros after it, or it counts as damaged.
"""

import contextlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import IO, Any, Final

from vit_ray.data.prepare.sources.columns import extra_of
from vit_ray.data.prepare.sources.entries import (
    IMAGE_SUFFIXES,
    MOST_IMAGE_BYTES,
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    is_hidden,
    opened,
    rejected,
    with_problem,
)
from vit_ray.data.prepare.sources.label_values import (
    MOST_JSON_BYTES,
    MOST_TEXT_BYTES,
    Labels,
    checked_label,
    json_object,
    labels_of_record,
)
from vit_ray.storage import Location, is_of_the_store

_BLOCK: Final = tarfile.BLOCKSIZE
MOST_HEADER_BYTES: Final = 1 << 20
"""Most bytes of a name or other property of a member, which tarfile reads into memory at once."""
MOST_FILES: Final = 1000
"""Most files of a sample; more means files whose names differ only after their first dot."""

_Members = list[tuple[str, tarfile.TarInfo]]
"""Suffix and header of each file of one sample."""


def index_tar(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """Samples of a shard.

    Raises:
        DamagedUnitError: the archive is truncated or broken; all samples before that have been
            yielded.
    """
    shard = unit.name.removesuffix(".tar")
    with opened(unit) as (file, size):  # tarfile reads 512 bytes at a time
        for name, members in _samples(_members(file, size, unit.path)):
            yield from _entries(unit, f"{shard}/{name}", members, file)


class _BoundedReads:
    """The file object for tarfile, which refuses very large headers."""

    def __init__(self, file: IO[bytes]) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        if size > MOST_HEADER_BYTES:
            raise tarfile.ReadError(
                f"a header of {size:,} bytes; at most {MOST_HEADER_BYTES:,} are allowed"
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
            raise DamagedUnitError(
                path, at, f"more data up to byte {size:,} after an archive's end marker"
            )


def _samples(members: Iterator[tarfile.TarInfo]) -> Iterator[tuple[str, _Members]]:
    """Consecutive members with one name, up to the first dot of the file's."""
    current: str | None = None
    sample: _Members = []
    suffixes: set[str] = set()
    try:
        for member in members:
            folder, _, file = member.name.rpartition("/")
            if member.isdir() or is_hidden(file):
                continue
            stem, _, suffix = file.partition(".")
            name = f"{folder}/{stem}" if folder else stem
            is_again = suffix.lower() in suffixes or len(sample) == MOST_FILES
            if sample and (name != current or is_again):
                yield str(current), sample
                sample, suffixes = [], set()
            current = name
            sample.append((suffix.lower(), member))
            suffixes.add(suffix.lower())
    except DamagedUnitError:
        # The next file of the sample may have been its label, or another image.
        if sample:
            sample.append(("...", tarfile.TarInfo()))
            yield str(current), sample
        raise
    if sample:
        yield str(current), sample


def _entries(
    unit: SourceUnit, key: str, members: _Members, file: IO[bytes]
) -> Iterator[IndexEntry]:
    """The entry of a sample; if it has no image but possible image files, one for each."""
    suffixes = [suffix for suffix, _ in members]
    images = [s for s in suffixes if s.rpartition(".")[2] in IMAGE_SUFFIXES]
    if unit.image_field or not images or not IMAGE_SUFFIXES.isdisjoint(suffixes):
        yield _entry(unit, key, members, file)
        return
    for suffix in images:
        yield rejected(
            unit.path,
            f"{key}.{suffix}",
            f"its name has several dots, so that WebDataset takes it for the file {suffix!r} of "
            f"the sample {key!r}; replace all dots but the last",
        )


def _entry(unit: SourceUnit, key: str, members: _Members, file: IO[bytes]) -> IndexEntry:
    path, wanted = unit.path, unit.image_field
    images = [m for s, m in members if (s in IMAGE_SUFFIXES if wanted is None else s == wanted)]
    found = sorted(suffix for suffix, _ in members)[:20]
    if len(images) != 1:
        how_many = "no image, only" if not images else "several images among"
        advice = "" if not images else "; choose one with convert.image_field"
        return rejected(path, key, f"the sample has {how_many} {found}{advice}")
    image = images[0]
    entry = IndexEntry(path, image.offset_data, image.size, key, ())
    if not image.isreg() or image.issparse():
        return rejected(path, key, "it is a link, a sparse or a special file in the archive")
    if image.size > MOST_IMAGE_BYTES:
        return rejected(path, key, f"it has {image.size:,} bytes, more than {MOST_IMAGE_BYTES:,}")
    files = dict(members)
    try:
        labels, kind = _labels(files, file, unit.label_field)
        extra: tuple[str | None, ...] = ()
        if unit.columns:
            fields: dict[str, Any] = {}
            # A separate file is more specific than a field of the JSON file.
            for name in dict.fromkeys(["json", *unit.columns]):
                if name in files:
                    text = _text(files, name, file, "cannot be passed through")
                    fields |= json_object(text.encode()) if name == "json" else {name: text}
            extra = extra_of(fields, unit.columns)
    except ValueError as error:
        return with_problem(entry, str(error))
    return replace(entry, labels=labels, label_kind=kind, extra=extra)


def _labels(files: Mapping[str, tarfile.TarInfo], file: IO[bytes], wanted: str | None) -> Labels:
    if "..." in files and not {wanted or "cls", "json"} & files.keys():
        raise ValueError("the archive is damaged before the sample's label")
    problem, suffix = "has no usable label", wanted or "cls"
    if suffix in files and suffix != "json":
        text = _text(files, suffix, file, problem)
        with _explained(suffix, problem):
            return (checked_label(text),), "text"
    if "json" in files:
        text = _text(files, "json", file, problem)
        with _explained("json", problem):
            return labels_of_record(json_object(text.encode()), wanted)
    raise ValueError(f"the sample has no .{suffix} or .json label")


def _text(files: Mapping[str, tarfile.TarInfo], suffix: str, file: IO[bytes], problem: str) -> str:
    """Content of a small regular member; a sparse one may have any size.

    Raises:
        ValueError: it is not such a member, or not text.
    """
    member = files[suffix]
    most = MOST_TEXT_BYTES if suffix == "cls" else MOST_JSON_BYTES
    with _explained(suffix, problem):
        if not member.isreg() or member.issparse():
            raise ValueError("it is not a plain file in the archive")
        if member.size > most:
            raise ValueError(f"it has {member.size:,} bytes; at most {most:,} are allowed")
        file.seek(member.offset_data)
        return file.read(member.size).decode("utf-8-sig")


@contextlib.contextmanager
def _explained(suffix: str, problem: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"its .{suffix} {problem} ({error})") from error
