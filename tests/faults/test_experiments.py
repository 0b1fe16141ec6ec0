"""Drivers of experiments are stopped and killed, and the same command continues.

Of a sweep by random sequences: `VIT_RAY_SEQUENCES` says how many; a number always has the same
signals, at the same parts of the time that the undisturbed sweep takes. The rungs of ASHA start
empty in each driver, so that other trials may be stopped: what two sweeps have both trained is
equal.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Digits, Head
from tests.end_to_end.runs import (
    Driver,
    checkpoint_steps,
    curve,
    runs_of,
    same_weights,
    weights_of,
    write_recipe,
)
from tests.faults.runs import (
    STEPS,
    STOPPED,
    actors_of,
    end,
    kinds_of,
    long_recipe,
    start,
    wait_until_nothing_is_left,
    worker_pids,
)
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.experiments.search_space import RATE, trial_recipe
from vit_ray.experiments.study import run_study
from vit_ray.experiments.study_cells import study_cells
from vit_ray.experiments.vtab import task_recipe
from vit_ray.launch.run import train
from vit_ray.outcomes import EventKind

RATES = (0.003, 0.03, 0.01, 0.1, 0.0001)
KILL, TERM, INT, HUP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP
WAYS = ([KILL], [KILL], [TERM], [TERM, TERM], [INT], [HUP])
SEQUENCES = int(os.environ.get("VIT_RAY_SEQUENCES", "2"))
ASHA = {"scheduler": "asha", "grace_steps": 2}


def test_a_vtab_job_that_is_stopped_and_then_killed_continues(ray_cluster, digits, folder):
    pretrained = small_recipe("pretrained-for-experiments", digits, folder, optim={"steps": 8})
    train(pretrained)
    for task in ("one", "other"):
        (folder / "vtab" / task).mkdir(parents=True)
        for part, path in (("train", digits.train), ("test", digits.test)):
            (folder / "vtab" / task / part).symlink_to(path)
    names = [{"name": "one", "group": "natural"}, {"name": "other", "group": "specialized"}]
    recipe = long_recipe(
        "vtab", digits, folder, init_from=pretrained.run_folder, workers={"num_workers": 1},
        vtab={"data": str(folder / "vtab"), "tasks": names},
    )  # fmt: skip
    assert recipe.vtab is not None
    tasks = [task_recipe(recipe, task) for task in recipe.vtab.tasks]
    before = actors_of(ray_cluster)
    driver = start(recipe, ray_cluster, folder, "vtab", lambda: all(map(checkpoint_steps, tasks)))
    end(driver, STOPPED, by=signal.SIGTERM)
    wait_until_nothing_is_left(ray_cluster, before)
    driver = start(recipe, ray_cluster, folder, "vtab", lambda: bool(worker_pids(ray_cluster)))
    end(driver, -signal.SIGKILL, by=signal.SIGKILL)
    wait_until_nothing_is_left(ray_cluster, before)
    end(start(recipe, ray_cluster, folder, "vtab", lambda: True))
    wait_until_nothing_is_left(ray_cluster, before)
    (whole,) = [run for run in runs_of(recipe) if run.data.tags["vit_ray.kind"] == "vtab"]
    assert whole.info.status == "FINISHED"
    found = whole.data.metrics
    assert found["vtab/tasks"] == 2
    # Both tasks are the same training.
    assert found["vtab/one_top1"] == found["vtab/other_top1"] > 0.5
    runs = {one.info.run_name: one for one in runs_of(recipe)}
    for task in tasks:
        assert runs[task.name].info.status == "FINISHED"
        assert EventKind.RESUMED in kinds_of(task)


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_a_stop_of_a_sweep_reaches_its_trials_and_the_same_command_goes_on(
    ray_cluster, digits, folder, number
):
    recipe = long_recipe(f"sweep-{number.name}", digits, folder).with_changes(
        workers={"num_workers": 1},
        sweep={"learning_rates": [0.001, 0.01], "dev_fraction": 0.1, "seeds": 1},
    )
    trials = [trial_recipe(recipe, {RATE: rate}) for rate in (0.001, 0.01)]
    driver = start(recipe, ray_cluster, folder, "sweep", lambda: any(map(checkpoint_steps, trials)))
    end(driver, STOPPED, by=number)
    stopped_at = [checkpoint_steps(trial)[-1:] for trial in trials]
    assert all(steps < [STEPS] for steps in stopped_at)
    end(start(recipe, ray_cluster, folder, "sweep", lambda: True))
    assert any(EventKind.RESUMED in kinds_of(trial) for trial in trials), stopped_at


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_a_stop_of_a_study_reaches_its_cell_and_the_same_command_goes_on(
    ray_cluster, digits, folder, number
):
    recipe = long_recipe(f"study-{number.name}", digits, folder)
    shape = recipe.model.model_dump(mode="json")
    recipe = recipe.with_changes(
        workers={"num_workers": 1},
        study={
            "models": [{"label": "tiny", "model": shape}],
            "data_fractions": [0.25, 1.0],
            "epochs": [25],
            "max_concurrent": 1,
        },
    )
    first, second = (cell.recipe for cell in study_cells(recipe))
    driver = start(
        recipe, ray_cluster, folder, "scaling_study", lambda: bool(checkpoint_steps(second))
    )
    end(driver, STOPPED, by=number)
    stopped_at = checkpoint_steps(second)[-1]
    before = weights_of(first)
    end(start(recipe, ray_cluster, folder, "scaling_study", lambda: True))
    assert checkpoint_steps(second)[-1] > stopped_at
    assert kinds_of(second).count(EventKind.RESUMED) == 1
    assert EventKind.RESUMED not in kinds_of(first)
    assert same_weights(weights_of(first), before)


def test_a_branch_of_a_study_ends_with_the_weights_of_a_run_of_its_own(
    ray_cluster, digits, tmp_path
):
    model = {"model": {"dropout": 0.1}}  # whose masks go on with the samples
    recipe = small_recipe("branching", digits, tmp_path).with_changes(
        optim={"schedule": "cooldown", "cooldown_fraction": 0.3},
        checkpoint={"every_steps": None},
        workers={"num_workers": 1},
        study={"models": [{"label": "a", "changes": model}], "steps": [20, 40], "branch": True},
    )
    result = run_study(recipe)
    assert result.published.is_complete
    short, long = result.cells
    assert short.branched_from == f"{long.cell.name} at step 14"
    assert not long.branched_from
    straight = short.cell.recipe.with_changes(name="straight")
    train(straight)
    assert same_weights(weights_of(short.cell.recipe), weights_of(straight))
    exaflops = [cell.outcome.metrics["study/exaflops"] for cell in (short, long)]
    assert exaflops[0] == exaflops[1] / 2


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

    def curves(self) -> dict[tuple[str, str], dict[int, float]]:
        """Losses and accuracies by step, of each run and by what they are of."""
        runs = runs_of(self.recipe)
        found = {
            (run.info.run_name, key): dict(curve(self.recipe, run.info.run_id, key))
            for run in runs
            for key in ("train/loss", "dev/top1")
        }
        assert len(found) == 2 * len(runs)
        return found

    def weights(self, name: str) -> dict[str, Any]:
        return weights_of(self.recipe.with_changes(name=name))

    def ended(self) -> dict[str, int | None]:
        """Trainings that have finished, and when."""
        return {
            run.info.run_id: run.info.end_time
            for run in runs_of(self.recipe)
            if run.info.status == "FINISHED" and run.data.tags["vit_ray.kind"] != "sweep"
        }


def run_sweep(
    head: Head, digits: Digits, folder: Path, interruptions: Any = (), **how: Any
) -> Sweep:
    """A driver for each interruption, by signals some seconds after its start, and a last one."""
    recipe = sweep_recipe(digits, folder, **how)
    arguments, before = str(write_recipe(recipe, folder)), actors_of(head)
    sweep, kept = Sweep(recipe, 0.0), dict[str, int | None]()
    for signals, after_s in [*interruptions, ([], None)]:
        start_s, driver = time.monotonic(), Driver(head, "sweep", arguments)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if signals:
                driver.process.wait(after_s)
        for number in signals:
            driver.process.send_signal(number)  # nothing where it has ended
            time.sleep(0.2)
        code, output = driver.wait()
        killed = {*(-one for one in signals), *(128 + one for one in signals)}
        assert code in ({0, STOPPED, *killed} if signals else {0}), output
        sweep.seconds = time.monotonic() - start_s
        wait_until_nothing_is_left(head, before)
        # What had finished was not trained again.
        assert kept.items() <= sweep.ended().items(), interruptions
        kept = sweep.ended()
    return sweep


@pytest.fixture(scope="module")
def whole(ray_cluster: Head, digits: Digits, folder: Path) -> Sweep:
    """An undisturbed sweep of a grid."""
    return run_sweep(ray_cluster, digits, folder / "whole-sweep")


def disturbed(
    sequence: int, head: Head, digits: Digits, folder: Path, whole: Sweep, **how: Any
) -> Sweep:
    draw = random.Random(sequence)
    interruptions = [
        (draw.choice(WAYS), whole.seconds * draw.uniform(0.05, 1))
        for _ in range(draw.randint(1, 3))
    ]
    return run_sweep(head, digits, folder / f"sweep-{sequence}", interruptions, **how)


def trained_alike(found: Any, expected: Any) -> None:
    """At the steps that both have: a driver that goes on logs its first step, too."""
    for name, points in expected.items():
        both = found[name].keys() & points.keys()
        assert [found[name][step] for step in both] == pytest.approx(
            [points[step] for step in both], rel=0, abs=0, nan_ok=True
        )  # a first metric that has no value yet is NaN at step 0


@pytest.mark.parametrize("sequence", range(SEQUENCES))
def test_a_sweep_whose_driver_is_killed_and_started_again_is_that_of_an_undisturbed_one(
    sequence, ray_cluster, digits, folder, whole
):
    sweep, expected = disturbed(sequence, ray_cluster, digits, folder, whole), whole.curves()
    found = sweep.curves()
    assert found.keys() == expected.keys()
    assert len(sweep.ended()) == len(whole.ended())
    trained_alike(found, expected)
    trained = [name for (name, key), points in expected.items() if key == "train/loss" and points]
    for name in trained:
        assert same_weights(sweep.weights(name), whole.weights(name)), name


@pytest.mark.parametrize("sequence", range(SEQUENCES, 2 * SEQUENCES))
def test_under_asha_no_trial_is_lost_and_what_two_sweeps_have_trained_is_equal(
    sequence, ray_cluster, digits, folder, whole
):
    found = disturbed(sequence, ray_cluster, digits, folder, whole, **ASHA).curves()
    expected = {key: one for key, one in whole.curves().items() if "-final-" not in key[0]}
    assert expected.keys() <= found.keys()
    trained_alike(found, expected)
