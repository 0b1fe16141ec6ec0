"""Converts a source of images to a data set: shuffled once, checked, committed whole.

Two Ray Data jobs. The first indexes the source, a task per unit; the index of all images is then
drawn into the order of the data set by the recorded seed, through files on disk. The second makes
the shards, a task each: it reads the images of its shard wherever they lie, checks them, and writes
the shard and its facts. A finished unit or shard is never made again; the manifest is written last,
when every shard has been looked at, and is the commit. No process ever holds more than a shard's
row group and a piece of the index.
"""

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import fs

from vit_ray.data.format.manifest import (
    Manifest,
    RowGroupColumns,
    ShardFile,
    keep_manifest,
    open_dataset,
    write_manifest,
)
from vit_ray.data.format.row_groups import problem_of_shard
from vit_ray.data.format.schema import (
    CHECKSUMS_FILE,
    DAMAGED_FILE,
    MANIFEST_FILE,
    REJECTED_FILE,
    REJECTED_SCHEMA,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
    VERSIONS_FOLDER,
    shard_name,
)
from vit_ray.data.format.shard_writer import ShardWriter
from vit_ray.data.format.sidecars import write_checksums
from vit_ray.data.jpeg_index.restart_markers import restart_writer
from vit_ray.data.prepare.label_map import LabelsAre, check_unique
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.shard_images import (
    Damaged,
    Shrinking,
    checked,
    read_ahead,
    written_bytes,
)
from vit_ray.data.prepare.shard_lists import (
    ShardRows,
    list_of_shard,
    shuffled_rows,
    write_shard_lists,
)
from vit_ray.data.prepare.source_index import SourceIndex, build_index
from vit_ray.data.prepare.source_record import (
    SourceRecord,
    changed_settings,
    changes_since,
    index_of_growth,
    read_record,
)
from vit_ray.data.prepare.sources.columns import check_columns
from vit_ray.data.prepare.sources.entries import IndexEntry, SourceUnit, printable, relative
from vit_ray.data.prepare.sources.formats import Format, list_units
from vit_ray.data.prepare.sources.patterns import is_pattern
from vit_ray.data.prepare.staged_files import (
    parquet_output,
    read_facts,
    read_many_facts,
    read_row_groups,
    write_facts,
)
from vit_ray.lock import HeldError, LockLostError, check_lock, hold_lock, is_lock_file
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate

_LOG: Final = logging.getLogger(__name__)
_MIB: Final = 1 << 20
_SAMPLED: Final = 256
"""Images that are read, and shrunk, to learn the mean size: it is right within 5 to 10 %."""
_SAMPLED_PER_TASK: Final = 32
_THREADS: Final = 16


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did.

    `label_histogram` counts images per class name; `rejected` maps the key of each of the first
    1,000 rejected images to its reason, and `rejected.parquet` has all. `num_indexed` images have a
    restart index, and `num_damaged` are in files that libjpeg warns of (`damaged.parquet` has keys
    and warnings); `jpeg_writers` names what rewrote their files on some machine, "none" where
    nothing could. `settings` are those of the conversion, with the whole address of its source.
    `was_done` says that the set was there, and that nothing had changed.
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


