"""The conversion command: from a recipe's `convert` section to a data set and a report."""

import platform

from joblib import cpu_count

from vit_ray.config import Recipe
from vit_ray.data.convert.commit import ConvertReport, listed
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.destination import convert_of
from vit_ray.data.convert.estimate import estimate_conversion
from vit_ray.data.dataset import DAMAGED_FILE, REJECTED_FILE
from vit_ray.data.progress import clock
from vit_ray.launch.cluster.connection import connect
from vit_ray.launch.inputs.shared_files import check_shared


def run_convert(recipe: Recipe) -> int:
    """Convert, and print the result.

    Raises:
        ValueError: the recipe has no `convert` section, or the source is wrong.
    """
    config = convert_of(recipe)
    check_shared(connect(recipe), [("convert.source", config.source)])
    report = convert(config, recipe.seed)
    for note in report.notes:
        print(f"{config.destination}: {note}")
    print(f"{config.destination}: the classes are {listed(list(report.label_histogram))}")
    print(
        f"{'already done: ' if report.was_done else ''}{config.destination}: {report.num_images} "
        f"images of {report.num_classes} classes in {report.num_shards} shards, "
        f"{report.bytes / 2**20:.1f} MiB; {rejected_text(report)}"
    )
    return 0


def describe_conversion(recipe: Recipe) -> str:
    """Images, classes, bytes, shards and time of a conversion, estimated from a few images.

    Raises:
        ValueError: as `run_convert`, except for errors that only reading all images finds.
    """
    config = convert_of(recipe)
    plan = estimate_conversion(config, recipe.seed)
    parts = f"{plan.num_counted:,} of {plan.num_parts:,} parts counted"
    made = f"{plan.written_bytes / 2**20:,.1f} MiB"
    source = f"{plan.source_bytes / 2**20:,.1f} MiB" if plan.source_bytes else "unknown size"
    shards = f"{plan.num_shards:,} shard{'s' if plan.num_shards > 1 else ''}"
    reason = f"; the first: {plan.reason}" if plan.reason else ""
    cores, rate = cpu_count(), plan.num_images / plan.seconds
    return "\n".join(
        [
            f"images      {plan.counts} ({parts})",
            f"source      {config.source}: {source}",
            f"data set    {config.destination}: "
            f"{'images read in place' if config.in_place else made}, {shards}",
            f"rejected    {plan.num_rejected} of {plan.num_sampled} sampled images{reason}",
            f"time        about {clock(plan.seconds / cores)} on the {cores} cores of this machine "
            f"({platform.node()}), {rate:,.0f} images/s per core",
        ]
    )


def rejected_text(report: ConvertReport) -> str:
    """How many files are not in the set, and how many damaged ones are."""
    total = report.num_images + report.num_rejected
    text = f"{report.num_rejected} files rejected"
    if report.num_rejected:
        text += f" ({report.num_rejected / total:.1%} of {total}; {REJECTED_FILE} says why)"
    if report.num_damaged:
        text += f"; {report.num_damaged} damaged files kept ({DAMAGED_FILE})"
    return text
