"""The commands for data sets: convert, verify, subset and deduplicate."""

import platform

from joblib import cpu_count

from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.commands.recorded_run import verify_run
from vit_ray.config import Recipe, require
from vit_ray.data import open_dataset
from vit_ray.data.convert.checks import check_conversion, convert_of, estimate_conversion
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.finished_sets import deduplicate, refuse_taken, verify
from vit_ray.data.convert.shards import listed
from vit_ray.data.dataset import DAMAGED_FILE, REJECTED_FILE
from vit_ray.data.parts import subset
from vit_ray.data.tasks import clock
from vit_ray.launch.cluster_checks import check_shared
from vit_ray.launch.connection import connect
from vit_ray.storage import locate


def run_convert(recipe: Recipe) -> None:
    """Convert, and print the result.

    Raises:
        ValueError: the recipe has no `convert` section, or the source is wrong.
    """
    config = convert_of(recipe)
    check_shared(connect(recipe), [("convert.source", config.source)])
    report = convert(config, recipe.seed)
    for note in report.notes:
        print(f"{config.destination}: {note}")
    total = report.num_images + report.num_rejected
    rejected = f"{report.num_rejected} files rejected"
    if report.num_rejected:
        rejected += f" ({report.num_rejected / total:.1%} of {total}; {REJECTED_FILE} says why)"
    if report.num_damaged:
        rejected += f"; {report.num_damaged} damaged files kept ({DAMAGED_FILE})"
    print(f"{config.destination}: the classes are {listed(list(report.label_histogram))}")
    print(
        f"{'already done: ' if report.was_done else ''}{config.destination}: {report.num_images} "
        f"images of {len(report.label_histogram)} classes in {report.num_shards} shards, "
        f"{report.bytes / 2**20:.1f} MiB; {rejected}"
    )


def describe_conversion(recipe: Recipe) -> str:
    """Images, classes, bytes, shards and time of a conversion, estimated from a few images.

    Starts no Ray and writes nothing.

    Raises:
        ValueError: as `run_convert`, except for errors that only reading all images finds.
    """
    check_conversion(recipe)
    config = convert_of(recipe)
    estimate = estimate_conversion(config, recipe.seed)
    written = f"{estimate.written_bytes / 2**20:,.1f} MiB"
    size = f"{estimate.source_bytes / 2**20:,.1f} MiB" if estimate.source_bytes else "unknown size"
    shards = f"{estimate.num_shards:,} shard{'s' if estimate.num_shards > 1 else ''}"
    reason = f"; the first: {estimate.reason}" if estimate.reason else ""
    cores, rate = cpu_count(), estimate.num_images / estimate.seconds
    return "\n".join([
        f"images      {estimate.counts} "
        f"({estimate.num_counted:,} of {estimate.num_parts:,} parts counted)",
        f"source      {config.source}: {size}",
        f"data set    {config.destination}: "
        f"{'images read in place' if config.in_place else written}, {shards}",
        f"rejected    {estimate.num_rejected} of {estimate.num_sampled} sampled images{reason}",
        f"time        about {clock(estimate.seconds / cores)} on the {cores} cores of this machine "
        f"({platform.node()}), {rate:,.0f} images/s per core",
    ])  # fmt: skip


_MAX_PRINTED = 20


def run_verify(recipe: Recipe) -> int:
    """Check a data set or the checkpoints of a run, and print the problems; returns 1 if there are
    any.

    Raises:
        ValueError: the recipe has no `verify` section, or there is no such data set.
    """
    config = require(recipe.verify, "verify", "verify.path")
    if list_checkpoints(locate(config.path)):
        return verify_run(config.path)
    open_dataset(config.path)  # a wrong path is reported before Ray starts
    check_shared(connect(recipe), [("verify.path", config.path)])
    report = verify(config.path, decode_fraction=config.decode_fraction)
    for problem in report.problems[:_MAX_PRINTED]:
        print(problem)
    if len(report.problems) > _MAX_PRINTED:
        print(f"... and {len(report.problems) - _MAX_PRINTED} more")
    advice = "restore these files from a copy, or convert again"
    print(
        f"{config.path}: {report.num_images} images in {report.num_files} files checked, "
        f"{report.num_decoded} decoded, {len(report.problems)} problems; "
        f"{advice if report.problems else 'the data set is complete and undamaged'}"
    )
    return 1 if report.problems else 0


def run_subset(recipe: Recipe) -> None:
    """Write the manifest of a subset of a data set.

    Raises:
        ValueError: the recipe has no `subset` section, or the subset cannot be taken.
    """
    config = require(recipe.subset, "subset", "subset.source and subset.destination")
    part = subset(**config.model_dump(), seed=recipe.seed)
    print(
        f"{config.destination}: {part.num_images} images of {config.source}, written as a manifest "
        "only"
    )


def run_deduplicate(recipe: Recipe) -> None:
    """Write the manifest of a data set without the images of evaluation sets.

    Raises:
        ValueError: the recipe has no `deduplicate` section, or a data set is missing, or the
            destination is taken.
    """
    config = require(
        recipe.deduplicate,
        "deduplicate",
        "deduplicate.source, deduplicate.evaluation_sets and deduplicate.destination",
    )
    sets = list(config.evaluation_sets)
    for path in (config.source, *sets):  # wrong paths are reported before Ray starts
        open_dataset(path)
    refuse_taken(config.destination)
    paths = [("deduplicate.source", config.source)]
    paths += [("deduplicate.evaluation_sets", path) for path in sets]
    check_shared(connect(recipe), paths)
    duplicates = deduplicate(config.source, sets, config.destination)
    num_exact = sum(duplicates["is_exact"].to_pylist())
    print(
        f"{config.destination}: {num_exact} exact and {len(duplicates) - num_exact} near "
        f"duplicates of {open_dataset(config.source).num_images} images left out; "
        "duplicates.parquet lists them"
    )
