"""Images as people keep them to a data set: shuffled once, checked, committed whole.

Two Ray Data jobs. The first indexes the source, a task per unit; the index of all images is then
drawn into the order of the data set by the recorded seed, through a file on disk. The second makes
the shards, a task each: it reads the images of its shard wherever they lie, checks them, and writes
the shard and its facts. A finished unit or shard is never made again; the manifest is written last,
and is the commit. No process ever holds more than a shard's row group and a piece of the index.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.manifest import RowGroupColumns, ShardFile, write_manifest
from vit_ray.data.format.schema import (
    MANIFEST_FILE,
    REJECTED_FILE,
    REJECTED_SCHEMA,
    REPORT_FILE,
    STAGING_FOLDER,
    shard_name,
)
from vit_ray.data.format.shard_writer import EncodedImage, ShardWriter
from vit_ray.data.images.crops import decode
from vit_ray.data.order.selection import KeyedPermutation
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.source_index import (
    SourceIndex,
    build_index,
    read_many,
    read_row_groups,
    table_entries,
)
from vit_ray.data.prepare.sources import INDEX_SCHEMA, Format, IndexEntry, SourceUnit, list_units
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_SHUFFLE: Final = 5
_MIB: Final = 1 << 20
_READERS: Final = 8
"""Threads that read a shard's images ahead: object stores are slow to answer, but answer many."""


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    `label_histogram` counts images per class name; `rejected` maps the key of each of the first
    1,000 rejected images to its reason, and `rejected.parquet` has all.
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
    _check_free(folder)
    settings = _Settings(
        source, format, seed, rows_per_row_group, shard_mib, list(classes or []), shrink_to,
        shrink_quality,
    )  # fmt: skip
    units = list_units(source, format)
    _begin(settings, folder)
    plan = _plan(settings, units, folder, num_cpus)
    _make_shards(plan, folder, num_cpus)
    return _commit(plan, folder, max_rejected_fraction)


def _check_free(folder: Location) -> None:
    """Refuse a finished data set; one that was stopped between manifest and report is finished."""
    is_committed = folder.child(MANIFEST_FILE).exists()
    is_begun = folder.child(STAGING_FOLDER).exists()
    if is_committed and (folder.child(REPORT_FILE).exists() or not is_begun):
        raise ValueError(
            f"convert.destination={folder.uri!r} already holds a data set; "
            f"choose another folder or delete it first."
        )


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
    """Note the settings; what an interrupted conversion made with others is no use to these."""
    staging = folder.child(STAGING_FOLDER)
    file = staging.child("settings.json")
    content = json.dumps(asdict(settings)).encode()
    if file.exists() and file.read() == content:
        return
    if staging.child(_PLAN).exists():
        raise ValueError(
            f"{folder.path!r} holds an interrupted conversion with another source or settings; "
            f"repeat its command to continue it, or delete the folder."
        )
    if staging.exists():
        staging.delete()
    file.write(content)


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
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks.
    """

    shard: int
    rows: list[int]
    row_group_bytes: list[int]
    bytes: int
    max_labels: int
    label_counts: dict[str, int]
    rejected: list[tuple[str, str]]


def _make_shards(plan: _Plan, folder: Location, num_cpus: float) -> None:
    done = {info.base_name for info in folder.child(STAGING_FOLDER).list_files()}
    missing = [shard for shard in range(plan.num_shards) if _result_name(shard) not in done]
    run_tasks(_ShardMaker(plan, folder.uri), missing, num_cpus)


def _result_name(shard: int) -> str:
    return f"shard-{shard:06d}.json"


def _results(plan: _Plan, staging: Location) -> Iterator[_ShardResult]:
    """The results of all shards, in order."""
    files = (staging.child(_result_name(shard)) for shard in range(plan.num_shards))
    for content in read_many(files):
        yield _ShardResult(**json.loads(content))


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
        rejected: list[tuple[str, str]] = []
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
                    rejected.append((entry.key, str(error)))
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


_REJECTED_SHOWN: Final = 1000


def _delete_abandoned(folder: Location) -> None:
    """Half-written files of killed processes; on S3 such a file never comes to be."""
    if folder.is_local:
        for info in folder.list_files(recursive=False):
            if info.base_name.endswith(".tmp"):
                os.remove(info.path)


def _commit(plan: _Plan, folder: Location, max_rejected_fraction: float) -> ConvertReport:
    """Write what is left to write: the manifest last but for the report and the tidying up."""
    shown: dict[str, str] = {}
    written: list[_ShardResult] = []
    counts = np.zeros(len(plan.classes), np.int64)
    with _RejectedWriter(folder.child(REJECTED_FILE)) as rejected:
        for result in _results(plan, folder.child(STAGING_FOLDER)):
            rejected.add(result.rejected)
            shown.update(result.rejected[: max(0, _REJECTED_SHOWN - len(shown))])
            for label, count in result.label_counts.items():
                counts[int(label)] += count
            if result.rows:
                written.append(replace(result, rejected=[], label_counts={}))
    _check_rejected(folder, shown, rejected.count, plan.num_images, max_rejected_fraction)
    report = ConvertReport(
        num_images=plan.num_images - rejected.count,
        num_classes=len(plan.classes),
        num_shards=len(written),
        num_rejected=rejected.count,
        bytes=sum(result.bytes for result in written),
        fingerprint=_write_manifest(plan, folder, written),
        label_histogram=dict(zip(plan.classes, counts.tolist(), strict=True)),
        rejected=shown,
    )
    folder.child(REPORT_FILE).write(json.dumps(asdict(report), indent=1).encode())
    _delete_abandoned(folder)
    folder.child(STAGING_FOLDER).delete()
    return report


def _check_rejected(
    folder: Location, shown: dict[str, str], count: int, total: int, max_fraction: float
) -> None:
    if count == total or count > max_fraction * total:
        key, reason = next(iter(shown.items()))
        raise ValueError(
            f"{count} of {total} files of the source are not usable images, above "
            f"convert.max_rejected_fraction={max_fraction}; the first is {key!r}: {reason}. "
            f"{folder.child(REJECTED_FILE).uri} lists all. Raise the limit and run the command "
            f"again; or mend the source, delete {folder.uri} and convert anew."
        )


class _RejectedWriter:
    """Writes the table of rejected images shard by shard."""

    def __init__(self, destination: Location) -> None:
        self._output = destination.atomic_output()
        self.count = 0

    def __enter__(self) -> "_RejectedWriter":
        target = self._output.__enter__()
        self._writer = pq.ParquetWriter(target.path, REJECTED_SCHEMA, filesystem=target.filesystem)
        return self

    def add(self, rejected: list[tuple[str, str]]) -> None:
        if rejected:
            columns = [pa.array(column, pa.string()) for column in zip(*rejected, strict=True)]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=REJECTED_SCHEMA))
        self.count += len(rejected)

    def __exit__(self, *error: Any) -> None:
        self._writer.close()
        self._output.__exit__(*error)


def _write_manifest(plan: _Plan, folder: Location, written: list[_ShardResult]) -> str:
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
