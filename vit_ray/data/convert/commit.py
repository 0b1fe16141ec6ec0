"""The end of a conversion: all shards are looked at, and the manifest makes the set visible."""

import json
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa

from vit_ray.data.convert.checks import OUTPUT
from vit_ray.data.convert.index import parquet_output, read_facts, write_facts
from vit_ray.data.convert.shards import RESULT, Plan, ShardResult
from vit_ray.data.dataset import (
    ABOUT,
    DAMAGED_FILE,
    REJECTED_FILE,
    REJECTED_SCHEMA,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
    ImageFile,
    RowGroupColumns,
    ShardFile,
    open_dataset,
    write_manifest,
)
from vit_ray.data.shards import problem_of_shard
from vit_ray.lock import check_lock
from vit_ray.storage import HALF_WRITTEN, Location

_THREADS: Final = 16
_REJECTED_SHOWN: Final = 1000
_NAMES_SHOWN: Final = 10


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    `label_histogram` counts images per class name; `rejected` maps the key of each of the first
    1,000 rejected images to its reason, and `rejected.parquet` has all. `num_indexed` images have a
    restart index, and `num_damaged` are in files that libjpeg warns of (`damaged.parquet` has keys
    and warnings). `was_done` says that the set was there, and that nothing had changed. `notes` say
    what may surprise: classes without images or of one, and orientations.
    """

    num_images: int
    num_classes: int
    num_shards: int
    num_rejected: int
    bytes: int
    fingerprint: str
    label_histogram: dict[str, int] = field(repr=False)
    rejected: dict[str, str] = field(repr=False)
    num_indexed: int = 0
    num_damaged: int = 0
    was_done: bool = False
    notes: list[str] = field(default_factory=list)


def report_of(folder: Location) -> ConvertReport:
    """The report of a data set that is there."""
    fields = json.loads(folder.child(REPORT_FILE).read())
    now = {"was_done": True, "fingerprint": open_dataset(folder.uri).fingerprint}
    return ConvertReport(**fields | now)


def commit(
    plan: Plan, folder: Location, max_rejected_fraction: float, lock_number: int
) -> ConvertReport:
    """Write what is left to write, the manifest last.

    Raises:
        ValueError: too much is rejected, a shard is not as it was written, or another conversion
            has taken the folder over. The same call can be repeated.
    """
    staging = folder.child(STAGING_FOLDER)
    results = [staging.child(RESULT.format(shard)) for shard in range(plan.num_shards)]
    written, shown = list[ShardResult](), dict[str, str]()
    totals, labels = Counter[str](), Counter[str]()
    with (
        parquet_output(folder.child(REJECTED_FILE), REJECTED_SCHEMA, "snappy") as rejected,
        parquet_output(folder.child(DAMAGED_FILE), REJECTED_SCHEMA, "snappy") as damaged,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        # In slices: all at once, those of a large set would wait in memory.
        slices = (results[at : at + _THREADS] for at in range(0, len(results), _THREADS))
        for facts in chain.from_iterable(pool.map(read_facts, some) for some in slices):
            result = ShardResult(**facts)
            for rows, target in ((result.rejected, rejected), (result.damaged, damaged)):
                if rows:
                    columns = [pa.array(column) for column in zip(*rows, strict=True)]
                    target.write_table(pa.Table.from_arrays(columns, schema=REJECTED_SCHEMA))
            totals.update(rejected=len(result.rejected), damaged=len(result.damaged))
            totals.update(indexed=result.num_indexed, turned=result.num_turned)
            labels.update(result.label_counts)
            shown.update(result.rejected[: max(0, _REJECTED_SHOWN - len(shown))])
            if result.rows:
                written.append(replace(result, rejected=[], damaged=[], label_counts={}))
            else:
                folder.child(plan.name_of(result.shard)).delete()
    _check_rejected(plan, folder, totals["rejected"], max_rejected_fraction, shown)
    _check_shards(plan, folder, written)
    num_images = sum(sum(r.rows) - sum(map(len, r.dropped)) for r in written)
    if num_images != plan.num_images - totals["rejected"]:
        raise ValueError(
            f"{num_images:,} images are in the shards, and {totals['rejected']:,} are rejected, "
            f"but the source had {plan.num_images:,} when it was indexed; delete {folder.uri!r}, "
            "and convert again"
        )
    check_lock(staging, lock_number)
    histogram = {name: labels[str(label)] for label, name in enumerate(plan.classes)}
    report = ConvertReport(
        num_images=num_images,
        num_classes=len(plan.classes),
        num_shards=len(written),
        num_rejected=totals["rejected"],
        bytes=sum(result.bytes for result in written),
        fingerprint="",
        label_histogram=histogram,
        rejected=shown,
        num_indexed=totals["indexed"],
        num_damaged=totals["damaged"],
        notes=_notes(plan, histogram, totals["turned"]),
    )
    folder.child(REPORT_FILE).write(json.dumps(asdict(report), indent=1).encode())
    record = {"settings": plan.settings, "versions": plan.versions}
    write_facts(folder.child(SOURCE_FILE), record)
    for info in folder.list_files(recursive=False) if folder.is_local else ():
        if re.fullmatch(f"({OUTPUT}){HALF_WRITTEN}", info.base_name):  # of a killed conversion
            os.remove(info.path)
    return replace(report, fingerprint=_write_manifest(plan, folder, written))


def _check_rejected(
    plan: Plan, folder: Location, num_rejected: int, most: float, shown: dict[str, str]
) -> None:
    if num_rejected < plan.num_images and num_rejected / plan.num_images <= most:
        return
    key, reason = next(iter(shown.items()))
    accepting = ""
    if num_rejected < plan.num_images:
        least = -(-100 * num_rejected // plan.num_images) / 100
        accepting = f", or leave them out with convert.max_rejected_fraction={least:g}"
    raise ValueError(
        f"{num_rejected} of {plan.num_images} files of the source are not usable images, above "
        f"convert.max_rejected_fraction={most}; the first is {key!r}: "
        f"{reason}. {folder.child(REJECTED_FILE).uri} lists all. Mend or remove them and run "
        f"the command again{accepting}"
    )


def _notes(plan: Plan, histogram: dict[str, int], num_turned: int) -> list[str]:
    """What may surprise in a set that is otherwise complete."""
    notes = []
    if num_turned and plan.settings["apply_orientation"]:
        notes.append(f"{num_turned} images were turned as their EXIF says")
    elif num_turned:
        notes.append(
            f"{num_turned} images have an orientation in EXIF and are kept as they are stored; "
            "convert.apply_orientation=true turns them as viewers show them"
        )
    for count, have in ((0, "have no images"), (1, "have one image")):
        if names := [name for name, found in histogram.items() if found == count]:
            notes.append(f"{len(names)} classes {have}: {listed(names)}")
    if names := plan.no_classes:
        notes.append(f"{len(names)} folders have no images and are no classes: {listed(names)}")
    if len(histogram) == 1:
        notes.append(f"there is one class only: {next(iter(histogram))!r}")
    return notes


def listed(names: list[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:_NAMES_SHOWN]) + (" and others" if len(names) > _NAMES_SHOWN else "")


def _check_shards(plan: Plan, folder: Location, written: list[ShardResult]) -> None:
    """Look at the size and the footer of every shard before the data set becomes visible.

    Raises:
        ValueError: some are not as they were written; a restart makes them again.
    """
    files = [_shard_file(plan, result) for result in written]
    with ThreadPoolExecutor(_THREADS) as pool:
        looks = pool.map(lambda file: problem_of_shard(folder.child(file.path), file), files)
        problems = {r.shard: found for r, found in zip(written, looks, strict=True) if found}
    for shard in problems:
        folder.child(STAGING_FOLDER).child(RESULT.format(shard)).delete()
    for shard, problem in problems.items():
        raise ValueError(
            f"{len(problems)} of {len(written)} shards in {folder.uri} are not as they were "
            f"written; the first is {plan.name_of(shard)}: {problem}. Check the storage, and run "
            "the same command again, which makes these shards again"
        )


def _shard_file(plan: Plan, result: ShardResult) -> ShardFile:
    name = plan.name_of(result.shard)
    images = ImageFile(*result.images) if result.images else None
    return ShardFile(name, sum(result.rows), result.bytes, result.crc32, images)


def _write_manifest(plan: Plan, folder: Location, written: list[ShardResult]) -> str:
    rows = np.concatenate([r.rows for r in written])
    lists = (rows_of_group for r in written for rows_of_group in r.dropped or [[]] * len(r.rows))
    dropped = {group: np.array(one, np.int32) for group, one in enumerate(lists) if one}
    for group, one in dropped.items():
        rows[group] -= len(one)
    columns = RowGroupColumns(
        file_index=np.repeat(np.arange(len(written)), [len(r.rows) for r in written]),
        row_group=np.concatenate([np.arange(len(r.rows)) for r in written]),
        rows=rows,
        bytes=np.concatenate([r.row_group_bytes for r in written]),
        dropped=dropped,
    ).without_empty()
    origin = {"seed": plan.settings["seed"], "source_digest": plan.source_digest}
    origin |= {name: plan.settings[name] for name in ABOUT if plan.settings.get(name)}
    return write_manifest(
        folder,
        columns,
        files=[_shard_file(plan, result) for result in written],
        classes=plan.classes,
        max_labels=max(r.max_labels for r in written),
        text_columns=plan.settings["columns"],
        origin=origin,
    )
