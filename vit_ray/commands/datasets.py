"""The commands for data sets: verify, subset and deduplicate."""

from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.commands.recorded_run import verify_run
from vit_ray.config import Recipe, require
from vit_ray.data import open_dataset
from vit_ray.data.convert.finished_sets import deduplicate, refuse_taken, verify
from vit_ray.data.parts import subset
from vit_ray.launch.cluster_checks import check_shared
from vit_ray.launch.connection import connect
from vit_ray.storage import locate

_SHOWN = 20


def run_verify(recipe: Recipe) -> int:
    """Check a data set, or the checkpoints of a run, and print what is wrong; returns 1 if anything
    is.

    Raises:
        ValueError: the recipe has no `verify` section, or there is no such data set.
    """
    config = require(recipe.verify, "verify", "verify.path")
    if list_checkpoints(locate(config.path)):
        return verify_run(config.path)
    open_dataset(config.path)  # an error before Ray starts
    check_shared(connect(recipe), [("verify.path", config.path)])
    report = verify(config.path, decode_fraction=config.decode_fraction)
    for problem in report.problems[:_SHOWN]:
        where = f"{problem.file} {problem.key}".strip()
        print(f"{where}: {problem.what}")
    if len(report.problems) > _SHOWN:
        print(f"... and {len(report.problems) - _SHOWN} more")
    advice = "restore these files from a copy, or convert again"
    print(
        f"{config.path}: {report.num_images} images in {report.num_files} files checked, "
        f"{report.num_decoded} decoded, {len(report.problems)} problems; "
        f"{advice if report.problems else 'the data set is complete and undamaged'}"
    )
    return 1 if report.problems else 0


def run_subset(recipe: Recipe) -> int:
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
    return 0


def run_deduplicate(recipe: Recipe) -> int:
    """Write the manifest of a data set without the images of evaluation sets.

    Raises:
        ValueError: the recipe has no `deduplicate` section, or a data set is missing, or the
            destination is taken.
    """
    hint = "deduplicate.source, deduplicate.evaluation_sets and deduplicate.destination"
    config = require(recipe.deduplicate, "deduplicate", hint)
    sets = list(config.evaluation_sets)
    for path in (config.source, *sets):  # an error before Ray starts
        open_dataset(path)
    refuse_taken(config.destination)
    read = [("deduplicate.source", config.source)]
    read += [("deduplicate.evaluation_sets", path) for path in sets]
    check_shared(connect(recipe), read)
    report = deduplicate(config.source, sets, config.destination)
    print(
        f"{config.destination}: {report.num_exact} exact and {report.num_near} near duplicates "
        f"of {report.num_images} images left out; duplicates.parquet lists them"
    )
    return 0
