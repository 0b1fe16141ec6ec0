"""Random sequences of kills and stops of a sweep's driver: the sweep is that of an undisturbed one.

`VIT_RAY_SEQUENCES` says how many; a number always has the same signals, at the same parts of the
time that the undisturbed sweep takes. The rungs of ASHA start empty in each driver, so that other
trials may be stopped: what two sweeps have both trained is equal.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.conftest import Digits, Head
from tests.end_to_end.runs import Driver, runs_of, same_weights, weights_of, write_recipe
from tests.faults.runs import STOPPED, actors_of, wait_until_nothing_is_left
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import RATE, final_recipe, trial_recipe

RATES = (0.003, 0.03, 0.01, 0.1, 0.0001)
WAYS = ([signal.SIGKILL], [signal.SIGKILL], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM])
SEQUENCES = int(os.environ.get("VIT_RAY_SEQUENCES", "2"))


ASHA = {"scheduler": "asha", "grace_steps": 2}


def sweep_recipe(digits: Digits, folder: Path, **how: Any) -> Recipe:
    """One trial at a time: which come to a rung first decides which others ASHA stops."""
    folder.mkdir(exist_ok=True)
    sweep = {
        "learning_rates": RATES, "dev_fraction": 0.1, "seeds": 1, "max_concurrent": 1, **how,
    }  # fmt: skip
    return small_recipe(
        "killed-sweep", digits, folder, sweep=sweep, workers={"num_workers": 1},
        checkpoint={"every_steps": 4},
    )  # fmt: skip


@dataclass
class Sweep:
    """A sweep whose driver has come to its end."""

    recipe: Recipe
    seconds: float
    kept: dict[str, int | None] = field(default_factory=dict)
    """Runs that had finished when a driver was killed, with the times of their ends."""

    def runs(self) -> dict[str, tuple[str, str | None, dict[str, float]]]:
        """State, words on its stop, and accuracies and losses of each run, by name."""
        found = {}
        for run in runs_of(self.recipe):
            metrics = {
                key: value
                for key, value in run.data.metrics.items()
                if key.split("/")[0] in ("dev", "eval") and "per_s" not in key
            }
            stopped = run.data.tags.get("vit_ray.stopped_early")
            assert run.info.run_name not in found, run.info.run_name
            found[run.info.run_name] = (run.info.status, stopped, metrics)
        return found

    def curves(self) -> dict[str, dict[str, dict[int, float]]]:
        """Losses and accuracies of each run by step."""
        client = MlflowClient(self.recipe.tracking.uri)
        found = {}
        for run in runs_of(self.recipe):
            points = {
                key: client.get_metric_history(run.info.run_id, key)
                for key in ("train/loss", "dev/top1")
            }
            found[run.info.run_name] = {
                key: {point.step: point.value for point in history}
                for key, history in points.items()
            }
        return found

    def trained(self) -> list[Recipe]:
        """All trials, and the one retraining."""
        trials = [trial_recipe(self.recipe, {RATE: rate}) for rate in RATES]
        finals = [final_recipe(self.recipe, {RATE: rate}, self.recipe.seed) for rate in RATES]
        names = self.runs()
        return [*trials, *(one for one in finals if one.name in names)]

    def ended(self) -> dict[str, int | None]:
        """Trainings that have finished, and when."""
        return {
            run.info.run_id: run.info.end_time
            for run in runs_of(self.recipe)
            if run.info.status == "FINISHED" and run.data.tags["vit_ray.kind"] != "sweep"
        }


def run_sweep(
    head: Head,
    digits: Digits,
    folder: Path,
    interruptions: Sequence[tuple[Sequence[int], float]],
    **how: Any,
) -> Sweep:
    """A driver for each interruption, by signals some seconds after its start, and a last one."""
    sweep = Sweep(sweep_recipe(digits, folder, **how), 0.0)
    arguments, before = str(write_recipe(sweep.recipe, folder)), actors_of(head)
    for signals, after_s in interruptions:
        driver = Driver(head, "sweep", arguments)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.process.wait(after_s)
        for number in signals:
            driver.process.send_signal(number)  # nothing where it has ended
            time.sleep(0.2)
        code, output = driver.wait()
        # 15: while Ray starts, which has a handler of its own for that time.
        killed = {signal.SIGTERM, *(-one for one in signals), *(128 + one for one in signals)}
        assert code in {0, STOPPED, *killed}, output
        wait_until_nothing_is_left(head, before)
        sweep.kept |= {run: end for run, end in sweep.ended().items() if run not in sweep.kept}
    start_s = time.monotonic()
    code, output = Driver(head, "sweep", arguments).wait()
    assert code == 0, output
    sweep.seconds = time.monotonic() - start_s
    wait_until_nothing_is_left(head, before)
    return sweep


@pytest.fixture(scope="module")
def whole(ray_cluster: Head, digits: Digits, folder: Path) -> Sweep:
    """An undisturbed sweep of a grid."""
    return run_sweep(ray_cluster, digits, folder / "whole-sweep", [])


def disturbed(
    sequence: int, head: Head, digits: Digits, folder: Path, whole: Sweep, **how: Any
) -> Sweep:
    draw = random.Random(sequence)
    interruptions = [
        (draw.choice(WAYS), whole.seconds * draw.uniform(0.05, 1))
        for _ in range(draw.randint(1, 3))
    ]
    sweep = run_sweep(head, digits, folder / f"sweep-{sequence}", interruptions, **how)
    # What had finished was not trained again.
    assert sweep.kept.items() <= sweep.ended().items(), interruptions
    return sweep


@pytest.mark.parametrize("sequence", range(SEQUENCES))
def test_a_sweep_whose_driver_is_killed_and_started_again_is_that_of_an_undisturbed_one(
    sequence, ray_cluster, digits, folder, whole
):
    sweep = disturbed(sequence, ray_cluster, digits, folder, whole)
    assert sweep.runs() == whole.runs()
    for one, other in zip(sweep.trained(), whole.trained(), strict=True):
        assert same_weights(weights_of(one), weights_of(other)), one.name


@pytest.mark.parametrize("sequence", range(SEQUENCES, 2 * SEQUENCES))
def test_under_asha_no_trial_is_lost_and_what_two_sweeps_have_trained_is_equal(
    sequence, ray_cluster, digits, folder, whole
):
    found = disturbed(sequence, ray_cluster, digits, folder, whole, **ASHA).curves()
    names = {name for name in whole.curves() if "-final-" not in name}
    assert names <= found.keys()
    for name in names:
        for key, curve in whole.curves()[name].items():
            both = found[name][key].keys() & curve.keys()
            assert {step: found[name][key][step] for step in both} == {
                step: curve[step] for step in both
            }, name
