"""Cells of a study: rows, axes, seeds, lengths that branch off, and their fine-tunings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkpoints.written import (
    flip,
    position,
    snapshot_of,
    values,
    write_checkpoint,
    write_snapshots,
)
from tests.experiments.studies import study_recipe, study_row, study_tree, with_steps
from vit_ray.checkpoints.checkpoint import folder_name
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, newest_checkpoint
from vit_ray.commands.plan import plan_study
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study_cells import (
    BRANCH_NOTE,
    Cell,
    begin_branch,
    branch_step,
    study_cells,
    task_recipe,
)
from vit_ray.storage import locate

OPTUNA = {"sweep.search": "optuna", "sweep.num_trials": 2, "sweep.space": {"optim.steps": [1]}}


def cells(*rows: dict[str, Any], **axes: Any) -> list[Cell]:
    return study_cells(study_recipe("/x", list(rows), **axes))


def refusal(*rows: dict[str, Any], **axes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        cells(*rows, **axes)
    return str(caught.value)


def row(label: str, **more: Any) -> dict[str, Any]:
    return {**study_row(label), **more}


def changed(label: str, **changes: Any) -> dict[str, Any]:
    return row(label, changes=changes)


def test_rows_change_any_key_in_either_spelling_and_nothing_else():
    plain, dotted, nested = cells(
        row("plain"),
        changed("dotted", **{"optim.name": "sgd", "model.pool": "gap"}),
        changed("nested", optim={"name": "sgd", "momentum": 0.8}, model={"pool": "gap"}),
    )
    for cell, momentum in ((dotted, 0.9), (nested, 0.8)):
        assert (cell.recipe.optim.name, cell.recipe.model.pool) == ("sgd", "gap")
        assert cell.recipe.optim.momentum == momentum
        before, now = plain.recipe.flat(), cell.recipe.flat()
        differing = {key for key in now if now[key] != before[key]}
        assert differing <= {"name", "optim.name", "optim.momentum", "model.pool"}
    # One without a model has the recipe's as far as it does not change it.
    tree = study_tree("/x", [{"label": "deep", "changes": {"model": {"depth": 3}}}])
    tree["model"] = study_row("base")["model"]
    (cell,) = study_cells(recipe_from_dict(tree, "test"))
    assert (cell.recipe.model.depth, cell.recipe.model.width) == (3, 16)


def test_a_rows_own_sizes_and_lengths_take_the_place_of_the_studys():
    alone = row("alone", epochs=[14.0], data_fractions=[0.5])
    rows = (row("grid"), alone, row("steps", steps=[100]))
    found = cells(*rows, data_fractions=[0.1, 1.0], epochs=[7.0])
    assert [cell.name.removeprefix("grid-") for cell in found] == [
        "grid-data0.1-epochs7", "grid-data1-epochs7", "alone-data0.5-epochs14",
        "steps-data0.1-steps100", "steps-data1-steps100",
    ]  # fmt: skip
    assert [cell.length for cell in found][2:4] == ["14 epochs", "100 steps"]
    assert [cell.recipe.data.fraction for cell in found] == [0.1, 1.0, 0.5, 0.1, 1.0]
    assert (found[3].recipe.optim.steps, found[3].recipe.optim.epochs) == (100, None)
    (cell,) = cells(row("a"), epochs=None, images=[2_121_000_000])
    assert cell.name == "grid-a-data1-images2121000000"
    assert cell.recipe.optim.steps == round(2_121_000_000 / cell.recipe.train.global_batch_size)


def test_rows_of_one_label_add_seeds_to_some_of_its_lengths():
    found = cells(row("a"), row("a", seeds=[1, 2], epochs=[4.0]), epochs=[2.0, 4.0])
    assert [(cell.name, cell.length, cell.recipe.seed) for cell in found] == [
        ("grid-a-data1-epochs2", "2 epochs", 0),
        ("grid-a-data1-epochs4", "4 epochs", 0),
        ("grid-a-data1-epochs4-seed1", "4 epochs", 1),
        ("grid-a-data1-epochs4-seed2", "4 epochs", 2),
    ]
    tree = {**study_tree("/x", [row("a")], seeds=[0, 5]), "seed": 5}
    names = [cell.name for cell in study_cells(recipe_from_dict(tree, "test"))]
    assert names == ["grid-a-data1-epochs1-seed0", "grid-a-data1-epochs1"]


def test_two_cells_of_one_name_or_of_one_training_are_refused():
    # Or the page would take them for two seeds of one group.
    text = refusal(row("one"), changed("two", **{"optim.weight_decay": 0.0}))  # the default
    assert "'grid-one-data1-epochs1' and 'grid-two-data1-epochs1' would train the same" in text
    for key, value in (("optim.weight_decay", 0.1), ("data.train", "/other")):
        assert len(cells(row("one"), changed("two", **{key: value}))) == 2
    assert "two cells have the name" in refusal(row("a"), row("a", seeds=[0, 1]))
    assert "fractions and lengths that differ more" in refusal(row("a"), epochs=[1.0, 1.0000001])
    assert "lengths are given in epochs and in steps" in refusal(row("a"), epochs=[1.0], steps=[10])
    assert "study.seeds: [1, 1] has 1 twice" in refusal(row("a"), seeds=[1, 1])


@pytest.mark.parametrize(("changes", "key"), [
    ({"optim.nme": "sgd"}, "optim.nme"),
    ({"model": {"num_heads": 3}}, "num_heads"),
    ({"model": {"name": "ViT-S/16"}}, "depth"),
    ({"model": 3}, "model=3"),
    ({"seed": 3}, "study.seeds"), ({"data": {"fraction": 0.5}}, "data_fractions"),
    ({"name": "x"}, "label"),
    ({"tracking": {"uri": "x"}}, "changes.tracking.uri"),
    ({"plan.device": "A100"}, "changes.plan.device"),
])  # fmt: skip
def test_a_row_that_cannot_be_is_refused_with_its_place(changes, key):
    with pytest.raises(ValueError, match=rf"study.models.1 \('bad'\): .*{key}"):
        cells(row("good"), row("bad", changes=changes))


@pytest.mark.parametrize("key", ["data_fractions", "epochs", "steps", "images", "seeds"])
def test_an_empty_axis_is_refused(key):
    assert f"study.{key}" in refusal(row("a"), **{"epochs": None, key: []})


def branching(folder: Any = "/x", schedule: str = "cooldown", **study: Any) -> dict[str, Any]:
    """A tree of two rows of three lengths, of which the second is the longest."""
    lengths = {"epochs": None, "steps": [100, 400, 200], "branch": True}
    found = study_tree(folder, [study_row("a"), study_row("b", rate=3e-4)], **{**lengths, **study})
    found["optim"]["schedule"] = schedule
    found["plan"] = {"num_images": 6400, "num_classes": 10}
    return found


def branches(folder: Any = "/x") -> list[Cell]:
    return with_steps(study_cells(recipe_from_dict(branching(folder), "test")))


def test_only_the_cool_downs_of_the_others_are_paid_for():
    with pytest.raises(ValueError, match=r"study.branch=true: cell .* has optim.schedule=cosine"):
        study_cells(recipe_from_dict(branching(schedule="cosine"), "test"))
    plan, _ = plan_study(recipe_from_dict(branching(data_fractions=[1.0]), "test"))
    _, exaflops, hours = zip(*(runs.costs for runs in plan[:3]), strict=True)
    for costs in (exaflops, hours):
        shares = [cost / costs[1] for cost in costs]
        assert shares == pytest.approx([0.2 * 100 / 400, 1.0, 0.2 * 200 / 400])
    assert [branch_step(cell) for cell in branches()[:3]] == [80, 320, 160]


def long_run(trunk: Cell, step: int) -> None:
    """A checkpoint of the longest cell, with another run of MLflow and an order of its own."""
    recipe = trunk.recipe.recorded()
    recipe["data"] |= {"shuffle_window": 64}
    at = replace(position(step), recipe=recipe, tracking_run_id="long")
    tensors = {f"weight|{key}|0": tensor for key, tensor in values(step).items()}
    folder = locate(trunk.recipe.run_folder).child(folder_name(step))
    write_snapshots(folder, snapshot_of(0, 1, tensors, at))


def test_a_branch_begins_with_the_longest_cells_checkpoint_as_a_run_of_its_own(tmp_path):
    short, trunk, *_ = branches(tmp_path)
    long_run(trunk, 80)
    for _ in range(2):  # warned at every start
        assert begin_branch(short, trunk) == f"{trunk.name} at step 80"
    found = newest_checkpoint(locate(short.recipe.run_folder))
    where = found.position
    assert (where.step, where.samples_seen, where.tracking_run_id) == (80, 640, None)
    assert (where.recipe["name"], where.recipe["optim"]["steps"]) == (short.name, 100)
    assert where.recipe["data"]["shuffle_window"] == 64  # the order of the data goes on, too


def test_a_damaged_checkpoint_is_told_and_the_cell_trained_from_its_start(tmp_path):
    short, trunk, *_ = branches(tmp_path)
    long_run(trunk, 80)
    damaged = locate(trunk.recipe.run_folder).child(folder_name(80))
    (tensors,) = Path(damaged.path).glob("*.safetensors")
    flip(damaged, tensors.name)
    warnings: list[str] = []
    assert begin_branch(short, trunk, warnings.append) == ""
    assert "starts at step 0" in warnings[0]
    folder = locate(short.recipe.run_folder)
    assert checkpoint_to_resume(folder) is None  # no loss: it may begin
    assert not folder.child(BRANCH_NOTE).exists()


def test_without_a_checkpoint_of_its_step_a_cell_is_trained_from_its_start(tmp_path):
    short, trunk, *_ = branches(tmp_path)
    folder, warnings = locate(short.recipe.run_folder), list[str]()
    folder.child(BRANCH_NOTE).write(b"a copy that was cut short")
    assert begin_branch(short, trunk, warnings.append) == ""
    (text,) = warnings  # it costs a whole training more
    assert f"{trunk.name}/{folder_name(80)} has no commit.json" in text
    cool = short.recipe.with_changes(optim={"cooldown_fraction": 1.0})
    assert begin_branch(replace(short, recipe=cool), trunk, warnings.append) == ""
    write_checkpoint(folder, 5)  # it has begun so
    long_run(trunk, 80)
    assert begin_branch(short, trunk, warnings.append) == ""
    assert warnings == [text]
    names = [one.name for one in Path(short.recipe.run_folder).glob("step-*")]
    assert names == [folder_name(5)]


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "tune.yaml"
    model = {"name": "ViT-B/16", "image_size": 16, "representation": False, "stochastic_depth": 0.2}
    tree = {
        "name": "tune", "output": "elsewhere", "init_from": "elsewhere/run", "model": model,
        "data": {"train": "/tune/train", "eval": "/tune/test"},
        "optim": {"name": "sgd", "learning_rate": 0.03, "steps": 5},
        "workers": {"num_workers": 8}, "tracking": {"experiment": "other"},
        "sweep": {"learning_rates": [0.01, 0.03]},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def pretrained(**changes: Any) -> Cell:
    options = {"representation": True, "head_bias": -10.0, "dropout": 0.1, "pool": "gap"}
    return cells({**study_row("row", **options), "changes": changes}, seeds=[3])[0]


def test_model_weights_seed_and_workers_are_the_cells_and_the_rest_the_tasks(base, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")  # it decides nothing there
    one = pretrained()
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
    changes = {"sweep": None, "optim": {"learning_rate": 0.5}, "model.dropout": 0.1}
    found = task_recipe(one, StudyTask(name="tune", recipe=base, changes=changes))
    assert found.sweep is None
    assert (found.optim.learning_rate, found.optim.steps) == (0.5, 5)
    assert found.model.dropout == 0.1


def test_a_task_that_trains_something_else_has_another_run(base):
    def name(one: Cell, **changes: Any) -> str:
        return task_recipe(one, StudyTask(name="tune", recipe=base, changes=changes)).name

    known = name(pretrained())
    assert name(pretrained(), **{"optim.steps": 6}) != known
    assert name(pretrained(), **{"optim.learning_rate": 0.5}) != known
    # Finished trials of the sweep are kept, and a run is gone on with on other workers.
    assert name(pretrained(), **{"sweep.seeds": 1}) == known
    assert name(pretrained(**{"workers.num_workers": 2})) == known


@pytest.mark.parametrize(("changes", "key"), [
    ({"init_from": "/y"}, "changes.init_from"),
    ({"workers": {"num_workers": 2}}, "changes.workers.num_workers"),
    ({"optim.stps": 3}, "optim.stps"),
    ({"model.patch_size": 5}, "changes.model.patch_size"),
    ({"model": {"name": "R50x1"}}, "changes.model.name"),
    ({"model.image_size": 15}, "image_size"),
    ({"sweep.scheduler": "asha"}, "sweep.scheduler=none"),
    (OPTUNA, "sweep.search=grid"),
])  # fmt: skip
def test_a_task_that_cannot_be_is_refused_with_its_name(base, changes, key):
    with pytest.raises(ValueError, match=rf"study.transfer 'tune': .*{key}"):
        task_recipe(pretrained(), StudyTask(name="tune", recipe=base, changes=changes))


def test_one_task_is_listed_once_and_has_a_recipe(base):
    task = {"name": "tune", "recipe": base}
    assert "has tune twice" in refusal(row("a"), transfer=[task, task])
    assert "name=mean is" in refusal(row("a"), transfer=[{**task, "name": "mean"}])
    with pytest.raises(ValueError, match=r"finetune/petz.*similar: .*finetune/pets"):
        task_recipe(pretrained(), StudyTask(name="tune", recipe="finetune/petz"))
