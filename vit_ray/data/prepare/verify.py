"""Checks every byte of a data set against its manifest, and decodes a sample of the images.

Where the source of the data set is still there, those of the sample that were rewritten are
compared with it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import ray

from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.format.row_groups import RowGroupReader
from vit_ray.data.format.sidecars import problems_of_sidecars
from vit_ray.data.format.stored_image import StoredImage
from vit_ray.data.images.crops import BadImageError, decode
from vit_ray.data.jpeg_index.restart_index import index_segments
from vit_ray.data.order.keyed_random import KeyedUniform
from vit_ray.data.prepare.compare_source import (
    OTHER_PIXELS,
    Rewritten,
    checksum_of_pixels,
    compare_with_source,
)
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.storage import locate

_SAMPLE: Final = 6


@dataclass(frozen=True)
class Problem:
    """Something wrong in one file; `key` and `row_group` where it is one image."""

    file: str
    what: str
    key: str = ""
    row_group: int = -1


@dataclass(frozen=True)
class VerifyReport:
    """What was checked and what is wrong; nothing is wrong where `problems` is empty.

    `source` says how many rewritten JPEG files were found equal to their originals,
    `num_compared`, or why none was; it is empty where none was to be compared, or none was decoded.
    """

    num_files: int
    num_images: int
    num_decoded: int
    problems: list[Problem]
    num_compared: int = 0
    source: str = ""

    def advice(self) -> str:
        """What to do, in one sentence."""
        damaged = sorted({problem.file for problem in self.problems})
        if not damaged:
            return "the data set is whole."
        return (
            f"restore {', '.join(damaged[:5])}{' and others' if len(damaged) > 5 else ''} from a "
            f"copy, or convert again."
        )


def verify(
    path: str,
    *,
    decode_fraction: float = 0.01,
    compares_source: bool = True,
    num_cpus: float = 1.0,
) -> VerifyReport:
    """Check every file and every checksum of a data set, and decode a sample of the images.

    Args:
        decode_fraction: share of the images to decode, from 0 to 1.
        compares_source: compare those of the sample that were rewritten with their originals.

    Raises:
        ValueError: if the manifest itself cannot be read.
    """
    manifest = open_dataset(path)
    used = np.unique(manifest.file_index)
    checker = _FileChecker(ray.put(manifest), decode_fraction)
    results = run_tasks(checker, [int(i) for i in used], num_cpus)
    problems = [Problem(**p) for result in results for p in result["problems"]]
    problems += [Problem(*beside) for beside in problems_of_sidecars(locate(path)).items()]
    rewritten = [Rewritten(**r) for result in results for r in result["rewritten"]]
    comparison = compare_with_source(manifest, rewritten if compares_source else [], num_cpus)
    for one in comparison.differing:
        problems.append(Problem(one.file, OTHER_PIXELS, one.key, one.row_group))
    return VerifyReport(
        num_files=len(used),
        num_images=sum(result["images"] for result in results),
        num_decoded=sum(result["decoded"] for result in results),
        problems=sorted(problems, key=lambda p: (p.file, p.row_group, p.key)),
        num_compared=comparison.num_equal,
        source=comparison.source,
    )


@dataclass(frozen=True)
class _FileChecker:
    manifest: Any
    decode_fraction: float

    def __call__(self, file_index: int) -> dict[str, Any]:
        # no limit: the driver has put it there before the task began
        check = check_file(ray.get(self.manifest), file_index, self.decode_fraction)
        return asdict(check)


@dataclass(frozen=True)
class FileCheck:
    """What was found in one file; `rewritten` are the images of the sample that were."""

    images: int
    decoded: int
    problems: list[Problem]
    rewritten: list[Rewritten] = field(default_factory=list)


def check_file(manifest: Manifest, file_index: int, decode_fraction: float) -> FileCheck:
    """Check one file of a data set."""
    entry = manifest.files[file_index]
    groups = np.flatnonzero(manifest.file_index == file_index)
    size = manifest.shard_location(int(groups[0])).info().size
    if size is None:
        return FileCheck(0, 0, [Problem(entry.path, "the file is missing")])
    if size != entry.bytes:
        what = f"the file has {size} bytes, expected {entry.bytes}"
        return FileCheck(0, 0, [Problem(entry.path, what)])
    reader = RowGroupReader(manifest)
    try:
        reader.check_footer(int(groups[0]))
    except ValueError as error:
        return FileCheck(0, 0, [Problem(entry.path, f"the footer cannot be read: {error}")])
    checks = [_check_group(manifest, reader, int(group), decode_fraction) for group in groups]
    return FileCheck(
        sum(check.images for check in checks),
        sum(check.decoded for check in checks),
        [problem for check in checks for problem in check.problems],
        [one for check in checks for one in check.rewritten],
    )


def _check_group(
    manifest: Manifest, reader: RowGroupReader, group: int, decode_fraction: float
) -> FileCheck:
    name = manifest.files[int(manifest.file_index[group])].path
    number = int(manifest.row_group[group])
    try:
        encoded = reader.read(group)
        originals = reader.original_crc32(group)
    except ValueError as error:
        return FileCheck(0, 0, [Problem(name, str(error), row_group=number)])
    found: list[Problem] = []
    rewritten: list[Rewritten] = []
    decoded = 0
    for row in range(len(encoded.keys)):
        is_sampled = KeyedUniform(_SAMPLE, group, row).draw() < decode_fraction
        try:
            image = encoded.stored(row)
            if is_sampled:
                decoded += 1
                pixels = checksum_of_pixels(decode(image.content))
                _check_index(image)
                if originals is not None and image.index is not None:
                    facts = (int(originals[row]), pixels, min(image.size))
                    rewritten.append(Rewritten(name, number, encoded.key(row), *facts))
        except (BadImageError, ValueError) as error:
            found.append(Problem(name, str(error), encoded.key(row), number))
    return FileCheck(len(encoded.keys), decoded, found, rewritten)


def _check_index(image: StoredImage) -> None:
    """Compare an index with what the file says.

    Raises:
        ValueError: if a crop would be cut from the wrong places.
    """
    if image.index is None:
        return
    found = index_segments(bytes(image.content))
    if found is None or any(
        not np.array_equal(value, vars(found)[name]) for name, value in vars(image.index).items()
    ):
        raise ValueError("its restart index is not that of its bytes")
