"""MLflow's pages of a sweep in a real browser: what they show by themselves.

The sweep is in MLflow as recorders write it, without a training: its points are made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from docs.screenshots import Pages, browsing, newest_sweep, serving
from vit_ray.commands.tracking_store import report
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import write_yaml
from vit_ray.experiments.search_space import RATE, trial_recipe
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import data_inputs, run_facts, trained_params, training_cost
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker

ACCURACIES = {0.003: 0.913, 0.01: 0.953, 0.03: 0.967, 0.1: 0.96}
"""Top-1 on the dev split by learning rate."""
STEPS = 100


def write_sweep(folder: Path) -> str:
    """Record a sweep with trials, curves, costs and a report; the address of its store."""
    uri = f"sqlite:///{folder}/mlflow.db"
    places = ["init_from=runs/vit", "data.train=data/train", "data.eval=data/test"]
    tracking = [f"tracking.uri={uri}", "tracking.experiment=synthetic"]
    recipe = load_recipe("digits_sweep", [*places, *tracking, f"output={folder}/runs"])
    parent = tracker_of(recipe, "sweep")
    assert parent.flush(60)
    for rate, accuracy in ACCURACIES.items():
        trial = trial_recipe(recipe, {RATE: rate})
        tracker = tracker_of(
            trial,
            "sweep_trial",
            measured_on="dev",
            awaited_metric="dev/top1",
            parent_log=parent.log.path,
        )
        for step in range(10, STEPS + 1, 10):
            tracker.log.metrics(step, {"train/loss": 2.3 / (1 + step / 20) + (1 - accuracy)})
        tracker.log.metrics(STEPS, {"eval/top1": accuracy, "eval/loss": 1.5 * (1 - accuracy)})
        tracker.log.metrics(STEPS, training_cost(resolved(trial), STEPS))
        assert tracker.finish("FINISHED")
    parent.log.text("recipe.yaml", write_yaml(recipe.written()))
    assert parent.finish("FINISHED")
    report(recipe)
    return uri


def tracker_of(recipe: Recipe, kind: str, **opening: Any) -> Tracker:
    run = resolved(recipe)
    return Tracker.begin(
        RunOpening(
            recipe.tracking.model_copy(update={"system_metrics": False}),
            recipe.name,
            Path(recipe.run_folder) / "metrics.jsonl",
            None,
            trained_params(recipe),
            run_facts(recipe, kind, run, ClusterShape(1, 2, 0, 0.0), "vit-ray sweep"),
            datasets=data_inputs(run),
            **opening,
        )
    )


def resolved(recipe: Recipe) -> Any:
    manifest = SimpleNamespace(
        path="data/train", fingerprint="5" * 64, num_images=1497, num_classes=10, about={}
    )
    streams = {"train": SimpleNamespace(manifest=manifest, num_images=1467)}
    return SimpleNamespace(
        recipe=recipe, manifest=manifest, num_images=1467, total_steps=STEPS, streams=streams
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder = tmp_path_factory.mktemp("sweep")
    uri = write_sweep(folder)
    with serving(uri) as address, browsing() as driver:
        yield Pages(driver, address, newest_sweep(MlflowClient(uri)), folder / "pictures")


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("runs", [f"digits-sweep-lr{rate}" for rate in ACCURACIES]),  # below the sweep
        ("view", ["optim.learning_rate", "dev/top1"]),
        ("compared", ["optim.learning_rate", "dev/top1"]),
    ],
)
def test_a_page_of_a_sweep_shows_its_trials_or_draws_their_rates_against_accuracy(
    pages, page, shown
):
    assert getattr(pages, page)() == shown
    picture = (pages._folder / f"{page.removesuffix('d')}.png").read_bytes()
    assert picture[:4] == b"\x89PNG"
    assert len(picture) > 30_000  # an empty page has fewer bytes
    assert pages.console_errors == []


def test_accuracy_can_be_drawn_over_exaflops_and_the_parent_keeps_report_and_recipe(pages):
    assert pages.scatter("study/exaflops", "dev/top1") == ["study/exaflops", "dev/top1"]
    assert {"report.html", "recipe.yaml"} <= set(pages.artifacts())
    assert pages.console_errors == []
