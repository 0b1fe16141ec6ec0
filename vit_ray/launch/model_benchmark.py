"""The speed of models on one device of the cluster, one after another, each with an MLflow run.

Each model has its own process, so that left-over device memory, or a crash, does not affect the
next one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import ray

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import BenchmarkModelsConfig
from vit_ray.launch.cluster.connection import ClusterShape, connect
from vit_ray.launch.record.run_metadata import git_commit, trained_params
from vit_ray.report.tables import Column, Table
from vit_ray.tracking.metrics_log import RunOpening, metrics_log_path
from vit_ray.tracking.tracker import Tracker
from vit_ray.train.memory.model_speed import ModelSpeed, measure_model

KIND = "model_benchmark"
MODEL_LIMIT_S: Final = 3600.0
"""A model that is not measured within this time has failed, and the next one starts."""


@dataclass(frozen=True)
class BenchmarkedRow:
    """One model, measured or failed."""

    label: str
    device: str = ""
    """The device's name; empty if unknown because the model failed."""
    speeds: list[ModelSpeed] = field(default_factory=list)
    error: str = ""


def benchmarked_models(recipe: Recipe) -> Iterator[BenchmarkedRow]:
    """Measure and record each model of `benchmark_models`; yields each result when it is done.

    Raises:
        ValueError: the recipe names no models, a model cannot be built, or the cluster has no GPU
            although `workers.use_gpu` is true.
    """
    config, recipes = benchmark_of(recipe), model_recipes(recipe)
    cluster, workers = connect(recipe), recipe.workers
    if workers.use_gpu is True and not cluster.num_gpus:
        raise ValueError(
            f"workers.use_gpu=true, but the cluster has no GPU ({cluster}); set it to auto or false"
        )
    # One GPU; without a GPU all CPUs of a node, because torch uses them.
    resources: dict[str, float] = {
        "num_gpus": 0,
        "num_cpus": max(1, int(cluster.num_cpus) // cluster.num_nodes),
    }
    if workers.use_gpu and cluster.num_gpus:
        resources = {"num_gpus": 1, "num_cpus": workers.cpus_per_worker}
    for label, model_recipe in recipes.items():
        row = _measured(label, model_recipe, config, resources)
        _record(model_recipe, row, cluster)
        yield row


def benchmark_of(recipe: Recipe) -> BenchmarkModelsConfig:
    """The recipe's section.

    Raises:
        ValueError: there is no such section.
    """
    hint = "benchmark_models.models, a list of {label: ..., model: {name: ...}}"
    return require(recipe.benchmark_models, "benchmark_models", hint)


def model_recipes(recipe: Recipe) -> dict[str, Recipe]:
    """Label to the recipe of a model, at its first input size.

    Raises:
        ValueError: a model cannot be built, for example because its heads do not divide its width.
    """
    config = benchmark_of(recipe)
    found = {}
    for one in config.models:
        size = one.model.side_in_whole_patches(config.image_sizes[0])
        found[one.label] = recipe.with_changes(
            name=f"{recipe.name}{_slug(one.label)}",
            model={**one.model.model_dump(mode="json"), "image_size": size},
            train={"mixup": 0.0, "cutmix": 0.0, "micro_batch_size": "auto"},
        )
    return found


def _slug(text: str) -> str:
    return f"-{name}" if (name := re.sub(r"[^A-Za-z0-9._+]+", "-", text).strip("-")) else ""


def _measured(
    label: str, recipe: Recipe, config: BenchmarkModelsConfig, resources: dict[str, float]
) -> BenchmarkedRow:
    """A model that fails, or whose process dies, is a row with its error."""
    once: Any = ray.remote(max_calls=1, max_retries=0)  # a separate process
    task = once(measure_model).options(**resources)
    reference = task.remote(recipe, config, use_gpu=resources["num_gpus"] > 0)
    try:
        return BenchmarkedRow(label, *ray.get(reference, timeout=MODEL_LIMIT_S))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=True)
        reason = f"not measured in {MODEL_LIMIT_S / 60:g} minutes"
    except ray.exceptions.RayTaskError as error:
        reason = f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:  # its process has died
        reason = str(error)
    return BenchmarkedRow(label, error=" ".join(reason.split())[:500])


def _record(recipe: Recipe, row: BenchmarkedRow, cluster: ClusterShape) -> None:
    """One run per model and device; measuring again continues it with the new values."""
    recipe = recipe.with_changes(name=f"{recipe.name}{_slug(row.device)}")
    log = metrics_log_path(recipe.run_folder)
    tags = {
        "vit_ray.kind": KIND,
        "vit_ray.study_label": row.label,
        "vit_ray.device": row.device,
        "vit_ray.model": recipe.model.name,
        "vit_ray.cluster": str(cluster),
        "vit_ray.git_commit": git_commit(),
    }
    params = trained_params(recipe)
    tracker = Tracker.start(RunOpening(recipe.tracking, recipe.name, log, params=params, tags=tags))
    tracker.log.metrics(
        0, {key: value for one in row.speeds for key, value in one.metrics().items()}
    )
    tracker.log.tag("vit_ray.error", row.error)
    titles = ("mode", "image_size", "batch_size", "images_per_s", "search_ended_by")
    lines = [
        (one.mode, one.image_size, batch.batch_size, f"{batch.images_per_s:.6g}", one.ended_by)
        for one in row.speeds
        for batch in one.batches
    ]
    table = Table("Every tried batch size that fits", list(map(Column, titles)), lines)
    tracker.log.text("batches.csv", table.csv())
    tracker.finish("FAILED" if row.error else "FINISHED")
