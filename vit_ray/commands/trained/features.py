"""The commands on features: writing them, and few-shot accuracy from them."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from vit_ray.config import Recipe
from vit_ray.evaluate.feature_files import read_facts
from vit_ray.experiments.few_shot_job import FewShotRow, run_few_shot
from vit_ray.launch.feature_extraction import extract_features
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
    table = Table(title="Few-shot top-1 accuracy")
    for title in ("shots", "linear", "nearest neighbours"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(str(row.shots), _spread(row.linear), _spread(row.neighbors))
    Console().print(table)


def _spread(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.2%}"
    return f"{mean} +- {statistics.stdev(values):.2%}" if len(values) > 1 else mean