def convert(
    source: str,
    destination: str,
    *,
    format: Format = "auto",
    split: str | None = None,
    seed: int = 0,
    rows_per_row_group: int = 64,
    shard_mib: float = 256,
    classes: Sequence[str] | None = None,
    labels_are: LabelsAre = "auto",
    columns: Sequence[str] = (),
    label_field: str | None = None,
    shrink_to: int | None = None,
    shrink_quality: int = 95,
    index_jpeg: bool = True,
    damaged: Damaged = "auto",
    extend: bool = False,
    keep_damaged_archives: bool = False,
    max_rejected_fraction: float = 0.01,
    num_cpus: float = 1.0,
) -> ConvertReport:
    """Convert images to a data set, or finish a conversion that was interrupted.

    Where the destination holds the data set of this source and these settings already, nothing is
    done, and its report is returned.

    Args:
        source: a folder of class folders, of WebDataset tar shards, of Hugging Face parquet files,
            or a CSV or JSONL list of paths and labels; local or `s3://`. Also a glob, or braces
            such as `{000..127}`.
        split: which of the source's splits; None is for a source that has no more than one.
        seed: of the one shuffle of all rows.
        shard_mib: target size of a shard in MiB.
        classes: class names in label order; None takes those that the source declares, or its
            sorted labels.
        labels_are: what the source's labels are: names, or indices into the classes; `auto` is as
            the source declares, and indices where it does not, all are integers, and no class
            name is.
        columns: fields of the source that are passed through as text, such as captions: columns of
            parquet and CSV, keys of JSON, suffixes of a tar's text files.
        label_field: the feature of TFRecord files that is the label, or the task of VTAB whose
            label is computed from several; None is for `label`.
        shrink_to: re-encode images whose shorter side is longer than this many pixels, as JPEG of
            `shrink_quality`; None keeps every size.
        index_jpeg: give JPEG files restart markers, losslessly, so that training decodes no more of
            them than its crops; the checksum of each file as it came is kept.
        damaged: reject or keep JPEG files that libjpeg warns of; `auto` rejects those that end
            early. Those that are kept are counted and listed.
        extend: add images that are new in the source to the data set that the destination holds.
            Those that it has keep their bytes and numbers; the manifest before stays in a folder
            `versions/FINGERPRINT`, which can be opened as a data set.
        keep_damaged_archives: take what stands before the damage of a tar that is cut or broken.
        max_rejected_fraction: refuse to commit when more of the source is rejected; the same call
            with a higher one commits what is finished.

    Raises:
        ValueError: if the source holds no images, is damaged or has several splits, the
            destination holds a data set of another source or other settings, or another conversion
            writes it, an interrupted one had other settings, or too much is rejected.
    """
    folder = locate(destination)
    check_unique(classes or (), "convert.classes")
    check_columns(columns)
    _check_free(folder)
    settings = _Settings(
        source, format, split, seed, rows_per_row_group, shard_mib, list(classes or []), labels_are,
        list(columns), shrink_to, shrink_quality, index_jpeg, damaged, label_field,
    )  # fmt: skip
    staging = folder.child(STAGING_FOLDER)
    report = _finished(settings, folder, num_cpus, extend=extend)
    if report is not None and not staging.exists():
        return report
    with _alone(folder) as lock_number:
        _check_free(folder)  # again: another conversion may have ended meanwhile
        report = _finished(settings, folder, num_cpus, extend=extend)
        if report is None:
            _begin(settings, folder)
            conversion = _prepare(settings, folder, keep_damaged_archives, num_cpus)
            if conversion is None:
                report = _report_of(folder)
            else:
                _make_shards(conversion, folder, num_cpus)
                report = _commit(conversion, folder, max_rejected_fraction, lock_number)
    _delete_staging(staging)
    return report


def check_conversion(source: str, destination: str, format: Format, split: str | None) -> None:
    """Refuse what can be seen without opening images, so that nobody waits for Ray to hear it.

    Raises:
        ValueError: there is nothing at the source, it is a file of no known format, or the
            destination is taken. What is in a folder is seen by the conversion.
    """
    if is_pattern(source) or locate(source).info().type != fs.FileType.Directory:
        list_units(source, format, split)
    _check_free(locate(destination))


def _delete_staging(staging: Location) -> None:
    if foreign := _foreign_files(staging):
        _LOG.warning("%s stays: it holds %r, which is not ours", staging.uri, foreign[0])
    else:
        staging.delete()


