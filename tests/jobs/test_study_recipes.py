"""Shipped studies: they can be planned without any data, and their rows are what they stand for."""

from __future__ import annotations

import pytest

from tests.jobs.test_recipes import FOLDER, PAPER, RECIPES, TABLE_6
from vit_ray.commands.dry_run import plan_study
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import is_trained
from vit_ray.experiments.study_cells import Cell, study_cells, task_recipe
from vit_ray.launch.resolved_run import check_batch
from vit_ray.models.catalog import model_names

OF_THE_PAPER = FOLDER / "study"


def cells_of(name: str) -> list[Cell]:
    return study_cells(load_recipe(OF_THE_PAPER / f"{name}.yaml"))


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("path", [path for path in RECIPES if load_recipe(path).study])
def test_every_study_is_planned_without_data(path):
    plan = plan_study(load_recipe(path))
    assert len(plan) >= 3
    for one in plan:
        check_batch(one.cell.recipe, one.facts.num_images)
        assert one.cell.recipe.model.name in model_names()
        assert min(one.exaflops, one.training_hours) > 0


SIZES = ("b32", "b16", "l32", "l16")
IMAGENETS = {f"vit_{size}_{data}" for size in SIZES for data in ("imagenet", "i21k")}
JFT = {"vit_b32_jft", "vit_b16_jft", "vit_l32_jft", "vit_l16_jft_14ep", "vit_h14_jft"}
ROWS = {
    "table6": set(TABLE_6),
    "figure3": IMAGENETS | JFT,
    "optimizers": {"r50x1_jft", "r50x1_jft_sgd", "r152x2_jft", "r152x2_jft_sgd"},
}
"""Recipes of `paper/`."""


def trained(recipe: Recipe) -> tuple[object, ...]:
    """What decides the weights, and where they are made."""
    flat = recipe.flat()
    measured = ("evaluate.", "data.held_out_fraction")
    keys = [key for key in flat if is_trained(key) and not key.startswith(measured)]
    return {key: flat[key] for key in keys}, recipe.workers, recipe.plan


@pytest.mark.parametrize("name", ROWS)
def test_each_row_trains_what_the_papers_recipe_of_it_trains(name):
    alone = {path.stem: load_recipe(path) for path in sorted(PAPER.glob("*.yaml"))}
    weights = {row: trained(recipe) for row, recipe in alone.items()}
    found = []
    for cell in cells_of(name):
        (row,) = [row for row in weights if weights[row] == trained(cell.recipe)]
        assert cell.label.startswith(cell.recipe.model.name)
        if "train" in cell.recipe.data.model_fields_set:
            assert cell.recipe.data.train == alone[row].data.train, row
        found.append(row)
    assert sorted(found) == sorted(ROWS[name])


def test_the_transfers_of_table_6_are_the_papers_sets_at_its_resolution():
    recipe = load_recipe(OF_THE_PAPER / "table6.yaml")
    assert recipe.study
    tasks = recipe.study.transfer
    assert [one.name for one in tasks] == ["imagenet", "cifar10", "cifar100", "pets", "flowers"]
    for cell in study_cells(recipe):
        found = task_recipe(cell, tasks[0])
        # 384; H/14 has 27 whole patches of 14 pixels there.
        assert found.model.image_size == (378 if cell.label == "ViT-H/14" else 384)
        assert (found.model.name, found.model.representation) == (cell.recipe.model.name, None)
        assert found.init_from == cell.recipe.run_folder
        assert (found.optim.name, found.optim.steps, found.optim.weight_decay) == ("sgd", 20_000, 0)
        assert found.sweep


def test_figure_4_takes_the_papers_parts_and_stops_early():
    plan = plan_study(load_recipe(OF_THE_PAPER / "figure4.yaml"))
    sizes = {round(one.facts.num_images / 1e6) for one in plan}
    assert sizes == {9, 30, 90, 303}
    assert len(plan) == 24
    assert all(one.cell.recipe.train.early_stopping for one in plan)
    assert {one.facts.total_steps for one in plan} == {517_822}


def test_the_positions_are_the_eight_of_table_8():
    kinds = [
        (cell.recipe.model.positions, cell.recipe.model.positions_at or "stem")
        for cell in cells_of("positions")
    ]
    everywhere = ("stem", "every_layer", "every_layer_shared")
    assert kinds == [
        ("none", "stem"),
        *(("learned_1d", place) for place in everywhere),
        *(("learned_2d", place) for place in everywhere),
        ("relative", "stem"),
    ]


def test_the_heads_have_the_rates_of_figure_9():
    rates = [(cell.recipe.model.pool, cell.recipe.optim.learning_rate) for cell in cells_of("head")]
    assert rates == [("cls", 8e-4), ("gap", 8e-4), ("gap", 3e-4)]
