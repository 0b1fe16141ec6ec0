"""A study whose lengths branch off one run has the weights of runs that were trained alone."""

from __future__ import annotations

from tests.end_to_end.runs import same_weights, weights_of
from tests.recipes import small_recipe
from vit_ray.experiments.study import run_study
from vit_ray.launch.run import train


def test_a_branch_ends_with_the_weights_of_a_run_of_its_own(ray_cluster, digits, tmp_path):
    model = {"model": {"dropout": 0.1}}  # whose masks go on with the samples
    recipe = small_recipe("branching", digits, tmp_path).with_changes(
        optim={"schedule": "cooldown", "cooldown_fraction": 0.3},
        checkpoint={"every_steps": None},
        workers={"num_workers": 1},
        study={"models": [{"label": "a", "changes": model}], "steps": [20, 40], "branch": True},
    )
    result = run_study(recipe)
    assert result.is_complete
    short, long = result.cells
    assert short.branched_from == f"{long.cell.name} at step 14"
    assert not long.branched_from
    straight = short.cell.recipe.with_changes(name="straight")
    train(straight)
    assert same_weights(weights_of(short.cell.recipe), weights_of(straight))
    assert result.cells[0].metrics["study/exaflops"] == long.metrics["study/exaflops"] / 2
