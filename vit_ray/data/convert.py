"""Images as people keep them to a data set: shuffled once, checked, committed whole.

Two Ray Data jobs. The first indexes the source, a task per unit; the index of all images is then
drawn into the order of the data set by the recorded seed, through a file on disk. The second makes
the shards, a task each: it reads the images of its shard wherever they lie, checks them, and writes
the shard and its facts. A finished unit or shard is never made again; the manifest is written last,
and is the commit. No process ever holds more than a shard's row group and a piece of the index.
"""

import json
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.images import decode
from vit_ray.data.manifest import RowGroupColumns, ShardFile, write_manifest
from vit_ray.data.run_tasks import run_tasks
from vit_ray.data.schema import (
    MANIFEST_FILE,
    REJECTED_FILE,
    REJECTED_SCHEMA,
    REPORT_FILE,
    STAGING_FOLDER,
    shard_name,
)
from vit_ray.data.selection import KeyedPermutation
from vit_ray.data.shard_writer import EncodedImage, ShardWriter
from vit_ray.data.source_index import (
    SourceIndex,
    build_index,
    read_row_groups,
    table_entries,
)
from vit_ray.data.sources import INDEX_SCHEMA, Format, IndexEntry, SourceUnit, list_units
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_SHUFFLE: Final = 5
_MIB: Final = 1 << 20
_READERS: Final = 8
"""Threads that read a shard's images ahead: object stores are slow to answer, but answer many."""


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    `label_histogram` counts images per class name; `rejected` maps a key to its reason.
    """

    num_images: int
    num_classes: int
    num_shards: int
    num_rejected: int
    bytes: int
    fingerprint: str
    label_histogram: dict[str, int] = field(repr=False)
    rejected: dict[str, str] = field(repr=False)


def convert(
    source: str,
    destination: str,
    *,
    format: Format = "auto",
    seed: int = 0,
    rows_per_row_group: int = 64,
    shard_mib: float = 256,
    classes: Sequence[str] | None = None,
    shrink_to: int | None = None,
    shrink_quality: int = 95,
    max_rejected_fraction: float = 0.1,
    num_cpus: float = 1.0,
) -> ConvertReport:
    """Convert images to a data set.

    Args:
        source: a folder of class folders, of WebDataset tar shards, of Hugging Face parquet files,
            or a CSV or JSONL list of paths and labels; local or `s3://`.
        seed: of the one shuffle of all rows.
        shard_mib: target size of a shard in MiB.
        classes: class names in label order; None takes those that the source declares, or its
            sorted labels.
        shrink_to: re-encode images whose shorter side is longer than this many pixels, as JPEG of
            `shrink_quality`; None keeps every byte as it came.
        max_rejected_fraction: refuse to commit when more of the source is rejected.

    Raises:
        ValueError: if the source holds no images, the destination holds a data set already, an
            interrupted conversion there had other settings, or too much is rejected.
    """
    folder = locate(destination)
    if folder.child(MANIFEST_FILE).exists():
        raise ValueError(
            f"convert.destination={destination!r} already holds a data set; "
            f"choose another folder or delete it first."
        )
    settings = _Settings(
        source, format, seed, rows_per_row_group, shard_mib, list(classes or []), shrink_to,
        shrink_quality,
    )  # fmt: skip
    units = list_units(source, format)
    _begin(settings, folder)
    plan = _plan(settings, units, folder, num_cpus)
    results = _make_shards(plan, folder, num_cpus)
    return _commit(plan, folder, results, max_rejected_fraction)


@dataclass(frozen=True)
class _Settings:
    """What a restart must have in common with the first start."""

    source: str
    format: str
    seed: int
    rows_per_row_group: int
    shard_mib: float
    classes: list[str]
    shrink_to: int | None
    shrink_quality: int


def _begin(settings: _Settings, folder: Location) -> None:
    """Note the settings, or check that an interrupted conversion had the same."""
    staging = folder.child(STAGING_FOLDER)
    file = staging.child("settings.json")
    content = json.dumps(asdict(settings)).encode()
    if staging.exists() and not staging.child(_PLAN).exists():
        staging.delete_folder()
    if not file.exists():
        file.write(content)
    elif file.read() != content:
        raise ValueError(
            f"{folder.path!r} holds an interrupted conversion with another source or settings; "
            f"repeat its command to continue it, or delete the folder."
        )


@dataclass(frozen=True)
class _Plan:
    """Which rows each shard holds; written once, and kept by restarts."""

    settings: _Settings
    source_digest: str
    classes: list[str]
    num_images: int
    num_shards: int

    def rows_of_shard(self, shard: int) -> tuple[int, int]:
        """First row, and row after the last, of a shard: whole row groups but at the very end."""
        group_rows = self.settings.rows_per_row_group
        groups = -(-self.num_images // group_rows)
        first, last = (i * groups // self.num_shards * group_rows for i in (shard, shard + 1))
        return first, min(last, self.num_images)


def _plan(settings: _Settings, units: list[SourceUnit], folder: Location, num_cpus: float) -> _Plan:
    staging = folder.child(STAGING_FOLDER)
    file = staging.child(_PLAN)
    if file.exists():
        fields = json.loads(file.read())
        return _Plan(**{**fields, "settings": _Settings(**fields["settings"])})
    with tempfile.TemporaryDirectory() as scratch:
        classes = settings.classes or None
        index = build_index(units, staging, Path(scratch), classes, num_cpus)
        plan = _Plan(
            settings, index.digest, index.classes, index.num_images, _num_shards(settings, index)
        )
        with_retries(lambda: _write_shard_lists(plan, index, staging), "writing the shard lists")
    file.write(json.dumps(asdict(plan)).encode())
    return plan


def _num_shards(settings: _Settings, index: SourceIndex) -> int:
    groups = -(-index.num_images // settings.rows_per_row_group)
    return min(groups, max(1, round(index.bytes / (settings.shard_mib * _MIB))))


def _write_shard_lists(plan: _Plan, index: SourceIndex, staging: Location) -> None:
    """Write the shuffled index: one parquet file with a row group per shard."""
    order = KeyedPermutation(plan.num_images, _SHUFFLE, plan.settings.seed)
    with staging.child(_LISTS).atomic_output() as target:
        options = {"filesystem": target.filesystem, "compression": "zstd"}
        with pq.ParquetWriter(target.path, INDEX_SCHEMA, **options) as writer:
            for shard in range(plan.num_shards):
                positions = np.arange(*plan.rows_of_shard(shard), dtype=np.int64)
                table = index.entries(order.ranks(positions))
                writer.write_table(table, row_group_size=max(1, len(positions)))


_PLAN: Final = "plan.json"
_LISTS: Final = "lists.parquet"


@dataclass(frozen=True)
class _ShardResult:
    """Facts and rejected images of one finished shard, as the staging folder keeps them."""

    shard: int
    rows: list[int]
    row_group_bytes: list[int]
    bytes: int
    max_labels: int
    label_counts: dict[str, int]
    rejected: dict[str, str]


def _make_shards(plan: _Plan, folder: Location, num_cpus: float) -> list[_ShardResult]:
    staging = folder.child(STAGING_FOLDER)
    results = [staging.child(_result_name(shard)) for shard in range(plan.num_shards)]
    missing = [shard for shard, result in enumerate(results) if not result.exists()]
    run_tasks(_ShardMaker(plan, folder.uri), missing, num_cpus)
    return [_ShardResult(**json.loads(result.read())) for result in results]


def _result_name(shard: int) -> str:
    return f"shard-{shard:06d}.json"


@dataclass(frozen=True)
class _ShardMaker:
    plan: _Plan
    destination: str

    def __call__(self, shard: int) -> int:
        folder = locate(self.destination)
        staging = folder.child(STAGING_FOLDER)
        result = with_retries(
            lambda: self._make(shard, folder, _list_of(staging, shard)), f"making shard {shard}"
        )
        staging.child(_result_name(shard)).write(json.dumps(asdict(result)).encode())
        return shard

    def _make(self, shard: int, folder: Location, entries: list[IndexEntry]) -> _ShardResult:
        settings = self.plan.settings
        label_of = {name: label for label, name in enumerate(self.plan.classes)}
        rejected: dict[str, str] = {}
        counts: dict[str, int] = {}
        max_labels = 0
        destination = folder.child(shard_name(shard, self.plan.num_shards))
        with ShardWriter(destination, settings.rows_per_row_group) as writer:
            for entry, image in _read_ahead(entries):
                try:
                    if isinstance(image, ValueError):
                        raise image
                    labels = tuple(_label(text, label_of) for text in entry.labels)
                    writer.add(_checked(image, entry.key, labels, settings))
                except ValueError as error:
                    rejected[entry.key] = str(error)
                    continue
                max_labels = max(max_labels, len(labels))
                for label in labels:
                    counts[str(label)] = counts.get(str(label), 0) + 1
        facts = writer.facts()
        return _ShardResult(
            shard, facts.rows, facts.row_group_bytes, facts.bytes, max_labels, counts, rejected
        )


def _list_of(staging: Location, shard: int) -> list[IndexEntry]:
    (table,) = read_row_groups(staging.child(_LISTS), only=shard)
    return list(table_entries(table))


def _read_ahead(entries: list[IndexEntry]) -> Iterator[tuple[IndexEntry, bytes | ValueError]]:
    """Each entry with its bytes, or why it has none, in order, a few reads ahead."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting = deque[tuple[IndexEntry, Future[bytes | ValueError]]]()
        for entry in entries:
            waiting.append((entry, pool.submit(_bytes_or_reason, entry)))
            if len(waiting) > 2 * _READERS:
                first, future = waiting.popleft()
                yield first, future.result()
        for entry, future in waiting:
            yield entry, future.result()


