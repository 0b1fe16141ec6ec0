"""Shipped studies: they can be planned without any data, and their rows are what they stand for."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from tests.conftest import ROOT
from tests.jobs.headers import PAPER, RECIPES, TABLE_6, stated_cost
from vit_ray.commands.dry_run import describe_study, plan_study
from vit_ray.config import load_recipe
from vit_ray.config.keys import is_trained
from vit_ray.experiments.study_cells import Cell, study_cells, task_recipe
from vit_ray.launch.resolved_run import check_batch
from vit_ray.models.catalog import model_names
from vit_ray.paper import table_5

STUDIES = [path for path in RECIPES if load_recipe(path).study is not None]
OF_THE_PAPER = ROOT / "jobs" / "recipes" / "study"


def cells_of(name: str) -> list[Cell]:
    return study_cells(load_recipe(OF_THE_PAPER / f"{name}.yaml"))


def trained(cell: Cell) -> dict[str, str]:
    """What decides the cell's weights."""
    flat = cell.recipe.flat()
    measured = ("evaluate.", "data.held_out_fraction")
    return {key: flat[key] for key in flat if is_trained(key) and not key.startswith(measured)}


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_is_planned_without_data(path):
    recipe = load_recipe(path)
    plan = plan_study(recipe)
    assert len(plan) >= 3
    for one in plan:
        check_batch(one.cell.recipe, one.facts.num_images)
        assert one.cell.recipe.model.name in model_names()
        assert one.facts.exaflops > 0
    assert f"{len(plan)} cells" in describe_study(recipe)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("path", sorted(OF_THE_PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_headers_say_what_the_study_costs(path):
    recipe = load_recipe(path)
    plan = plan_study(recipe)
    hours = sum(one.training_hours for one in plan)
    assert (sum(one.exaflops for one in plan), hours) == pytest.approx(stated_cost(path), rel=1e-3)
    text = describe_study(recipe)
    pattern = rf"^{{}} +([\d.,e+]+) exaFLOPs, ([\d.,e+]+) {recipe.plan.device}-hours"
    sums = [
        [float(number.replace(",", "")) for number in found.groups()]
        for name in (rf"total +{len(plan)} cells,", "pre-training", "transfer")
        if (found := re.search(pattern.format(name), text, re.MULTILINE))
    ]
    whole, training, *transfer = sums
    assert training == pytest.approx(stated_cost(path), rel=1e-3)
    assert len(transfer) == bool(recipe.study.transfer)
    assert all(min(costs) > 0 for costs in transfer)
    assert whole == pytest.approx([*map(sum, zip(training, *transfer, strict=True))], rel=1e-3)
    assert re.search(r"Paper: arXiv:2010\.11929v2, ", path.read_text())


# Row and length of a study, recipe in paper/.
ROWS = {
    "table6": {
        "ViT-B/32 7": "vit_b32_jft", "ViT-B/16 7": "vit_b16_jft", "ViT-L/32 7": "vit_l32_jft",
        "ViT-L/16 7": "vit_l16_jft", "ViT-L/16 14": "vit_l16_jft_14ep",
        "ViT-H/14 14": "vit_h14_jft", "R50x1 7": "r50x1_jft", "R50x2 7": "r50x2_jft",
        "R101x1 7": "r101x1_jft", "R152x1 7": "r152x1_jft", "R152x2 7": "r152x2_jft",
        "R152x2 14": "r152x2_jft_14ep", "R200x3 14": "r200x3_jft_14ep",
        "R50x1+ViT-B/32 7": "r50x1_vit_b32_jft", "R50x1+ViT-B/16 7": "r50x1_vit_b16_jft",
        "R50x1+ViT-L/32 7": "r50x1_vit_l32_jft", "R50x1+ViT-L/16 7": "r50x1_vit_l16_jft",
        "R50x1+ViT-L/16 14": "r50x1_vit_l16_jft_14ep",
    },
    "figure3": {
        "ViT-B/32 on ImageNet 300": "vit_b32_imagenet",
        "ViT-B/16 on ImageNet 300": "vit_b16_imagenet",
        "ViT-L/32 on ImageNet 300": "vit_l32_imagenet",
        "ViT-L/16 on ImageNet 300": "vit_l16_imagenet",
        "ViT-B/32 on ImageNet-21k 90": "vit_b32_i21k",
        "ViT-B/16 on ImageNet-21k 90": "vit_b16_i21k",
        "ViT-L/32 on ImageNet-21k 90": "vit_l32_i21k",
        "ViT-L/16 on ImageNet-21k 90": "vit_l16_i21k",
        "ViT-B/32 on JFT-300M 7": "vit_b32_jft",
        "ViT-B/16 on JFT-300M 7": "vit_b16_jft",
        "ViT-L/32 on JFT-300M 7": "vit_l32_jft",
        "ViT-L/16 on JFT-300M 14": "vit_l16_jft_14ep",
        "ViT-H/14 on JFT-300M 14": "vit_h14_jft",
    },
    "optimizers": {
        "R50x1 Adam 7": "r50x1_jft", "R50x1 SGD 7": "r50x1_jft_sgd",
        "R152x2 Adam 7": "r152x2_jft", "R152x2 SGD 7": "r152x2_jft_sgd",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_each_row_trains_what_the_papers_recipe_of_it_trains(name):
    found = {f"{cell.label} {cell.recipe.optim.epochs:g}": cell for cell in cells_of(name)}
    assert found.keys() == ROWS[name].keys()
    for row, file in ROWS[name].items():
        single = load_recipe(PAPER / f"{file}.yaml")
        alone = Cell(row, 1.0, "", single)
        assert trained(found[row]) == trained(alone), row
        assert found[row].recipe.workers == single.workers, row
        assert found[row].recipe.plan == single.plan, row
        if "train" in found[row].recipe.data.model_fields_set:
            assert found[row].recipe.data.train == single.data.train, row


def test_the_models_of_figure_3_on_jft_are_those_of_table_5():
    on_jft = {row: file for row, file in ROWS["figure3"].items() if "JFT" in row}
    assert len(on_jft) == 5
    for row, file in on_jft.items():
        top1 = table_5(row.partition(" ")[0], "jft300m", "imagenet")
        assert top1
        header = (PAPER / f"{file}.yaml").read_text().partition("base:")[0]
        assert f"{top1 * 100:.2f}" in header, row


@pytest.mark.slow
def test_table_6_has_its_exaflops():
    plan = plan_study(load_recipe(OF_THE_PAPER / "table6.yaml"))
    assert len(plan) == len(TABLE_6) == 18
    for one in plan:
        row = f"{one.cell.label} {one.cell.recipe.optim.epochs:g}"
        wide = 0.025 if row in ("ViT-B/32 7", "R50x1 7") else 0.01
        assert one.facts.exaflops == pytest.approx(TABLE_6[ROWS["table6"][row]], rel=wide), row


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


def test_shapes_start_from_the_papers_base_and_vary_one_dimension():
    base, *others = cells_of("shape")
    sizes = ("depth", "width", "mlp_dim", "patch_size")
    assert [getattr(base.recipe.model, key) for key in sizes] == [8, 1024, 2048, 32]
    assert 64 in {cell.recipe.model.depth for cell in others}
    for cell in others:
        model = cell.recipe.model
        assert model.width is not None
        assert model.num_heads == model.width / 64
        varied = [key for key in sizes if getattr(model, key) != getattr(base.recipe.model, key)]
        assert len(varied) == (4 if cell.label.startswith("all") else 1), cell.label


def families_of(cells: list[Cell]) -> list[str]:
    names = {cell.label.partition(" at ")[0]: cell.recipe.model.name for cell in cells}
    return sorted(name.partition(" ")[0] for name in names.values())


def test_the_study_of_cifar10_asks_about_compute_and_data_with_seeds():
    cells = study_cells(load_recipe("study_cifar10"))
    assert families_of(cells) == ["R+ViT", "ResNet", "ResNet", "ViT", "ViT", "ViT"]
    assert {cell.recipe.optim.steps for cell in cells} == {150, 400, 1000, 2500}
    assert {cell.fraction for cell in cells if cell.recipe.model.name == "R+ViT"} == {1.0}
    seeds = Counter((cell.label, cell.fraction, cell.recipe.optim.steps) for cell in cells)
    assert {key for key, count in seeds.items() if count == 3} == set(
        itertools.product(("ViT-S/4", "R7"), (0.1, 1.0), (400, 1000))
    )
    assert len(cells) == 44 + 2 * 8
