"""A run whose folders only the head has, on hosts with own disks: ended with what to change."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hosts
from tests.conftest import ROOT
from tests.data.converted_set import converted_set
from tests.end_to_end.runs import write_recipe
from tests.hosts import Host
from tests.recipes import recipe_with
from vit_ray.config import Recipe


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path where each host but the head has a folder of its own."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def members(own: Path) -> Iterator[dict[str, Host]]:
    """A head without CPUs, a host with room for a worker, and one for reading alone."""
    hosts.require()
    with hosts.network() as net:
        members = {"head": net.join("head")}
        hosts.start_head(members["head"])
        for name, cpus in (("first", 2), ("reader", 1)):
            members[name] = net.join(name, private=[str(own)])
            hosts.start_raylet(members[name], members["head"], cpus)
        hosts.wait_for_nodes(members["head"], 3)
        yield members


def folder_of(host: Host, own: Path) -> Path:
    """The folder of a host, as this machine sees it."""
    return host.folder / str(own).strip("/").replace("/", "-")


def error_of(head: Host, recipe: Recipe, folder: Path) -> tuple[int, str]:
    """Exit code and the line that ends a run."""
    environment = {"RAY_ADDRESS": f"{head.address}:{hosts.PORT}", "PYTHONPATH": str(ROOT)}
    job, path = str(ROOT / "jobs" / "pretrain.py"), str(write_recipe(recipe, folder))
    code, output = head.run(sys.executable, job, path, environment=environment, cwd=ROOT)
    lines = [one for one in output.splitlines() if one.startswith("error: ")]
    assert len(lines) == 1, output
    return code, lines[0]


@pytest.mark.slow
def test_a_run_ends_where_nodes_do_not_see_its_folders(members, own, tmp_path):
    first, reader = (f"{name} ({members[name].address})" for name in ("first", "reader"))
    shutil.copytree(converted_set(), own / "set")
    recipe = recipe_with(
        "unshared", output=str(own / "runs"), data={"train": str(own / "set"), "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 4},
        workers={"num_workers": 1, "cpus_per_worker": 1.5},
        tracking={"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"},
    )  # fmt: skip
    code, line = error_of(members["head"], recipe, tmp_path)
    assert (code, f"data.train={own / 'set'}: not on {first}, {reader}; give" in line) == (2, True)
    assert [path.name for path in own.iterdir()] == ["set"]  # nothing was begun
    assert not (tmp_path / "mlflow.db").exists()
    for name in ("first", "reader"):
        shutil.copytree(converted_set(), folder_of(members[name], own) / "set")
    # A folder of the same name is not the same folder.
    (folder_of(members["first"], own) / "runs").mkdir()
    code, line = error_of(members["head"], recipe, tmp_path)
    assert (code, "does not see the driver's files in" in line) == (1, True), line
    assert list((folder_of(members["first"], own) / "runs").iterdir()) == []
