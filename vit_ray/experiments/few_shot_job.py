"""Few-shot accuracy of weights: features from all workers, then every draw from files."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_ray.config import Recipe, require
from vit_ray.config.training_sections import EvalConfig
from vit_ray.data import open_dataset
from vit_ray.data.format.labels import all_first_labels
from vit_ray.evaluate.feature_files import read_features
from vit_ray.evaluate.few_shot import FewShot, neighbor_accuracy, ranks_in_class, require_shots
from vit_ray.experiments.parent_run import earlier_run, open_parent
from vit_ray.experiments.runner import Work, in_parallel
from vit_ray.launch.feature_extraction import plan_extraction
from vit_ray.launch.pool.pool_training import RunFailedError
from vit_ray.metric_names import FEW_SHOT_GROUP, KNN_GROUP, few_shot_top1
from vit_ray.report.tables import Column, Table
from vit_ray.storage import Location
from vit_ray.tracking.past_runs import is_finished

Features = NDArray[np.float32]


@dataclass(frozen=True)
class FewShotRow:
    """One number of shots; accuracies in [0, 1], one for each seed."""

    shots: int
    linear: list[float]
    neighbors: list[float]

    def metrics(self) -> dict[str, float]:
        """Mean and deviation over seeds, as MLflow has them."""
        found = {}
        for group, values in ((FEW_SHOT_GROUP, self.linear), (KNN_GROUP, self.neighbors)):
            key = few_shot_top1(self.shots, group)
            found[key] = statistics.fmean(values)
            if len(values) > 1:
                found[f"{key}_std"] = statistics.stdev(values)
        return found


@dataclass(frozen=True)
class FewShotResult:
    """Every number of shots, and how to open MLflow's page of the job."""

    rows: list[FewShotRow]
    hint: str


def run_few_shot(recipe: Recipe) -> FewShotResult | None:
    """Extract features of both sets, if they are not there, and measure every number of shots.

    Returns:
        None if it was stopped on request; the same command continues.

    Raises:
        ValueError: a set is missing, the two have different classes, a class has fewer images than
            shots, or there are features with other settings; nothing was started. Or a feature is
            not finite.
        RunFailedError: an extraction has failed.
    """
    recipe = recipe.with_absolute_paths()
    sets = {"train": recipe.evaluate.few_shot_train, "test": recipe.evaluate.few_shot_test}
    pool, test = (
        open_dataset(require(path, f"evaluate.few_shot_{part}", "a converted data set"))
        for part, path in sets.items()
    )
    if pool.classes != test.classes:
        raise ValueError(
            f"evaluate.few_shot_test: {test.path} has other classes than {pool.path}; convert both "
            "with the same list of classes"
        )
    labels = all_first_labels(pool.path)
    examples = np.bincount(labels[labels >= 0], minlength=pool.num_classes)
    require_shots(examples, shots=recipe.evaluate.shots, classes=pool.classes)
    recipes = [
        recipe.with_changes(
            name=f"{recipe.name}-{part}",
            extract={
                "data": path,
                "path": f"{recipe.run_folder}-features/{part}",
                "logits": False,
            },
        )
        for part, path in sets.items()
    ]
    planned = [plan_extraction(one) for one in recipes]
    missing = [k for k, features in enumerate(planned) if not features.are_whole()]
    first, last = (features.prepared.resolved for features in planned)
    parts = {"train": first, "few_shot_train": first, "few_shot_test": last}
    streams = {name: resolved.streams["eval"] for name, resolved in parts.items()}
    own = recipe.with_changes(name=f"{recipe.name}-few-shot")
    run_id = earlier_run(own, "few_shot")
    if run_id is not None and is_finished(own.tracking, run_id):
        run_id = None
    with open_parent(
        own,
        "few_shot",
        replace(first, streams=streams),
        0,
        run_id,
        trainings=[features.prepared.recipe for features in planned],
        trains=False,
        tags={"init_from": str(recipe.init_from)},
    ) as parent:
        parent.start_workers(recipes[missing[0]] if missing else None, trains=False)
        parent.run.control.begin_stage("extraction", len(missing))
        trainings = [parent.training(recipes[k], "extract", retries=1) for k in missing]
        works = [Work(each, on_end=parent.note_end) for each in trainings]
        outcomes = parent.run_flow(in_parallel(works), None)
        if outcomes is None:
            return None
        if failed := [one.error for one in outcomes if one.error]:
            raise RunFailedError("; ".join(dict.fromkeys(failed)))
        examples_at, tests_at = (features.folder for features in planned)
        rows = measure(recipe.evaluate, examples_at, tests_at, labels, pool.num_classes)
        record = parent.run.record
        record.results(0, {key: value for row in rows for key, value in row.metrics().items()})
        record.text("few_shot.csv", table_csv(rows))
        parent.run.is_complete = True
        return FewShotResult(rows, record.hint())


def measure(
    config: EvalConfig,
    pool: Location,
    test: Location,
    labels: NDArray[np.integer],
    num_classes: int,
) -> list[FewShotRow]:
    """Linear and nearest-neighbour accuracy of every number of shots, from features in files.

    Args:
        labels: of the pool, by sample number. An image without a feature, because it could not be
            decoded, is not drawn.
    """
    drawable = np.full(len(labels), -1, np.int64)
    for part in read_features(pool, ["sample", "label"]):
        drawable[part["sample"]] = part["label"]
    few_shot = FewShot(drawable, num_classes, shots=config.shots, seeds=config.few_shot_seeds)
    for part in read_features(pool, ["sample", "feature"]):
        few_shot.add_examples(part["feature"], part["sample"])
    few_shot.solve()
    for features, truth in _tests(test):
        few_shot.add_tests(features, truth)
    rows = [FewShotRow(shots, of_seeds, []) for shots, of_seeds in few_shot.accuracies().items()]
    for seed in range(config.few_shot_seeds):  # only one seed's features are in memory at a time
        ranks = ranks_in_class(drawable, num_classes, seed)
        drawn = []
        for part in read_features(pool, ["sample", "feature"]):
            kept = ranks[part["sample"]] < max(config.shots)
            drawn.append((part["sample"][kept], part["feature"][kept]))
        samples, features = map(np.concatenate, zip(*drawn, strict=True))
        for row in rows:
            chosen = ranks[samples] < row.shots
            labels_drawn = drawable[samples[chosen]]
            row.neighbors.append(
                neighbor_accuracy(
                    features[chosen], labels_drawn, _tests(test), num_classes=num_classes
                )
            )
    return rows


def _tests(folder: Location) -> Iterator[tuple[Features, NDArray[Any]]]:
    for part in read_features(folder, ["label", "feature"]):
        yield part["feature"], part["label"]


def table_csv(rows: list[FewShotRow]) -> str:
    """Text with every draw on a line."""
    columns = [Column(title) for title in ("shots", "seed", "linear_top1", "knn_top1")]
    lines = [
        (row.shots, seed, *pair)
        for row in rows
        for seed, pair in enumerate(zip(row.linear, row.neighbors, strict=True))
    ]
    return Table("Few-shot accuracy", columns, lines).csv()
