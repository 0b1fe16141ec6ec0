"""The files of a checkpoint's folder, and when they make a checkpoint.

Rank r of n writes `rank-0000r-of-0000n.safetensors`, 1-D fp32 tensors named `KIND|PARAMETER|START`
for the fragments that it owns, and then `rank-0000r-of-0000n.json`, its index: the size and
checksum of the tensors' file, and their keys. Rank 0's index also holds the run's position. A rank
reads its tensors back before it writes their index. When all indexes are there, rank 0 writes
`commit.json`, which lists every file with its size and checksum, and has one of itself. The
checkpoint is what that lists; other files do not count. The first file of every rank is the same
empty `uncommitted`, which goes right before the commit: a folder that has it never was whole.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from vit_ray.storage import Location, read_again, with_retries

FORMAT_VERSION = 3
COMMIT: Final = "commit.json"
_UNCOMMITTED: Final = "uncommitted"
_INDEX: Final = re.compile(r"rank-(\d{5})-of-(\d{5})\.json")
LEAST_BYTES: Final = 2
"""Of an element: a custom optimizer may keep bf16."""
_READERS: Final = 8
"""Files read at a time."""
_PIECE_BYTES: Final = 32 << 20
"""Bytes per read."""
_HASHED_BYTES: Final = 1 << 20
_LOCAL_BYTES: Final = 4 << 20
"""Bytes per read of a local file that is compared: they fit into a processor's cache."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class DamagedCheckpointError(ValueError):
    """What is in a checkpoint's folder is not what was written."""


class PartialCheckpointError(ValueError):
    """A checkpoint's folder that is not committed."""


@dataclass(frozen=True)
class Shard:
    """One rank's tensors in a checkpoint."""

    file: str
    bytes: int
    sha256: str
    tensors: dict[str, int]
    """Elements by key."""

    def fragments(self) -> Iterable[tuple[str, str, str, int, int]]:
        """(key, kind, parameter, start, elements) of each tensor."""
        for key, count in self.tensors.items():
            kind, name, start = key.split("|")
            yield key, kind, name, int(start), count


def file_of_rank(rank: int, world_size: int, suffix: str = "json") -> str:
    """A rank's file: its index, its tensors, or (`failed`) the note that it cannot write them."""
    return f"rank-{rank:05d}-of-{world_size:05d}.{suffix}"


def write_part(
    folder: Location, rank: int, world_size: int, content: memoryview, index: Mapping[str, Any]
) -> None:
    """Write a rank's tensors, read them back, and write their index.

    Args:
        content: the bytes of the tensors' file.
        index: `tensors`, and of rank 0 the `position`.

    Raises:
        DamagedCheckpointError: what was read back is not what was written.
        OSError: the folder cannot be read or written.
    """
    folder.child(_UNCOMMITTED).write(b"")
    name = file_of_rank(rank, world_size)
    file = folder.child(file_of_rank(rank, world_size, "safetensors"))
    sha256 = _write_hashed(file, content)
    read_again(lambda: _compare_content(file, content), DamagedCheckpointError)
    facts = {"format_version": FORMAT_VERSION, "bytes": len(content), "sha256": sha256}
    folder.child(name).write(json.dumps({**facts, **index}).encode())


def _write_hashed(file: Location, content: memoryview) -> str:
    """Write a file and return its SHA-256.

    Each piece is hashed right before it is written, while it is in the processor's cache.
    """

    def write() -> str:
        digest = hashlib.sha256()
        with file.output() as stream:
            for first in range(0, len(content), _HASHED_BYTES):
                piece = content[first : first + _HASHED_BYTES]
                digest.update(piece)
                stream.write(piece)
        return digest.hexdigest()

    return with_retries(write, f"writing {file.path}")


def commit(folder: Location, world_size: int, before_commit: Callable[[], object]) -> None:
    """Make the checkpoint whole; every rank has written its part, and read it back.

    Args:
        before_commit: called when nothing but the marker is missing; may raise.

    Raises:
        DamagedCheckpointError: the parts are not what the ranks wrote, or do not fit together.
        OSError: the folder cannot be read or written.
    """
    names = [file_of_rank(rank, world_size) for rank in range(world_size)]

    def agreed(name: str) -> bytes:
        """Without a recorded checksum: read twice, and a third time if they differ."""
        file = folder.child(name)
        first, second = file.read(), file.read()
        return first if first == second else file.read()

    contents = dict(zip(names, read_all(names, agreed), strict=True))
    indexes = {name: _parse(folder, name, content) for name, content in contents.items()}
    shards = [_shard(folder, name, index) for name, index in indexes.items()]
    with _parsed(f"checkpoint file {folder.path}/{names[0]} has no position, or a damaged one"):
        shapes = indexes[names[0]]["position"]["shapes"]
        shapes = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    check_coverage(folder, shards, shapes)
    sizes = _sizes(folder)
    for shard in shards:
        _check_size(folder, shard.file, shard.bytes, sizes)
    files = {name: (len(content), _sha256(content)) for name, content in contents.items()}
    files |= {shard.file: (shard.bytes, shard.sha256) for shard in shards}
    before_commit()
    folder.child(_UNCOMMITTED).delete()
    folder.child(COMMIT).write(_marker(files))


