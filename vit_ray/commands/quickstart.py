"""The main job in small: digits to parquet, pre-training, a sweep at a higher resolution."""

from __future__ import annotations

import time
from pathlib import Path

from vit_ray.commands.report import report
from vit_ray.commands.tables.printed_tables import print_result, print_sweep
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset
from vit_ray.data.prepare.convert.conversion import convert
from vit_ray.data.prepare.digits import write_digits
from vit_ray.experiments.sweep import run_sweep
from vit_ray.launch.cluster.connection import connect
from vit_ray.launch.pool.pool_keeper import kept_pools
from vit_ray.launch.run import train

SWEEP_RECIPE = "digits_sweep"


def run_quickstart(recipe: Recipe) -> int:
    """Convert, pre-train, sweep, and print a table; finished parts are not done again.

    Raises:
        ValueError: the recipe has several training or test sets, or none.
    """
    start_s = time.monotonic()
    for name, path in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        if not isinstance(path, str):
            raise ValueError(
                f"data.{name}={path!r}: quickstart writes one data set there; give one path"
            )
    sweep = load_recipe(SWEEP_RECIPE).with_changes(
        output=recipe.output,
        init_from=f"{recipe.output}/{recipe.name}",
        data={"train": recipe.data.train, "eval": recipe.data.eval},
        tracking=recipe.tracking.model_dump(mode="json"),
    )
    connect(recipe)
    _convert_digits(recipe)
    with kept_pools():
        code = print_result(train(recipe)) or _sweep_and_report(recipe, sweep)
    print(f"All of it took {time.monotonic() - start_s:.0f} s.")
    return code


def _sweep_and_report(recipe: Recipe, sweep: Recipe) -> int:
    """Sweep, and make one page of that and of the pre-training, kept with the run of the sweep."""
    result = run_sweep(sweep)
    code = print_sweep(result)
    if result is not None and result.parent_run_id is not None:
        page = report(recipe, whole_experiment=True, keep_with=result.parent_run_id)
        print(f"report of all runs: {page}")
        print(f"all runs in MLflow: {result.hint}")
    return code


def is_converted(path: str) -> bool:
    """Whether there is a whole data set."""
    try:
        open_dataset(path)
    except ValueError:
        return False
    return True


def _convert_digits(recipe: Recipe) -> None:
    images = Path(recipe.output) / "digits_images"  # where no folder of the user is
    for split, destination in (("train", recipe.data.train), ("test", recipe.data.eval)):
        assert isinstance(destination, str)  # as `run_quickstart` has seen
        if is_converted(destination):
            continue
        write_digits(images)  # again, if it was interrupted: the files are the same
        config = ConvertConfig(source=str(images / split), destination=destination)
        report = convert(config, recipe.seed)
        print(f"{destination}: {report.num_images} digits in {report.num_shards} shard(s)")
