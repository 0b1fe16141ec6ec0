"""Models measured one after the other in a Ray process each, and recorded in MLflow."""

from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.recipes import recipe_with
from vit_ray.commands.benchmark_models import benchmark_models, describe_benchmark
from vit_ray.config import Recipe
from vit_ray.launch import model_benchmark
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.model_benchmark import benchmarked_models

SMALL = {"name": "ViT", "patch_size": 4, "depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 2}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    other = {"label": "R", "model": {**SMALL, "patch_size": 3}}
    models = [{"label": "ViT small/4", "model": SMALL}, other]
    return recipe_with(
        "cost", output=str(tmp_path / "runs"), train={"precision": "fp32"},
        tracking={"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "cost"},
        benchmark_models={
            "models": models, "image_sizes": [16, 17], "max_batch_size": 2,
        },
    )  # fmt: skip


def recorded(recipe: Recipe) -> dict[str, Any]:
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name("cost")
    runs = client.search_runs([experiment.experiment_id])
    return {run.data.tags["vit_ray.study_label"]: run for run in runs}


@pytest.mark.slow
def test_models_are_measured_on_ray_and_recorded_one_run_each(
    recipe: Recipe, ray_cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark_models(recipe) == 0
    runs = recorded(recipe)
    assert runs.keys() == {"ViT small/4", "R"}
    vit, other = runs["ViT small/4"], runs["R"]
    assert vit.info.run_name == "cost-ViT-small-4-CPU"
    assert vit.info.status == other.info.status == "FINISHED"
    assert vit.data.tags["vit_ray.kind"] == "model_benchmark"
    assert vit.data.tags["vit_ray.device"] == "CPU"
    assert vit.data.params["model.patch_size"] == "4"
    speeds = [key for key in vit.data.metrics if key.endswith("images_per_s")]
    assert sorted(speeds) == [f"benchmark/{m}_16px_images_per_s" for m in ("inference", "training")]
    assert "benchmark/training_18px_batch_at_least" in other.data.metrics
    kept = MlflowClient(recipe.tracking.uri).list_artifacts(vit.info.run_id)
    assert "batches.csv" in {item.path for item in kept}
    shown = capsys.readouterr().out
    assert "ViT small/4 on CPU" in shown
    assert "2 or more" in shown


@pytest.mark.slow
def test_a_model_that_fails_is_told_and_recorded_and_the_next_is_measured(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterShape(1, 2.0, 0.0, 0.0)
    monkeypatch.setattr(model_benchmark, "connect", lambda recipe: cluster)

    def measured(label: str, *_: Any) -> model_benchmark.BenchmarkedRow:
        error = "the process has died" if label == "R" else ""
        return model_benchmark.BenchmarkedRow(label, "CPU", [], error)

    monkeypatch.setattr(model_benchmark, "_measured", measured)
    assert benchmark_models(recipe) == 1
    assert "R: failed: the process has died" in capsys.readouterr().out
    runs = recorded(recipe)
    assert runs["R"].info.status == "FAILED"
    assert runs["R"].data.tags["vit_ray.error"] == "the process has died"
    assert runs["ViT small/4"].info.status == "FINISHED"


def test_what_cannot_be_measured_is_refused(recipe: Recipe, monkeypatch: Any) -> None:
    cluster = ClusterShape(1, 2.0, 0.0, 0.0)
    monkeypatch.setattr(model_benchmark, "connect", lambda recipe: cluster)
    gpu = recipe.with_changes(workers={"use_gpu": True})
    with pytest.raises(ValueError, match="the cluster has no GPU"):
        next(benchmarked_models(gpu))
    with pytest.raises(ValueError, match="benchmark_models is not set"):
        next(benchmarked_models(recipe.with_changes(benchmark_models=None)))
    twice = {"models": [{"label": "R", "model": {"name": "R50x1"}}] * 2}
    with pytest.raises(ValueError, match=r"benchmark_models.models=.* has R twice"):
        recipe.with_changes(benchmark_models=twice)
    odd = {"models": [{"label": "odd", "model": {**SMALL, "num_heads": 3}}]}
    with pytest.raises(ValueError, match="num_heads=3 does not divide"):
        next(benchmarked_models(recipe.with_changes(benchmark_models=odd)))


def test_a_dry_run_tells_the_work_of_each_model(recipe: Recipe) -> None:
    told = describe_benchmark(recipe)
    assert "ViT small/4: 16 px" in told
    assert "R: 15 px" in told
    assert "18 px" in told
