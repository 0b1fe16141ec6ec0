"""Cells of a study: rows with keys of their own, axes, seeds, and what is refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments.studies import study_recipe, study_row, study_tree
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study_cells import Cell, study_cells


def study(*rows: dict[str, Any], **axes: Any) -> Recipe:
    return study_recipe("/x", list(rows), **axes)


def cells(*rows: dict[str, Any], **axes: Any) -> list[Cell]:
    return study_cells(study(*rows, **axes))


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


def test_a_row_without_a_model_has_the_recipes_as_far_as_it_does_not_change_it():
    tree = study_tree("/x", [{"label": "deep", "changes": {"model": {"depth": 3}}}])
    tree["model"] = study_row("base")["model"]
    (cell,) = study_cells(recipe_from_dict(tree, "test"))
    assert (cell.recipe.model.depth, cell.recipe.model.width) == (3, 16)


def test_a_rows_own_sizes_and_lengths_take_the_place_of_the_studys():
    found = cells(
        row("grid"),
        row("alone", epochs=[14.0], data_fractions=[0.5]),
        row("steps", steps=[100]),
        data_fractions=[0.1, 1.0],
        epochs=[7.0],
    )
    assert [cell.name for cell in found] == [
        "grid-grid-data0.1-epochs7",
        "grid-grid-data1-epochs7",
        "grid-alone-data0.5-epochs14",
        "grid-steps-data0.1-steps100",
        "grid-steps-data1-steps100",
    ]
    assert [cell.length for cell in found][2:4] == ["14 epochs", "100 steps"]
    assert [cell.recipe.data.fraction for cell in found] == [0.1, 1.0, 0.5, 0.1, 1.0]
    assert (found[3].recipe.optim.steps, found[3].recipe.optim.epochs) == (100, None)


def test_lengths_in_steps_and_images_are_the_lengths_of_cells():
    (cell,) = cells(row("a"), epochs=None, images=[2_121_000_000])
    assert cell.name == "grid-a-data1-images2121000000"
    assert cell.recipe.optim.steps == round(2_121_000_000 / cell.recipe.train.global_batch_size)
    tree = study_tree("/x", [row("a")], epochs=None)
    (paper,) = study_cells(recipe_from_dict(tree, "test"))
    assert paper.recipe.optim.epochs == 7.0
    with pytest.raises(ValueError, match="lengths are given in epochs and in steps; keep one"):
        study(row("a"), epochs=[1.0], steps=[10])


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
    assert "study.seeds: [1, 1] has 1 twice" in refusal(row("a"), seeds=[1, 1])
    assert "two cells have the name" in refusal(row("a"), row("a", seeds=[0, 1]))
    assert "fractions and lengths that differ more" in refusal(row("a"), epochs=[1.0, 1.0000001])


def test_two_rows_that_make_one_cell_are_refused():
    text = refusal(row("one"), row("two"))
    assert "rows 'one' and 'two' give the same cell" in text
    assert "'grid-one-data1-epochs1' and 'grid-two-data1-epochs1'" in text
    same = refusal(row("one"), changed("two", **{"optim.weight_decay": 0.0}))
    assert "give the same cell" in same  # the default, given once more
    assert len(cells(row("one"), changed("two", **{"optim.weight_decay": 0.1}))) == 2
    assert len(cells(row("one"), changed("two", **{"data.train": "/other"}))) == 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optim.nme": "sgd"}, "optim.nme"),
        ({"model": {"positions": "3d"}}, "model.positions"),
        ({"optim.learning_rate": -1.0}, "optim.learning_rate"),
        ({"model": {"num_heads": 3}}, "num_heads"),
        ({"model": {"name": "ViT-S/16"}}, "depth"),
        ({"model": 3}, "model=3"),
        ({"seed": 3}, "study.seeds"),
        ({"data": {"fraction": 0.5}}, "data_fractions"),
        ({"name": "x"}, "label"),
        ({"tracking": {"uri": "x"}}, "changes.tracking.uri"),
        ({"plan.device": "A100"}, "changes.plan.device"),
        ({"optim.name": "sgd", "optim": {"name": "adamw"}}, "optim.name is given twice"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_place(changes, key):
    with pytest.raises(ValueError, match=rf"study.models.1 \('bad'\): .*{key}"):
        cells(row("good"), row("bad", changes=changes))


def test_what_is_told_of_a_rows_own_data_may_differ():
    (cell,) = cells(changed("a", data={"train": "/d"}, plan={"num_images": 9, "num_classes": 3}))
    assert (cell.recipe.plan.num_images, cell.recipe.data.train) == (9, "/d")


@pytest.mark.parametrize("key", ["data_fractions", "epochs", "steps", "images", "seeds"])
def test_an_empty_axis_is_refused(key):
    with pytest.raises(ValueError, match=f"study.{key}"):
        study(row("a"), **{"epochs": None, key: []})
    with pytest.raises(ValueError, match=r"study.models"):
        study()
