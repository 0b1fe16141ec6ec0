"""The shards of a conversion: which rows each holds, and the tasks that write them.

A plan is decided once, when the source is indexed, and kept by restarts. It is written when the
list of each shard is, and only then are shards made.
"""

from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Final

import numpy as np

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import bytes_of, checked, read_ahead, written_bytes
from vit_ray.data.convert.hub import (
    MOST_ROWS,
    check_in_place_bytes,
    facts_of_file,
    rows_of_groups,
)
from vit_ray.data.convert.index import RowStore
from vit_ray.data.convert.rows import ROW_SCHEMA, Row, SourceChangedError, printable, table_rows
from vit_ray.data.convert.sources import units_of
from vit_ray.data.convert.staged_files import parquet_output, read_row_groups, write_facts
from vit_ray.data.dataset import STAGING_FOLDER, ImageFile, checksum, shard_name
from vit_ray.data.jpeg_index.rewriting import restart_writer
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.orientation import orientation_of
from vit_ray.data.progress import Shown, report_done
from vit_ray.data.run_tasks import run_tasks
from vit_ray.data.shard_writer import EncodedImage, ShardFacts, ShardWriter
from vit_ray.storage import Location, locate, with_retries

_SHUFFLE: Final = 5
# Of what the staging folder and the record of a source hold.
PLAN_VERSION: Final = 7
_MIB: Final = 1 << 20
# Images that are read, and shrunk, to estimate the mean size: it is correct within 5 to 10 %.
_SAMPLED: Final = 256
_SAMPLED_PER_TASK: Final = 32
# Files in the staging folder, with the rows and the result of a shard.
_LIST: Final = "list-{:06d}.parquet"
RESULT: Final = "shard-{:06d}.json"


