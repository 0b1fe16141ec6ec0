"""Checks every byte of a data set against its manifest, and decodes a sample of the images."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vit_ray.data.dataset import Manifest, open_dataset
from vit_ray.data.images import decode
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.data.restart_index import StoredImage, index_segments
from vit_ray.data.shards import RowGroupReader, problem_of_shard
from vit_ray.data.tasks import Shown, report_done, run_tasks

_SAMPLE: Final = 6


@dataclass(frozen=True)
class Problem:
    """A problem in one file; with `key` and `row_group` if it is one image."""

    file: str
    what: str
    key: str = ""
    row_group: int = -1


@dataclass
class VerifyReport:
    """What was checked, of a file or a data set, and what is wrong; `problems` may be empty."""

    num_files: int = 0
    num_images: int = 0
    num_decoded: int = 0
    problems: list[Problem] = field(default_factory=list)

    def __add__(self, other: "VerifyReport") -> "VerifyReport":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return VerifyReport(*(one + another for one, another in pairs))


def verify(path: str, *, decode_fraction: float = 0.01) -> VerifyReport:
    """Check every file and every checksum of a data set, and decode a sample of the images.

    Args:
        decode_fraction: share of the images to decode, from 0 to 1.

    Raises:
        ValueError: the manifest itself cannot be read.
    """
    manifest = open_dataset(path)
    used = [int(index) for index in np.unique(manifest.file_index)]
    shown = Shown(f"verifying {path}", manifest.num_images, "problems")
    checks = run_tasks(check_file, used, manifest, decode_fraction, shown=shown)
    return sum(checks, VerifyReport())


def check_file(file_index: int, manifest: Manifest, decode_fraction: float) -> VerifyReport:
    """Check one file of a data set."""
    entry, found = manifest.files[file_index], VerifyReport(num_files=1)
    location, reader = manifest.file_location(file_index), RowGroupReader(manifest)
    groups = np.flatnonzero(manifest.file_index == file_index).tolist()
    if problem := problem_of_shard(location, entry):
        found.problems.append(Problem(entry.path, f"it cannot be opened: {problem}"))
        groups = []
    for group in groups:
        number = int(manifest.row_group[group])
        try:
            encoded = reader.read(group)
        except ValueError as error:
            found.problems.append(Problem(entry.path, str(error), row_group=number))
            continue
        for row in manifest.stored_rows(group).tolist():
            is_decoded = KeyedUniform(_SAMPLE, group, row).draw() < decode_fraction
            found.num_images += 1
            try:
                image = encoded.stored(row)
                found.num_decoded += is_decoded
                if is_decoded:
                    _check_image(image)
            except ValueError as error:
                found.problems.append(Problem(entry.path, str(error), encoded.key(row), number))
        report_done(found.num_images, len(found.problems))
    if not found.problems and (problem := problem_of_shard(location, entry, is_read=True)):
        found.problems.append(Problem(entry.path, problem))
    return found


def _check_image(image: StoredImage) -> None:
    """Raises ValueError if it cannot be decoded, or its index is another file's."""
    decode(image.content)
    if image.index is not None:
        known, index = vars(image.index), index_segments(bytes(image.content))
        if index is None or any(
            not np.array_equal(value, known[name]) for name, value in vars(index).items()
        ):  # a crop would be cut from the wrong region
            raise ValueError("its restart index is not that of its bytes")