def _bytes_or_reason(entry: IndexEntry) -> bytes | ValueError:
    try:
        return entry.read()
    except ValueError as error:
        return error


def _label(text: str, label_of: dict[str, int]) -> int:
    label = label_of.get(text)
    return int(text) if label is None else label


def _checked(image: bytes, key: str, labels: tuple[int, ...], settings: _Settings) -> EncodedImage:
    """A row of the data set.

    Raises:
        ValueError: if the image is empty, not an image, or cut short.
    """
    if not image:
        raise ValueError("the file is empty")
    pixels = decode(image)
    if settings.shrink_to is not None and min(pixels.shape[:2]) > settings.shrink_to:
        image, pixels = _shrunk(pixels, settings.shrink_to, settings.shrink_quality)
    return EncodedImage(image, labels, key, pixels.shape[1], pixels.shape[0])


def _shrunk(
    pixels: NDArray[np.uint8], shorter_side: int, quality: int
) -> tuple[bytes, NDArray[np.uint8]]:
    """The image re-encoded as JPEG with its shorter side at a length."""
    factor = shorter_side / min(pixels.shape[:2])
    height, width = (max(shorter_side, round(side * factor)) for side in pixels.shape[:2])
    small = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    bgr = cv2.cvtColor(small, cv2.COLOR_RGB2BGR)
    encoded = cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return encoded.tobytes(), small  # type: ignore[return-value]


