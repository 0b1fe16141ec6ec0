"""Points of a sweep: every combination, or random ones that are the same each time."""

from typing import Any

import numpy as np
import pytest

from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import (
    RATE,
    Point,
    final_recipe,
    point_name,
    point_text,
    points_of,
    trial_recipe,
    with_point,
)


def searched_recipe(**sweep: Any) -> Recipe:
    return recipe_with("s", optim={"steps": 5}, sweep=sweep)


def points(**sweep: Any) -> list[Point]:
    recipe = searched_recipe(**sweep)
    assert recipe.sweep is not None
    return points_of(recipe, recipe.sweep)


def test_a_grid_is_every_combination_of_any_keys():
    found = points(learning_rates=[0.003, 0.01])
    assert found == [{RATE: 0.003}, {RATE: 0.01}]
    assert [point_name(point) for point in found] == ["lr0.003", "lr0.01"]
    space = {RATE: [0.01, 0.1], "optim.steps": [500, 2000], "data.augment.kind": ["resize"]}
    found = points(space=space)
    assert len(found) == 4
    assert found[1] == {RATE: 0.01, "optim.steps": 2000, "data.augment.kind": "resize"}
    assert point_name(found[1]) == "lr0.01-steps2000-kindresize"
    assert point_text(found[1]) == "learning_rate=0.01, steps=2000, kind=resize"
    recipe = searched_recipe(space=space).with_changes(data={"augment": {"flip": False}})
    changed = with_point(recipe, found[1], name="t")
    assert (changed.name, changed.optim.steps, changed.optim.learning_rate) == ("t", 2000, 0.01)
    assert (changed.data.augment.kind, changed.data.augment.flip) == ("resize", False)


def test_values_of_a_section_change_the_keys_that_they_name():
    space = {"optim": [{"steps": 9, "warmup_steps": 1}, {"steps": 90}]}
    recipe = searched_recipe(space=space).with_changes(optim={"name": "sgd", "clip_norm": 3.0})
    changed = [with_point(recipe, point).optim for point in points(space=space)]
    kept = recipe.optim.warmup_steps
    assert [(one.steps, one.warmup_steps) for one in changed] == [(9, 1), (90, kept)]
    assert {(one.name, one.clip_norm) for one in changed} == {("sgd", 3.0)}


def test_a_model_of_another_name_keeps_what_the_recipe_gives_or_is_refused():
    sizes = {"depth": 2, "width": 8, "mlp_dim": 8, "num_heads": 2, "patch_size": 8}
    space = {"model": [{"name": "Axial-ViT"}, {"name": "ViT-S/16"}]}
    recipe = searched_recipe(space=space).with_changes(
        model={"name": "ViT", "image_size": 32, **sizes}
    )
    assert recipe.sweep is not None
    with pytest.raises(ValueError, match=r"sweep\.space: .*'ViT-S/16' has no option depth, width"):
        points_of(recipe, recipe.sweep)
    space["model"][1] |= dict.fromkeys(sizes)
    recipe = recipe.with_changes(sweep={"space": space})
    assert recipe.sweep is not None
    axial, small = (with_point(recipe, one).model for one in points_of(recipe, recipe.sweep))
    assert (axial.options(), axial.image_size) == (sizes, 32)
    assert (small.options(), small.image_size) == ({}, 32)


def test_random_points_are_in_their_ranges_and_the_same_for_the_same_seed():
    space = {
        RATE: {"log_uniform": [1e-4, 1e-1]},
        "optim.weight_decay": {"uniform": [0.0, 0.2]},
        "optim.warmup_steps": [0, 1, 2],
    }
    found = points(space=space, search="random", num_trials=200)
    assert found[:20] == points(space=space, search="random", num_trials=20)
    assert found[:20] != points(space=space, search="random", num_trials=20, seed=1)
    rates = np.log10([point[RATE] for point in found])
    # A third of the decades each, within 4 standard deviations.
    assert np.histogram(rates, bins=[-4, -3, -2, -1])[0] == pytest.approx([67] * 3, abs=27)
    assert (rates.min() >= -4, rates.max() <= -1) == (True, True)
    decays = [point["optim.weight_decay"] for point in found]
    assert np.mean(decays) == pytest.approx(0.1, abs=0.02)
    assert {point["optim.warmup_steps"] for point in found} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(3))
def test_random_points_of_lists_are_different_up_to_the_last(seed):
    space = {RATE: [0.003, 0.01, 0.03, 0.1], "optim.steps": [500, 2000]}
    found = points(space=space, search="random", num_trials=8, seed=seed)
    assert {point_name(p) for p in found} == {point_name(p) for p in points(space=space)}
    assert found[:6] == points(space=space, search="random", num_trials=6, seed=seed)


@pytest.mark.parametrize(
    ("space", "key"),
    [
        ({RATE: [0.1, 0.1]}, "learning_rate"),
        ({RATE: [0.1, -0.1]}, "learning_rate=-0.1"),
        ({RATE: [0.1, 0.10000001]}, "have the name lr0.1"),
        ({RATE: []}, "learning_rate"),
        ({RATE: 0.1}, "learning_rate"),
        ({RATE: {"normal": [0, 1]}}, "learning_rate"),
        ({RATE: {"uniform": [False, True]}}, "learning_rate"),
        ({RATE: {"log_uniform": [0.1, 1.0]}}, "sweep.search=random"),
        ({RATE: {"log_uniform": [0, 1]}}, "for log_uniform above zero"),
        ({RATE: {"uniform": [1, 1]}}, "from a smaller to a larger"),
        ({"optim.lr": [0.1]}, "unknown key optim.lr"),
        ({}, "sweep.space"),
        ({"seed": [1, 2]}, "seed cannot"),
        ({"data.held_out_fraction": [0.1]}, "data.held_out_fraction cannot"),
        ({"data": [{"eval": "a"}]}, "data cannot"),
        ({"tracking.uri": ["a"]}, "tracking.uri cannot"),
    ],
)
def test_a_space_that_cannot_work_is_refused(space, key):
    with pytest.raises(ValueError) as refused:
        points(space=space)
    assert key in str(refused.value)


def test_random_points_need_a_number_of_trials_that_there_are():
    rates, steps = {RATE: [0.1, 0.2]}, {"optim.steps": {"uniform": [1, 9]}}
    with pytest.raises(ValueError, match="num_trials"):
        points(search="random", space=rates)
    with pytest.raises(ValueError, match="num_trials"):
        points(num_trials=3)
    with pytest.raises(ValueError, match="num_trials is 9"):
        points(search="random", num_trials=9, space=rates)
    with pytest.raises(ValueError, match=r"optim\.steps="):
        points(search="random", num_trials=2, space=steps)


def test_trials_hold_out_the_dev_split_and_the_final_run_does_not():
    recipe = recipe_with(
        "s", data={"train": "/a", "eval": "/b"}, init_from="x", sweep={"learning_rates": [0.1]}
    )
    trial, final = trial_recipe(recipe, {RATE: 0.1}), final_recipe(recipe, {RATE: 0.1}, seed=7)
    assert (trial.data.held_out_fraction, trial.data.eval) == (0.02, None)
    assert (final.data.held_out_fraction, final.data.eval) == (0.0, "/b")
    assert (trial.seed, final.seed) == (0, 7)
    assert trial.name != final.name
