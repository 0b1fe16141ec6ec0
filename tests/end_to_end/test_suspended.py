"""A RayJob that Kueue suspends and admits again, as far as Ray sees it: all pods end together."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.end_to_end.runs import (
    checkpoint_steps,
    constant_recipe,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.hosts import PORT, RAY, Network
from vit_ray import trust_modules
from vit_ray.config import Recipe

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


class Pods:
    """Of one admission: a head without CPUs, and a pod that trains; each on a host of its own."""

    def __init__(self, net: Network, number: int) -> None:
        spec = MANIFEST["spec"]["rayClusterSpec"]
        head, gpu = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
        self.head, self.worker = net.join(f"head-{number}"), net.join(f"worker-{number}")
        address = f"{self.head.address}:{PORT}"
        self.environment = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}  # KubeRay sets it
        hosts.start_head(self.head, **variables_of(head))
        hosts.wait_for_nodes(self.head, 1)
        words = [RAY, "start", "--block", f"--address={address}", "--num-cpus=2", "--num-gpus=0",
                 f"--node-ip-address={self.worker.address}", "--object-store-memory=300000000",
                 "--disable-usage-stats"]  # fmt: skip
        self.process = self.worker.serve("ray.log", *words, environment=variables_of(gpu))
        hosts.wait_for_nodes(self.head, 2)
        (container,) = head["template"]["spec"]["containers"]
        self._pre_stop = container["lifecycle"]["preStop"]["exec"]["command"]
        self._head_grace_s, self._worker_grace_s = (
            pod["template"]["spec"]["terminationGracePeriodSeconds"] for pod in (head, gpu)
        )

    def run_on_head(self, *words: str) -> tuple[int, str]:
        return self.head.run(*words, environment=self.environment, timeout_s=600)

    def submit(self, recipe_path: Path, name: str) -> None:
        """As the operator does."""
        entrypoint = MANIFEST["spec"]["entrypoint"].replace(MANIFEST["spec"]["jobId"], name)
        entrypoint = entrypoint.replace("/home/ray/recipe/recipe.yaml", str(recipe_path))
        entrypoint = entrypoint.replace("python jobs/", f"{sys.executable} {ROOT}/jobs/")
        code, output = self.run_on_head(
            RAY, "job", "submit", "--no-wait", f"--submission-id={name}", "--",
            "bash", "-c", entrypoint,
        )  # fmt: skip
        assert code == 0, output

    def log(self, name: str) -> str:
        return self.run_on_head(RAY, "job", "logs", name)[1]

    def wait(self, name: str) -> None:
        """Until the job has succeeded."""
        deadline = time.monotonic() + 600
        while "succeeded" not in (told := self.run_on_head(RAY, "job", "status", name)[1]):
            assert "failed" not in told, self.log(name)
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(2)

    def end(self, name: str) -> str:
        """All pods at once, as the kubelet does: SIGTERM, and for the head `preStop` before it.

        Fails if one takes longer than its grace period; returns what all have written.
        """
        stop = [RAY if word == "ray" else word for word in self._pre_stop]
        stop[-1] = name
        stopping = self.head.start(*stop, environment=self.environment)
        self.worker.run("pkill", "-TERM", "-f", "ray start --block")
        output, _ = stopping.communicate(timeout=self._head_grace_s)
        assert stopping.returncode == 0, output
        try:
            self.process.wait(self._worker_grace_s)
        except subprocess.TimeoutExpired:
            pytest.fail((self.worker.folder / "ray.log").read_text()[-3000:])
        told = (self.worker.folder / "ray.log").read_text()[-3000:]
        assert "Local node finished draining" in told, told  # it had nothing left to wait for
        log = self.log(name)
        self.head.lose()
        self.worker.lose()
        return f"{log}\n{output}\n{told}"


@pytest.fixture
def net(ray_cluster: None) -> Iterator[Network]:
    hosts.require()
    with hosts.network() as made:
        yield made


def recipe_of(name: str, digits: Digits, folder: Path) -> Recipe:
    trust_modules("tests.parts")
    return constant_recipe(
        name, digits, folder, optim={"steps": STEPS},
        train={"callbacks": ["tests.parts.wait_on_first_pods"]},
        checkpoint={"every_steps": 1000}, workers={"use_gpu": False},
    )  # fmt: skip


@pytest.mark.slow
def test_a_job_that_is_suspended_is_saved_in_time_and_continues_where_it_was(net, digits, tmp_path):
    recipe = recipe_of("suspended", digits, tmp_path)
    path = write_recipe(recipe, tmp_path)
    first = Pods(net, 1)
    first.submit(path, recipe.name)
    deadline = time.monotonic() + 600
    while "first step:" not in (log := first.log(recipe.name)):
        assert time.monotonic() < deadline, log
        time.sleep(2)
    assert any("RayTrainWorker" in process for process in first.worker.processes())
    log = first.end(recipe.name)
    assert checkpoint_steps(recipe), log
    saved = checkpoint_steps(recipe)[-1]
    assert 0 < saved < STEPS
    second = Pods(net, 2)
    second.submit(path, recipe.name)
    second.wait(recipe.name)
    assert f"resumed: from step {saved}" in second.log(recipe.name)
    straight = recipe_of("straight", digits, tmp_path)
    second.submit(write_recipe(straight, tmp_path), straight.name)
    second.wait(straight.name)
    assert same_weights(weights_of(recipe), weights_of(straight))