@contextmanager
def _alone(folder: Location) -> Iterator[int]:
    """Keep other conversions out of a destination; yields the number that `check_lock` takes.

    The lock lies among what is deleted in the end. Who has lost it, to another that could not see
    it alive, may go on for a while, since both make the same shards, but does not commit.
    """
    staging = folder.child(STAGING_FOLDER)
    try:
        with hold_lock(staging, on_lost=_LOG.warning) as number:
            yield number
    except HeldError as error:
        raise ValueError(
            f"convert.destination={folder.uri!r} is being written by another conversion: "
            f"{error.owner}; wait for it or stop it, or choose another folder."
        ) from error
    except LockLostError as error:
        raise ValueError(f"convert.destination={folder.uri!r}: {error}") from error


def _check_free(folder: Location) -> None:
    """Refuse files that are somebody else's and that ours would replace."""
    folder.refuse_file_in_its_place("convert.destination")
    names = {info.base_name for info in folder.list_files(recursive=False)}
    staging = folder.child(STAGING_FOLDER)
    if foreign := _foreign_files(staging):
        raise ValueError(
            f"{staging.uri!r} holds {foreign[0]!r}, which no conversion has put there; choose "
            f"another convert.destination, or move it away."
        )
    is_begun = staging.child(_SETTINGS).exists()
    if is_begun or {MANIFEST_FILE, SOURCE_FILE} <= names:
        return
    if MANIFEST_FILE in names:
        raise ValueError(
            f"convert.destination={folder.uri!r} already holds a data set, without {SOURCE_FILE}, "
            "which says what it was made of; choose another folder or delete it first"
        )
    if taken := sorted(name for name in names if _OUTPUT.fullmatch(name)):
        raise ValueError(
            f"convert.destination={folder.uri!r} has a file {taken[0]!r}, which a conversion would "
            f"replace; choose another folder, or move it away."
        )


def _finished(
    settings: "_Settings", folder: Location, num_cpus: float, *, extend: bool
) -> ConvertReport | None:
    """The report of the data set that is there; None if there is something to do.

    Raises:
        ValueError: it is of other settings, or its source has changed.
    """
    record = read_record(folder)
    is_planned = folder.child(STAGING_FOLDER).child(_PLAN).exists()
    if record is None:
        return None
    if record.fingerprint != open_dataset(folder.uri).fingerprint:
        if is_planned:  # a conversion was interrupted before its last file
            return None
        raise ValueError(
            f"{folder.child(SOURCE_FILE).uri!r} is of another data set than the {MANIFEST_FILE} "
            "beside it; restore both from a copy, or convert to another folder"
        )
    what = f"convert.destination={folder.uri!r} already holds a data set"
    if other := changed_settings(record.settings, settings.kept()):
        raise ValueError(
            f"{what} of other settings: {other}; put these back, or choose another folder"
        )
    changes = changes_since(record, settings.units(), num_cpus)
    if changes and not extend:
        raise ValueError(
            f"{what}, and its source has changed since: {changes}; set convert.extend=true to add "
            "images that are new, or choose another folder"
        )
    return None if changes else _report_of(folder)


def _report_of(folder: Location) -> ConvertReport:
    fields = json.loads(folder.child(REPORT_FILE).read())
    return ConvertReport(**fields | {"was_done": True})


def _foreign_files(staging: Location) -> list[str]:
    names = [relative(info.path, staging.path) for info in staging.list_files()]
    return [name for name in names if not is_lock_file(name) and not _STAGED.fullmatch(name)]


_SETTINGS: Final = "settings.json"
_PLAN: Final = "plan.json"
_HALF_WRITTEN: Final = r"\.[0-9a-f]{8}\.tmp"
"""What `AtomicOutput` appends to a file's name."""
_STAGED: Final = re.compile(
    r"(settings|plan|source|rejected|damaged|index-[0-9a-f]{16}|list-\d{5,}|shard-\d{6,})\.(json|parquet|bin)"
    rf"({_HALF_WRITTEN})?"
)
_LISTS: Final = (REJECTED_FILE, DAMAGED_FILE)
_SIDECARS: Final = (MANIFEST_FILE, *_LISTS, REPORT_FILE, CHECKSUMS_FILE, SOURCE_FILE)
_OUTPUT: Final = re.compile(r"part-\d+-of-\d+\.parquet|" + "|".join(map(re.escape, _SIDECARS)))
"""Names that a conversion gives to files; others are somebody else's."""
_STAGING_VERSION: Final = 5
"""Of what the staging folder holds; raised when a restart could not read it."""


