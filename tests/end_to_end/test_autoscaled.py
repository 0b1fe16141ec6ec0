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
        "type": "external", "module": f"{QuotaProvider.__module__}.QuotaProvider",
        "launch_multiple": True,
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
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture
def head(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """The fixture's parameter is how many nodes the cloud gives of the two that are promised."""
    hosts.require()
    config = tmp_path / "autoscaler.yaml"
    provider: Any = {**CONFIG["provider"], "quota": request.param}  # type: ignore[dict-item]
    config.write_text(yaml.safe_dump({**CONFIG, "provider": provider}))
    with hosts.network() as net:
        host = net.join("head")
        hosts.start_head(host, options=[f"--autoscaling-config={config}"], **ENVIRONMENT)
        hosts.wait_for_nodes(host, 1)
        yield host


def run_job(host: Host, job: str, recipe: Recipe, folder: Path) -> tuple[int, str]:
    job = str(ROOT / "jobs" / f"{job}.py")
    path = str(write_recipe(recipe, folder))
    environment = {"RAY_ADDRESS": f"{host.address}:{hosts.PORT}", "PYTHONPATH": str(ROOT)}
    return host.run(sys.executable, job, path, environment=environment, timeout_s=400)


def group(name: str, digits: Digits, folder: Path, **workers: Any) -> Recipe:
    """One worker for each of two nodes of 4 CPUs."""
    return small_recipe(
        name, digits, folder, optim={"steps": 4},
        workers={"num_workers": 2, "cpus_per_worker": 3.0, **workers},
        train={"global_batch_size": 12, "micro_batch_size": "auto"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("head", [2], indirect=True)
def test_a_job_and_the_cells_of_a_study_start_the_nodes_that_they_need(head, digits, tmp_path):
    study = small_recipe(
        "grid", digits, tmp_path, workers={"num_workers": 1, "cpus_per_worker": 3.0},
        study={
            "models": [study_row("small"), study_row("large", width=32)],
            "epochs": None, "steps": [4], "max_concurrent": 2,
        },
    )  # fmt: skip
    code, output = run_job(head, "scaling_study", study, tmp_path)
    assert code == 0, output
    found = {run.info.run_name: run.info.status for run in runs_of(study)}
    assert found == dict.fromkeys(
        ("grid", "grid-small-data1-steps4", "grid-large-data1-steps4"), "FINISHED"
    )
    hosts.wait_for_nodes(head, 3)  # a node for each cell
    hosts.wait_for_nodes(head, 1, timeout_s=300)  # idle for a minute
    code, output = run_job(head, "pretrain", group("fits", digits, tmp_path), tmp_path)
    assert code == 0, output
    hosts.wait_for_nodes(head, 3)


@pytest.mark.slow
@pytest.mark.parametrize("head", [1], indirect=True)
def test_a_quota_that_ends_in_the_middle_of_a_group_is_waited_for_or_done_without(
    head, digits, tmp_path
):
    unsure = group("gpu", digits, tmp_path, use_gpu="auto")
    code, output = run_job(head, "pretrain", unsure, tmp_path)
    assert (code, "set workers.use_gpu=true, or false" in output) == (2, True), output
    waits = {"place_timeout_minutes": 1.5}
    fixed = group("fixed", digits, tmp_path, **waits)
    code, output = run_job(head, "pretrain", fixed, tmp_path)
    missing = r"2 workers need 6 CPU \(the cluster has 4, .*place_timeout_minutes=1\.5"
    assert (code, bool(re.search(missing, output))) == (1, True), output
    elastic = group("elastic", digits, tmp_path, num_workers=(1, 2), **waits)
    code, output = run_job(head, "pretrain", elastic, tmp_path)
    assert code == 0, output
    hosts.wait_for_nodes(head, 2)
