"""A RayJob that Kueue suspends and admits again, as far as Ray sees it: all pods end together."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import hosts
from tests.conftest import ROOT
from tests.end_to_end.runs import (
    checkpoint_steps,
    constant_recipe,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.hosts import PORT, RAY
from vit_ray import trust_modules
from vit_ray.launch.run import train

STEPS = 120
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


@pytest.mark.slow
def test_a_job_that_is_suspended_is_saved_in_time_and_continues_where_it_was(
    ray_cluster, digits, tmp_path
):
    """As the kubelet ends pods: SIGTERM to all, and for the head `preStop` before it."""
    hosts.require()
    trust_modules("tests.parts")
    recipe = constant_recipe(
        "suspended", digits, tmp_path, optim={"steps": STEPS},
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
        address = f"{head.address}:{PORT}"
        environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}  # KubeRay sets it
        hosts.start_head(head, **variables_of(head_group))
        hosts.wait_for_nodes(head, 1)
        words = [RAY, "start", "--block", f"--address={address}", "--num-cpus=2", "--num-gpus=0",
                 f"--node-ip-address={worker.address}", "--object-store-memory=300000000",
                 "--disable-usage-stats"]  # fmt: skip
        pod = worker.serve("ray.log", *words, environment=variables_of(gpu_group))
        hosts.wait_for_nodes(head, 2)

        def on_head(*words: str) -> str:
            code, output = head.run(*words, environment=environment, timeout_s=600)
            assert code == 0, output
            return output

        on_head(
            RAY, "job", "submit", "--no-wait", f"--submission-id={recipe.name}", "--",
            "bash", "-c", entrypoint_of(recipe.name, write_recipe(recipe, tmp_path)),
        )  # fmt: skip
        deadline = time.monotonic() + 600
        while "first step:" not in (log := on_head(RAY, "job", "logs", recipe.name)):
            assert time.monotonic() < deadline, log
            time.sleep(2)
        assert any("RayTrainWorker" in process for process in worker.processes())
        words = [RAY if word == "ray" else word for word in stop[:-1]]
        stopping = head.start(*words, recipe.name, environment=environment)
        worker.run("pkill", "-TERM", "-f", "ray start --block")
        output, _ = stopping.communicate(timeout=head_grace_s)
        assert stopping.returncode == 0, output
        with contextlib.suppress(subprocess.TimeoutExpired):
            pod.wait(worker_grace_s)
        told = (worker.folder / "ray.log").read_text()[-3000:]
        assert pod.returncode is not None, told
        assert "Local node finished draining" in told, told  # it had nothing left to wait for
        log = on_head(RAY, "job", "logs", recipe.name)
    (saved,) = checkpoint_steps(recipe) or pytest.fail(f"{log}\n{output}\n{told}")
    assert 0 < saved < STEPS
    straight = recipe.with_changes(name="straight")
    train(straight)
    result = train(recipe)
    assert any(f"resumed: from step {saved}" in event for event in result.events)
    assert same_weights(weights_of(recipe), weights_of(straight))
