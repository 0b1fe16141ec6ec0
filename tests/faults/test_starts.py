"""A worker that dies, or a stop that comes, while a worker group starts."""

import os
import signal
from pathlib import Path

from ray.util.state import list_placement_groups

from tests.conftest import Head
from tests.end_to_end.runs import Driver, same_weights, wait_until, weights_of, write_recipe
from tests.faults.runs import kinds_of, long_recipe, worker_pids
from vit_ray.config import Recipe
from vit_ray.outcomes import EventKind


def start_of_workers(recipe: Recipe, head: Head, folder: Path, before: set[int]) -> Driver:
    """A driver whose workers have processes, and have not met yet."""
    driver = Driver(head, "pretrain", str(write_recipe(recipe, folder)))
    wait_until(lambda: len(set(worker_pids(head)) - before) == 2, driver)
    return driver


def test_a_worker_that_is_killed_while_its_group_starts_leaves_no_place_behind(
    ray_cluster, digits, folder, undisturbed
):
    recipe = long_recipe("killed-at-start", digits, folder)
    before = set(worker_pids(ray_cluster))
    driver = start_of_workers(recipe, ray_cluster, folder, before)
    *_, killed = set(worker_pids(ray_cluster)) - before
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: EventKind.FIRST_STEP in kinds_of(recipe), driver)
    present = [("state", "!=", "REMOVED")]
    assert len(list_placement_groups(ray_cluster.dashboard, filters=present)) == 1
    code, output = driver.wait()
    assert code == 0, output
    assert kinds_of(recipe).count(EventKind.WORKER_FAILED) == 1
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


def test_a_stop_while_a_group_starts_ends_before_its_first_step(ray_cluster, digits, folder):
    recipe = long_recipe("stopped-at-start", digits, folder)
    driver = start_of_workers(recipe, ray_cluster, folder, set(worker_pids(ray_cluster)))
    driver.process.send_signal(signal.SIGTERM)
    code, output = driver.wait()
    assert code == 3, output
    assert EventKind.STOPPED in kinds_of(recipe)
    assert EventKind.FIRST_STEP not in kinds_of(recipe)
