"""The shards of a conversion: each a file, and its result in the staging folder."""

from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.dataset import STAGING_FOLDER, ImageFile, checksum
from vit_ray.data.jpeg_index.rewriting import restart_writer
from vit_ray.data.prepare.conversion_plan import RESULT, Plan
from vit_ray.data.prepare.convert.shard_images import checked, read_ahead
from vit_ray.data.prepare.convert.shard_lists import list_of_shard
from vit_ray.data.prepare.convert.staged_files import write_facts
from vit_ray.data.prepare.progress import Shown, report_done
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.entries import SourceChangedError, printable, storable
from vit_ray.data.prepare.sources.hub import (
    MOST_ROWS,
    check_in_place_bytes,
    facts_in_place,
    rows_of,
)
from vit_ray.data.prepare.sources.source_index import units_of
from vit_ray.data.shard_writer import EncodedImage, ShardFacts, ShardWriter
from vit_ray.storage import locate, with_retries


@dataclass
class ShardResult(ShardFacts):
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `jpeg_writer` is empty where none was asked for. Where images are read in place,
    `images` are the fields of their `ImageFile`, `dropped` the rows of each row group that do not
    count, and `classes_of_groups` how many classes each has.
    """

    shard: int = 0
    max_labels: int = 0
    label_counts: dict[str, int] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    num_indexed: int = 0
    jpeg_writer: str = ""
    dropped: list[list[int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    classes_of_groups: list[int] = field(default_factory=list)
    largest_pixels: int = 0

    def note(self, row: EncodedImage) -> None:
        """Count a row that was written."""
        if row.damage:
            self.damaged.append((row.key, row.damage))
        self.num_indexed += row.index is not None
        self.largest_pixels = max(self.largest_pixels, row.height * row.width)
        self.max_labels = max(self.max_labels, len(row.labels))
        for label in map(str, row.labels):
            self.label_counts[label] = self.label_counts.get(label, 0) + 1


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result, a task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    done = {info.base_name for info in staging.list_files()}
    missing = [shard for shard in range(plan.num_shards) if RESULT.format(shard) not in done]
    # About: shards of files that are read in place differ in size.
    num_images = round(plan.num_images * len(missing) / plan.num_shards)
    shown = Shown(f"converting to {config.destination}", num_images, "rejected")
    run_tasks(make_shard, missing, plan, config, shown=shown)


def make_shard(shard: int, plan: Plan, config: ConvertConfig) -> None:
    """Write one shard, and its result when it is whole."""
    written = written_facts if config.in_place else written_shard
    result = with_retries(lambda: written(shard, plan, config), f"making shard {shard}")
    staging = locate(config.destination).child(STAGING_FOLDER)
    write_facts(staging.child(RESULT.format(shard)), asdict(result))


def written_shard(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard of images that are copied."""
    folder = locate(config.destination)
    file = folder.child(plan.name_of(shard))
    entries = list_of_shard(plan.shards, folder.child(STAGING_FOLDER), shard)
    label_of, libjpeg = plan.label_of(), restart_writer()
    name = libjpeg.name if libjpeg else "none"
    found = ShardResult(shard=shard, jpeg_writer=name if config.index_jpeg else "")
    writer = ShardWriter(
        file, config.rows_per_row_group, config.columns, is_indexed=config.index_jpeg
    )
    with writer:
        for number, (entry, image) in enumerate(read_ahead(entries), 1):
            report_done(number, len(found.rejected))
            labels = tuple(label_of[text] for text in entry.labels)
            try:
                row = checked(image, entry.key, labels, config, libjpeg)
            except ValueError as error:
                found.rejected.append((entry.key, printable(str(error))))
                continue
            writer.add(replace(row, extra=entry.extra))
            found.note(row)
    return replace(found, **vars(writer.facts()))


def written_facts(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard without images, of a file that has them and is read where it lies.

    Raises:
        ValueError: the file has changed meanwhile, or a row group is larger than its footer says.
    """
    unit, label_of, libjpeg = units_of(config)[shard], plan.label_of(), restart_writer()
    location = locate(unit.path)
    before = location.info()
    as_it_is = config.model_copy(update={"index_jpeg": False})
    found, labels_of_groups = ShardResult(shard=shard), list[set[int]]()
    image_bytes, row = list[int](), 0
    target = locate(config.destination).child(plan.name_of(shard))
    writer = ShardWriter(target, MOST_ROWS, config.columns)
    with writer:
        for number, (group, indexed, image) in enumerate(rows_of(unit), 1):
            report_done(number, len(found.rejected))
            entry = storable(indexed)
            if group == len(found.dropped):
                writer.end_row_group()
                found.dropped.append([])
                labels_of_groups.append(set())
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
            found.note(made)
            row += 1
            labels_of_groups[group].update(made.labels[:1])
    if location.info() != before:
        raise SourceChangedError(unit.path)
    facts = writer.facts()
    sizes = [own + of_images for own, of_images in
             zip(facts.row_group_bytes, image_bytes, strict=True)]  # fmt: skip
    _, _, size, version = before
    images = ImageFile(
        unit.path, size or 0, version, facts_in_place(unit, with_labels=False).column
    )
    classes = [len(labels) for labels in labels_of_groups]
    facts = replace(facts, row_group_bytes=sizes)
    return replace(found, **vars(facts), images=list(astuple(images)), classes_of_groups=classes)
