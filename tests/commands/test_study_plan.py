"""What a study says that it will cost."""

import re
from typing import Any

import pytest

from tests.experiments.studies import study_row, study_tree
from vit_ray.commands.dry_run import describe_study, plan_study
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


def test_every_cell_has_its_compute_steps_and_hours_and_no_transfer_where_none_is_asked():
    text = describe_study(paper_study())
    (line,) = [line for line in text.splitlines() if line.startswith("grid-H-data1-epochs7")]
    _, images, steps, exaflops, gpus, gpu_hours, wall = line.split()
    assert (images, steps, gpus) == ("303,000,000", "517,822", "4")
    assert "transfer" not in text
    numbers = [float(one.replace(",", "")) for one in (exaflops, gpu_hours, wall)]
    expected = hours("ViT-H/14")
    assert numbers[0] == pytest.approx(training_exaflops("ViT-H/14", 303_000_000, 7), rel=1e-3)
    assert numbers[1:] == pytest.approx([expected, expected / 4], rel=1e-3)


def test_the_sum_is_told():
    plan = plan_study(paper_study())
    whole = [hours(name) for name in ("ViT-H/14", "ViT-B/16", "ViT-B/32")]
    assert sum(one.gpu_hours for one in plan) == pytest.approx(sum(whole), rel=1e-3)
    text = describe_study(paper_study())
    assert re.search(r"total +3 cells, \S+ exaFLOPs, \S+ H200-hours", text)
    assert "cost  " not in text


def test_a_cell_wider_than_the_cluster_is_refused():
    told = r"plan.num_gpus=2: cell 'grid-H-data1-epochs7' needs 4 GPUs"
    with pytest.raises(ValueError, match=told):
        plan_study(paper_study({"num_gpus": 2}))


def test_cells_of_other_lengths_cost_in_proportion():
    row = study_row("a")
    tree = study_tree("/x", [row], train="s3://BUCKET/d", epochs=None, steps=[10, 30])
    tree["plan"] = {"num_images": 6400, "num_classes": 10}
    short, long = plan_study(recipe_from_dict(tree, "test"))
    assert (short.facts.total_steps, long.facts.total_steps) == (10, 30)
    assert long.gpu_hours == pytest.approx(3 * short.gpu_hours)


def test_transfers_are_part_of_what_a_cell_costs():
    pets = {"name": "pets", "recipe": "finetune/pets"}  # four rates, then three runs
    fixed = {**pets, "name": "fixed", "changes": {"sweep": None}}
    tree = study_tree(
        "/x", [{"label": "L", "model": {"name": "ViT-L/16"}}], train="s3://BUCKET/jft"
    )
    tree["plan"] = {"num_images": 303_000_000, "num_classes": 18_291}
    tree["study"]["transfer"] = [pets]
    (swept,) = plan_study(recipe_from_dict(tree, "test"))
    text = describe_study(recipe_from_dict(tree, "test"))
    assert re.search(r"^transfer +\S+ exaFLOPs, 1.44\d H200-hours$", text, re.M)
    assert "of transfer" in text
    tree["study"]["transfer"] = [fixed]
    (single,) = plan_study(recipe_from_dict(tree, "test"))
    # What the header of finetune/pets says of one run with ViT-L/16.
    assert single.transfer_hours == pytest.approx(0.2061, rel=1e-3)
    assert swept.transfer_hours == pytest.approx(7 * 0.2061, rel=1e-3)
    assert swept.gpu_hours == swept.training_hours + swept.transfer_hours
