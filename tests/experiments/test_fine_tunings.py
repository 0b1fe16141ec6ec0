"""Transfers of a study: the recipe of each fine-tuning, and which are finished."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.experiments.studies import study_recipe, study_row, study_tree
from vit_ray.config import loading
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study_cells import Cell, study_cells, task_recipe


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "tune.yaml"
    tree = {
        "name": "tune",
        "output": "elsewhere",
        "init_from": "elsewhere/run",
        "model": {
            "name": "ViT-B/16",
            "image_size": 16,
            "representation": False,
            "stochastic_depth": 0.2,
        },
        "data": {"train": "/tune/train", "eval": "/tune/test"},
        "optim": {"name": "sgd", "learning_rate": 0.03, "steps": 5},
        "workers": {"num_workers": 8},
        "tracking": {"experiment": "other"},
        "sweep": {"learning_rates": [0.01, 0.03]},
    }
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def cell(**changes: Any) -> Cell:
    options = {"representation": True, "head_bias": -10.0, "dropout": 0.1, "pool": "gap"}
    row = {**study_row("row", **options), "changes": changes}
    tree = study_tree("/x", [row], seeds=[3])
    return study_cells(recipe_from_dict(tree, "test"))[0]


def test_model_weights_seed_and_workers_are_the_cells_and_the_rest_the_tasks(base):
    one = cell()
    found = task_recipe(one, StudyTask(name="tune", recipe=base))
    assert re.fullmatch("grid-row-data1-epochs1-seed3-tune-[0-9a-f]{8}", found.name)
    assert found.init_from == "/x/runs/grid-row-data1-epochs1-seed3"
    assert (found.output, found.seed) == ("/x/runs", 3)
    assert (found.workers, found.tracking) == (one.recipe.workers, one.recipe.tracking)
    model = found.model
    assert (model.name, model.width, model.pool, model.image_size) == ("ViT", 16, "gap", 16)
    assert (model.representation, model.head_bias, model.dropout) == (None, None, None)
    assert model.stochastic_depth == 0.2
    assert (found.data.train, found.data.eval) == ("/tune/train", "/tune/test")
    assert (found.optim.name, found.optim.steps) == ("sgd", 5)
    assert found.sweep


def test_a_task_changes_its_recipe_and_can_go_without_its_sweep(base):
    changes = {"sweep": None, "optim": {"learning_rate": 0.5}, "model.dropout": 0.1}
    found = task_recipe(cell(), StudyTask(name="tune", recipe=base, changes=changes))
    assert found.sweep is None
    assert (found.optim.learning_rate, found.optim.steps) == (0.5, 5)
    assert found.model.dropout == 0.1


def test_a_task_that_trains_something_else_has_another_run(base):
    def name(one: Cell, **changes: Any) -> str:
        return task_recipe(one, StudyTask(name="tune", recipe=base, changes=changes)).name

    known = name(cell())
    assert name(cell(), **{"optim.steps": 6}) != known
    assert name(cell(), **{"optim.learning_rate": 0.5}) != known
    # Finished trials of the sweep are kept, and a run is gone on with on other workers.
    assert name(cell(), **{"sweep.seeds": 1}) == known
    assert name(cell(**{"workers.num_workers": 2})) == known


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"init_from": "/y"}, "changes.init_from"),
        ({"workers": {"num_workers": 2}}, "changes.workers.num_workers"),
        ({"optim.stps": 3}, "optim.stps"),
        ({"model.patch_size": 5}, "changes.model.patch_size"),
        ({"model": {"name": "R50x1"}}, "changes.model.name"),
        ({"model.image_size": 15}, "image_size"),
        ({"sweep.scheduler": "asha"}, "sweep.scheduler=none"),
        (
            {"sweep.search": "optuna", "sweep.num_trials": 2, "sweep.space": {"optim.steps": [1]}},
            "sweep.search=grid",
        ),
    ],
)
def test_a_task_that_cannot_be_is_refused_with_its_name(base, changes, key):
    with pytest.raises(ValueError, match=rf"study.transfer 'tune': .*{key}"):
        task_recipe(cell(), StudyTask(name="tune", recipe=base, changes=changes))


def test_a_fine_tuning_is_recorded_where_its_study_is(base, monkeypatch, caplog):
    """MLflow's own variables decide nothing there, so nothing is said of them."""
    loading._say_taken.cache_clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    found = task_recipe(cell(), StudyTask(name="tune", recipe=base))
    assert found.tracking == cell().recipe.tracking
    assert "MLFLOW_TRACKING_URI" not in caplog.text


def test_a_recipe_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"finetune/petz.*similar: .*finetune/pets"):
        task_recipe(cell(), StudyTask(name="tune", recipe="finetune/petz"))


def test_one_task_is_listed_once(base):
    task = {"name": "tune", "recipe": base}
    with pytest.raises(ValueError, match=r"study.transfer: .* has tune twice"):
        study_recipe("/x", [study_row("a")], transfer=[task, task])
    with pytest.raises(ValueError, match=r"transfer\.0: name=mean is .*; give another"):
        study_recipe("/x", [study_row("a")], transfer=[{**task, "name": "mean"}])
