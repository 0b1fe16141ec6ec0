"""The shards of a conversion: each a file, and its result in the staging folder."""

from collections import Counter
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.format.schema import STAGING_FOLDER, checksum
from vit_ray.data.format.shard_files import ImageFile
from vit_ray.data.format.shard_writer import EncodedImage, ShardWriter
from vit_ray.data.jpeg_index.restart_markers import restart_writer
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
from vit_ray.retry import with_retries
from vit_ray.storage import file_version, locate


@dataclass(frozen=True)
class ShardResult:
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `jpeg_writer` is empty where none was asked for. Where images are read in place,
    `images` are the fields of their `ImageFile`, `dropped` the rows of each row group that do not
    count, and `classes_of_groups` how many classes each has.
    """

    shard: int
    rows: list[int]
    row_group_bytes: list[int]
    bytes: int
    row_group_crc32: list[int]
    footer_crc32: int
    max_labels: int
    label_counts: dict[str, int]
    rejected: list[tuple[str, str]]
    damaged: list[tuple[str, str]]
    num_indexed: int
    jpeg_writer: str
    dropped: list[list[int]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    classes_of_groups: list[int] = field(default_factory=list)
    largest_pixels: int = 0


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result, a task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    done = {info.base_name for info in staging.list_files()}
    missing = [shard for shard in range(plan.num_shards) if RESULT.format(shard) not in done]
    # About: shards of files that are read in place differ in size.
    num_images = round(plan.num_images * len(missing) / plan.num_shards)
    shown = Shown(f"converting to {config.destination}", num_images, "rejected")
    run_tasks(make_shard, missing, config.cpus_per_task, plan, config, shown=shown)


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
    rejected: list[tuple[str, str]] = []
    damaged: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    max_labels = num_indexed = pixels = 0
    label_of, libjpeg = plan.label_of(), restart_writer()
    writer = ShardWriter(
        file, config.rows_per_row_group, config.columns, is_indexed=config.index_jpeg
    )
    with writer:
        for number, (entry, image) in enumerate(read_ahead(entries), 1):
            report_done(number, len(rejected))
            labels = tuple(label_of[text] for text in entry.labels)
            try:
                row = checked(image, entry.key, labels, config, libjpeg)
            except ValueError as error:
                rejected.append((entry.key, printable(str(error))))
                continue
            writer.add(replace(row, extra=entry.extra))
            if row.damage:
                damaged.append((entry.key, row.damage))
            num_indexed += row.index is not None
            pixels = max(pixels, row.height * row.width)
            max_labels = max(max_labels, len(labels))
            counts.update(map(str, labels))
    name = libjpeg.name if libjpeg else "none"
    return ShardResult(
        shard, **vars(writer.facts()), max_labels=max_labels, label_counts=dict(counts),
        rejected=rejected, damaged=damaged, num_indexed=num_indexed,
        jpeg_writer=name if config.index_jpeg else "", largest_pixels=pixels,
    )  # fmt: skip


def written_facts(shard: int, plan: Plan, config: ConvertConfig) -> ShardResult:
    """Write a shard without images, of a file that has them and is read where it lies.

    Raises:
        ValueError: the file has changed meanwhile, or a row group is larger than its footer says.
    """
    unit, label_of, libjpeg = units_of(config)[shard], plan.label_of(), restart_writer()
    location = locate(unit.path)
    before = location.info().size, file_version(location)
    as_it_is = config.model_copy(update={"index_jpeg": False})
    rejected: list[tuple[str, str]] = []
    damaged: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    dropped: list[list[int]] = []
    labels_of_groups: list[set[int]] = []
    image_bytes: list[int] = []
    max_labels = row = pixels = 0
    target = locate(config.destination).child(plan.name_of(shard))
    writer = ShardWriter(target, MOST_ROWS, config.columns)
    with writer:
        for number, (group, found, image) in enumerate(rows_of(unit), 1):
            report_done(number, len(rejected))
            entry = storable(found)
            if group == len(dropped):
                writer.end_row_group()
                dropped.append([])
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
                rejected.append((entry.key, printable(str(error))))
                dropped[group].append(row)
                nothing = (None,) * len(config.columns)
                made = EncodedImage(b"", (), entry.key, 0, 0, extra=nothing, crc32=checksum(image))
            writer.add(made)
            row += 1
            if made.damage:
                damaged.append((entry.key, made.damage))
            max_labels = max(max_labels, len(made.labels))
            pixels = max(pixels, made.height * made.width)
            counts.update(map(str, made.labels))
            labels_of_groups[group].update(made.labels[:1])
    if (location.info().size, file_version(location)) != before:
        raise SourceChangedError(unit.path)
    facts = writer.facts()
    sizes = [own + of_images for own, of_images in
             zip(facts.row_group_bytes, image_bytes, strict=True)]  # fmt: skip
    size, version = before
    images = ImageFile(
        unit.path, size or 0, version, facts_in_place(unit, with_labels=False).column
    )
    return ShardResult(
        shard, **{**vars(facts), "row_group_bytes": sizes}, max_labels=max_labels,
        label_counts=dict(counts), rejected=rejected, damaged=damaged, num_indexed=0,
        jpeg_writer="", dropped=dropped, images=list(astuple(images)),
        classes_of_groups=[len(labels) for labels in labels_of_groups], largest_pixels=pixels,
    )  # fmt: skip
