"""The result of a conversion: decided once, when its source is indexed, and kept by restarts.

The plan names the settings that decide the bytes of a data set. It is written when the list of each
shard is, and only then are shards made: with a plan, files of a conversion may be there, and
without one there are none.
"""

import logging
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER, shard_name
from vit_ray.data.prepare.convert.destination import LISTS, PLAN
from vit_ray.data.prepare.convert.shard_images import written_bytes
from vit_ray.data.prepare.convert.shard_lists import ShardRows, shuffled_rows, write_shard_lists
from vit_ray.data.prepare.convert.source_record import (
    SourceRecord,
    changed_settings,
    changes_since,
    read_record,
    text_of_changes,
)
from vit_ray.data.prepare.convert.staged_files import read_facts, write_facts
from vit_ray.data.prepare.in_place import index_in_place
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.source_index import SourceIndex, build_index, units_of
from vit_ray.storage import Location, absolute, with_retries

_LOG: Final = logging.getLogger(__name__)
_MIB: Final = 1 << 20
_SAMPLED: Final = 256
"""Images that are read, and shrunk, to estimate the mean size: it is correct within 5 to 10 %."""
_SAMPLED_PER_TASK: Final = 32
RESULT: Final = "shard-{:06d}.json"
"""File with the result of a shard in the staging folder."""
STAGING_VERSION: Final = 6
"""Version of what the staging folder holds; raised when a restart could not read it."""
_DO_NOT_DECIDE: Final = {"destination", "max_rejected_fraction"}
"""Keys of `convert` that may change between a conversion and its restart."""


def settings_of(config: ConvertConfig, seed: int) -> dict[str, Any]:
    """What a restart must have in common with the first start, as JSON."""
    settings = config.model_dump(mode="json", exclude=_DO_NOT_DECIDE)
    source = absolute(config.source)
    classes = settings["classes"] or []
    return {"seed": seed, **settings, "source": source, "classes": classes}


@dataclass(frozen=True)
class Plan:
    """The planned shards.

    Attributes:
        settings: from `settings_of`.
        fields: as `SourceIndex.fields`.
    """

    settings: dict[str, Any]
    source_digest: str
    classes: list[str]
    are_indices: bool
    num_images: int
    num_shards: int
    version: int = STAGING_VERSION
    fields: dict[str, list[str]] = field(default_factory=dict)

    def name_of(self, shard: int) -> str:
        return shard_name(shard, self.num_shards)

    @property
    def shards(self) -> ShardRows:
        """Which rows each shard holds."""
        return ShardRows(self.num_images, self.num_shards, self.settings["rows_per_row_group"])

    def label_of(self) -> dict[str, int]:
        """The label for each label of the source."""
        names = map(str, range(len(self.classes))) if self.are_indices else self.classes
        return {name: label for label, name in enumerate(names)}


def plan_conversion(config: ConvertConfig, seed: int, folder: Location) -> Plan:
    """The plan of an interrupted conversion, or a new one.

    Raises:
        ValueError: the interrupted conversion has other settings, for example from another
            conversion that took the folder over; or the source cannot be indexed.
    """
    staging, settings = folder.child(STAGING_FOLDER), settings_of(config, seed)
    if staging.child(PLAN).exists():
        fields = read_facts(staging.child(PLAN))
        now = {**settings, "version": STAGING_VERSION}
        then = {**fields["settings"], "version": fields.get("version")}
        if other := changed_settings(then, now):
            raise ValueError(
                f"{folder.uri!r} holds an interrupted conversion with another source or settings, "
                f"or of another version of vit_ray: {other}; repeat its command there to continue "
                "it, or delete the folder"
            )
        plan = Plan(**fields)
        if folder.child(MANIFEST_FILE).exists():
            return plan  # committed, except for the files next to the manifest
        planned = read_record(staging)
        changes = planned and changes_since(planned, units_of(config))
        if not changes:
            return plan
        _LOG.warning(
            "the source of %s has changed, so it is planned again: %s",
            folder.uri, text_of_changes(changes),
        )  # fmt: skip
        for shard in range(plan.num_shards):
            staging.child(RESULT.format(shard)).delete()
            folder.child(plan.name_of(shard)).delete()
        for name in LISTS:  # of a refusal; without a plan they could be someone else's
            folder.child(name).delete()
        staging.child(PLAN).delete()
    with tempfile.TemporaryDirectory() as scratch:
        if config.in_place:
            index = index_in_place(config)
        else:
            index = build_index(config, staging, Path(scratch))
        plan = Plan(
            settings,
            index.digest,
            index.classes,
            index.are_indices,
            index.num_images,
            len(index.rows) if config.in_place else _num_shards(config, seed, index),
            fields=index.fields,
        )
        if not config.in_place:
            with_retries(
                lambda: write_shard_lists(index, plan.shards, seed, staging, Path(scratch)),
                "writing the shard lists",
            )
    SourceRecord("", settings, index.are_indices, index.units).write(staging)
    write_facts(staging.child(PLAN), asdict(plan))
    return plan


def _num_shards(config: ConvertConfig, seed: int, index: SourceIndex) -> int:
    """Bytes of all images as shards hold them; from a sample if they are not known."""
    written = float(index.bytes)
    if config.shrink_to is not None or index.unknown_lengths:
        count = min(_SAMPLED, index.num_images)
        places = np.arange(count, dtype=np.int64)
        sample = list(index.entries(shuffled_rows(index.num_images, seed, places)))
        parts = [sample[at : at + _SAMPLED_PER_TASK] for at in range(0, count, _SAMPLED_PER_TASK)]
        sizes = run_tasks(written_bytes, parts, config)
        written = float(sum(sizes)) / count * index.num_images
    return shards_for(written, index.num_images, config)


def shards_for(written_bytes: float, num_images: int, config: ConvertConfig) -> int:
    """How many shards hold this many bytes of images, each of at least one row group."""
    groups = -(-num_images // config.rows_per_row_group)
    return min(groups, max(1, round(written_bytes / (config.shard_mib * _MIB))))
