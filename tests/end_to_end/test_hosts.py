"""A training on several hosts with addresses of their own."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hosts
from tests.conftest import ROOT
from tests.end_to_end.runs import (
    checkpoint_steps,
    constant_recipe,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.hosts import Host, Network
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch.run import train

pytestmark = pytest.mark.usefixtures("ray_cluster")

SERVERS = re.compile(r"ray::(StreamServer)")


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[tuple[Network, dict[str, Host]]]:
    """A head without CPUs, two hosts with room for one worker each, and one for reading alone."""
    hosts.require()
    with hosts.network() as net:
        names = ("head", "first", "second", "reader")
        members = {name: net.join(name) for name in names}
        head = members["head"]
        hosts.start_head(head)
        for name, cpus in (("first", 2), ("second", 2), ("reader", 1)):
            hosts.start_raylet(members[name], head, cpus, [f"--labels=pool={name}"])
        hosts.wait_for_nodes(head, 4)
        yield net, members


def train_on(
    members: dict[str, Host],
    recipe: Recipe,
    folder: Path,
    disturb: Callable[[], bool] = bool,
    processes: re.Pattern[str] = SERVERS,
) -> dict[str, set[str]]:
    """Which kinds of process each host had while a driver on the head trained.

    Args:
        disturb: called again and again until it says that it has done its part.
        processes: their names, with one group.
    """
    head = members["head"]
    environment = {"RAY_ADDRESS": f"{head.address}:{hosts.PORT}", "PYTHONPATH": str(ROOT)}
    job = str(ROOT / "jobs" / "pretrain.py")
    path = str(write_recipe(recipe, folder))
    driver = head.start(sys.executable, job, path, environment=environment, cwd=ROOT)
    servers: dict[str, set[str]] = {name: set() for name in members}
    # Three drivers' work on two slow cores has taken four minutes: this ends what hangs, no more.
    deadline, is_done = time.monotonic() + 720, False
    while driver.poll() is None and time.monotonic() < deadline:
        for name, host in members.items():
            servers[name] |= {m[1] for p in host.processes() if (m := processes.match(p))}
        is_done = is_done or disturb()
        time.sleep(0.5)
    driver.kill()
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    assert is_done or disturb is bool, output
    return servers


@pytest.mark.slow
def test_two_hosts_train_as_one_and_each_serves_its_own_ranks(cluster, digits, tmp_path):
    _, members = cluster
    settings = {"optim": {"learning_rate": 1e-3}, "data": {"shuffle_window": 256}}
    alone = small_recipe("alone", digits, tmp_path, **settings)
    train(alone)
    recipe = small_recipe(
        "hosts", digits, tmp_path, **settings, workers={"num_workers": 2, "cpus_per_worker": 1.5}
    )
    servers = train_on(members, recipe, tmp_path)
    assert servers == {
        "head": set(),
        "first": {"StreamServer"},
        "second": {"StreamServer"},
        "reader": set(),
    }
    assert same_weights(weights_of(recipe), weights_of(alone))


@pytest.mark.slow
def test_nodes_of_one_label_train_and_those_of_another_read(cluster, digits, tmp_path):
    _, members = cluster
    settings: dict[str, Any] = {"optim": {"steps": 200}}
    alone = constant_recipe("unlabelled", digits, tmp_path, **settings)
    train(alone)
    recipe = constant_recipe(
        "labelled", digits, tmp_path, **settings,
        workers={"cpus_per_worker": 0.5, "label_selector": {"pool": "second"}},
        data={"cpus_per_task": 0.5, "label_selector": {"pool": "in(reader, other)"}},
    )  # fmt: skip
    doing = re.compile(r"ray::(Read|[^:]*RayTrainWorker|StreamServer)")
    found = train_on(members, recipe, tmp_path, processes=doing)
    assert {name for name, kinds in found.items() if "Read" in kinds} == {"reader"}, found
    assert found["second"] >= {"StreamServer"}, found
    assert found["first"] == set(), found
    assert same_weights(weights_of(recipe), weights_of(alone))


@pytest.mark.slow
def test_a_run_goes_on_where_the_server_of_one_host_dies(cluster, digits, tmp_path):
    _, members = cluster
    length: dict[str, Any] = {"optim": {"steps": 200}, "checkpoint": {"every_steps": 50}}
    alone = constant_recipe("undisturbed", digits, tmp_path, **length)
    train(alone)
    recipe = constant_recipe(
        "killed", digits, tmp_path, **length, workers={"num_workers": 2, "cpus_per_worker": 1.5}
    )

    def kill_server() -> bool:
        if 50 not in checkpoint_steps(recipe) or 200 in checkpoint_steps(recipe):
            return False
        return members["second"].run("pkill", "-9", "-f", "ray::StreamServer")[0] == 0

    train_on(members, recipe, tmp_path, kill_server)
    assert same_weights(weights_of(recipe), weights_of(alone))
