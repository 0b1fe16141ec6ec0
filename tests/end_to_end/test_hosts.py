"""A training on several hosts with addresses of their own, which a cloud may give, or take away."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.data.converted_set import converted_set
from tests.end_to_end.quota_provider import QuotaProvider
from tests.end_to_end.runs import (
    checkpoint_steps,
    constant_recipe,
    runs_of,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.experiments.studies import study_row
from tests.hosts import Host
from tests.recipes import recipe_with, small_recipe
from vit_ray import trust_modules
from vit_ray.config import Recipe
from vit_ray.launch.run import train

pytestmark = pytest.mark.slow


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


SUSPENDED_STEPS = 120
(MANIFEST,) = [
    one
    for one in yaml.safe_load_all((ROOT / "cluster" / "rayjob.yaml").read_text())
    if one["kind"] == "RayJob"
]


def variables_of(group: dict) -> dict[str, str]:
    (container,) = group["template"]["spec"]["containers"]
    own = {item["name"]: item["value"] for item in container["env"] if "value" in item}
    return {"PYTHONPATH": str(ROOT), **own}


def entrypoint_of(name: str, recipe_path: Path) -> str:
    """As the operator submits it."""
    entrypoint = MANIFEST["spec"]["entrypoint"].replace(MANIFEST["spec"]["jobId"], name)
    entrypoint = entrypoint.replace("/home/ray/recipe/recipe.yaml", str(recipe_path))
    return entrypoint.replace("python jobs/", f"{sys.executable} {ROOT}/jobs/")


def test_a_job_that_is_suspended_is_saved_in_time_and_continues_where_it_was(
    ray_cluster, digits, tmp_path
):
    """As the kubelet ends pods: SIGTERM to all, and for the head `preStop` before it."""
    hosts.require()
    trust_modules("tests.parts")
    recipe = constant_recipe(
        "suspended", digits, tmp_path, optim={"steps": SUSPENDED_STEPS},
        train={"callbacks": ["tests.parts.wait_on_first_pods"]},
        checkpoint={"every_steps": 1000}, workers={"use_gpu": False},
    )  # fmt: skip
    spec = MANIFEST["spec"]["rayClusterSpec"]
    head_group, gpu_group = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    (container,) = head_group["template"]["spec"]["containers"]
    stop = container["lifecycle"]["preStop"]["exec"]["command"]
    head_grace_s, worker_grace_s = (
        group["template"]["spec"]["terminationGracePeriodSeconds"]
        for group in (head_group, gpu_group)
    )
    with hosts.network() as net:
        head, worker = net.join("head-1"), net.join("worker-1")
        address = f"{head.address}:{hosts.PORT}"
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}  # KubeRay sets it
        hosts.start_head(head, **variables_of(head_group))
        hosts.wait_for_nodes(head, 1)
        pod = worker.serve(
            "ray.log", hosts.RAY, "start", "--block", f"--address={address}", "--num-cpus=2",
            "--num-gpus=0", f"--node-ip-address={worker.address}", "--disable-usage-stats",
            "--object-store-memory=300000000", environment=variables_of(gpu_group),
        )  # fmt: skip
        hosts.wait_for_nodes(head, 2)

        def job(*words: str) -> tuple[int, str]:
            return head.run(hosts.RAY, "job", *words, environment=environment, timeout_s=600)

        code, output = job(
            "submit", "--no-wait", f"--submission-id={recipe.name}", "--",
            "bash", "-c", entrypoint_of(recipe.name, write_recipe(recipe, tmp_path)),
        )  # fmt: skip
        assert code == 0, output
        deadline = time.monotonic() + 600
        while "first step:" not in (log := job("logs", recipe.name)[1]):
            assert time.monotonic() < deadline, log
            time.sleep(2)
        assert any("RayTrainWorker" in process for process in worker.processes())
        words = [hosts.RAY if word == "ray" else word for word in stop[:-1]]
        stopping = head.start(*words, recipe.name, environment=environment)
        worker.run("pkill", "-TERM", "-f", "ray start --block")
        output, _ = stopping.communicate(timeout=head_grace_s)
        assert stopping.returncode == 0, output
        with contextlib.suppress(subprocess.TimeoutExpired):
            pod.wait(worker_grace_s)
        told = (worker.folder / "ray.log").read_text()[-3000:]
        assert pod.returncode is not None, told
        assert "Local node finished draining" in told, told  # it had nothing left to wait for
        log = job("logs", recipe.name)[1]
    *_, saved = checkpoint_steps(recipe) or pytest.fail(f"{log}\n{output}\n{told}")
    assert 0 < saved < SUSPENDED_STEPS
    straight = recipe.with_changes(name="straight")
    train(straight)
    result = train(recipe)
    assert any(f"resumed: from step {saved}" in event for event in result.events)
    assert same_weights(weights_of(recipe), weights_of(straight))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path where each host but the head has a folder of its own."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def members(ray_cluster: None, own: Path) -> Iterator[dict[str, Host]]:
    """A head without CPUs, two hosts with room for one worker each, and one for reading alone.

    As on Debian, the name of each leads to itself: it has the address 127.0.1.1.
    """
    hosts.require()
    with hosts.network() as net:
        members = {"head": net.join("head")}
        hosts.start_head(members["head"])
        for name, cpus in (("first", 2), ("second", 2), ("reader", 1)):
            members[name] = net.join(name, private=[str(own)])
            names = members[name].folder / "own_names"
            names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            assert members[name].run("mount", "--bind", str(names), "/etc/hosts")[0] == 0
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
