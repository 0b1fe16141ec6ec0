"""The shards of a conversion: the tasks that write them as planned, and the commit.

The staging folder has a list of the rows of each shard, and the result of each finished one. At the
end all shards are checked, and the manifest makes the data set visible.
"""

import contextlib
import functools
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import OUTPUT, delete_files, image_or_reason, read_ahead
from vit_ray.data.convert.rows import (
    Row,
    SourceChangedError,
    Unit,
    table_rows,
)
from vit_ray.data.convert.tables import check_in_place, opened, parquet_rows
from vit_ray.data.dataset import (
    ABOUT,
    DAMAGED_FILE,
    REJECTED_FILE,
    REJECTED_SCHEMA,
    REPORT_FILE,
    STAGING_FOLDER,
    Manifest,
    ShardFile,
    open_dataset,
    shard_name,
    write_manifest,
)
from vit_ray.data.shard_writer import (
    EncodedImage,
    ShardFacts,
    closed_after,
    row_groups,
    write_row_groups,
)
from vit_ray.data.shards import problem_of_shard
from vit_ray.data.tasks import run_tasks
from vit_ray.lock import check_lock
from vit_ray.storage import HALF_WRITTEN, Location, locate, naming, read_again

LIST: Final = "list-{:06d}.parquet"
"""File in the staging folder with the rows of a shard."""
# File in the staging folder with the result of a shard.
_RESULT: Final = "shard-{:06d}.json"
_THREADS: Final = 16
_NAMES_SHOWN: Final = 10


def write_facts(file: Location, facts: dict[str, Any]) -> None:
    """Write JSON and its checksum."""
    content = json.dumps(facts).encode()
    file.write(b"%s\n%08x" % (content, zlib.crc32(content)))


def read_facts(file: Location) -> dict[str, Any]:
    """What `write_facts` wrote; raises ValueError if the checksum differs."""

    def read() -> dict[str, Any]:
        content, _, crc32 = file.read().rpartition(b"\n")
        if crc32 != b"%08x" % zlib.crc32(content):
            raise ValueError(
                f"{file.uri!r} is not what was written; delete it and run the same command again, "
                "or choose another convert.destination"
            )
        return dict(json.loads(content))

    return read_again(read, ValueError)