@dataclass(frozen=True)
class _Settings:
    """What a restart must have in common with the first start."""

    source: str
    format: Format
    split: str | None
    seed: int
    rows_per_row_group: int
    shard_mib: float
    classes: list[str]
    labels_are: LabelsAre
    columns: list[str]
    shrink_to: int | None
    shrink_quality: int
    index_jpeg: bool
    damaged: Damaged
    label_field: str | None = None

    def kept(self) -> dict[str, Any]:
        """As the staging folder has them: what is not set is left out, where versions lack it."""
        fields = asdict(self) | {"source": _address(self.source)}
        return {k: v for k, v in fields.items() if k != "label_field" or v is not None}

    def units(self) -> list[SourceUnit]:
        """Those of the source as it is now."""
        found = list_units(self.source, self.format, self.split)
        columns, label_field = tuple(self.columns), self.label_field
        return [replace(unit, columns=columns, label_field=label_field) for unit in found]

    @property
    def shrinking(self) -> Shrinking | None:
        """How large images are made small."""
        return None if self.shrink_to is None else Shrinking(self.shrink_to, self.shrink_quality)


def _begin(settings: _Settings, folder: Location) -> None:
    """Note the settings; what an interrupted conversion made with others is no use to these."""
    staging = folder.child(STAGING_FOLDER)
    file = staging.child(_SETTINGS)
    content = json.dumps({"version": _STAGING_VERSION, **settings.kept()}).encode()
    if file.exists() and file.read() == content:
        return
    if staging.child(_PLAN).exists():
        raise _other_settings(folder, json.loads(file.read()), settings)
    for info in staging.list_files():
        if not is_lock_file(info.base_name):
            staging.child(info.base_name).delete()
    file.write(content)


def _other_settings(folder: Location, then: dict[str, Any], now: _Settings) -> ValueError:
    kept = {"version": _STAGING_VERSION, **now.kept()}
    other = changed_settings(kept | then, kept)
    return ValueError(
        f"{folder.uri!r} holds an interrupted conversion with another source or settings, or of "
        f"another version of vit_ray: {other}; repeat its command there to continue it, or delete "
        f"the folder"
    )


@dataclass(frozen=True)
class _Conversion:
    """What is made; written once, when the list of each shard is, and kept by restarts.

    Attributes:
        extends: fingerprint of the data set that the shards are added to; empty for none.
        first_shard: number of the first file, after those of that set.
    """

    settings: _Settings
    source_digest: str
    classes: list[str]
    are_indices: bool
    num_images: int
    num_shards: int
    extends: str = ""
    first_shard: int = 0

    def name_of(self, shard: int) -> str:
        """The file of a shard."""
        return shard_name(self.first_shard + shard, self.first_shard + self.num_shards)

    @property
    def shards(self) -> ShardRows:
        """Which rows each shard holds."""
        return ShardRows(self.num_images, self.num_shards, self.settings.rows_per_row_group)

    def label_of(self) -> dict[str, int]:
        """The label that each of the source's stands for."""
        names = map(str, range(len(self.classes))) if self.are_indices else self.classes
        return {name: label for label, name in enumerate(names)}


