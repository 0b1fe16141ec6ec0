"""What a conversion will make, from a sample of its images; without Ray, and nothing is written."""

import platform

from joblib import cpu_count

from vit_ray.config import Recipe
from vit_ray.data.convert.checks import check_conversion, convert_of, estimate_conversion
from vit_ray.data.tasks import clock


def describe_conversion(recipe: Recipe) -> str:
    """Images, classes, bytes, shards and time of a conversion, estimated from a few images.

    Raises:
        ValueError: as `run_convert`, except for errors that only reading all images finds.
    """
    check_conversion(recipe)
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
