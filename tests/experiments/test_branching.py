"""Lengths that branch off the longest run of their row: what is trained, and from where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.written import (
    position,
    snapshot_of,
    values,
    write_checkpoint,
    write_snapshot,
)
from tests.experiments.studies import study_row, study_tree
from vit_ray.checkpoints.checkpoint import Position, folder_name
from vit_ray.checkpoints.run_checkpoints import checkpoint_to_resume, newest_checkpoint
from vit_ray.commands.dry_run import plan_study
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study_cells import (
    BRANCH_NOTE,
    Cell,
    begin_branch,
    branch_step,
    study_cells,
    with_kept_steps,
)
from vit_ray.storage import locate


def tree(folder: Any = "/x", schedule: str = "cooldown", **study: Any) -> dict[str, Any]:
    lengths = {"epochs": None, "steps": [100, 400, 200], "branch": True}
    found = study_tree(folder, [study_row("a"), study_row("b", rate=3e-4)], **{**lengths, **study})
    found["optim"]["schedule"] = schedule
    found["plan"] = {"num_images": 6400, "num_classes": 10}
    return found


def cells(folder: Any = "/x", **study: Any) -> list[Cell]:
    return study_cells(recipe_from_dict(tree(folder, **study), "test"))


def test_other_schedules_cannot_branch():
    recipe = recipe_from_dict(tree(schedule="cosine"), "test")
    with pytest.raises(ValueError, match=r"study.branch=true: cell .* has optim.schedule=cosine"):
        study_cells(recipe)


def test_only_the_cool_downs_of_the_others_are_paid_for():
    plan = plan_study(recipe_from_dict(tree(data_fractions=[1.0]), "test"))
    whole = plan[1].training_hours
    hours = [one.training_hours / whole for one in plan[:3]]
    assert hours == pytest.approx([0.2 * 100 / 400, 1.0, 0.2 * 200 / 400])
    assert plan[0].facts.exaflops == pytest.approx(plan[1].facts.exaflops / 4)
    spent = [one.exaflops / plan[1].exaflops for one in plan[:3]]
    assert spent == pytest.approx(hours)
    assert sum(one.exaflops for one in plan) == pytest.approx(sum(spent) * 2 * plan[1].exaflops)


def test_the_longest_keeps_what_the_others_need():
    short, trunk, middle, *_ = cells()
    steps = [branch_step(short, 100), branch_step(middle, 200), 0]
    assert steps == [80, 160, 0]
    assert with_kept_steps(trunk, steps).recipe.checkpoint.keep_steps == (80, 160)


def long_run(trunk: Cell, step: int) -> None:
    """A checkpoint of the longest cell, with another run of MLflow and an order of its own."""
    folder = locate(trunk.recipe.run_folder).child(folder_name(step))
    recipe = trunk.recipe.recorded()
    recipe["data"] |= {"shuffle_window": 64}
    at = replace(position(step), recipe=recipe, tracking_run_id="long")
    assert write_snapshot(snapshot_of(0, 1, whole(step), at), folder)


def whole(step: int) -> dict[str, Any]:
    return {f"weight|{key}|0": tensor for key, tensor in values(step).items()}


def test_a_branch_begins_with_the_longest_cells_checkpoint_as_a_run_of_its_own(tmp_path):
    short, trunk, *_ = cells(tmp_path)
    long_run(trunk, 80)
    assert begin_branch(short, trunk, 80) == f"{trunk.name} at step 80"
    found = newest_checkpoint(locate(short.recipe.run_folder))
    assert found is not None
    where: Position = found.position
    assert (where.step, where.samples_seen, where.tracking_run_id) == (80, 640, None)
    recipe = where.recipe
    assert (recipe["name"], recipe["optim"]["steps"]) == (short.name, 100)
    assert recipe["data"]["shuffle_window"] == 64  # the order of the data goes on, too
    assert begin_branch(short, trunk, 80) == f"{trunk.name} at step 80"  # told at every start


def test_a_damaged_checkpoint_is_told_and_the_cell_trained_from_its_start(tmp_path):
    short, trunk, *_ = cells(tmp_path)
    long_run(trunk, 80)
    (tensors,) = (Path(trunk.recipe.run_folder) / folder_name(80)).glob("*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    told: list[str] = []
    assert begin_branch(short, trunk, 80, told.append) == ""
    assert "is trained from its start" in told[0]
    folder = locate(short.recipe.run_folder)
    assert checkpoint_to_resume(folder) is None  # no loss: it may begin
    assert not folder.child(BRANCH_NOTE).exists()


def test_a_note_of_a_copy_that_was_cut_short_says_nothing_of_a_later_start(tmp_path):
    short, trunk, *_ = cells(tmp_path)
    locate(short.recipe.run_folder).child(BRANCH_NOTE).write(b"a copy that was cut short")
    assert begin_branch(short, trunk, 80) == ""
    write_checkpoint(locate(short.recipe.run_folder), 5)
    assert begin_branch(short, trunk, 80) == ""


def test_without_a_checkpoint_of_its_step_a_cell_is_trained_from_its_start(tmp_path):
    short, trunk, *_ = cells(tmp_path)
    told: list[str] = []
    assert begin_branch(short, trunk, 80, told.append) == ""
    assert told == [  # it costs a whole training more
        f"{short.name} does not branch off {trunk.name} at step 80, and is trained from its start: "
        f"{trunk.name} has no complete checkpoint of that step"
    ]
    assert begin_branch(short, trunk, 0, told.append) == ""  # a cool-down from the first step on
    write_checkpoint(locate(short.recipe.run_folder), 5)  # it has begun so
    long_run(trunk, 80)
    assert begin_branch(short, trunk, 80, told.append) == ""
    assert len(told) == 1
    names = [one.name for one in Path(short.recipe.run_folder).iterdir()]
    assert [name for name in names if not name.startswith("lock-")] == [folder_name(5)]