def _commit(
    plan: _Plan, folder: Location, results: list[_ShardResult], max_rejected_fraction: float
) -> ConvertReport:
    rejected = {key: why for result in results for key, why in result.rejected.items()}
    _check_rejected(rejected, plan.num_images, max_rejected_fraction)
    _write_rejected(folder, rejected)
    fingerprint = _write_manifest(plan, folder, results)
    counts = np.zeros(len(plan.classes), np.int64)
    for result in results:
        for label, count in result.label_counts.items():
            counts[int(label)] += count
    report = ConvertReport(
        num_images=plan.num_images - len(rejected),
        num_classes=len(plan.classes),
        num_shards=len([result for result in results if result.rows]),
        num_rejected=len(rejected),
        bytes=sum(result.bytes for result in results),
        fingerprint=fingerprint,
        label_histogram=dict(zip(plan.classes, counts.tolist(), strict=True)),
        rejected=rejected,
    )
    folder.child(REPORT_FILE).write(json.dumps(asdict(report), indent=1).encode())
    folder.child(STAGING_FOLDER).delete_folder()
    return report


def _check_rejected(rejected: dict[str, str], total: int, max_fraction: float) -> None:
    if len(rejected) == total or len(rejected) > max_fraction * total:
        key, reason = next(iter(rejected.items()))
        raise ValueError(
            f"{len(rejected)} of {total} files of the source are not usable images, above "
            f"convert.max_rejected_fraction={max_fraction}; the first is {key!r}: {reason}. "
            f"Mend the source, or raise the limit and run the command again."
        )


def _write_rejected(folder: Location, rejected: dict[str, str]) -> None:
    columns = [
        pa.array(list(rejected), pa.string()),
        pa.array(list(rejected.values()), pa.string()),
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=REJECTED_SCHEMA), sink)
    folder.child(REJECTED_FILE).write(sink.getvalue().to_pybytes())


def _write_manifest(plan: _Plan, folder: Location, results: list[_ShardResult]) -> str:
    written = [result for result in results if result.rows]
    columns = RowGroupColumns(
        file_index=np.repeat(np.arange(len(written)), [len(r.rows) for r in written]),
        row_group=np.concatenate([np.arange(len(r.rows)) for r in written]),
        rows=np.concatenate([r.rows for r in written]),
        bytes=np.concatenate([r.row_group_bytes for r in written]),
        dropped={},
    )
    files = [ShardFile(shard_name(r.shard, plan.num_shards), sum(r.rows), r.bytes) for r in written]
    return write_manifest(
        folder,
        columns,
        files=files,
        classes=plan.classes,
        max_labels=max(r.max_labels for r in written),
        origin={"seed": plan.settings.seed, "source_digest": plan.source_digest},
    )
