"""Which MLflow run the parent of trainings goes on with, on a real store, written by a Tracker."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.launch.resolved import resolved_run
from vit_ray.config import Recipe, load_recipe
from vit_ray.experiments.trials import open_parent
from vit_ray.launch import connection
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run_record import run_facts
from vit_ray.outcomes import RUN_FOLDER
from vit_ray.tracking.metrics_log import RunOpening, metrics_log_path
from vit_ray.tracking.tracker import Tracker


def sweep_in(folder: Path, output: str) -> Recipe:
    words = [f"output={folder}/{output}", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    return load_recipe("digits_sweep", [*words, "name=one", "init_from=x"])


def record(recipe: Recipe, kind: str = "sweep", *, continues: bool = True) -> str:
    """As a sweep records itself."""
    tags = run_facts(recipe, kind, resolved_run(), ClusterShape(1, 2, 0, 0.0), "vit-ray sweep")
    log = metrics_log_path(recipe.run_folder)
    opening = RunOpening(recipe.tracking, recipe.name, log, tags=tags, continues=continues)
    tracker = Tracker.begin(opening)
    tracker.finish("KILLED")
    return tracker.run_id


def test_a_training_for_which_the_ray_of_this_process_is_too_small_is_refused_before_it_starts(
    ray_cluster, tmp_path, monkeypatch
):
    """As one that an earlier command in the process has started; a new one has room for all."""
    monkeypatch.setattr(connection, "_STARTED", set())
    connection.mark_private()
    recipe = sweep_in(tmp_path, "runs").with_changes(workers={"num_workers": 1})
    wide = recipe.with_changes(name="wide", workers={"num_workers": 64})
    refusal = pytest.raises(ValueError, match=r"wide: workers.num_workers=64 .* hold at most \d")
    with refusal, open_parent(recipe, "sweep", resolved_run(), 1, [recipe, wide]):
        pass
    assert list(tmp_path.iterdir()) == []  # neither a folder of the sweep nor a store


@pytest.mark.parametrize("has_logs", [True, False])
def test_two_outputs_with_a_sweep_of_one_name_go_on_each_under_its_own_run(tmp_path, has_logs):
    recipes = [sweep_in(tmp_path, "first"), sweep_in(tmp_path, "second")]
    runs = [record(one, continues=False) for one in recipes]
    assert runs[0] != runs[1]
    if not has_logs:  # they are on another machine
        for one in recipes:
            shutil.rmtree(one.run_folder)
    assert [record(one) for one in recipes] == runs
    assert record(sweep_in(tmp_path, "third")) not in runs
    shutil.rmtree(recipes[0].run_folder)
    assert record(recipes[0], "study") not in runs


def test_a_sweep_whose_folder_was_moved_goes_on_under_its_run(tmp_path):
    run_id = record(sweep_in(tmp_path, "first"))
    (tmp_path / "first").rename(tmp_path / "second")
    record(sweep_in(tmp_path, "first"), continues=False)
    moved = sweep_in(tmp_path, "second")
    assert record(moved) == run_id
    tags = MlflowClient(moved.tracking.uri).get_run(run_id).data.tags
    assert tags[RUN_FOLDER] == moved.run_folder
    MlflowClient(moved.tracking.uri).delete_run(run_id)
    assert record(moved) != run_id
