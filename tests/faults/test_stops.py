"""Stops of a run that waits for its place on the cluster."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.state import list_placement_groups

from tests.conftest import Digits, Head
from tests.end_to_end.runs import (
    Driver,
    small_recipe,
    wait_until,
    write_recipe,
)
from vit_ray.config import Recipe

STOP_S = 60.0
"""Well below `workers.place_timeout_minutes`, after which a run ends by itself."""


@ray.remote(num_cpus=4)
class AllCpus:
    def hold(self) -> None: ...


@pytest.fixture
def full_cluster(ray_cluster: Head) -> Iterator[Head]:
    holder: Any = AllCpus.remote()  # type: ignore[attr-defined]
    ray.get(holder.hold.remote())
    yield ray_cluster
    ray.kill(holder)


def waiting_groups(head: Head) -> set[str]:
    """Worker groups that have no place; one that nobody waits for any more may still be there."""
    filters = [("state", "=", "PENDING")]
    return {one.placement_group_id for one in list_placement_groups(head.dashboard, filters)}


def start_without_place(recipe: Recipe, head: Head, folder: Path) -> Driver:
    """A driver whose worker group waits for its place."""
    before = waiting_groups(head)
    driver = Driver(head, "pretrain", str(write_recipe(recipe, folder)))
    wait_until(lambda: bool(waiting_groups(head) - before), driver)
    return driver


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_a_place_is_stopped_while_it_waits(
    full_cluster: Head, digits: Digits, tmp_path: Path, number: signal.Signals
) -> None:
    recipe = small_recipe("waits", digits, tmp_path)
    driver = start_without_place(recipe, full_cluster, tmp_path)
    driver.process.send_signal(number)
    code, output = driver.wait(STOP_S)
    assert code == 3, output
    assert "waits: stopped: " in output
    assert "no workers were running" in output


def test_a_second_signal_ends_a_run_that_waits_for_a_place_at_once(
    full_cluster: Head, digits: Digits, tmp_path: Path
) -> None:
    recipe = small_recipe("waits-twice", digits, tmp_path)
    driver = start_without_place(recipe, full_cluster, tmp_path)
    driver.process.send_signal(signal.SIGINT)
    driver.process.send_signal(signal.SIGTERM)
    code, _ = driver.wait(STOP_S)
    assert code in (-signal.SIGTERM, 3)  # it may have been as quick as that
