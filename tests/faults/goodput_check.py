"""Goodput of a run whose workers die at random times, beside what the planner's model gives for it.

    python -m tests.faults.goodput_check FOLDER

A worker is killed again and again, after exponential times as the model has them; a step lasts as
long on any machine, since it mostly sleeps. What a restart and a checkpoint cost is the run's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import psutil

from tests.conftest import ROOT
from tests.faults.host_cluster import converted_digits
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.launch.record.run_time import marks_of
from vit_ray.measure.failures import Interruptions
from vit_ray.measure.goodput import TimeClass, account
from vit_ray.outcomes import EventKind
from vit_ray.tracking.metrics_log import MetricsLog

STEPS: Final = 1200
EVERY: Final = 20
"""Steps between two checkpoints."""
LOGGED: Final = 4
FAILURE_S: Final = 45.0
"""Mean time between two kills."""
_ONCE: Final = (TimeClass.PLACE, TimeClass.ENDING, TimeClass.STOPPED)
_RESTART: Final = (TimeClass.STARTING, TimeClass.RESTORING, TimeClass.LOST)
_TRAINED: Final = (TimeClass.TRAINING, TimeClass.DATA)


def pace(step: int, metrics: object) -> None:
    """A part of the recipe, on rank 0: four steps take a second, whatever else the machine does."""
    time.sleep(1.0)


def train_and_kill(recipe: Recipe, folder: Path, rng: np.random.Generator) -> None:
    """The run to its end, on a Ray of its own."""
    path = folder / "recipe.json"
    path.write_text(recipe.model_dump_json())
    command = [sys.executable, str(ROOT / "jobs" / "pretrain.py"), str(path)]
    environment = {**os.environ, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    with open(folder / "run.log", "ab") as log:
        driver = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    while "first step:" not in (folder / "run.log").read_text():
        assert driver.poll() is None, "the run failed: see run.log"
        time.sleep(0.1)
    while driver.poll() is None:
        next_s = time.monotonic() + rng.exponential(FAILURE_S)
        while time.monotonic() < next_s and driver.poll() is None:
            time.sleep(0.1)
        for process in psutil.process_iter(["name", "environ"]):
            if "RayTrainWorker" in (process.info["name"] or "") and (
                (process.info["environ"] or {}).get("HOME") == environment["HOME"]
            ):
                process.kill()
                break
    assert driver.returncode == 0, "the run failed: see run.log"


def main() -> int:
    """Run, and print the figures."""
    folder = Path(sys.argv[1]).absolute()
    (folder / "home").mkdir(parents=True, exist_ok=True)
    digits = converted_digits(folder / "data")
    recipe = small_recipe(
        "killed", digits, folder, optim={"steps": STEPS}, checkpoint={"every_steps": EVERY},
        train={"log_every_steps": LOGGED, "callbacks": ["tests.faults.goodput_check.pace"]},
        workers={"max_failures": -1},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    train_and_kill(recipe, folder, rng)
    (log,) = (folder / "runs").rglob("killed/metrics.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    failed_s = [
        one["time_ms"] / 1e3 for one in records if one.get("event") == EventKind.WORKER_FAILED
    ]
    failures = len(failed_s)
    spent = account(marks_of(MetricsLog(log).timeline())).seconds
    began_ms = min(one["time_ms"] for one in records if one.get("event") == EventKind.FIRST_STEP)
    first_s = began_ms / 1e3 - min(one["began_s"] for one in records if one.get("began_s"))
    wall_s = sum(spent.values()) - first_s - sum(spent[kind] for kind in _ONCE)
    trained_s = sum(spent[kind] for kind in _TRAINED)
    restart_s = (sum(spent[kind] for kind in _RESTART) - first_s) / failures
    model = Interruptions(FAILURE_S, restart_s, spent[TimeClass.CHECKPOINT] / (STEPS / EVERY))
    interval_s = trained_s / STEPS * EVERY
    runs_s = model.simulated_s(interval_s, trained_s, 4000, rng)
    low, middle, high = np.percentile(trained_s / runs_s, [5, 50, 95])
    gaps_s = iter([*np.diff([began_ms / 1e3, *failed_s]), *[1e9] * failures])
    own = SimpleNamespace(exponential=lambda *_: np.array([next(gaps_s)]))
    traced = trained_s / model.simulated_s(interval_s, trained_s, 1, cast(Any, own)).item()
    print(f"{failures} kills in {wall_s:.0f} s, {restart_s:.1f} s from each to the next step")
    print(f"goodput {trained_s / wall_s:.1%}; by the formula {model.goodput(interval_s):.1%}, "
          f"in simulated runs {middle:.1%} ({low:.1%} to {high:.1%}), "
          f"in one that is killed at the same times {traced:.1%}")  # fmt: skip
    return 0 if low <= trained_s / wall_s <= high else 1


if __name__ == "__main__":
    sys.exit(main())
