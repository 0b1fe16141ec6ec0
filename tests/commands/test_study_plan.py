"""What a study says that it will cost, and when it is refused for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.experiments.studies import study_row, study_tree
from vit_ray.commands.experiments import study
from vit_ray.commands.plans.study_plan import describe_study, plan_study
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.measure.devices import find_device
from vit_ray.models.flops import training_exaflops


def paper_study(plan: dict[str, Any] | None = None, **axes: Any) -> Recipe:
    rows = [
        {"label": "H", "model": {"name": "ViT-H/14"}, "changes": {"workers.num_workers": 4}},
        {"label": "B", "model": {"name": "ViT-B/16"}, "changes": {"workers.num_workers": 2}},
        {"label": "b", "model": {"name": "ViT-B/32"}},
    ]
    tree = study_tree("/x", rows, train="s3://BUCKET/jft", **{"epochs": [7.0], **axes})
    tree["train"] = {"global_batch_size": 4096}
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291, **(plan or {})}
    return recipe_from_dict(tree, "test")


def hours(name: str) -> float:
    """GPU-hours of 7 epochs of JFT-300M at 40 % of an H200."""
    device = find_device("H200")
    assert device
    return training_exaflops(name, 303_000_000, 7) * 1e18 / (0.4 * device.bf16_flops) / 3600


def test_every_cell_has_its_compute_steps_hours_and_cost() -> None:
    text = describe_study(paper_study({"price_per_gpu_hour": 2.5}))
    (line,) = [line for line in text.splitlines() if line.startswith("grid-H-data1-epochs7")]
    _, images, steps, exaflops, gpus, gpu_hours, transfer, wall, cost = line.split()
    assert (images, steps, gpus, transfer) == ("303,000,000", "517,822", "4", "0")
    numbers = [float(one.replace(",", "")) for one in (exaflops, gpu_hours, wall, cost)]
    expected = hours("ViT-H/14")
    assert numbers[0] == pytest.approx(training_exaflops("ViT-H/14", 303_000_000, 7), rel=1e-3)
    assert numbers[1:] == pytest.approx([expected, expected / 4, 2.5 * expected], rel=1e-3)


def test_the_sum_and_the_critical_path_are_told() -> None:
    plan = plan_study(paper_study())
    whole = [hours(name) for name in ("ViT-H/14", "ViT-B/16", "ViT-B/32")]
    assert plan.gpu_hours == pytest.approx(sum(whole), rel=1e-3)
    # On 4 GPUs H/14 takes all of them; then B/16 on two, and B/32 on one of the other two.
    assert plan.num_gpus == 4
    assert plan.hours == pytest.approx(whole[0] / 4 + whole[1] / 2, rel=1e-3)
    wide = plan_study(paper_study({"num_gpus": 7}))
    assert wide.hours == pytest.approx(whole[0] / 4, rel=1e-3)
    text = describe_study(paper_study({"num_gpus": 7}))
    assert re.search(r"side by side +\S+ hours on 7 x H200", text)
    assert re.search(r"critical path +\S+ hours: grid-H-data1-epochs7", text)
    assert "cost  " not in text


def test_one_cell_at_a_time_takes_the_sum_of_their_hours() -> None:
    plan = plan_study(paper_study({"num_gpus": 64}, max_concurrent=1))
    assert plan.hours == pytest.approx(sum(one.hours for one in plan.cells))


def test_the_studys_gpus_bound_the_plans() -> None:
    assert plan_study(paper_study({"num_gpus": 64}, max_gpus=4)).num_gpus == 4


def test_a_cell_wider_than_the_cluster_is_refused() -> None:
    told = r"plan.num_gpus=2: cell 'grid-H-data1-epochs7' has 4 workers"
    with pytest.raises(ValueError, match=told):
        plan_study(paper_study({"num_gpus": 2}))


def test_a_study_over_its_budget_is_refused_before_anything_is_opened() -> None:
    total = sum(map(hours, ("ViT-H/14", "ViT-B/16", "ViT-B/32")))
    plan_study(paper_study(budget_gpu_hours=total * 1.01)).check_budget()
    small = paper_study(budget_gpu_hours=total * 0.99)
    told = r"study.budget_gpu_hours=\S+: the 3 cells need .* hours of H200 at 40 % MFU, "
    with pytest.raises(ValueError, match=told + r"'grid-H-data1-epochs7' alone .*raise the budget"):
        study(small)
    assert "refused        study.budget_gpu_hours=" in describe_study(small)


def test_cells_of_other_lengths_cost_in_proportion() -> None:
    row = study_row("a")
    tree = study_tree("/x", [row], train="s3://BUCKET/d", epochs=None, steps=[10, 30])
    tree["plan"] = {"num_images": 6400, "num_classes": 10}
    short, long = plan_study(recipe_from_dict(tree, "test")).cells
    assert (short.facts.total_steps, long.facts.total_steps) == (10, 30)
    assert long.gpu_hours == pytest.approx(3 * short.gpu_hours)


def test_transfers_are_part_of_what_a_cell_costs() -> None:
    pets = {"name": "pets", "recipe": "finetune/pets"}  # four rates, then three runs
    fixed = {**pets, "name": "fixed", "changes": {"sweep": None}}
    tree = study_tree(
        "/x", [{"label": "L", "model": {"name": "ViT-L/16"}}], train="s3://BUCKET/jft"
    )
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291}
    tree["study"]["transfer"] = [pets]
    (swept,) = plan_study(recipe_from_dict(tree, "test")).cells
    tree["study"]["transfer"] = [fixed]
    (single,) = plan_study(recipe_from_dict(tree, "test")).cells
    # What the header of finetune/pets says of one run with ViT-L/16.
    assert single.transfer_hours == pytest.approx(0.2061, rel=1e-3)
    assert swept.transfer_hours == pytest.approx(7 * 0.2061, rel=1e-3)
    assert swept.gpu_hours == swept.training_hours + swept.transfer_hours
