"""Runs that are long enough to be disturbed, and what their drivers are started with."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.util.state import list_actors, list_placement_groups

from tests.conftest import Digits, Head
from tests.end_to_end.runs import (
    Driver,
    checkpoint_steps,
    curve,
    runs_of,
    same_weights,
    wait_until,
    weights_of,
    write_recipe,
)
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.measure.phases import Phase
from vit_ray.outcomes import EventKind
from vit_ray.tracking.metrics_log import MetricsLog, metrics_log_path

# Long enough that there is time to interfere after the first checkpoint.
STEPS = 600
EVERY = 40
END_S = 60
OF_THE_CLUSTER = ("_StatsActor", "_AutoscalingCoordinatorActor", "PlacementGroupCleaner")
"""Actors that Ray Data starts once for all jobs; and a detached one of each Ray Train controller,
which Ray 2.60 leaves without work if the controller dies before that actor has started."""
MOST = 10_000
STOPPED = 3
"""Exit code of a driver that was stopped on request."""


def long_recipe(name: str, digits: Digits, folder: Path, **sections: Any) -> Recipe:
    recipe = small_recipe(
        name, digits, folder, optim={"steps": STEPS, "schedule": "constant"},
        checkpoint={"every_steps": EVERY, "keep_last": 3}, train={"log_every_steps": 50},
    )  # fmt: skip
    return recipe.with_changes(**sections)


def start(
    recipe: Recipe, head: Head, folder: Path, job: str = "pretrain",
    has_begun: Callable[[], bool] | None = None,
) -> Driver:  # fmt: skip
    """A driver whose run has its first checkpoint, or has come where `has_begun` says."""
    driver = Driver(head, job, str(write_recipe(recipe, folder)))
    wait_until(has_begun or (lambda: bool(checkpoint_steps(recipe))), driver)
    return driver


def start_of_workers(recipe: Recipe, head: Head, folder: Path, before: set[int]) -> Driver:
    """A driver whose workers have processes, and have not met yet."""
    return start(recipe, head, folder, has_begun=lambda: len(set(worker_pids(head)) - before) == 2)


def end(driver: Driver, code: int = 0, by: signal.Signals | None = None) -> None:
    """Wait for a driver, which is told to stop by a signal or not, to end with this code."""
    if by is not None:
        driver.process.send_signal(by)
    found, output = driver.wait()
    assert found == code, output


def ends_as(recipe: Recipe, undisturbed: Recipe) -> None:
    """With the same weights, and each logged step once in the loss curve of one MLflow run."""
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    (run,) = [run for run in runs_of(recipe) if run.info.run_name == recipe.name]
    steps = [step for step, _ in curve(recipe, run.info.run_id)]
    assert len(steps) == len(set(steps))
    assert steps[-1] == STEPS


def seconds_of(recipe: Recipe) -> dict[str, float]:
    """Where the time of a run went, by phase, and `wall`."""
    (run,) = [run for run in runs_of(recipe) if run.info.run_name == recipe.name]
    held = run.data.metrics
    seconds = {str(kind): held[f"run/{kind}_s"] for kind in Phase}
    wall_s = held["run/wall_s"]
    assert sum(seconds.values()) == pytest.approx(wall_s)
    return {**seconds, "wall": wall_s}


def events_of(recipe: Recipe) -> list[tuple[EventKind, int]]:
    """Kind and step of what happened to a run, in its order: texts are for people."""
    log = MetricsLog(metrics_log_path(recipe.run_folder))
    found = [record for record, _ in log.read(0, log.size) if record["kind"] == "event"]
    return [(EventKind(one["event"]), one["step"]) for one in found]


def kinds_of(recipe: Recipe) -> list[EventKind]:
    return [kind for kind, _ in events_of(recipe)]


def is_lost_until_noticed(recipe: Recipe, struck_s: float) -> bool:
    """Whether the time from a fault until it was noticed counts as lost."""
    events = MetricsLog(metrics_log_path(recipe.run_folder)).records("event")
    failed = EventKind.WORKER_FAILED
    noticed_s = next(one["time_ms"] / 1000 for one in events if one["event"] == failed)
    return seconds_of(recipe)["lost"] > noticed_s - struck_s


def worker_pids(head: Head, kind: str = "RayTrainWorker") -> list[int]:
    """Of all workers that train, or of actors of another kind."""
    filters = [("class_name", "=", kind), ("state", "=", "ALIVE")]
    # By address: there may be other clusters on this machine.
    return [actor.pid for actor in list_actors(head.dashboard, filters=filters, detail=True)]


def groups(head: Head, sign: str, state: str) -> set[str]:
    """Placement groups whose state is that, or is not."""
    found = list_placement_groups(head.dashboard, filters=[("state", sign, state)], limit=MOST)
    return {one.placement_group_id for one in found}


def wait_until_nothing_is_left(head: Head, but_for: set[str]) -> None:
    """Of a driver that was killed: no process, and no place that is kept or waited for."""
    left: list[str] = []
    for _ in range(2 * END_S):
        filters = [("state", "=", "ALIVE")]
        actors = list_actors(head.dashboard, filters=filters, detail=True, limit=MOST)
        actors = [one for one in actors if one.class_name not in OF_THE_CLUSTER]
        left = [f"{one.class_name} {one.pid}" for one in actors if one.actor_id not in but_for]
        left += [f"group {one}" for one in groups(head, "!=", "REMOVED")]
        if not left:
            return
        time.sleep(0.5)
    raise AssertionError(left)


def actors_of(head: Head) -> set[str]:
    found = list_actors(head.dashboard, filters=[("state", "=", "ALIVE")])
    return {one.actor_id for one in found}
