"""Drivers of experiments are stopped and killed, and the same command continues."""

import signal
from pathlib import Path

import pytest

from tests.conftest import Digits
from tests.end_to_end.runs import checkpoint_steps, runs_of, same_weights, weights_of
from tests.faults.runs import (
    STEPS,
    STOPPED,
    actors_of,
    end,
    long_recipe,
    start,
    wait_until_nothing_is_left,
    worker_pids,
)
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.config.keys import tags_of
from vit_ray.experiments.search_space import RATE, trial_recipe
from vit_ray.experiments.study import run_study
from vit_ray.experiments.study_cells import study_cells
from vit_ray.experiments.vtab import task_recipe
from vit_ray.launch.run import train

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
RESUMED = "vit_ray.events.resumed"


@pytest.fixture(scope="module")
def pretrained(ray_cluster: object, digits: Digits, folder: Path) -> Recipe:
    recipe = small_recipe("pretrained-for-experiments", digits, folder, optim={"steps": 8})
    train(recipe)
    return recipe


def test_a_vtab_job_that_is_stopped_and_then_killed_continues(
    ray_cluster, digits, folder, pretrained
):
    for task in ("one", "other"):
        (folder / "vtab" / task).mkdir(parents=True)
        for part, path in (("train", digits.train), ("test", digits.test)):
            (folder / "vtab" / task / part).symlink_to(path)
    names = [{"name": "one", "group": "natural"}, {"name": "other", "group": "specialized"}]
    recipe = long_recipe(
        "vtab", digits, folder, init_from=pretrained.run_folder, workers={"num_workers": 1},
        vtab={"data": str(folder / "vtab"), "tasks": names},
    )  # fmt: skip
    assert recipe.vtab is not None
    tasks = [task_recipe(recipe, task) for task in recipe.vtab.tasks]
    before = actors_of(ray_cluster)
    driver = start(recipe, ray_cluster, folder, "vtab", lambda: all(map(checkpoint_steps, tasks)))
    end(driver, STOPPED, by=signal.SIGTERM)
    wait_until_nothing_is_left(ray_cluster, before)
    driver = start(recipe, ray_cluster, folder, "vtab", lambda: bool(worker_pids(ray_cluster)))
    end(driver, -signal.SIGKILL, by=signal.SIGKILL)
    wait_until_nothing_is_left(ray_cluster, before)
    end(start(recipe, ray_cluster, folder, "vtab", lambda: True))
    wait_until_nothing_is_left(ray_cluster, before)
    (whole,) = [run for run in runs_of(recipe) if run.data.tags["vit_ray.kind"] == "vtab"]
    assert whole.info.status == "FINISHED"
    found = whole.data.metrics
    assert found["vtab/tasks"] == 2
    # Both tasks are the same training.
    assert found["vtab/one_top1"] == found["vtab/other_top1"] > 0.5
    runs = {one.info.run_name: one for one in runs_of(recipe)}
    for task in tasks:
        assert runs[task.name].info.status == "FINISHED"
        assert int(tags_of(runs[task.name].data.tags)[RESUMED]) >= 1


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stop_of_a_sweep_reaches_its_trials_and_the_same_command_goes_on(
    ray_cluster, digits, folder, pretrained, number
):
    recipe = long_recipe(
        f"sweep-{number.name}", digits, folder, init_from=pretrained.run_folder,
        workers={"num_workers": 1},
        sweep={"learning_rates": [0.001, 0.01], "dev_fraction": 0.1, "seeds": 1},
    )  # fmt: skip
    trials = [trial_recipe(recipe, {RATE: rate}) for rate in (0.001, 0.01)]
    driver = start(recipe, ray_cluster, folder, "sweep", lambda: any(map(checkpoint_steps, trials)))
    end(driver, STOPPED, by=number)
    stopped_at = [checkpoint_steps(trial)[-1:] for trial in trials]
    assert all(steps < [STEPS] for steps in stopped_at)
    end(start(recipe, ray_cluster, folder, "sweep", lambda: True))
    runs = [run for run in runs_of(recipe) if run.info.run_name.startswith(recipe.name)]
    assert any(tags_of(run.data.tags).get(RESUMED) for run in runs), stopped_at


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stop_of_a_study_reaches_its_cell_and_the_same_command_goes_on(
    ray_cluster, digits, folder, number
):
    recipe = long_recipe(f"study-{number.name}", digits, folder)
    shape = recipe.model.model_dump(mode="json")
    recipe = recipe.with_changes(
        workers={"num_workers": 1},
        study={
            "models": [{"label": "tiny", "model": shape}],
            "data_fractions": [0.25, 1.0],
            "epochs": [25],
            "max_concurrent": 1,
        },
    )
    first, second = (cell.recipe for cell in study_cells(recipe))
    driver = start(
        recipe, ray_cluster, folder, "scaling_study", lambda: bool(checkpoint_steps(second))
    )
    end(driver, STOPPED, by=number)
    stopped_at = checkpoint_steps(second)[-1]
    before = weights_of(first)
    end(start(recipe, ray_cluster, folder, "scaling_study", lambda: True))
    assert checkpoint_steps(second)[-1] > stopped_at
    cells = {run.info.run_name: tags_of(run.data.tags) for run in runs_of(recipe)}
    assert cells[second.name][RESUMED] == "1"
    assert RESUMED not in cells[first.name]
    assert same_weights(weights_of(first), before)


def test_a_branch_of_a_study_ends_with_the_weights_of_a_run_of_its_own(
    ray_cluster, digits, tmp_path
):
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
