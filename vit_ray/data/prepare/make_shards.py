"""The shards of a conversion: each a file, and its result in the staging folder."""

from collections import Counter
from dataclasses import asdict, dataclass, replace

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.format.schema import STAGING_FOLDER
from vit_ray.data.format.shard_writer import ShardWriter
from vit_ray.data.jpeg_index.restart_markers import restart_writer
from vit_ray.data.prepare.plan import RESULT, Plan
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.shard_images import checked, read_ahead
from vit_ray.data.prepare.shard_lists import list_of_shard
from vit_ray.data.prepare.sources.entries import IndexEntry, printable
from vit_ray.data.prepare.staged_files import write_facts
from vit_ray.retry import with_retries
from vit_ray.storage import Location, locate


@dataclass(frozen=True)
class ShardResult:
    """Facts of one finished shard, as the staging folder keeps them.

    `rejected` has (key, reason) of each image that the shard lacks, `damaged` of each that it has
    all the same; `jpeg_writer` is empty where none was asked for.
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


def make_shards(plan: Plan, config: ConvertConfig) -> None:
    """Make the shards that have no result, a task each."""
    staging = locate(config.destination).child(STAGING_FOLDER)
    done = {info.base_name for info in staging.list_files()}
    missing = [shard for shard in range(plan.num_shards) if RESULT.format(shard) not in done]
    run_tasks(make_shard, missing, config.cpus_per_task, plan, config)


def make_shard(shard: int, plan: Plan, config: ConvertConfig) -> None:
    """Write one shard, and its result when it is whole."""
    folder = locate(config.destination)
    staging = folder.child(STAGING_FOLDER)

    def make() -> ShardResult:
        entries = list_of_shard(plan.shards, staging, shard)
        return _written_shard(shard, plan, config, folder.child(plan.name_of(shard)), entries)

    result = with_retries(make, f"making shard {shard}")
    write_facts(staging.child(RESULT.format(shard)), asdict(result))


def _written_shard(
    shard: int, plan: Plan, config: ConvertConfig, file: Location, entries: list[IndexEntry]
) -> ShardResult:
    rejected: list[tuple[str, str]] = []
    damaged: list[tuple[str, str]] = []
    counts: Counter[str] = Counter()
    max_labels = num_indexed = 0
    label_of, libjpeg = plan.label_of(), restart_writer()
    writer = ShardWriter(
        file, config.rows_per_row_group, config.columns, is_indexed=config.index_jpeg
    )
    with writer:
        for entry, image in read_ahead(entries):
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
            max_labels = max(max_labels, len(labels))
            counts.update(map(str, labels))
    name = libjpeg.name if libjpeg else "none"
    return ShardResult(
        shard, **vars(writer.facts()), max_labels=max_labels, label_counts=dict(counts),
        rejected=rejected, damaged=damaged, num_indexed=num_indexed,
        jpeg_writer=name if config.index_jpeg else "",
    )  # fmt: skip
