"""Images as people keep them to a data set: shuffled once, checked, committed whole.

A Ray Data job with one task per shard. The order of all images is drawn first from the recorded
seed; each task then reads the images of its shard wherever they lie, checks them, and writes the
shard and its facts. A finished shard is never made again; the manifest is written last, and is the
commit.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from vit_ray.data.images import BadImageError, decode
from vit_ray.data.manifest import RowGroupColumns, ShardFile, write_manifest
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
from vit_ray.data.sources import ImageFile, list_class_folders
from vit_ray.data.storage import Location, locate

_SHUFFLE: Final = 5
_MIB: Final = 1 << 20


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
    format: Literal["auto", "folder"] = "auto",
    seed: int = 0,
    rows_per_row_group: int = 64,
    shard_mib: float = 256,
    classes: Sequence[str] | None = None,
    max_rejected_fraction: float = 0.1,
    num_cpus: float = 1.0,
) -> ConvertReport:
    """Convert images to a data set.

    Args:
        source: a folder of class folders.
        seed: of the one shuffle of all rows.
        shard_mib: target size of a shard in MiB.
        classes: class names in label order; None takes the sorted folder names.
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
    names, files = list_class_folders(source, classes)
    plan = _Plan.of(names, files, seed, rows_per_row_group, shard_mib)
    _begin(plan, files, folder)
    results = _make_shards(plan, destination, num_cpus)
    return _commit(plan, folder, results, max_rejected_fraction)