@contextlib.contextmanager
def parquet_output(destination: Location, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A parquet writer; the file appears at `destination` when the block ends without an error."""
    with destination.output() as stream:
        writer = pq.ParquetWriter(stream, schema, compression="zstd", write_page_checksum=True)
        with closed_after(writer):
            yield writer


def read_groups(location: Location) -> Iterator[pa.Table]:
    """The row groups of a parquet file; what differs from its checksum is read again."""

    def read(number: int) -> pa.Table | None:
        with naming(location.uri), location.open() as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            return file.read_row_group(number) if number < file.num_row_groups else None

    for number in count():
        table = read_again(functools.partial(read, number), OSError, pa.ArrowException)
        if table is None:
            return
        yield table


@dataclass(frozen=True)
class Plan:
    """What a conversion writes, as in `source.json`.

    Attributes:
        settings: those that decide the bytes of the data set.
        versions: version of each unit of the source, by path.
        label_of: class index of each label of the source.
        folder: folder of the source; keys are relative to it.
        no_classes: names of class folders without images.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    classes: list[str]
    label_of: dict[str, int]
    num_images: int
    num_shards: int
    folder: str
    no_classes: list[str]


@dataclass
class ShardResult(ShardFacts):
    """Facts of one finished shard, as in its JSON file in the staging folder.

    `num_turned` images have an orientation in EXIF. `rejected` has (key, reason) of each image that
    was left out, `damaged` of each damaged one that was kept. For images read in place, `images`
    are the last fields of the shard's `ShardFile`, and `dropped` has the rejected rows of each row
    group.
    """

    shard: int = 0
    max_labels: int = 0
    num_turned: int = 0
    label_counts: Counter[str] = field(default_factory=Counter)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[list[int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)

    def counted(self, row: Row, image: EncodedImage | str) -> EncodedImage | None:
        """Count an image; None if it is rejected, for the reason that is given instead."""
        if isinstance(image, str):
            self.rejected.append((row.key, image))
            return None
        if image.damage:
            self.damaged.append((row.key, image.damage))
        self.num_turned += image.is_turned
        self.max_labels = max(self.max_labels, len(image.labels))
        self.label_counts.update(map(str, image.labels))
        return image


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result yet, one task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    results = {info.base_name for info in staging.list_files(recursive=False)}
    missing = [shard for shard in range(plan.num_shards) if _RESULT.format(shard) not in results]
    # Only reading in place needs `versions`, which may have an entry for each of many files.
    sent_plan = plan if config.in_place else replace(plan, versions={})
    run_tasks(make_shard, missing, sent_plan, config, title=f"converting to {config.destination}")


def make_shard(shard: int, plan: Plan, config: ConvertConfig) -> None:
    """Write one shard, and then its result."""
    write = write_in_place if config.in_place else write_shard
    staging = locate(config.destination).child(STAGING_FOLDER)
    write_facts(staging.child(_RESULT.format(shard)), vars(write(shard, plan, config)))


def write_shard(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard of images that are copied."""
    folder, result = locate(config.destination), ShardResult(shard=shard)
    tables = read_groups(folder.child(STAGING_FOLDER).child(LIST.format(shard)))
    rows = chain.from_iterable(map(table_rows, tables))
    images = (
        result.counted(row, image_or_reason(row, file.result, config, plan.label_of))
        for row, file in read_ahead(rows)  # no limit: the storage limits each file
    )
    groups = row_groups(filter(None, images), config.rows_per_row_group)
    target = folder.child(shard_name(shard, plan.num_shards))
    facts = write_row_groups(target, groups, config.columns, is_indexed=config.index_jpeg)
    return replace(result, **vars(facts))


def write_in_place(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard without images, for a parquet file whose images are read in place.

    Raises:
        ValueError: the file has changed meanwhile, or a row group is too large.
    """
    path = [*plan.versions][shard]
    before = locate(path).info()
    if before.version != plan.versions[path]:
        raise SourceChangedError(path)
    unit = Unit("huggingface", path, plan.folder, config)
    unchanged = config.model_copy(update={"index_jpeg": False})
    result, image_bytes = ShardResult(shard=shard), list[int]()
    rows, no_texts = parquet_rows(unit), (None,) * len(config.columns)

    def checked_groups(file: pq.ParquetFile) -> Iterator[list[EncodedImage]]:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            images, dropped, size = list[EncodedImage](), list[int](), 0
            for number, row in enumerate(islice(rows, num_rows)):
                # The file may store equal images once; each row reads its own copy.
                content, row = row.image or b"", row.storable()
                size += len(content)
                made = image_or_reason(row, row.read, unchanged, plan.label_of)
                if (image := result.counted(row, made)) is None:
                    dropped.append(number)
                    image = EncodedImage(b"", (), row.key, 0, 0, extra=no_texts)
                images.append(replace(image, image=b"", crc32=zlib.crc32(content)))
            check_in_place(path, group, num_rows, size)
            result.dropped.append(dropped)
            image_bytes.append(size)
            yield images

    target = locate(config.destination).child(shard_name(shard, plan.num_shards))
    with opened(unit) as (file, columns):
        facts = write_row_groups(target, checked_groups(file), config.columns)
    if locate(path).info() != before:
        raise SourceChangedError(path)
    facts.row_group_bytes = (np.array(facts.row_group_bytes) + image_bytes).tolist()
    images = [path, before.size, before.version, columns.image_path]
    return replace(result, **vars(facts), images=images)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did; its file has all but the last two fields.

    `label_histogram` counts images per class name. libjpeg warns of `num_damaged`
    images (keys and warnings are in `damaged.parquet`). `notes` are about classes with no image or
    one, and orientations. `was_done`: the data set existed already,
    and nothing had changed.
    """

    num_images: int
    num_shards: int
    num_rejected: int
    num_damaged: int
    bytes: int
    label_histogram: dict[str, int] = field(repr=False)
    notes: list[str]
    fingerprint: str
    was_done: bool


def report_of(folder: Location, *, was_done: bool) -> ConvertReport:
    """The report of the data set that a folder holds."""
    fields = json.loads(folder.child(REPORT_FILE).read())
    fingerprint = open_dataset(folder.uri).fingerprint
    return ConvertReport(**fields, fingerprint=fingerprint, was_done=was_done)


def commit(plan: Plan, config: ConvertConfig, lock_number: int) -> None:
    """Check the shards, and write the lists, the report and, last, the manifest.

    Raises:
        ValueError: too much is rejected, a shard is not as it was written, or another conversion
            has taken the folder over. The same call can be repeated.
    """
    folder = locate(config.destination)
    staging = folder.child(STAGING_FOLDER)
    results = [staging.child(_RESULT.format(shard)) for shard in range(plan.num_shards)]
    written, rejected = list[ShardResult](), list[tuple[str, str]]()
    counts, labels = Counter[str](), Counter[str]()
    with (
        parquet_output(folder.child(REJECTED_FILE), REJECTED_SCHEMA) as rejected_file,
        parquet_output(folder.child(DAMAGED_FILE), REJECTED_SCHEMA) as damaged_file,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        # In slices, as the results of a large set may not fit in memory.
        slices = (results[at : at + _THREADS] for at in range(0, len(results), _THREADS))
        for facts in chain.from_iterable(pool.map(read_facts, part) for part in slices):
            result = ShardResult(**facts)
            for rows, file in ((result.rejected, rejected_file), (result.damaged, damaged_file)):
                if rows:
                    reasons = [{"key": key, "reason": reason} for key, reason in rows]
                    file.write_table(pa.Table.from_pylist(reasons, REJECTED_SCHEMA))
            counts["turned"] += result.num_turned
            counts["rejected"] += len(result.rejected)
            counts["damaged"] += len(result.damaged)
            labels.update(result.label_counts)
            rejected = rejected or result.rejected[:1]
            if result.rows:
                written.append(replace(result, rejected=[], damaged=[], label_counts=Counter()))
            else:
                folder.child(shard_name(result.shard, plan.num_shards)).delete()
    _check_rejected(plan, config, counts["rejected"], rejected)
    files = [
        ShardFile(shard_name(r.shard, plan.num_shards), sum(r.rows), r.bytes, r.crc32, *r.images)
        for r in written
    ]
    _check_shards(folder, written, files)
    num_images = sum(sum(r.rows) - sum(map(len, r.dropped)) for r in written)
    if num_images != plan.num_images - counts["rejected"]:
        raise ValueError(
            f"{num_images:,} images are in the shards, and {counts['rejected']:,} are rejected, "
            f"but the source had {plan.num_images:,} when it was indexed; delete {folder.uri!r}, "
            "and convert again"
        )
    check_lock(staging, lock_number)
    histogram = {name: labels[str(label)] for label, name in enumerate(plan.classes)}
    report = {
        "num_images": num_images,
        "num_shards": len(written),
        "num_rejected": counts["rejected"],
        "num_damaged": counts["damaged"],
        "bytes": sum(result.bytes for result in written),
        "label_histogram": histogram,
        "notes": _notes(plan, config, histogram, counts["turned"]),
    }
    folder.child(REPORT_FILE).write(json.dumps(report, indent=1).encode())
    delete_files(folder, f"({OUTPUT}){HALF_WRITTEN}")  # of killed conversions
    _write_manifest(plan, config, written, files)


def _check_rejected(
    plan: Plan, config: ConvertConfig, num_rejected: int, rejected: list[tuple[str, str]]
) -> None:
    alternative = ""
    if num_rejected < plan.num_images:
        if num_rejected / plan.num_images <= config.max_rejected_fraction:
            return
        fraction = -(-100 * num_rejected // plan.num_images) / 100
        alternative = f", or leave them out with convert.max_rejected_fraction={fraction:g}"
    raise ValueError(
        f"{num_rejected} of {plan.num_images} files of the source are not usable images, above "
        f"convert.max_rejected_fraction={config.max_rejected_fraction}; the first is "
        f"{rejected[0][0]!r}: {rejected[0][1]}. "
        f"{locate(config.destination).child(REJECTED_FILE).uri} lists all. Mend or remove them "
        f"and run the command again{alternative}"
    )


def _notes(
    plan: Plan, config: ConvertConfig, histogram: dict[str, int], num_turned: int
) -> list[str]:
    turned = "were turned as their EXIF says"
    if not config.apply_orientation:
        turned = (
            "have an orientation in EXIF and are kept as they are stored; "
            "convert.apply_orientation=true turns them as viewers show them"
        )
    notes = [f"{num_turned} images {turned}"] if num_turned else []
    listings = {
        "classes have no images": [name for name, count in histogram.items() if count == 0],
        "classes have one image": [name for name, count in histogram.items() if count == 1],
        "folders have no images and are no classes": plan.no_classes,
    }
    notes += [f"{len(names)} {what}: {listed(names)}" for what, names in listings.items() if names]
    if len(histogram) == 1:
        notes.append(f"there is one class only: {next(iter(histogram))!r}")
    return notes


def listed(names: list[str]) -> str:
    """The first ten names as text."""
    return ", ".join(names[:_NAMES_SHOWN]) + (" and others" if len(names) > _NAMES_SHOWN else "")


def _check_shards(folder: Location, written: list[ShardResult], files: list[ShardFile]) -> None:
    """Check the size and the footer of every shard before the data set becomes visible.

    Raises:
        ValueError: some are not as they were written; a restart makes them again.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        texts = list(pool.map(lambda file: problem_of_shard(folder.child(file.path), file), files))
    problems = {
        result.shard: f"{file.path}: {text}"
        for result, file, text in zip(written, files, texts, strict=True)
        if text
    }
    for shard in problems:
        folder.child(STAGING_FOLDER).child(_RESULT.format(shard)).delete()
    if problems:
        raise ValueError(
            f"{len(problems)} of {len(written)} shards in {folder.uri} are not as they were "
            f"written; the first is {next(iter(problems.values()))}. Check the storage, and run "
            "the same command again, which makes these shards again"
        )


def _write_manifest(
    plan: Plan, config: ConvertConfig, written: list[ShardResult], files: list[ShardFile]
) -> None:
    lists = (numbers for r in written for numbers in r.dropped or [[]] * len(r.rows))
    dropped = {group: np.array(numbers, np.int32) for group, numbers in enumerate(lists) if numbers}
    facts = {name: getattr(config, name) for name in ABOUT if getattr(config, name)}
    manifest = Manifest(
        file_index=np.repeat(np.arange(len(written)), [len(r.rows) for r in written]),
        row_group=np.concatenate([np.arange(len(r.rows)) for r in written]),
        rows=np.concatenate([np.subtract(r.rows, [*map(len, r.dropped)] or 0) for r in written]),
        bytes=np.concatenate([r.row_group_bytes for r in written]),
        files=files,
        classes=plan.classes,
        max_labels=max(r.max_labels for r in written),
        dropped=dropped,
        origin={"seed": plan.settings["seed"]} | facts,
    )
    write_manifest(locate(config.destination), manifest)
