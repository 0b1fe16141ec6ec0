"""Checks a data set against its manifest: files, footers, checksums, and images that decode."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from vit_ray.data.format.manifest import Manifest, open_dataset
from vit_ray.data.format.row_groups import RowGroupReader
from vit_ray.data.images.crops import BadImageError, decode
from vit_ray.data.order.keyed_random import KeyedUniform
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.retry import with_retries
from vit_ray.storage import Location

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
    """What was checked and what is wrong; nothing is wrong where `problems` is empty."""

    num_files: int
    num_images: int
    num_decoded: int
    problems: list[Problem]

    def advice(self) -> str:
        """What to do, in one sentence."""
        damaged = sorted({problem.file for problem in self.problems})
        if not damaged:
            return "the data set is whole."
        return (
            f"{len(damaged)} of {self.num_files} files are damaged: restore "
            f"{', '.join(damaged[:5])}{' and others' if len(damaged) > 5 else ''} from a copy, "
            f"or convert again."
        )


def verify(path: str, *, decode_fraction: float = 0.01, num_cpus: float = 1.0) -> VerifyReport:
    """Check every file and every checksum of a data set, and decode a sample of the images.

    Args:
        decode_fraction: share of the images to decode, from 0 to 1.

    Raises:
        ValueError: if the manifest itself cannot be read.
    """
    manifest = open_dataset(path)
    used = np.unique(manifest.file_index)
    checker = _FileChecker(ray.put(manifest), decode_fraction)
    results = run_tasks(checker, [int(i) for i in used], num_cpus)
    problems = [Problem(**p) for result in results for p in result["problems"]]
    return VerifyReport(
        num_files=len(used),
        num_images=sum(result["images"] for result in results),
        num_decoded=sum(result["decoded"] for result in results),
        problems=sorted(problems, key=lambda p: (p.file, p.row_group, p.key)),
    )


@dataclass(frozen=True)
class _FileChecker:
    manifest: Any
    decode_fraction: float

    def __call__(self, file_index: int) -> dict[str, Any]:
        manifest: Manifest = ray.get(self.manifest)
        groups = np.flatnonzero(manifest.file_index == file_index)
        found = _footer_problems(manifest, groups)
        images = decoded = 0
        if not found:
            reader = RowGroupReader(manifest)
            for group in groups:
                rows, tried, wrong = self._check_group(manifest, reader, int(group))
                images, decoded, found = images + rows, decoded + tried, found + wrong
        # Ray Data needs a type for the elements even where there are none.
        return {
            "images": images,
            "decoded": decoded,
            "problems": [asdict(problem) for problem in found],
        }

    def _check_group(
        self, manifest: Manifest, reader: RowGroupReader, group: int
    ) -> tuple[int, int, list[Problem]]:
        name = manifest.files[int(manifest.file_index[group])].path
        number = int(manifest.row_group[group])
        try:
            encoded = reader.read(group)
        except ValueError as error:
            return 0, 0, [Problem(name, str(error), row_group=number)]
        found, decoded = [], 0
        for row in range(len(encoded.keys)):
            is_sampled = KeyedUniform(_SAMPLE, group, row).draw() < self.decode_fraction
            try:
                image = encoded.image(row)
                if is_sampled:
                    decoded += 1
                    decode(image)
            except (BadImageError, ValueError) as error:
                found.append(Problem(name, str(error), encoded.key(row), number))
        return len(encoded.keys), decoded, found


def _metadata(location: Location) -> pq.FileMetaData:
    with location.filesystem.open_input_file(location.path) as source:
        return pq.ParquetFile(source).metadata


def _footer_problems(manifest: Manifest, groups: Any) -> list[Problem]:
    """Whether the file is there, has the size and row groups that the manifest says."""
    location = manifest.shard_location(int(groups[0]))
    entry = manifest.files[int(manifest.file_index[groups[0]])]
    size = location.info().size
    if size is None:
        return [Problem(entry.path, "the file is missing")]
    if size != entry.bytes:
        return [Problem(entry.path, f"the file has {size} bytes, expected {entry.bytes}")]
    try:
        metadata = with_retries(lambda: _metadata(location), f"reading {location.path}")
    except (pa.ArrowException, OSError) as error:
        return [Problem(entry.path, f"the footer cannot be read ({error})")]
    for group in groups:
        number = int(manifest.row_group[group])
        expected = int(manifest.rows[group]) + len(manifest.dropped.get(int(group), ()))
        if number >= metadata.num_row_groups or metadata.row_group(number).num_rows != expected:
            return [Problem(entry.path, f"row group {number} is not as the manifest says")]
    return []