def _prepare(
    settings: _Settings, folder: Location, keep_damaged: bool, num_cpus: float
) -> _Conversion | None:
    """What is to be made; None where a source that has changed has no new image."""
    staging = folder.child(STAGING_FOLDER)
    before = open_dataset(folder.uri) if folder.child(MANIFEST_FILE).exists() else None
    if staging.child(_PLAN).exists():
        conversion = _known_conversion(settings, folder)
        if before is not None and before.fingerprint != conversion.extends:
            return conversion  # committed, but for the files beside the manifest
        planned = read_record(staging)
        changes = planned and changes_since(planned, settings.units(), num_cpus)
        if not changes:
            return conversion
        _LOG.warning(
            "the source of %s has changed, so it is planned again: %s", folder.uri, changes
        )
        _delete_plan(conversion, folder)
    with tempfile.TemporaryDirectory() as scratch:
        index = _index(settings, folder, before, Path(scratch), keep_damaged, num_cpus)
        if index is None:
            return None
        conversion = _Conversion(
            settings,
            index.digest,
            index.classes,
            index.are_indices,
            index.num_images,
            _num_shards(settings, index, num_cpus),
            "" if before is None else before.fingerprint,
            0 if before is None else 1 + max(int(f.path.split("-")[1]) for f in before.files),
        )
        with_retries(
            lambda: write_shard_lists(
                index, conversion.shards, settings.seed, staging, Path(scratch)
            ),
            "writing the shard lists",
        )
    SourceRecord("", settings.kept(), index.are_indices, index.units).write(staging)
    write_facts(staging.child(_PLAN), asdict(conversion))
    return conversion


def _index(
    settings: _Settings,
    folder: Location,
    before: Manifest | None,
    scratch: Path,
    keep_damaged: bool,
    num_cpus: float,
) -> SourceIndex | None:
    """The images of the source, or those that a data set lacks, which is kept as it is."""
    staging, units = folder.child(STAGING_FOLDER), settings.units()
    if before is None:
        return build_index(
            units,
            staging,
            scratch,
            classes=settings.classes or None,
            labels_are=settings.labels_are,
            columns=settings.columns,
            label_field=settings.label_field,
            keep_damaged=keep_damaged,
            num_cpus=num_cpus,
        )
    record = read_record(folder)
    assert record is not None
    kept = folder.child(VERSIONS_FOLDER).child(before.fingerprint)
    if not kept.child(MANIFEST_FILE).exists():
        for name in (*_LISTS, REPORT_FILE, SOURCE_FILE):
            kept.child(name).write(folder.child(name).read())
        keep_manifest(folder, kept)
    return index_of_growth(
        record, before, units, staging, scratch, keep_damaged=keep_damaged, num_cpus=num_cpus
    )


def _delete_plan(conversion: _Conversion, folder: Location) -> None:
    """With what was made by it; the shards of the data set that it extends have other names."""
    staging = folder.child(STAGING_FOLDER)
    staging.child(_PLAN).delete()
    for shard in range(conversion.num_shards):
        staging.child(_result_name(shard)).delete()
        folder.child(conversion.name_of(shard)).delete()


def _known_conversion(settings: _Settings, folder: Location) -> _Conversion:
    """An interrupted conversion.

    Raises:
        ValueError: it has other settings, as when a conversion that had lost the folder wrote it.
    """
    fields = read_facts(folder.child(STAGING_FOLDER).child(_PLAN))
    then = _Settings(**fields["settings"]).kept()
    if then != settings.kept():
        raise _other_settings(folder, then, settings)
    return _Conversion(**{**fields, "settings": settings})


