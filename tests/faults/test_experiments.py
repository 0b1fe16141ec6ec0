"""Drivers of experiments are stopped and killed, and the same command continues."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Digits, Head
from tests.end_to_end.runs import Driver, checkpoint_steps, runs_of, wait_until, write_recipe
from tests.faults.runs import actors_of, long_recipe, wait_until_nothing_is_left, worker_pids
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.config.keys import tags_of
from vit_ray.experiments.vtab import task_recipe
from vit_ray.launch.run import train


def metrics_of(recipe: Recipe, kind: str, group: str) -> dict[str, float]:
    """Metrics of a group, of the one run of this kind whose name begins with the recipe's."""
    (run,) = [
        one
        for one in runs_of(recipe)
        if one.data.tags["vit_ray.kind"] == kind and one.info.run_name.startswith(recipe.name)
    ]
    assert run.info.status == "FINISHED"
    return {key: value for key, value in run.data.metrics.items() if key.startswith(group)}


@pytest.fixture(scope="module")
def pretrained(digits: Digits, folder: Path) -> Recipe:
    recipe = small_recipe("pretrained-for-experiments", digits, folder, optim={"steps": 8})
    train(recipe)
    return recipe


def vtab_recipe(digits: Digits, folder: Path, pretrained: Recipe) -> Recipe:
    for task in ("one", "other"):
        (folder / "vtab" / task).mkdir(parents=True)
        for part, path in (("train", digits.train), ("test", digits.test)):
            (folder / "vtab" / task / part).symlink_to(path)
    return long_recipe("vtab", digits, folder).with_changes(
        init_from=pretrained.run_folder,
        workers={"num_workers": 1},
        vtab={
            "data": str(folder / "vtab"),
            "tasks": [
                {"name": "one", "group": "natural"},
                {"name": "other", "group": "specialized"},
            ],
        },
    )


def test_a_vtab_job_that_is_stopped_and_then_killed_continues(
    ray_cluster, digits, folder, pretrained
):
    recipe = vtab_recipe(digits, folder, pretrained)
    assert recipe.vtab is not None
    tasks = [task_recipe(recipe, task) for task in recipe.vtab.tasks]
    disturb(ray_cluster, "vtab", recipe, folder, lambda: all(map(checkpoint_steps, tasks)))
    found = metrics_of(recipe, "vtab", "vtab/")
    assert found["vtab/tasks"] == 2
    # Both tasks are the same training.
    assert found["vtab/one_top1"] == found["vtab/other_top1"] > 0.5
    runs = {one.info.run_name: one for one in runs_of(recipe)}
    for task in tasks:
        assert runs[task.name].info.status == "FINISHED"
        assert int(tags_of(runs[task.name].data.tags)["vit_ray.events.resumed"]) >= 1


def disturb(
    head: Head, job: str, recipe: Recipe, folder: Path, has_begun: Callable[[], bool]
) -> None:
    """Three drivers: one is stopped, one is killed, and the last comes to the end."""
    arguments = str(write_recipe(recipe, folder))
    before = actors_of(head)
    driver = Driver(head, job, arguments)
    wait_until(has_begun, driver)
    driver.process.send_signal(signal.SIGTERM)
    code, output = driver.wait()
    assert code == 3, output
    wait_until_nothing_is_left(head, before)
    driver = Driver(head, job, arguments)
    wait_until(lambda: bool(worker_pids(head)), driver)
    driver.process.kill()
    driver.wait()
    wait_until_nothing_is_left(head, before)
    code, output = Driver(head, job, arguments).wait()
    assert code == 0, output
    wait_until_nothing_is_left(head, before)
