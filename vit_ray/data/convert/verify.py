"""Checks every byte of a data set against its manifest, and decodes a sample of the images."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vit_ray.data.crops import BadImageError, decode
from vit_ray.data.dataset import Manifest, open_dataset
from vit_ray.data.jpeg_index.segments import index_segments
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.data.progress import Shown, report_done
from vit_ray.data.run_tasks import run_tasks
from vit_ray.data.shards import RowGroupReader, problem_of_shard

_SAMPLE: Final = 6


@dataclass(frozen=True)
class Problem:
    """A problem in one file; with `key` and `row_group` if it is one image."""

    file: str
    what: str
    key: str = ""
    row_group: int = -1


@dataclass(frozen=True)
class VerifyReport:
    """What was checked and what is wrong; `problems` is empty if nothing is."""

    num_files: int
    num_images: int
    num_decoded: int
    problems: list[Problem]

    def advice(self) -> str:
        """What to do, in one sentence."""
        damaged = sorted({problem.file for problem in self.problems})
        if not damaged:
            return "the data set is complete and undamaged"
        return (
            f"restore {', '.join(damaged[:5])}{' and others' if len(damaged) > 5 else ''} from a "
            "copy, or convert again"
        )


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
    problems = [problem for check in checks for problem in check.problems]
    return VerifyReport(
        num_files=len(used),
        num_images=sum(check.images for check in checks),
        num_decoded=sum(check.decoded for check in checks),
        problems=sorted(problems, key=lambda p: (p.file, p.row_group, p.key)),
    )


@dataclass
class FileCheck:
    """The findings for one file."""

    images: int = 0
    decoded: int = 0
    problems: list[Problem] = field(default_factory=list)


def check_file(file_index: int, manifest: Manifest, decode_fraction: float) -> FileCheck:
    """Check one file of a data set."""
    entry = manifest.files[file_index]
    groups = np.flatnonzero(manifest.file_index == file_index)
    info = manifest.shard_location(int(groups[0])).info()
    if info.kind != "file":
        return FileCheck(problems=[Problem(entry.path, "the file is missing")])
    if info.size != entry.bytes:
        what = f"the file has {info.size} bytes, expected {entry.bytes}"
        return FileCheck(problems=[Problem(entry.path, what)])
    location = manifest.shard_location(int(groups[0]))
    if problem := problem_of_shard(location, entry):
        return FileCheck(problems=[Problem(entry.path, f"the footer cannot be read: {problem}")])
    reader, found, num_images = RowGroupReader(manifest), FileCheck(), 0
    for group in groups.tolist():
        _check_group(found, manifest, reader, group, decode_fraction)
        num_images += int(manifest.rows[group])
        report_done(num_images, len(found.problems))
    if not found.problems and (problem := problem_of_shard(location, entry, is_read=True)):
        found.problems.append(Problem(entry.path, problem))
    return found


def _check_group(
    found: FileCheck, manifest: Manifest, reader: RowGroupReader, group: int, decode_fraction: float
) -> None:
    name = manifest.files[int(manifest.file_index[group])].path
    number = int(manifest.row_group[group])
    try:
        encoded = reader.read(group)
    except ValueError as error:
        found.problems.append(Problem(name, str(error), row_group=number))
        return
    stored = manifest.stored_rows(group).tolist()
    for row in stored:
        is_sampled = KeyedUniform(_SAMPLE, group, row).draw() < decode_fraction
        try:
            image = encoded.stored(row)
            if is_sampled:
                found.decoded += 1
                decode(image.content)
                if image.index is not None:
                    known, index = vars(image.index), index_segments(bytes(image.content))
                    if index is None or any(
                        not np.array_equal(value, known[name])
                        for name, value in vars(index).items()
                    ):  # a crop would be cut from the wrong region
                        raise ValueError("its restart index is not that of its bytes")
        except (BadImageError, ValueError) as error:
            found.problems.append(Problem(name, str(error), encoded.key(row), number))
    found.images += len(stored)