@dataclass(frozen=True)
class _Plan:
    """Settings of a conversion; a restart must have the same."""

    source_digest: str
    classes: list[str]
    num_files: int
    num_shards: int
    seed: int
    rows_per_row_group: int

    @classmethod
    def of(
        cls,
        classes: list[str],
        files: list[ImageFile],
        seed: int,
        group_rows: int,
        shard_mib: float,
    ) -> "_Plan":
        digest = hashlib.sha256(json.dumps([classes, [asdict(f) for f in files]]).encode())
        total = sum(file.bytes for file in files)
        wanted = max(1, round(total / (shard_mib * _MIB)))
        groups = -(-len(files) // group_rows)
        shards = -(-groups // -(-groups // min(wanted, groups)))
        return cls(digest.hexdigest()[:16], classes, len(files), shards, seed, group_rows)

    def rows_of_shard(self, shard: int) -> tuple[int, int]:
        """First row, and row after the last, of a shard: whole row groups but at the very end."""
        groups = -(-self.num_files // self.rows_per_row_group)
        per_shard = -(-groups // self.num_shards) * self.rows_per_row_group
        return shard * per_shard, min((shard + 1) * per_shard, self.num_files)

    def shuffled(self, files: list[ImageFile]) -> list[ImageFile]:
        """All files in the order of the data set."""
        ranks = KeyedPermutation(len(files), _SHUFFLE, self.seed).ranks(np.arange(len(files)))
        return [files[i] for i in np.argsort(ranks)]


def _begin(plan: _Plan, files: list[ImageFile], folder: Location) -> None:
    """Write the plan and the shuffled index, or check that an earlier start had the same plan."""
    staging = folder.child(STAGING_FOLDER)
    plan_file = staging.child("plan.json")
    content = json.dumps(asdict(plan)).encode()
    if plan_file.exists():
        if plan_file.read() != content:
            raise ValueError(
                f"{folder.path!r} holds an interrupted conversion with another source or settings; "
                f"repeat its command to continue it, or delete the folder."
            )
        return
    staging.child("index.parquet").write(_index(plan, plan.shuffled(files)))
    plan_file.write(content)


def _index(plan: _Plan, files: list[ImageFile]) -> bytes:
    """The shuffled list of files as parquet, one row group per shard."""
    schema = pa.schema(
        [("path", pa.string()), ("key", pa.string()), ("labels", pa.list_(pa.int32()))]
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for shard in range(plan.num_shards):
            part = files[slice(*plan.rows_of_shard(shard))]
            columns = [[f.path for f in part], [f.key for f in part], [f.labels for f in part]]
            arrays = [pa.array(c, type=f.type) for c, f in zip(columns, schema, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue().to_pybytes())


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


def _make_shards(plan: _Plan, destination: str, num_cpus: float) -> list[_ShardResult]:
    staging = locate(destination).child(STAGING_FOLDER)
    done = {i for i in range(plan.num_shards) if staging.child(_result_name(i)).exists()}
    missing = [i for i in range(plan.num_shards) if i not in done]
    if missing:
        dataset = ray.data.from_items(missing, override_num_blocks=len(missing)).map(
            _ShardMaker(plan, destination), num_cpus=num_cpus
        )
        for _ in dataset.iter_rows():
            pass
    return [
        _ShardResult(**json.loads(staging.child(_result_name(i)).read()))
        for i in range(plan.num_shards)
    ]


def _result_name(shard: int) -> str:
    return f"shard-{shard:05d}.json"


@dataclass(frozen=True)
class _ShardMaker:
    plan: _Plan
    destination: str

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = int(row["item"])
        folder = locate(self.destination)
        staging = folder.child(STAGING_FOLDER)
        result = self._make(shard, folder, _index_of(staging, shard))
        staging.child(_result_name(shard)).write(json.dumps(asdict(result)).encode())
        return {"shard": shard}

    def _make(self, shard: int, folder: Location, files: list[ImageFile]) -> _ShardResult:
        rejected: dict[str, str] = {}
        counts: dict[str, int] = {}
        destination = folder.child(shard_name(shard, self.plan.num_shards))
        with ShardWriter(destination, self.plan.rows_per_row_group) as writer:
            max_labels = 0
            for file in files:
                try:
                    writer.add(_load(file))
                except ValueError as error:
                    rejected[file.key] = str(error)
                    continue
                max_labels = max(max_labels, len(file.labels))
                for label in file.labels:
                    counts[str(label)] = counts.get(str(label), 0) + 1
        facts = writer.facts()
        return _ShardResult(
            shard, facts.rows, facts.row_group_bytes, facts.bytes, max_labels, counts, rejected
        )


def _index_of(staging: Location, shard: int) -> list[ImageFile]:
    index = staging.child("index.parquet")
    with index.filesystem.open_input_file(index.path) as source:
        table = pq.ParquetFile(source).read_row_group(shard)
    return [ImageFile(r["path"], r["key"], tuple(r["labels"]), 0) for r in table.to_pylist()]


def _load(file: ImageFile) -> EncodedImage:
    """Read and check one image.

    Raises:
        BadImageError: if it is empty, not an image, or cut short.
    """
    image = locate(file.path).read()
    if not image:
        raise BadImageError("the file is empty")
    height, width = decode(image).shape[:2]
    return EncodedImage(image, file.labels, file.key, width, height)


def _commit(
    plan: _Plan, folder: Location, results: list[_ShardResult], max_rejected_fraction: float
) -> ConvertReport:
    rejected = {key: why for result in results for key, why in result.rejected.items()}
    _check_rejected(rejected, plan.num_files, max_rejected_fraction)
    _write_rejected(folder, rejected)
    fingerprint = _write_manifest(plan, folder, results)
    counts = np.zeros(len(plan.classes), np.int64)
    for result in results:
        for label, count in result.label_counts.items():
            counts[int(label)] += count
    report = ConvertReport(
        num_images=plan.num_files - len(rejected),
        num_classes=len(plan.classes),
        num_shards=plan.num_shards,
        num_rejected=len(rejected),
        bytes=sum(result.bytes for result in results),
        fingerprint=fingerprint,
        label_histogram=dict(zip(plan.classes, counts.tolist(), strict=True)),
        rejected=rejected,
    )
    folder.child(REPORT_FILE).write(json.dumps(asdict(report), indent=1).encode())
    folder.filesystem.delete_dir(folder.child(STAGING_FOLDER).path)
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
        origin={"seed": plan.seed, "source_digest": plan.source_digest},
    )
