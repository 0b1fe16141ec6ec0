"""The files of a checkpoint's folder, and when they make a checkpoint.

Rank r of n writes two files of 1-D fp32 tensors named `KIND|PARAMETER|START`, the fragments that it
owns: `weights-0000r-of-0000n-TOKEN.safetensors`, and `rest-...` with the optimizer's states; and
`averages-...` if the weights are averaged. No two saves have the same token, so a lost rank that
still writes cannot replace a file of another save. When all ranks have written their files, rank 0
writes the marker, `commit.json`: the run's position, and the size, SHA-256 and tensors' numbers of
elements of every file. The checkpoint is what the marker lists; other files do not count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vit_ray.storage import Location, read_again, with_retries

FORMAT_VERSION: Final = 6
COMMIT: Final = "commit.json"
WEIGHT, AVERAGE = "weight", "average"
FP32_BYTES: Final = 4
# Pause before a file that seems damaged is read again: network disks may show files late.
READ_AGAIN_S: Final = 10.0
_HASHED_BYTES: Final = 1 << 20
_SHA256: Final = slice(-66, -2)  # the checksum in a sealed file


class DamagedCheckpointError(ValueError):
    """A checkpoint's files are not as they were written."""


class PartialCheckpointError(ValueError):
    """A checkpoint's folder is not committed."""


@dataclass(frozen=True)
class SavedFile:
    """One of a rank's files in a checkpoint; `tensors` has numbers of elements by key."""

    name: str
    bytes: int
    sha256: str
    tensors: dict[str, int]

    def fragments(self) -> Iterable[tuple[str, str, str, int, int]]:
        """(key, kind, parameter, start, elements) of each tensor."""
        for key, count in self.tensors.items():
            kind, name, start = key.split("|")
            yield key, kind, name, int(start), count


@dataclass(frozen=True)
class Marker:
    """The content of `commit.json`; `sha256` covers the whole checkpoint."""

    files: list[SavedFile]
    position: dict[str, Any]
    sha256: str


def part_of(kind: str) -> str:
    """Which of a rank's files has the tensors of a kind; weights are in one of their own."""
    return {WEIGHT: "weights", AVERAGE: "averages"}.get(kind, "rest")


def write_file(
    folder: Location, name: str, content: memoryview, tensors: dict[str, int]
) -> SavedFile:
    """Write a file, hashing each piece right before, while it is in the processor's cache.

    Raises:
        OSError: the storage does not accept it.
    """

    def write() -> str:
        digest = hashlib.sha256()
        with folder.child(name).output() as stream:
            for first in range(0, len(content), _HASHED_BYTES):
                piece = content[first : first + _HASHED_BYTES]
                digest.update(piece)
                stream.write(piece)
        return digest.hexdigest()

    sha256 = with_retries(write, f"writing {folder.path}/{name}")
    return SavedFile(name, len(content), sha256, tensors)


def commit(folder: Location, files: list[SavedFile], position: dict[str, Any]) -> str:
    """Complete the checkpoint after every rank has written its files.

    Returns:
        The marker's checksum.

    Raises:
        DamagedCheckpointError: the files do not fit together.
        OSError: the storage does not accept the marker.
    """
    check_coverage(folder, files, position["shapes"])
    listed = {
        file.name: {"bytes": file.bytes, "sha256": file.sha256, "tensors": file.tensors}
        for file in files
    }
    content = sealed({"format_version": FORMAT_VERSION, "position": position, "files": listed})
    folder.child(COMMIT).write(content)
    return content[_SHA256].decode()


def is_committed(folder: Location) -> bool:
    """Whether the folder has a marker."""
    return folder.child(COMMIT).exists()


def read_marker(folder: Location) -> Marker:
    """The marker of a folder; compares the sizes of its files, and reads no tensors.

    Raises:
        PartialCheckpointError: the folder is not committed.
        DamagedCheckpointError: the marker was changed, or files are missing or of another size.
        ValueError: the checkpoint has another format.
    """

    def read() -> Marker:
        sizes = {info.base_name: info.size for info in folder.list_files(recursive=False)}
        if COMMIT not in sizes:
            raise PartialCheckpointError(f"checkpoint {folder.path} has no {COMMIT}")
        body = unsealed(folder.child(COMMIT))
        if body.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"checkpoint {folder.path} has format {body.get('format_version')}; this code "
                f"reads format {FORMAT_VERSION} only; use the version of vit_ray that wrote it"
            )
        files = [SavedFile(name, **facts) for name, facts in body["files"].items()]
        for file in files:
            if sizes.get(file.name) != file.bytes:
                raise DamagedCheckpointError(
                    f"checkpoint file {folder.path}/{file.name}: {sizes.get(file.name, 'none')} "
                    f"of the {file.bytes} bytes are there"
                )
        return Marker(files, body["position"], body["sha256"])

    try:
        return read_again(read, DamagedCheckpointError, pause_s=READ_AGAIN_S)
    except FileNotFoundError:
        raise PartialCheckpointError(f"checkpoint {folder.path} is being removed") from None


def read_file(folder: Location, file: SavedFile) -> bytes:
    """The content of a file, compared with its checksum.

    Raises:
        DamagedCheckpointError: two reads differ from what was written, or the file is missing.
    """
    path = f"checkpoint file {folder.path}/{file.name}"

    def read() -> bytes:
        content = folder.child(file.name).read()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DamagedCheckpointError(f"{path}: its bytes do not match its checksum")
        return content

    try:
        return read_again(read, DamagedCheckpointError, FileNotFoundError, pause_s=READ_AGAIN_S)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is not there") from None


def check_coverage(
    folder: Location, files: list[SavedFile], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Check that fragments cover each parameter, of each kind, without a gap or an overlap.

    Args:
        shapes: of all parameters that must have weights.

    Raises:
        DamagedCheckpointError: naming the parameter.
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for file in files:
        for _, kind, name, start, count in file.fragments():
            spans[kind, name].append((start, start + count))
    missing = [name for name in shapes if (WEIGHT, name) not in spans]
    if missing:
        raise DamagedCheckpointError(f"checkpoint {folder.path}: no weights of {missing[0]}")
    for (kind, name), fragments in spans.items():
        covered = 0
        size = math.prod(shapes[name]) if name in shapes else -1
        for first, last in [*sorted(fragments), (size, size)]:
            if first != covered:
                raise DamagedCheckpointError(
                    f"checkpoint {folder.path}: {kind} of {name} has "
                    f"{'a gap' if first > covered else 'an overlap'} at element {covered}"
                )
            covered = last


def sealed(body: dict[str, Any]) -> bytes:
    """JSON of an object, with a checksum of all bytes before it as its last value, `sha256`."""
    return _with_seal(json.dumps(body).encode()[:-1])


def _with_seal(content: bytes) -> bytes:
    return content + f', "sha256": "{hashlib.sha256(content).hexdigest()}"}}'.encode()


def unsealed(file: Location) -> dict[str, Any]:
    """The object in a file that was written by `sealed`, with its checksum as `sha256`.

    Raises:
        DamagedCheckpointError: the file has changed.
    """
    content = file.read()
    if content != _with_seal(content[: -len(_with_seal(b""))]):  # byte for byte
        raise DamagedCheckpointError(f"checkpoint file {file.path} was changed")
    return dict(json.loads(content))
