"""The end of a conversion: all shards are looked at, and the manifest makes the set visible."""

import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from vit_ray.data.convert.destination import OUTPUT
from vit_ray.data.convert.shards import RESULT, Plan, ShardResult, results
from vit_ray.data.convert.staged_files import parquet_output, read_many_facts, write_facts
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

_LOG: Final = logging.getLogger(__name__)
_THREADS: Final = 16
_REJECTED_SHOWN: Final = 1000
_NAMES_SHOWN: Final = 10
_MIB: Final = 1 << 20
# Of the further classes that a row group of rows in random order would have; with fewer they are
# sorted.
_SHARE_SORTED: Final = 0.5
_UNLIKE_WRITERS: Final = (
    "JPEG files got their restart markers from: %s. Bytes and fingerprint depend on it, and "
    "without any they are read more slowly: install the same Pillow from PyPI on all machines"
)


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    `label_histogram` counts images per class name; `rejected` maps the key of each of the first
    1,000 rejected images to its reason, and `rejected.parquet` has all. `num_indexed` images have a
    restart index, and `num_damaged` are in files that libjpeg warns of (`damaged.parquet` has keys
    and warnings); `jpeg_writers` names what rewrote their files on some machine, "none" where
    nothing could. `settings` are those of the conversion, with the whole address of its source.
    `fields` are those of the source that images and labels were read from, where its files name
    them once. `was_done` says that the set was there, and that nothing had changed. `notes` say
    what may surprise: classes of one image, orientations, what reading images in place costs.
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
    jpeg_writers: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict, repr=False)
    was_done: bool = False
    fields: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    empty_classes: list[str] = field(default_factory=list)


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
    total = ShardResult()
    shown: dict[str, str] = {}
    written: list[ShardResult] = []
    counts = np.zeros(len(plan.classes), np.int64)
    num_rejected = num_damaged = 0
    with (
        parquet_output(folder.child(REJECTED_FILE), REJECTED_SCHEMA, "snappy") as rejected,
        parquet_output(folder.child(DAMAGED_FILE), REJECTED_SCHEMA, "snappy") as damaged,
    ):
        for facts in read_many_facts(results(plan, staging)):
            result = ShardResult(**facts)
            for rows, target in ((result.rejected, rejected), (result.damaged, damaged)):
                if rows:
                    columns = [pa.array(column) for column in zip(*rows, strict=True)]
                    target.write_table(pa.Table.from_arrays(columns, schema=REJECTED_SCHEMA))
            num_rejected += len(result.rejected)
            num_damaged += len(result.damaged)
            shown.update(result.rejected[: max(0, _REJECTED_SHOWN - len(shown))])
            total.num_indexed += result.num_indexed
            total.num_turned += result.num_turned
            for label, count in result.label_counts.items():
                counts[int(label)] += count
            if result.rows:
                written.append(replace(result, rejected=[], damaged=[], label_counts={}))
            else:
                folder.child(plan.name_of(result.shard)).delete()
    _check_rejected(plan, folder, num_rejected, max_rejected_fraction, shown)
    _check_shards(plan, folder, written)
    num_rows = sum(sum(r.rows) - sum(map(len, r.dropped)) for r in written)
    if num_rows != plan.num_images - num_rejected:
        raise ValueError(
            f"{num_rows:,} images are in the shards, and {num_rejected:,} are rejected, but the "
            f"source had {plan.num_images:,} when it was indexed; delete {folder.uri!r}, and "
            "convert again"
        )
    check_lock(staging, lock_number)
    histogram = dict(zip(plan.classes, counts.tolist(), strict=True))
    notes = _notes(plan, histogram, total.num_turned)
    report = ConvertReport(
        num_images=plan.num_images - num_rejected,
        num_classes=len(plan.classes),
        num_shards=len(written),
        num_rejected=num_rejected,
        bytes=sum(result.bytes for result in written),
        fingerprint="",
        label_histogram=histogram,
        rejected=shown,
        num_indexed=total.num_indexed,
        num_damaged=num_damaged,
        jpeg_writers=sorted({result.jpeg_writer for result in written} - {""}),
        settings=plan.settings,
        fields=plan.fields,
        notes=notes + (_costs_in_place(written, len(plan.classes)) if plan.is_in_place else []),
        empty_classes=sorted({*(n for n, k in histogram.items() if not k), *plan.empty_classes}),
    )
    if len(report.jpeg_writers) > 1 or "none" in report.jpeg_writers:
        _LOG.warning(_UNLIKE_WRITERS, ", ".join(report.jpeg_writers))
    folder.child(REPORT_FILE).write(json.dumps(asdict(report), indent=1).encode())
    record = {
        name: getattr(plan, name) for name in ("version", "settings", "versions", "source_digest")
    }
    write_facts(folder.child(SOURCE_FILE), record)
    _delete_abandoned(folder)
    return replace(report, fingerprint=_write_manifest(plan, folder, written))


def _check_rejected(
    plan: Plan, folder: Location, num_rejected: int, most: float, shown: dict[str, str]
) -> None:
    if num_rejected < plan.num_images and num_rejected <= most * plan.num_images:
        return
    key, reason = next(iter(shown.items()))
    accepting = ""
    if num_rejected < plan.num_images:
        shares = (percent / 100 for percent in range(101))
        least = next(share for share in shares if num_rejected <= share * plan.num_images)
        accepting = (
            f", or leave them out with convert.max_rejected_fraction={least:g}, which uses the "
            "shards that are made"
        )
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
    if single := [name for name, count in histogram.items() if count == 1]:
        notes.append(f"{len(single)} classes have one image: {listed(single)}")
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

    def problem_of(result: ShardResult) -> str | None:
        file = _shard_file(plan, result)
        return problem_of_shard(folder.child(file.path), file)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = zip(written, pool.map(problem_of, written), strict=True)
        problems = {result.shard: problem for result, problem in found if problem}
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
        largest_pixels=max(r.largest_pixels for r in written),
    )


def _delete_abandoned(folder: Location) -> None:
    """Half-written files of killed conversions; on S3 such a file never comes to be."""
    for info in folder.list_files(recursive=False) if folder.is_local else ():
        if re.fullmatch(f"({OUTPUT}){HALF_WRITTEN}", info.base_name):
            os.remove(info.path)


def _costs_in_place(written: list[ShardResult], num_classes: int) -> list[str]:
    """What reading in place costs, as a report says it."""
    rows = [count for result in written for count in result.rows]
    sizes = [size for result in written for size in result.row_group_bytes]
    classes = [count for result in written for count in result.classes_of_groups]
    found = sum(classes) / len(classes)
    expected = sum(num_classes * (1 - (1 - 1 / num_classes) ** n) for n in rows) / len(rows)
    notes = [
        f"row groups have up to {max(rows):,} rows and {max(sizes) / _MIB:,.0f} MiB, and are read "
        "whole: a shuffle window holds those that fit in 256 MiB",
        "images have no restart markers, so that crops decode whole images",
    ]
    if found - 1 < _SHARE_SORTED * (expected - 1):
        notes.append(
            f"rows are sorted by class ({found:.1f} of {num_classes} classes in a row group), so "
            "classes meet only within data.shuffle_window, and data.fraction and "
            "data.held_out_fraction take whole row groups of them"
        )
    return notes
