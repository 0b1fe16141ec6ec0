"""The commands on features: writing them, and few-shot accuracy from them."""

import statistics

from vit_ray.commands.printed_tables import print_rows
from vit_ray.config import Recipe
from vit_ray.evaluate.feature_files import read_facts
from vit_ray.experiments.few_shot_job import FewShotRow, run_few_shot
from vit_ray.launch.feature_extraction import SPEED, extract_features
from vit_ray.launch.stopping import RunStoppedError


def run_extract(recipe: Recipe) -> int:
    """Write features and print where; exit code 3 if it was stopped on request."""
    try:
        folder = extract_features(recipe)
    except RunStoppedError:
        print("stopped on request; run the same command again to continue after the complete files")
        return 3
    facts = read_facts(folder)
    assert facts is not None
    print(f"features of {facts['num_images']} images in {len(facts['files'])} files: {folder.uri}")
    speed = facts.get("speed", {})
    if speed.keys() >= {*SPEED}:
        images_per_s, for_images, for_files = (speed[key] for key in SPEED)
        print(
            f"{images_per_s:,.0f} images/s from the first batch on; {for_images:.1%} of the time "
            f"waited for images, {for_files:.1%} for files to be written"
        )
    return 0


def run_few_shot_job(recipe: Recipe) -> int:
    """Measure, print and record; exit code 3 if it was stopped on request."""
    result = run_few_shot(recipe)
    if result is None:
        print(
            "stopped on request; run the same command again to continue after the complete features"
        )
        return 3
    print_few_shot(result.rows)
    print(f"MLflow page: {result.hint}")
    return 0


def print_few_shot(rows: list[FewShotRow]) -> None:
    """Mean over the seeds, and deviation."""
    texts = [(str(row.shots), _spread(row.linear), _spread(row.neighbors)) for row in rows]
    columns = ("shots", "linear", "nearest neighbours")
    print_rows("Few-shot top-1 accuracy", columns, texts, num_left=0)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.2%}"
    return f"{mean} +- {statistics.stdev(values):.2%}" if len(values) > 1 else mean
