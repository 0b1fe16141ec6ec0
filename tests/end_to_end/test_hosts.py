"""A training on several hosts with addresses of their own."""

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hosts
from tests.conftest import ROOT
from tests.data.converted_set import converted_set
from tests.end_to_end.runs import (
    checkpoint_steps,
    constant_recipe,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.hosts import Host
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.launch.run import train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path where each host but the head has a folder of its own."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def members(ray_cluster: None, own: Path) -> Iterator[dict[str, Host]]:
    """A head without CPUs, two hosts with room for one worker each, and one for reading alone."""
    hosts.require()
    with hosts.network() as net:
        members = {"head": net.join("head")}
        hosts.start_head(members["head"])
        for name, cpus in (("first", 2), ("second", 2), ("reader", 1)):
            members[name] = net.join(name, private=[str(own)])
            hosts.start_raylet(members[name], members["head"], cpus, [f"--labels=pool={name}"])
        hosts.wait_for_nodes(members["head"], 4)
        yield members


def train_on(
    members: dict[str, Host],
    recipe: Recipe,
    folder: Path,
    disturb: Callable[[], bool] = bool,
    ends_with: int = 0,
) -> tuple[dict[str, set[str]], str]:
    """Which kinds of process each host had while a driver on the head trained, and its output.

    Args:
        disturb: called again and again until it says that it has done its part.
        ends_with: the driver's exit code.
    """
    head = members["head"]
    environment = {"RAY_ADDRESS": f"{head.address}:{hosts.PORT}", "PYTHONPATH": str(ROOT)}
    job = str(ROOT / "jobs" / "pretrain.py")
    path = str(write_recipe(recipe, folder))
    driver = head.start(sys.executable, job, path, environment=environment, cwd=ROOT)
    kinds = re.compile(r"ray::(Read|[^:]*RayTrainWorker|StreamServer)")
    found: dict[str, set[str]] = {name: set() for name in members}
    # Three drivers' work on two slow cores has taken four minutes: this ends what hangs, no more.
    deadline, is_done = time.monotonic() + 720, False
    while driver.poll() is None and time.monotonic() < deadline:
        for name, host in members.items():
            found[name] |= {m[1] for p in host.processes() if (m := kinds.match(p))}
        is_done = is_done or disturb()
        time.sleep(0.5)
    driver.kill()
    output, _ = driver.communicate()
    assert driver.returncode == ends_with, output
    assert is_done or disturb is bool, output
    return found, output


def test_two_hosts_train_as_one_each_serves_its_own_ranks_and_one_servers_death_costs_nothing(
    members, digits, tmp_path
):
    length: dict[str, Any] = {
        "optim": {"steps": 200, "learning_rate": 1e-3}, "checkpoint": {"every_steps": 50},
        "data": {"shuffle_window": 256},
    }  # fmt: skip
    alone = constant_recipe("undisturbed", digits, tmp_path, **length)
    train(alone)
    recipe = constant_recipe(
        "killed", digits, tmp_path, **length, workers={"num_workers": 2, "cpus_per_worker": 1.5}
    )

    def kill_server() -> bool:
        if 50 not in checkpoint_steps(recipe) or 200 in checkpoint_steps(recipe):
            return False
        return members["second"].run("pkill", "-9", "-f", "ray::StreamServer")[0] == 0

    found, _ = train_on(members, recipe, tmp_path, kill_server)
    serving = {name for name, kinds in found.items() if "StreamServer" in kinds}
    assert serving == {"first", "second"}
    assert same_weights(weights_of(recipe), weights_of(alone))


def test_nodes_of_one_label_train_and_those_of_another_read(members, digits, tmp_path):
    settings: dict[str, Any] = {"optim": {"steps": 200}}
    alone = constant_recipe("unlabelled", digits, tmp_path, **settings)
    train(alone)
    recipe = constant_recipe(
        "labelled", digits, tmp_path, **settings,
        workers={"cpus_per_worker": 0.5, "label_selector": {"pool": "second"}},
        data={"cpus_per_task": 0.5, "label_selector": {"pool": "in(reader, other)"}},
    )  # fmt: skip
    found, _ = train_on(members, recipe, tmp_path)
    assert {name for name, kinds in found.items() if "Read" in kinds} == {"reader"}, found
    assert found["second"] >= {"StreamServer"}, found
    assert found["first"] == set(), found
    assert same_weights(weights_of(recipe), weights_of(alone))


def test_a_run_ends_where_nodes_do_not_see_its_folders(members, own, tmp_path):
    recipe = recipe_with(
        "unshared", output=str(own / "runs"), data={"train": str(own / "set"), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 4},
        workers={"num_workers": 1, "cpus_per_worker": 1.5},
        tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )  # fmt: skip
    others = {name: host for name, host in members.items() if name != "head"}
    shutil.copytree(converted_set(), own / "set")
    _, output = train_on(members, recipe, tmp_path, ends_with=2)
    lacking = ", ".join(sorted(f"{name} ({host.address})" for name, host in others.items()))
    assert f"data.train={own / 'set'}: not on {lacking}; give" in output
    assert [path.name for path in own.iterdir()] == ["set"]  # nothing was begun
    assert not (tmp_path / "mlflow.db").exists()
    folders = [host.folder / str(own).strip("/").replace("/", "-") for host in others.values()]
    for folder in folders:
        shutil.copytree(converted_set(), folder / "set")
        (folder / "runs").mkdir()  # a folder of the same name is not the same folder
    _, output = train_on(members, recipe, tmp_path, ends_with=1)
    assert "does not see the driver's files in" in output
    assert [list((folder / "runs").iterdir()) for folder in folders] == [[], [], []]
