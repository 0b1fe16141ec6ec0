"""What a study spends on other than training and evaluating its cells, by its record in MLflow.

    python jobs/scaling_study.py jobs/recipes/study_cifar10_short.yaml
    python benchmarks/study_overhead.py sqlite:///mlflow.db cifar10-study-short

Cells are laid into as many pools as ran side by side. A pool's time goes from the start of the
study to the end of the last cell in it, and for one pool to the end of the study, which writes its
page there. From that the cells' own times are taken: training, from its first step to its last,
and the evaluation after it. What is left is the study's: starting, preparing, saving, recording.
A pool that ends early, because no cell waits any more, is no overhead. Run the study on a quiet
machine, from its start to its end in one go.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

BAR = 0.10


@dataclass(frozen=True)
class CellTimes:
    """One cell; moments are unix times in seconds."""

    name: str
    start_s: float
    end_s: float
    training_s: float
    evaluation_s: float


def cell_times(client: MlflowClient, run: Run) -> CellTimes:
    """By the moments at which its first and last loss and its accuracy were recorded."""
    steps = sorted(
        client.get_metric_history(run.info.run_id, "train/loss"), key=lambda point: point.step
    )
    first_s, last_s = steps[0].timestamp / 1000, steps[-1].timestamp / 1000
    per_step_s = (last_s - first_s) / max(1, steps[-1].step - steps[0].step)
    measured = [
        point.timestamp / 1000
        for key in run.data.metrics
        if key.startswith(("eval/", "few_shot/"))
        for point in client.get_metric_history(run.info.run_id, key)
        if point.step == steps[-1].step
    ]
    return CellTimes(
        str(run.info.run_name),
        run.info.start_time / 1000,
        run.info.end_time / 1000,
        last_s - first_s + per_step_s,  # the first step is recorded at its end
        max([*measured, last_s]) - last_s,
    )


def pools_of(cells: list[CellTimes]) -> list[list[CellTimes]]:
    """Each cell in the pool that has been free for the longest, or in a new one."""
    pools: list[list[CellTimes]] = []
    for cell in sorted(cells, key=lambda one: one.start_s):
        free = [pool for pool in pools if pool[-1].end_s <= cell.start_s]
        if free:
            min(free, key=lambda pool: pool[-1].end_s).append(cell)
        else:
            pools.append([cell])
    return pools


def overhead(cells: list[CellTimes], start_s: float, end_s: float) -> tuple[float, float, int]:
    """Share of the pools' time that is the study's own, that time in all, and how many pools."""
    pools = pools_of(cells)
    ends = sorted(pool[-1].end_s for pool in pools)
    ends[-1] = max(ends[-1], end_s)
    whole_s = sum(end - start_s for end in ends)
    busy_s = sum(one.training_s + one.evaluation_s for one in cells)
    return 1 - busy_s / whole_s, whole_s, len(pools)


def study_of(client: MlflowClient, experiment: str) -> tuple[Run, list[Run]]:
    """The newest study of an experiment, and its finished cells.

    Raises:
        SystemExit: there is none, or it was not run in one go.
    """
    found = client.get_experiment_by_name(experiment)
    if found is None:
        sys.exit(f"no experiment {experiment!r}")
    runs = list(client.search_runs([found.experiment_id], max_results=5000))
    studies = [run for run in runs if run.data.tags.get("vit_ray.kind") == "study"]
    if not studies:
        sys.exit(f"no study in experiment {experiment!r}")
    study = max(studies, key=lambda run: run.info.start_time)
    cells = [
        run
        for run in runs
        if run.data.tags.get("mlflow.parentRunId") == study.info.run_id
        and run.data.tags.get("vit_ray.kind") == "study_cell"
        and run.info.status == "FINISHED"
    ]
    if again := [run.info.run_name for run in cells if "vit_ray.events.resumed" in run.data.tags]:
        sys.exit(f"{again[0]} was interrupted; its times say nothing of the study's overhead")
    return study, cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("uri", help="MLflow's address, such as sqlite:///mlflow.db")
    parser.add_argument("experiment")
    options = parser.parse_args()
    client = MlflowClient(options.uri)
    study, runs = study_of(client, options.experiment)
    cells = [cell_times(client, run) for run in runs]
    share, whole_s, num_pools = overhead(
        cells, study.info.start_time / 1000, study.info.end_time / 1000
    )
    own = [one.end_s - one.start_s - one.training_s - one.evaluation_s for one in cells]
    print("| | s |\n|---|---|")
    print(f"| {num_pools} pools, from the study's start to their ends | {whole_s:.1f} |")
    print(f"| training {len(cells)} cells | {sum(one.training_s for one in cells):.1f} |")
    print(f"| evaluating them | {sum(one.evaluation_s for one in cells):.1f} |")
    print(f"| within a run, beside these: median | {statistics.median(own):.2f} |")
    print(f"| within a run, beside these: most | {max(own):.2f} |")
    print(f"\nThe study's own: {share:.1%} of the pools' time (bar: {BAR:.0%}).")


if __name__ == "__main__":
    main()