def is_committed(folder: Location) -> bool:
    """Whether the folder's marker is there."""
    return folder.child(COMMIT).exists()


def never_was_whole(folder: Location) -> bool:
    """Whether it is certain that the folder was never committed."""
    return folder.child(_UNCOMMITTED).exists() and not is_committed(folder)


def marker_sha256(folder: Location) -> str:
    """Of the marker, which lists the checksums of all files."""
    return _sha256(folder.child(COMMIT).read())


def missing_ranks(folder: Location, world_size: int) -> tuple[list[int], list[int]]:
    """Ranks that have not written their part, and those of them that cannot."""
    sizes = _sizes(folder)
    missing = [rank for rank in range(world_size) if file_of_rank(rank, world_size) not in sizes]
    failed = [rank for rank in missing if file_of_rank(rank, world_size, "failed") in sizes]
    return missing, failed


def note_failure(folder: Location, rank: int, world_size: int, reason: str) -> None:
    """Note that a rank cannot write its part, so that rank 0 does not wait for it.

    Raises:
        OSError: the folder does not take the note either.
    """
    folder.child(file_of_rank(rank, world_size, "failed")).write(reason.encode())


def read_marker(folder: Location) -> dict[str, dict[str, Any]]:
    """`bytes` and `sha256` of each file of a whole checkpoint; all files have their size.

    Two or three requests, however many files there are.

    Raises:
        PartialCheckpointError, DamagedCheckpointError, ValueError: as `read_folder`.
    """
    sizes = _sizes(folder)
    if COMMIT not in sizes:
        raise PartialCheckpointError(_why_partial(folder, sizes))
    content = folder.child(COMMIT).read()
    marker = _parse(folder, COMMIT, content)
    _check_version(folder, marker)
    with _parsed(f"checkpoint file {folder.path}/{COMMIT} was changed"):
        files = {name: (f["bytes"], f["sha256"]) for name, f in marker["files"].items()}
        if content != _marker(files):  # it has to be, byte for byte, what `commit` writes
            raise ValueError
    for name, (size, _) in files.items():
        _check_size(folder, name, size, sizes)
    return dict(marker["files"])


def read_folder(folder: Location) -> tuple[list[Shard], dict[str, Any]]:
    """A whole checkpoint's shards, their tensors unread, and the run's position.

    Raises:
        PartialCheckpointError: it is not committed.
        DamagedCheckpointError: it was committed, and its files are not what was written.
        ValueError: it has another format.
    """
    listed = read_marker(folder)
    names = [name for name in listed if name.endswith(".json")]
    shards, positions = [], []
    for name, content in zip(names, read_all(names, lambda n: folder.child(n).read()), strict=True):
        if _sha256(content) != listed[name]["sha256"]:
            raise DamagedCheckpointError(f"checkpoint file {folder.path}/{name} was changed")
        index = _parse(folder, name, content)
        shard = _shard(folder, name, index)
        if shard.file not in listed:
            raise DamagedCheckpointError(
                f"checkpoint file {folder.path}/{COMMIT} does not list {shard.file}"
            )
        _check_size(folder, shard.file, shard.bytes, {shard.file: listed[shard.file]["bytes"]})
        shards.append(shard)
        positions += [index["position"]] if "position" in index else []
    if len(positions) != 1 or not isinstance(positions[0], dict):
        raise DamagedCheckpointError(f"checkpoint {folder.path} has {len(positions)} positions")
    return shards, positions[0]


def verify_shard(folder: Location, shard: Shard) -> None:
    """Compare a file with its checksum piece by piece: it may be gigabytes.

    Raises:
        DamagedCheckpointError: it differs from what was written, each time it is read.
    """

    def verify_once() -> None:
        file, digest, size = folder.child(shard.file), hashlib.sha256(), 0
        while True:  # to the end of the file: asking for its size would be one more request
            piece = file.read_range(size, _PIECE_BYTES)
            digest.update(piece)
            size += len(piece)
            if len(piece) < _PIECE_BYTES or size > shard.bytes:
                break
        _check_size(folder, shard.file, shard.bytes, {shard.file: size})
        compare(folder, shard, digest.hexdigest())

    read_again(verify_once, DamagedCheckpointError)


def compare(folder: Location, shard: Shard, sha256: str) -> None:
    """Raise unless this is the checksum of what was written."""
    if sha256 != shard.sha256:
        raise DamagedCheckpointError(
            f"checkpoint file {folder.path}/{shard.file}: its bytes do not match the checksum of "
            f"the {shard.bytes} bytes that were written"
        )


