"""Small recipes on the digits, drivers as processes, and what a run left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mlflow import MlflowClient

from tests.conftest import ROOT, Digits, Head
from tests.recipes import small_recipe
from vit_ray.checkpoints.checkpoint import folder_name, open_checkpoint
from vit_ray.checkpoints.run_checkpoints import list_checkpoints, newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.launch.run import RunResult
from vit_ray.storage import locate

Finished = tuple[Recipe, RunResult]


def constant_recipe(name: str, digits: Digits, folder: Path, **sections: Any) -> Recipe:
    """A recipe whose rate does not depend on the length, so that runs of several lengths agree."""
    optim = {"schedule": "constant", **sections.pop("optim", {})}
    return small_recipe(name, digits, folder, optim=optim, **sections)


def weights_of(recipe: Recipe, step: int | None = None) -> dict[str, torch.Tensor]:
    """Weights of a run's checkpoint of that step, or of its newest."""
    folder = locate(recipe.output).child(recipe.name)
    if step is None:
        checkpoint = newest_checkpoint(folder)
    else:
        checkpoint = open_checkpoint(folder.child(folder_name(step)))
    assert checkpoint is not None
    return checkpoint.weights()


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit-equal, tensor by tensor."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def checkpoint_steps(recipe: Recipe) -> list[int]:
    """Steps of the whole checkpoints, oldest first."""
    folder = locate(recipe.output).child(recipe.name)
    return sorted(s for s, place in list_checkpoints(folder) if open_checkpoint(place))


def curve(recipe: Recipe, run_id: str, key: str = "train/loss") -> list[tuple[int, float]]:
    """(step, value) of every point that MLflow holds, in the order of the steps."""
    client = MlflowClient(recipe.tracking.uri)
    points = client.get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def runs_of(recipe: Recipe) -> list[Any]:
    """All MLflow runs of the recipe's experiment, newest first."""
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    return client.search_runs([experiment.experiment_id]) if experiment else []


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """The recipe as a YAML file (JSON is YAML)."""
    path = folder / f"{recipe.name}.yaml"
    path.write_text(recipe.model_dump_json())
    return path


class Driver:
    """`python jobs/NAME.py ...` as a process against the session's cluster."""

    def __init__(self, head: Head, job: str, *arguments: str, **environment: str) -> None:
        """`job`: a name in jobs/, or a module with its packages."""
        target = ["-m", job] if "." in job else [str(ROOT / "jobs" / f"{job}.py")]
        command = [sys.executable, *target, *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": head.address, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self, timeout_s: float = 300) -> tuple[int, str]:
        """Exit code and all output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output


def wait_until(condition: Callable[[], bool], driver: Driver, timeout_s: float = 180) -> None:
    """Poll until the condition holds; fails if the driver ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if driver.process.poll() is not None:
            raise AssertionError(f"the driver ended: {driver.wait()}")
        if time.monotonic() > deadline:
            driver.process.kill()
            raise AssertionError(f"not in {timeout_s} s: {driver.wait()}")
        time.sleep(0.05)


def submit(head: Head, working_dir: Path, *entrypoint: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of `ray job submit --working-dir ... -- ENTRYPOINT`."""
    command = [
        str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", head.dashboard,
        "--working-dir", str(working_dir),
        "--runtime-env-json", json.dumps({"env_vars": variables}), "--", *entrypoint,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=dict(os.environ), cwd=ROOT
    )
    return done.returncode, done.stdout + done.stderr