def _num_shards(settings: _Settings, index: SourceIndex, num_cpus: float) -> int:
    groups = -(-index.num_images // settings.rows_per_row_group)
    written = _written_bytes(settings, index, num_cpus)
    return min(groups, max(1, round(written / (settings.shard_mib * _MIB))))


def _written_bytes(settings: _Settings, index: SourceIndex, num_cpus: float) -> float:
    """Bytes of all images as shards will hold them, by a sample where they must be looked at."""
    if settings.shrinking is None and not index.unknown_lengths:
        return index.bytes
    count = min(_SAMPLED, index.num_images)
    places = np.arange(count, dtype=np.int64)
    sample = list(index.entries(shuffled_rows(index.num_images, settings.seed, places)))
    firsts = range(0, count, _SAMPLED_PER_TASK)
    sizes = run_tasks(_Sizer(sample, settings.shrinking), firsts, num_cpus)
    return float(sum(sizes)) / count * index.num_images


@dataclass(frozen=True)
class _Sizer:
    sample: list[IndexEntry]
    shrinking: Shrinking | None

    def __call__(self, first: int) -> int:
        return written_bytes(self.sample[first : first + _SAMPLED_PER_TASK], self.shrinking)


@dataclass(frozen=True)
class _ShardResult:
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `jpeg_writer` is empty where none was asked for.
    """

    shard: int
    rows: list[int]
    row_group_bytes: list[int]
    bytes: int
    max_labels: int
    label_counts: dict[str, int]
    rejected: list[tuple[str, str]]
    row_group_crc32: list[int]
    footer_crc32: int
    num_indexed: int = 0
    jpeg_writer: str = ""
    damaged: list[tuple[str, str]] = field(default_factory=list)


def _make_shards(conversion: _Conversion, folder: Location, num_cpus: float) -> None:
    done = {info.base_name for info in folder.child(STAGING_FOLDER).list_files()}
    missing = [shard for shard in range(conversion.num_shards) if _result_name(shard) not in done]
    run_tasks(_ShardMaker(conversion, folder.uri), missing, num_cpus)


def _result_name(shard: int) -> str:
    return f"shard-{shard:06d}.json"


def _results(conversion: _Conversion, staging: Location) -> Iterator[_ShardResult]:
    """The results of all shards, in order."""
    files = (staging.child(_result_name(shard)) for shard in range(conversion.num_shards))
    for facts in read_many_facts(files):
        yield _ShardResult(**facts)


@dataclass(frozen=True)
class _ShardMaker:
    conversion: _Conversion
    destination: str

    def __call__(self, shard: int) -> int:
        folder = locate(self.destination)
        staging = folder.child(STAGING_FOLDER)
        result = with_retries(
            lambda: self._make(
                shard, folder, list_of_shard(self.conversion.shards, staging, shard)
            ),
            f"making shard {shard}",
        )
        write_facts(staging.child(_result_name(shard)), asdict(result))
        return shard

    def _make(self, shard: int, folder: Location, entries: list[IndexEntry]) -> _ShardResult:
        settings = self.conversion.settings
        label_of = self.conversion.label_of()
        rejected: list[tuple[str, str]] = []
        damaged: list[tuple[str, str]] = []
        counts: dict[str, int] = {}
        max_labels = num_indexed = 0
        destination = folder.child(self.conversion.name_of(shard))
        writer = ShardWriter(
            destination,
            settings.rows_per_row_group,
            settings.columns,
            is_indexed=settings.index_jpeg,
        )
        libjpeg = restart_writer()
        with writer:
            for entry, image in read_ahead(entries):
                labels = tuple(label_of[text] for text in entry.labels)
                try:
                    row = checked(
                        image, entry.key, labels, settings.shrinking, libjpeg, settings.damaged,
                        gets_markers=settings.index_jpeg,
                    )  # fmt: skip
                except ValueError as error:
                    rejected.append((entry.key, printable(str(error))))
                    continue
                writer.add(replace(row, extra=entry.extra))
                if row.damage:
                    damaged.append((entry.key, row.damage))
                num_indexed += row.index is not None
                max_labels = max(max_labels, len(labels))
                for label in labels:
                    counts[str(label)] = counts.get(str(label), 0) + 1
        facts = writer.facts()
        jpeg_writer = "" if not settings.index_jpeg else libjpeg.name if libjpeg else "none"
        return _ShardResult(
            shard, facts.rows, facts.row_group_bytes, facts.bytes, max_labels, counts, rejected,
            facts.row_group_crc32, facts.footer_crc32, num_indexed, jpeg_writer, damaged,
        )  # fmt: skip


_REJECTED_SHOWN: Final = 1000
_UNLIKE_WRITERS: Final = (
    "JPEG files got their restart markers from: %s. Bytes and fingerprint depend on it, and "
    "without any they are read more slowly: install the same Pillow from PyPI on all machines"
)


def _delete_abandoned(folder: Location) -> None:
    """Half-written files of killed conversions; on S3 such a file never comes to be."""
    if folder.is_local:
        for info in folder.list_files(recursive=False):
            if re.fullmatch(f"({_OUTPUT.pattern}){_HALF_WRITTEN}", info.base_name):
                os.remove(info.path)


def _commit(
    conversion: _Conversion, folder: Location, max_rejected_fraction: float, lock_number: int
) -> ConvertReport:
    """Write what is left to write: the manifest last but for the report and the tidying up."""
    staging = folder.child(STAGING_FOLDER)
    base = folder.child(VERSIONS_FOLDER).child(conversion.extends) if conversion.extends else None
    shown: dict[str, str] = {}
    written: list[_ShardResult] = []
    counts = np.zeros(len(conversion.classes), np.int64)
    num_rejected = num_damaged = 0
    # A set that is extended keeps its own lists until nothing can refuse the extension.
    place = folder if base is None else staging
    with (
        parquet_output(place.child(REJECTED_FILE), REJECTED_SCHEMA, "snappy") as output,
        parquet_output(place.child(DAMAGED_FILE), REJECTED_SCHEMA, "snappy") as damaged,
    ):
        if base is not None:
            for name, target in ((REJECTED_FILE, output), (DAMAGED_FILE, damaged)):
                for table in read_row_groups(base.child(name)):
                    target.write_table(table)
        for result in _results(conversion, staging):
            if result.rejected:
                output.write_table(_rejected_table(result.rejected))
            if result.damaged:
                damaged.write_table(_rejected_table(result.damaged))
            num_rejected += len(result.rejected)
            num_damaged += len(result.damaged)
            shown.update(result.rejected[: max(0, _REJECTED_SHOWN - len(shown))])
            for label, count in result.label_counts.items():
                counts[int(label)] += count
            if result.rows:
                written.append(replace(result, rejected=[], damaged=[], label_counts={}))
    _check_rejected(place, shown, num_rejected, conversion.num_images, max_rejected_fraction)
    _check_shards(conversion, folder, written)
    check_lock(staging, lock_number)
    if base is not None:
        for name in _LISTS:
            folder.child(name).write(staging.child(name).read())
    report = ConvertReport(
        num_images=conversion.num_images - num_rejected,
        num_classes=len(conversion.classes),
        num_shards=len(written),
        num_rejected=num_rejected,
        bytes=sum(result.bytes for result in written),
        fingerprint=_write_manifest(conversion, folder, written),
        label_histogram=dict(zip(conversion.classes, counts.tolist(), strict=True)),
        rejected=shown,
        num_indexed=sum(result.num_indexed for result in written),
        num_damaged=num_damaged,
        jpeg_writers=sorted({result.jpeg_writer for result in written} - {""}),
        settings=asdict(conversion.settings) | {"source": _address(conversion.settings.source)},
    )
    if base is not None:
        report = _added(_report_of(base), report)
    if len(report.jpeg_writers) > 1 or "none" in report.jpeg_writers:
        _LOG.warning(_UNLIKE_WRITERS, ", ".join(report.jpeg_writers))
    content = json.dumps(asdict(report), indent=1).encode()
    lists = {name: folder.child(name).read() for name in _LISTS}
    write_checksums(folder, {**lists, REPORT_FILE: content})
    folder.child(REPORT_FILE).write(content)
    record = read_record(staging)
    assert record is not None
    replace(record, fingerprint=report.fingerprint).write(folder)
    _delete_abandoned(folder)
    return report


def _added(before: ConvertReport, new: ConvertReport) -> ConvertReport:
    """The report of a data set with what was added to it."""
    sums = ("num_images", "num_shards", "num_rejected", "num_damaged", "num_indexed", "bytes")
    totals = {name: getattr(before, name) + getattr(new, name) for name in sums}
    shown = list({**before.rejected, **new.rejected}.items())[:_REJECTED_SHOWN]
    return replace(
        new,
        **totals,
        label_histogram={k: n + before.label_histogram[k] for k, n in new.label_histogram.items()},
        rejected=dict(shown),
        jpeg_writers=sorted({*before.jpeg_writers, *new.jpeg_writers}),
    )


def _address(source: str) -> str:
    """The source from wherever one looks."""
    return source if "://" in source else os.path.abspath(source)


def _rejected_table(rejected: list[tuple[str, str]]) -> pa.Table:
    rows = [dict(zip(REJECTED_SCHEMA.names, row, strict=True)) for row in rejected]
    return pa.Table.from_pylist(rows, REJECTED_SCHEMA)


def _check_rejected(
    folder: Location, shown: dict[str, str], count: int, total: int, max_fraction: float
) -> None:
    if count == total or count > max_fraction * total:
        key, reason = next(iter(shown.items()))
        raise ValueError(
            f"{count} of {total} files of the source are not usable images, above "
            f"convert.max_rejected_fraction={max_fraction}; the first is {key!r}: {reason}. "
            f"{folder.child(REJECTED_FILE).uri} lists all. Raise the limit and run the command "
            f"again, which makes no shard again; or mend the source and run it again"
        )


def _check_shards(conversion: _Conversion, folder: Location, written: list[_ShardResult]) -> None:
    """Look at the size and the footer of every shard before the data set becomes visible.

    Raises:
        ValueError: some are not as they were written; a restart makes these anew.
    """

    def problem_of(result: _ShardResult) -> str | None:
        file = _shard_file(conversion, result)
        return problem_of_shard(folder.child(file.path), file)

    with ThreadPoolExecutor(_THREADS) as pool:
        found = zip(written, pool.map(problem_of, written), strict=True)
        problems = {result.shard: problem for result, problem in found if problem}
    for shard in problems:
        folder.child(STAGING_FOLDER).child(_result_name(shard)).delete()
    if problems:
        shard, problem = next(iter(problems.items()))
        name = conversion.name_of(shard)
        raise ValueError(
            f"{len(problems)} of {len(written)} shards in {folder.uri} are not as they were "
            f"written; the first is {name}: {problem}. Check the "
            f"storage, and run the same command again: it makes these shards anew."
        )


def _shard_file(conversion: _Conversion, result: _ShardResult) -> ShardFile:
    name = conversion.name_of(result.shard)
    return ShardFile(name, sum(result.rows), result.bytes, result.footer_crc32)


def _write_manifest(conversion: _Conversion, folder: Location, written: list[_ShardResult]) -> str:
    columns = RowGroupColumns(
        file_index=np.repeat(np.arange(len(written)), [len(r.rows) for r in written]),
        row_group=np.concatenate([np.arange(len(r.rows)) for r in written]),
        rows=np.concatenate([r.rows for r in written]),
        bytes=np.concatenate([r.row_group_bytes for r in written]),
        dropped={},
        crc32=np.concatenate([r.row_group_crc32 for r in written]),
    )
    files = [_shard_file(conversion, result) for result in written]
    max_labels = max(r.max_labels for r in written)
    origin: dict[str, Any] = {
        "seed": conversion.settings.seed,
        "source_digest": conversion.source_digest,
    }
    if conversion.extends:
        before = open_dataset(folder.child(VERSIONS_FOLDER).child(conversion.extends).uri)
        columns = columns.after(before)
        files = [*before.files, *files]
        max_labels = max(before.max_labels, max_labels)
        origin["extends"] = conversion.extends
    return write_manifest(
        folder,
        columns,
        files=files,
        classes=conversion.classes,
        max_labels=max_labels,
        text_columns=conversion.settings.columns,
        origin=origin,
    )
