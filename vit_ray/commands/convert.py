"""The conversion command: from a recipe's `convert` section to a data set and a report."""

from vit_ray.config import Recipe
from vit_ray.data.convert.checks import convert_of
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.shards import listed
from vit_ray.data.dataset import DAMAGED_FILE, REJECTED_FILE
from vit_ray.launch.cluster_checks import check_shared
from vit_ray.launch.connection import connect


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
    total = report.num_images + report.num_rejected
    rejected = f"{report.num_rejected} files rejected"
    if report.num_rejected:
        rejected += f" ({report.num_rejected / total:.1%} of {total}; {REJECTED_FILE} says why)"
    if report.num_damaged:
        rejected += f"; {report.num_damaged} damaged files kept ({DAMAGED_FILE})"
    print(f"{config.destination}: the classes are {listed(list(report.label_histogram))}")
    print(
        f"{'already done: ' if report.was_done else ''}{config.destination}: {report.num_images} "
        f"images of {report.num_classes} classes in {report.num_shards} shards, "
        f"{report.bytes / 2**20:.1f} MiB; {rejected}"
    )
    return 0
