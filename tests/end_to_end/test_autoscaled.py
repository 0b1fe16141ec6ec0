"""A cluster that has only its head: the job asks for nodes, and trains on them."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.end_to_end.quota_provider import QuotaProvider
from tests.end_to_end.runs import runs_of, write_recipe
from tests.experiments.studies import study_row
from tests.hosts import Host
from tests.recipes import small_recipe
from vit_ray.config import Recipe

CONFIG = {
    "cluster_name": "fake",
    "max_workers": 2,
    "idle_timeout_minutes": 1,
    "provider": {
        "type": "fake_multinode", "launch_multiple": True,
        # It gives numbers of nodes as their addresses: by others the autoscaler would not know
        # which are idle, nor which live. They cannot be reached by ssh.
        "use_node_id_as_ip": True, "disable_node_updaters": True,
    },
    # The provider's own name for the head, and its number for the head's node.
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "max_workers": 0, "node_config": {}},
        "cpu": {"resources": {"CPU": 4}, "min_workers": 0, "max_workers": 2, "node_config": {}},
    },
    "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [],
    "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
    "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
    "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
}  # fmt: skip
ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "f" * 51 + "00000",
    "AUTOSCALER_UPDATE_INTERVAL_S": "2",
}


@pytest.fixture
def head(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """The fixture's parameter is what the configuration has of another provider."""
    hosts.require()
    config = tmp_path / "autoscaler.yaml"
    provider = {**CONFIG["provider"], **getattr(request, "param", {})}  # type: ignore[dict-item]
    config.write_text(yaml.safe_dump({**CONFIG, "provider": provider}))
    with hosts.network() as net:
        host = net.join("head")
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        hosts.start_head(host, options=[f"--autoscaling-config={config}"], **environment)
        hosts.wait_for_nodes(host, 1)
        yield host


def run_job(host: Host, job: str, recipe: Recipe, folder: Path) -> tuple[int, str]:
    job = str(ROOT / "jobs" / f"{job}.py")
    path = str(write_recipe(recipe, folder))
    environment = {"RAY_ADDRESS": f"{host.address}:{hosts.PORT}", "PYTHONPATH": str(ROOT)}
    return host.run(sys.executable, job, path, environment=environment, timeout_s=400)


@pytest.mark.slow
def test_a_job_starts_the_nodes_that_it_needs(head, digits, tmp_path):
    def recipe(**workers: Any) -> Recipe:
        # One worker for each node of 4 CPUs.
        return small_recipe(
            "fits", digits, tmp_path, optim={"steps": 4},
            workers={"num_workers": 2, "cpus_per_worker": 3.0, **workers},
            train={"global_batch_size": 12, "micro_batch_size": "auto"},
        )  # fmt: skip

    code, output = run_job(head, "pretrain", recipe(use_gpu="auto"), tmp_path)
    assert code == 2, output
    assert "set workers.use_gpu=true, or false" in output
    code, output = run_job(head, "pretrain", recipe(), tmp_path)
    assert code == 0, output
    hosts.wait_for_nodes(head, 3)
    hosts.wait_for_nodes(head, 1, timeout_s=300)  # idle for a minute


@pytest.mark.slow
def test_a_study_starts_the_nodes_that_its_cells_need(head, digits, tmp_path):
    rows = [study_row("small"), study_row("large", width=32)]
    recipe = small_recipe(
        "grid", digits, tmp_path,
        workers={"num_workers": 1, "cpus_per_worker": 3.0, "use_gpu": False},
        study={"models": rows, "epochs": None, "steps": [4], "max_concurrent": 2},
    )  # fmt: skip
    code, output = run_job(head, "scaling_study", recipe, tmp_path)
    assert code == 0, output
    found = {run.info.run_name: run.info.status for run in runs_of(recipe)}
    assert found == dict.fromkeys(
        ("grid", "grid-small-data1-steps4", "grid-large-data1-steps4"), "FINISHED"
    )
    hosts.wait_for_nodes(head, 3)  # a node for each cell


def limited(quota: int) -> pytest.MarkDecorator:
    """The cluster's cloud gives so many nodes, and its configuration promises two."""
    provider = {"type": "external", "module": f"{QuotaProvider.__module__}.QuotaProvider"}
    return pytest.mark.parametrize("head", [{**provider, "quota": quota}], indirect=True, ids=[""])


def train_group(
    head: Host, name: str, num_workers: int | tuple[int, int], digits: Digits, folder: Path
) -> tuple[int, str]:
    """Exit code and output; one worker for each node of 4 CPUs, for which it waits 90 s."""
    workers = {
        "num_workers": num_workers, "cpus_per_worker": 3.0, "place_timeout_minutes": 1.5,
    }  # fmt: skip
    recipe = small_recipe(
        name, digits, folder, workers=workers, optim={"steps": 4},
        train={"global_batch_size": 12, "micro_batch_size": "auto"},
    )  # fmt: skip
    return run_job(head, "pretrain", recipe, folder)


@pytest.mark.slow
@limited(quota=1)
def test_a_quota_that_ends_in_the_middle_of_a_group_is_waited_for_or_done_without(
    head, digits, tmp_path
):
    code, output = train_group(head, "fixed", 2, digits, tmp_path)
    missing = r"2 workers need 6 CPU \(the cluster has 4, .*place_timeout_minutes=1\.5"
    assert (code, bool(re.search(missing, output))) == (1, True), output
    code, output = train_group(head, "elastic", (1, 2), digits, tmp_path)
    assert code == 0, output
    hosts.wait_for_nodes(head, 2)