@dataclass(frozen=True)
class Plan:
    """The planned shards.

    Attributes:
        settings: those of the conversion that decide the bytes of the data set.
        versions: of each part of the source, by its path.
        are_indices: whether labels are indices into the classes, and not names of them.
        fields: of the source that images and labels are read from.
        empty_classes: class folders without any file.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    source_digest: str
    classes: list[str]
    are_indices: bool
    num_images: int
    num_shards: int
    fields: dict[str, list[str]] = field(default_factory=dict)
    empty_classes: list[str] = field(default_factory=list)
    version: int = PLAN_VERSION

    @property
    def is_in_place(self) -> bool:
        return bool(self.settings["in_place"])

    def name_of(self, shard: int) -> str:
        return shard_name(shard, self.num_shards)

    def first_row(self, shard: int) -> int:
        """Position of the first row of a shard in the order; shards have whole row groups."""
        rows = int(self.settings["rows_per_row_group"])
        groups = -(-self.num_images // rows)
        return min(shard * groups // self.num_shards * rows, self.num_images)

    def label_of(self) -> dict[str, int]:
        """The label for each label of the source."""
        names = map(str, range(len(self.classes))) if self.are_indices else self.classes
        return {name: label for label, name in enumerate(names)}


def shards_for(written_bytes: float, num_images: int, config: ConvertConfig) -> int:
    """How many shards hold this many bytes of images, each of at least one row group."""
    groups = -(-num_images // config.rows_per_row_group)
    return min(groups, max(1, round(written_bytes / (config.shard_mib * _MIB))))


def mean_written_bytes(store: RowStore, num_images: int, seed: int, config: ConvertConfig) -> float:
    """Bytes of an image as shards hold it, from a sample."""
    places = np.arange(min(_SAMPLED, num_images), dtype=np.int64)
    order = KeyedPermutation(num_images, _SHUFFLE, seed)
    rows = list(table_rows(store.take(np.sort(order.ranks(places)))))
    parts = [rows[at : at + _SAMPLED_PER_TASK] for at in range(0, len(rows), _SAMPLED_PER_TASK)]
    return float(sum(run_tasks(written_bytes, parts, config))) / len(rows)


def write_lists(plan: Plan, store: RowStore, seed: int, staging: Location) -> None:
    """Write the rows of each shard, in their order: the one shuffle of all rows."""
    order = KeyedPermutation(plan.num_images, _SHUFFLE, seed)
    for shard in range(plan.num_shards):
        places = np.arange(plan.first_row(shard), plan.first_row(shard + 1), dtype=np.int64)
        with parquet_output(staging.child(_LIST.format(shard)), ROW_SCHEMA) as writer:
            writer.write_table(store.take(order.ranks(places)))


def rows_of_shard(staging: Location, shard: int) -> list[Row]:
    """The rows of one shard."""
    tables = read_row_groups(staging.child(_LIST.format(shard)))
    return [row for table in tables for row in table_rows(table)]


@dataclass
class ShardResult(ShardFacts):
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `num_turned` images have an orientation in EXIF; `jpeg_writer` is empty where none
    was asked for. Where images are read in place, `images` are the fields of their `ImageFile`,
    `dropped` the rows of each row group that do not count, and `classes_of_groups` how many classes
    each has.
    """

    shard: int = 0
    max_labels: int = 0
    label_counts: dict[str, int] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    num_indexed: int = 0
    num_turned: int = 0
    jpeg_writer: str = ""
    dropped: list[list[int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    classes_of_groups: list[int] = field(default_factory=list)
    largest_pixels: int = 0

    def note(self, row: EncodedImage, came_as: bytes) -> None:
        """Count a row that was written."""
        if row.damage:
            self.damaged.append((row.key, row.damage))
        self.num_indexed += row.index is not None
        self.num_turned += orientation_of(came_as) != 1
        self.largest_pixels = max(self.largest_pixels, row.height * row.width)
        self.max_labels = max(self.max_labels, len(row.labels))
        for label in map(str, row.labels):
            self.label_counts[label] = self.label_counts.get(label, 0) + 1


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result, a task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    done = {info.base_name for info in staging.list_files(recursive=False)}
    missing = [shard for shard in range(plan.num_shards) if RESULT.format(shard) not in done]
    # About: shards of files that are read in place differ in size.
    num_images = round(plan.num_images * len(missing) / plan.num_shards)
    shown = Shown(f"converting to {config.destination}", num_images, "rejected")
    small = plan if plan.is_in_place else replace(plan, versions={}, empty_classes=[])
    run_tasks(make_shard, missing, small, config, shown=shown)


def make_shard(shard: int, plan: Plan, config: ConvertConfig) -> None:
    """Write one shard, and its result when it is whole."""
    written = written_facts if config.in_place else written_shard
    result = with_retries(lambda: written(shard, plan, config), f"making shard {shard}")
    staging = locate(config.destination).child(STAGING_FOLDER)
    write_facts(staging.child(RESULT.format(shard)), asdict(result))


def written_shard(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard of images that are copied."""
    folder, label_of, libjpeg = locate(config.destination), plan.label_of(), restart_writer()
    name = libjpeg.name if libjpeg else "none"
    found = ShardResult(shard=shard, jpeg_writer=name if config.index_jpeg else "")
    rows, is_indexed = config.rows_per_row_group, config.index_jpeg
    target = folder.child(plan.name_of(shard))
    writer = ShardWriter(target, rows, config.columns, is_indexed=is_indexed)
    listed = rows_of_shard(folder.child(STAGING_FOLDER), shard)
    with writer:
        for number, (row, image) in enumerate(read_ahead(listed), 1):
            report_done(number, len(found.rejected))
            labels = tuple(label_of[text] for text in row.labels)
            try:
                came_as = bytes_of(image)
                made = checked(came_as, row.key, labels, config, libjpeg)
            except ValueError as error:
                found.rejected.append((row.key, printable(str(error))))
                continue
            writer.add(replace(made, extra=row.extra))
            found.note(made, came_as)
    return replace(found, **vars(writer.facts()))


def written_facts(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard without images, of a file that has them and is read where it lies.

    Raises:
        ValueError: the file has changed meanwhile, or a row group is larger than its footer says.
    """
    path, label_of, libjpeg = [*plan.versions][shard], plan.label_of(), restart_writer()
    before = locate(path).info()
    unit = next((unit for unit in units_of(config) if unit.path == path), None)
    if unit is None or before.version != plan.versions[path]:
        raise SourceChangedError(path)
    as_it_is = config.model_copy(update={"index_jpeg": False})
    found, image_bytes, classes, row = ShardResult(shard=shard), list[int](), list[set[int]](), 0
    target = locate(config.destination).child(plan.name_of(shard))
    writer = ShardWriter(target, MOST_ROWS, config.columns)
    with writer:
        for number, (group, indexed) in enumerate(rows_of_groups(unit), 1):
            report_done(number, len(found.rejected))
            entry, image = indexed.storable(), indexed.image or b""
            if group == len(image_bytes):
                writer.end_row_group()
                found.dropped.append([])
                classes.append(set())
                image_bytes.append(0)
                row = 0
            # Equal images may stand once in the file, and are read as often as there are rows.
            image_bytes[group] += len(image)
            check_in_place_bytes(unit, group, image_bytes[group])
            try:
                if entry.problem is not None:
                    raise ValueError(entry.problem)
                labels = tuple(label_of[text] for text in entry.labels)
                made = checked(image, entry.key, labels, as_it_is, libjpeg)
                made = replace(made, image=b"", crc32=checksum(image), extra=entry.extra)
            except ValueError as error:
                found.rejected.append((entry.key, printable(str(error))))
                found.dropped[group].append(row)
                nothing = (None,) * len(config.columns)
                made = EncodedImage(b"", (), entry.key, 0, 0, extra=nothing, crc32=checksum(image))
            writer.add(made)
            found.note(made, image if made.labels else b"")
            row += 1
            classes[group].update(made.labels[:1])
    if locate(path).info() != before:
        raise SourceChangedError(path)
    facts = writer.facts()
    own = zip(facts.row_group_bytes, image_bytes, strict=True)
    facts = replace(facts, row_group_bytes=[sum(sizes) for sizes in own])
    _, _, column = facts_of_file(unit, with_labels=False)
    images = list(astuple(ImageFile(path, before.size, before.version, column)))
    return replace(found, **vars(facts), images=images, classes_of_groups=list(map(len, classes)))


def results(plan: Plan, staging: Location) -> Iterator[Location]:
    """The files with the results of all shards."""
    return (staging.child(RESULT.format(shard)) for shard in range(plan.num_shards))
