"""The shards of a conversion: which rows each holds, and the tasks that write them.

A plan is decided once, when the source is indexed, and kept by restarts. It is written when the
list of each shard is, and only then are shards made.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import islice
from typing import Any, Final

import numpy as np

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.checks import checked, read_ahead
from vit_ray.data.convert.index import RowStore, parquet_output, read_groups, write_facts
from vit_ray.data.convert.rows import (
    ROW_SCHEMA,
    Row,
    SourceChangedError,
    Unit,
    printable,
    table_rows,
)
from vit_ray.data.convert.tables import MOST_ROWS, check_in_place, opened, parquet_rows
from vit_ray.data.dataset import STAGING_FOLDER, ImageFile, checksum, shard_name
from vit_ray.data.images import orientation_of
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.data.restart_markers import restart_writer
from vit_ray.data.shard_writer import EncodedImage, ShardFacts, ShardWriter
from vit_ray.data.tasks import Shown, report_done, run_tasks
from vit_ray.storage import Location, locate, with_retries

SHUFFLE: Final = 5
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
        folder: of the source, which keys are relative to.
        no_classes: names of class folders without images.
    """

    settings: dict[str, Any]
    versions: dict[str, str]
    source_digest: str
    classes: list[str]
    are_indices: bool
    num_images: int
    num_shards: int
    folder: str
    no_classes: list[str] = field(default_factory=list)

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


def write_lists(plan: Plan, store: RowStore, staging: Location) -> None:
    """Write the rows of each shard, in their order: the one shuffle of all rows."""
    order = KeyedPermutation(plan.num_images, SHUFFLE, plan.settings["seed"])
    for shard in range(plan.num_shards):
        places = np.arange(plan.first_row(shard), plan.first_row(shard + 1), dtype=np.int64)
        with parquet_output(staging.child(_LIST.format(shard)), ROW_SCHEMA) as writer:
            writer.write_table(store.take(order.ranks(places)))


def rows_of_shard(staging: Location, shard: int) -> Iterator[Row]:
    """The rows of one shard."""
    for table in read_groups(staging.child(_LIST.format(shard))):
        yield from table_rows(table)


@dataclass
class ShardResult(ShardFacts):
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `num_turned` images have an orientation in EXIF. Where images are read in place,
    `images` are the fields of their `ImageFile`, and `dropped` the rows of each row group that do
    not count.
    """

    shard: int = 0
    max_labels: int = 0
    label_counts: dict[str, int] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    num_indexed: int = 0
    num_turned: int = 0
    dropped: list[list[int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)

    def checked(
        self, row: Row, read: Callable[[], bytes], label_of: dict[str, int], config: ConvertConfig
    ) -> EncodedImage | None:
        """A row of the shard, which is counted; None if it is rejected."""
        try:
            came_as = read()
            labels = tuple(label_of[text] for text in row.labels)
            made = checked(came_as, row.key, labels, config, restart_writer())
        except SourceChangedError:
            raise
        except ValueError as error:
            self.rejected.append((row.key, printable(str(error))))
            return None
        if made.damage:
            self.damaged.append((row.key, made.damage))
        self.num_indexed += made.index is not None
        self.num_turned += orientation_of(came_as) != 1
        self.max_labels = max(self.max_labels, len(labels))
        for label in map(str, labels):
            self.label_counts[label] = self.label_counts.get(label, 0) + 1
        return replace(made, extra=row.extra)


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result, a task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    done = {info.base_name for info in staging.list_files(recursive=False)}
    missing = [shard for shard in range(plan.num_shards) if RESULT.format(shard) not in done]
    # About: shards of files that are read in place differ in size.
    num_images = round(plan.num_images * len(missing) / plan.num_shards)
    shown = Shown(f"converting to {config.destination}", num_images, "rejected")
    small = plan if config.in_place else replace(plan, versions={})
    run_tasks(make_shard, missing, small, config, shown=shown)


def make_shard(shard: int, plan: Plan, config: ConvertConfig) -> None:
    """Write one shard, and its result when it is whole."""
    write = write_in_place if config.in_place else write_shard
    result = with_retries(lambda: write(shard, plan, config), f"making shard {shard}")
    staging = locate(config.destination).child(STAGING_FOLDER)
    write_facts(staging.child(RESULT.format(shard)), asdict(result))


def write_shard(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard of images that are copied."""
    folder, label_of = locate(config.destination), plan.label_of()
    found = ShardResult(shard=shard)
    target, rows = folder.child(plan.name_of(shard)), config.rows_per_row_group
    with ShardWriter(target, rows, config.columns, is_indexed=config.index_jpeg) as writer:
        listed = rows_of_shard(folder.child(STAGING_FOLDER), shard)
        for number, (row, image) in enumerate(read_ahead(listed), 1):
            report_done(number, len(found.rejected))
            # no limit: the storage limits each file
            if (made := found.checked(row, image.result, label_of, config)) is not None:
                writer.add(made)
    return replace(found, **vars(writer.facts()))


def write_in_place(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard without images, of a file that has them and is read where it lies.

    Raises:
        ValueError: the file has changed meanwhile, or a row group cannot be read at once.
    """
    path, label_of = [*plan.versions][shard], plan.label_of()
    before = locate(path).info()
    unit = Unit("huggingface", path, plan.folder, config)
    if before.version != plan.versions[path]:
        raise SourceChangedError(path)
    as_it_is = config.model_copy(update={"index_jpeg": False})
    found, image_bytes, first = ShardResult(shard=shard), list[int](), 0
    nothing = (None,) * len(config.columns)
    target, rows = locate(config.destination).child(plan.name_of(shard)), parquet_rows(unit)
    with opened(unit) as (file, columns), ShardWriter(target, MOST_ROWS, config.columns) as writer:
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            found.dropped.append([])
            image_bytes.append(0)
            for at, row in enumerate(islice(rows, num_rows)):
                report_done(first + at, len(found.rejected))
                # Equal images may stand once in the file, and are read as often as there are rows.
                image_bytes[-1] += len(row.image or b"")
                check_in_place(path, group, num_rows, image_bytes[-1])
                entry = row.storable()
                made = found.checked(entry, entry.read, label_of, as_it_is)
                if made is None:
                    found.dropped[-1].append(at)
                    made = EncodedImage(b"", (), entry.key, 0, 0, extra=nothing)
                writer.add(replace(made, image=b"", crc32=checksum(row.image or b"")))
            writer.end_row_group()
            first += num_rows
    if locate(path).info() != before:
        raise SourceChangedError(path)
    facts = writer.facts()
    sizes = zip(facts.row_group_bytes, image_bytes, strict=True)
    facts = replace(facts, row_group_bytes=[sum(pair) for pair in sizes])
    images = astuple(ImageFile(path, before.size, before.version, columns.image_path))
    return replace(found, **vars(facts), images=list(images))
