"""Stops: at bad moments, by every signal, by `ray job stop`, and of the driver's whole group."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.conftest import ROOT, Head
from tests.end_to_end.runs import checkpoint_steps, same_weights, weights_of, write_recipe
from tests.faults import runs
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch.run import train
from vit_ray.outcomes import EventKind

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


def goes_on_to_the_same_weights(recipe: Recipe, undisturbed: Recipe) -> None:
    stopped_at = checkpoint_steps(recipe)[-1]
    assert (EventKind.STOPPED, stopped_at) in runs.events_of(recipe)
    assert stopped_at < runs.STEPS
    assert train(recipe.with_changes(checkpoint={"every_steps": runs.STEPS})).is_complete
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


def test_a_run_that_waits_for_a_place_is_stopped_while_it_waits(full_cluster, digits, tmp_path):
    recipe = small_recipe("waits", digits, tmp_path)
    # One that nobody waits for any more may still be there.
    before = runs.groups(full_cluster, "=", "PENDING")

    def waits() -> bool:
        return bool(runs.groups(full_cluster, "=", "PENDING") - before)

    driver = runs.start(recipe, full_cluster, tmp_path, has_begun=waits)
    driver.process.send_signal(signal.SIGTERM)
    code, output = driver.wait(STOP_S)
    assert code == runs.STOPPED, output
    assert EventKind.STOPPED in runs.kinds_of(recipe)


def test_a_stop_while_a_group_starts_ends_before_its_first_step(ray_cluster, digits, folder):
    recipe = runs.long_recipe("stopped-at-start", digits, folder)
    driver = runs.start_of_workers(recipe, ray_cluster, folder, set(runs.worker_pids(ray_cluster)))
    runs.end(driver, runs.STOPPED, by=signal.SIGTERM)
    assert EventKind.STOPPED in runs.kinds_of(recipe)
    assert EventKind.FIRST_STEP not in runs.kinds_of(recipe)


@pytest.mark.parametrize(
    ("number", "every_steps"),
    [(signal.SIGINT, 40), (signal.SIGHUP, 40), (signal.SIGTERM, 1)],
    ids=["SIGINT", "SIGHUP", "SIGTERM while a checkpoint is written at any time"],
)
def test_a_stop_makes_a_checkpoint_and_ends_clean(
    number, every_steps, ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe(
        f"stopped-by-{number.name}", digits, folder, checkpoint={"every_steps": every_steps}
    )
    runs.end(runs.start(recipe, ray_cluster, folder), runs.STOPPED, by=number)
    goes_on_to_the_same_weights(recipe, undisturbed)


def test_two_sigterms_end_a_training_at_once_and_lose_no_checkpoint(
    ray_cluster, digits, folder, undisturbed
):
    recipe = runs.long_recipe("told-twice", digits, folder)
    driver = runs.start(recipe, ray_cluster, folder)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.stdout is not None
    while "repeat to end at once" not in driver.process.stdout.readline():
        assert driver.process.poll() is None
    driver.process.send_signal(signal.SIGTERM)
    code, output = driver.wait(STOP_S)
    assert code in (-signal.SIGTERM, runs.STOPPED), output  # the first has been as quick as that
    assert checkpoint_steps(recipe)[-1] < runs.STEPS
    assert train(recipe).is_complete
    assert same_weights(weights_of(recipe), weights_of(undisturbed))


def test_ray_job_stop_makes_a_checkpoint(ray_cluster, digits, folder, working_dir, undisturbed):
    recipe = runs.long_recipe("job-stopped", digits, folder)

    def ray_job(*words: str) -> str:
        command = [str(Path(sys.executable).parent / "ray"), "job", *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
        ).stdout

    at = ["--address", ray_cluster.dashboard]
    path = str(write_recipe(recipe, folder))
    submit = ["--no-wait", "--submission-id", recipe.name, "--working-dir", str(working_dir)]
    ray_job("submit", *at, *submit, "--", "python", "jobs/pretrain.py", path)
    logs = subprocess.Popen(
        [str(Path(sys.executable).parent / "ray"), "job", "logs", *at, "--follow", recipe.name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 300
    try:
        while not checkpoint_steps(recipe):
            assert logs.poll() is None, ray_job("logs", *at, recipe.name)
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        logs.kill()
        logs.wait()
    ray_job("stop", *at, recipe.name)
    goes_on_to_the_same_weights(recipe, undisturbed)


def test_a_signal_to_all_of_the_drivers_group_leaves_its_own_ray_to_write_the_checkpoint(
    digits, folder, undisturbed
):
    """As a service manager, a container's stop and some terminals send it."""
    recipe = runs.long_recipe("group-got-sigterm", digits, folder)
    command = [sys.executable, str(ROOT / "jobs/pretrain.py"), str(write_recipe(recipe, folder))]
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        command, env=environment, cwd=ROOT, process_group=0, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    deadline = time.monotonic() + 180
    while not checkpoint_steps(recipe) and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.1)
    os.killpg(driver.pid, signal.SIGTERM)
    output, _ = driver.communicate(timeout=180)
    assert driver.returncode == runs.STOPPED, output
    assert EventKind.STOPPED in runs.kinds_of(recipe)
    assert train(recipe).is_complete
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