def _compare_content(file: Location, content: memoryview) -> None:
    """Raise unless the file holds these bytes; a quarter of the work of a second checksum."""
    expected = np.frombuffer(content, np.uint8)
    most = _LOCAL_BYTES if file.is_local else _PIECE_BYTES
    for first in range(0, len(expected) + 1, most):  # one byte beyond: the file may be longer
        read = np.frombuffer(file.read_range(first, most), np.uint8)
        if not np.array_equal(read, expected[first : first + most]):
            raise DamagedCheckpointError(
                f"checkpoint file {file.path}: its bytes are not the {len(expected)} bytes that "
                "were written"
            )


def check_coverage(
    folder: Location, shards: list[Shard], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Every kind covers each of its parameters from end to end, without a gap or an overlap.

    Args:
        shapes: of the parameters; each has weights.

    Raises:
        DamagedCheckpointError: naming the parameter.
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for shard in shards:
        for _, kind, name, start, count in shard.fragments():
            spans[kind, name].append((start, start + count))
    missing = [name for name in shapes if ("weight", name) not in spans]
    if missing:
        raise DamagedCheckpointError(f"checkpoint {folder.path}: no weights of {missing[0]}")
    for (kind, name), parts in spans.items():
        reached = 0
        size = math.prod(shapes[name]) if name in shapes else -1
        for first, last in [*sorted(parts), (size, size)]:
            if first != reached:
                raise DamagedCheckpointError(
                    f"checkpoint {folder.path}: {kind} of {name} has "
                    f"{'a gap' if first > reached else 'an overlap'} at element {reached}"
                )
            reached = last


def read_all(items: Iterable[_Item], read: Callable[[_Item], _Result]) -> list[_Result]:
    """Some at a time."""
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, items))


def _sizes(folder: Location) -> dict[str, int]:
    return {info.base_name: info.size for info in folder.list_files(recursive=False)}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _marker(files: Mapping[str, tuple[int, str]]) -> bytes:
    body = {
        "format_version": FORMAT_VERSION,
        "files": {name: {"bytes": size, "sha256": sha} for name, (size, sha) in files.items()},
    }
    sha256 = _sha256(json.dumps(body, sort_keys=True).encode())
    return json.dumps({**body, "sha256": sha256}, indent=1).encode()


def _why_partial(folder: Location, sizes: Mapping[str, int]) -> str:
    """Why a folder without the marker is no checkpoint, by the ranks whose indexes are there.

    Raises:
        ValueError: it has another format; the first one had no marker.
    """
    matches = [match for match in map(_INDEX.fullmatch, sorted(sizes)) if match]
    if not matches:
        return f"checkpoint {folder.path} holds no part of any rank"
    name = matches[0][0]
    _check_version(folder, _parse(folder, name, folder.child(name).read()))
    groups: dict[int, set[int]] = defaultdict(set)
    for match in matches:
        groups[int(match[2])].add(int(match[1]))
    if any(len(ranks) == n for n, ranks in groups.items()):
        return f"checkpoint {folder.path} has no {COMMIT}"
    parts = [f"{len(ranks)} of {n} ranks" for n, ranks in sorted(groups.items())]
    return f"checkpoint {folder.path} holds the parts of {' and '.join(parts)}"


@contextmanager
def _parsed(damage: str) -> Iterator[None]:
    """What cannot be parsed in the block has this damage."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DamagedCheckpointError(damage) from None


def _parse(folder: Location, name: str, content: bytes) -> dict[str, Any]:
    with _parsed(f"checkpoint file {folder.path}/{name} is not what was written"):
        return dict(json.loads(content))


def _check_version(folder: Location, content: Mapping[str, Any]) -> None:
    version = content.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {folder.path} has format {version}; this code reads format "
            f"{FORMAT_VERSION} only; use the version of vit_ray that wrote it"
        )


def _shard(folder: Location, name: str, index: dict[str, Any]) -> Shard:
    """What an index says of its rank's tensors, which are no more than their file can hold."""
    with _parsed(f"checkpoint file {folder.path}/{name} is not what was written"):
        tensors = {str(key): int(count) for key, count in index["tensors"].items()}
        file = name.removesuffix("json") + "safetensors"
        shard = Shard(file, int(index["bytes"]), str(index["sha256"]), tensors)
        list(shard.fragments())
    if LEAST_BYTES * sum(tensors.values()) > shard.bytes:
        raise DamagedCheckpointError(
            f"checkpoint file {folder.path}/{shard.file} of {shard.bytes} bytes cannot hold "
            f"{sum(tensors.values())} elements"
        )
    return shard


def _check_size(folder: Location, name: str, size: int, sizes: Mapping[str, int | None]) -> None:
    if sizes.get(name) != size:
        raise DamagedCheckpointError(
            f"checkpoint file {folder.path}/{name}: {sizes.get(name, 'none')} of the {size} bytes "
            "that were written are there"
        )
