"""A node goes away under a worker, and the run goes on with the worker that is left."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.conftest import Digits, Head
from tests.end_to_end.runs import (
    Driver,
    checkpoint_steps,
    curve,
    runs_of,
    small_recipe,
    wait_until,
    write_recipe,
)
from vit_ray.config import Recipe
from vit_ray.launch.trainer import train

STEPS, EVERY = 800, 40


@pytest.fixture
def two_nodes() -> Iterator[Cluster]:
    """A cluster of its own; a worker and a data task fit on each node."""
    address = os.environ.pop("RAY_ADDRESS", None)
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, include_dashboard=False)
        yield cluster
    finally:
        cluster.shutdown()
        if address:
            os.environ["RAY_ADDRESS"] = address


def elastic_recipe(name: str, digits: Digits, folder: Path) -> Recipe:
    return small_recipe(
        name,
        digits,
        folder,
        model={"dropout": 0.0},
        data={"cpus_per_task": 0.25},
        optim={"steps": STEPS, "schedule": "constant", "learning_rate": 1e-4},
        checkpoint={"every_steps": EVERY, "keep_last": 3},
        workers={"num_workers": [1, 2], "cpus_per_worker": 0.75},
        train={"log_every_steps": 100},
    )


def test_a_run_goes_on_with_the_same_batches_on_the_node_that_is_left(
    ray_cluster: Head, two_nodes: Cluster, digits: Digits, tmp_path: Path
) -> None:
    recipe = elastic_recipe("node-lost", digits, tmp_path)
    head = Head(two_nodes.address, "")
    sooner = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
    driver = Driver(head, "pretrain", str(write_recipe(recipe, tmp_path)), **sooner)
    wait_until(lambda: bool(checkpoint_steps(recipe)), driver)
    (lost,) = two_nodes.worker_nodes
    two_nodes.remove_node(lost, allow_graceful=False)
    code, output = driver.wait()
    assert code == 0, output
    assert "worker failed" in output
    assert "resumed: from step" in output
    (run,) = runs_of(recipe)
    disturbed = dict(curve(recipe, run.info.run_id))

    undisturbed = elastic_recipe("undisturbed", digits, tmp_path)
    undisturbed = undisturbed.with_changes(workers={"num_workers": 2})
    straight = dict(curve(undisturbed, train(undisturbed).run_id or ""))
    assert set(straight) <= set(disturbed)
    for step, loss in straight.items():
        assert disturbed[step] == pytest.approx(loss, rel=1e-2), step
