"""Trials of Ray Tune as thin drivers: they are shown, stopped, and die."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

from tests.conftest import Digits, Head
from tests.end_to_end.runs import checkpoint_steps, runs_of, same_weights, weights_of
from tests.faults.runs import (
    STEPS,
    actors_of,
    long_recipe,
    wait_until_nothing_is_left,
    worker_pids,
)
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.config.recorded_recipe import tags_of
from vit_ray.experiments import parent_run
from vit_ray.experiments.parent_run import OpenParent, open_parent
from vit_ray.experiments.runner import Flow, Room, Work
from vit_ray.experiments.training import Outcome
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.pool.pool_keeper import keeper
from vit_ray.launch.run import train
from vit_ray.outcomes import TrialState


def run_works(
    recipe: Recipe, works: Callable[[OpenParent], list[Work]], max_runs: int | None = None
) -> list[Outcome]:
    """Outcomes of work under a parent run of the recipe's name."""
    with open_parent(recipe, "sweep", resolve_run(recipe), 1) as parent:

        def flow() -> Flow[list[Outcome]]:
            return (yield works(parent))

        found = parent.run_flow(flow(), max_runs)
    assert found is not None
    return found


def refuse(text: str, _: Any) -> str:
    raise ValueError(text)


def die_once(folder: Path, _: Any) -> str:
    pids = folder / "pids"
    pids.write_text(f"{pids.read_text() if pids.exists() else ''}{os.getpid()} ")
    if len(pids.read_text().split()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("the second attempt")


def note_pid(file: Path, _: Any) -> str:
    file.write_text(str(os.getpid()))
    return ""


def test_ray_tune_sees_what_varies_and_a_trial_whose_process_dies_is_started_again(
    ray_cluster: Head, digits: Digits, tmp_path: Path
) -> None:
    recipe = small_recipe("shown", digits, tmp_path)
    points: dict[str, dict[str, Any]] = {
        "a": {"optim.learning_rate": 0.1, "optim.frozen": ["head", "norm"], "optim.images": None},
        "b": {"optim.learning_rate": 0.2, "optim.frozen": [], "optim.images": 7},
    }

    def works(parent: OpenParent) -> list[Work]:
        begin = [partial(die_once, tmp_path), partial(refuse, "the first attempt")]
        return [
            Work(
                parent.training(recipe.with_changes(name=name), "finetune", point=point, begin=each)
            )
            for (name, point), each in zip(points.items(), begin, strict=True)
        ]

    outcomes = run_works(recipe, works)
    assert [one.error for one in outcomes] == ["the second attempt", "the first attempt"]
    assert [one.point for one in outcomes] == list(points.values())
    assert len(set((tmp_path / "pids").read_text().split())) == 2
    shown = tune.ExperimentAnalysis(str(tmp_path / "runs" / "tune" / "shown-tune"))
    trials = [
        {**config, "trial": str(config["trial"])} for config in shown.get_all_configs().values()
    ]
    kept = [path for path in (tmp_path / "runs" / "tune").rglob("*") if path.is_file()]
    assert kept  # Ray Tune's own files: they have no recipe, whose addresses may hold a password
    assert [path for path in kept if digits.train.encode() in path.read_bytes()] == []
    assert sorted(trials, key=lambda config: config["optim.learning_rate"]) == [
        {"trial": "a", **points["a"], "optim.frozen": '["head", "norm"]'},
        {"trial": "b", **points["b"], "optim.frozen": "[]"},
    ]


@pytest.mark.parametrize(
    ("killed", "pools"),
    [
        ("trial", 2),  # the first has lost its places with its trial
        ("keeper", 1),  # of the next keeper
    ],
)
def test_a_trial_resumes_whose_process_or_whose_pools_keeper_is_killed(
    killed: str, pools: int, ray_cluster: Head, digits: Digits, folder: Path, undisturbed: Recipe
) -> None:
    recipe = long_recipe(f"killed-{killed}", digits, folder)
    before = actors_of(ray_cluster)
    num_started: list[int] = []
    ended, pid = threading.Event(), folder / f"pid-of-{killed}"

    def kill() -> None:
        while len(checkpoint_steps(recipe)) < 2:
            ended.wait(0.05)
        (its_keeper,) = worker_pids(ray_cluster, "PoolKeeper")
        os.kill(int(pid.read_text()) if killed == "trial" else its_keeper, signal.SIGKILL)

    def works(parent: OpenParent) -> list[Work]:
        def note(*_: Any) -> None:
            num_started.append(ray.get(keeper().num_started.remote(), timeout=60))

        training = parent.training(recipe, "pretrain", begin=partial(note_pid, pid))
        return [Work(training, on_end=note)]

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    (outcome,) = run_works(recipe.with_changes(name=f"parent-of-{killed}"), works)
    killer.join(60)
    assert (outcome.error, outcome.state, outcome.steps) == ("", TrialState.FINISHED, STEPS)
    assert num_started == [pools]
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    (run,) = [one for one in runs_of(recipe) if one.info.run_name == recipe.name]
    assert run.info.status == "FINISHED"
    assert tags_of(run.data.tags)["vit_ray.events.resumed"] == "1"
    wait_until_nothing_is_left(ray_cluster, before)


def test_a_rung_stops_a_trial_and_its_process_and_pool_train_the_next_bit_equal_to_a_cold_run(
    ray_cluster: Head, digits: Digits, tmp_path: Path
) -> None:
    recipe = small_recipe("rungs", digits, tmp_path, optim={"steps": 8})
    num_started: list[int] = []

    def goes_on(training: Any, outcome: Outcome) -> bool:
        return outcome.is_over or training.label == "b"

    def note(*_: Any) -> None:
        num_started.append(ray.get(keeper().num_started.remote(), timeout=60))

    def works(parent: OpenParent) -> list[Work]:
        trainings = [
            parent.training(
                recipe.with_changes(name=f"rungs-{name}"),
                "pretrain",
                rungs=(4,),
                begin=partial(note_pid, tmp_path / name),
            )
            for name in "ab"
        ]
        return [Work(training, goes_on=goes_on, on_end=note) for training in trainings]

    stopped, whole = run_works(recipe, works, max_runs=1)
    assert (stopped.state, stopped.steps) == (TrialState.STOPPED_EARLY, 4)
    assert (whole.state, whole.steps) == (TrialState.FINISHED, 8)
    assert stopped.top1 is not None
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert num_started == [1, 1]
    cold = recipe.with_changes(name="cold")
    train(cold)
    assert same_weights(weights_of(recipe.with_changes(name="rungs-b")), weights_of(cold))


@pytest.mark.parametrize("alike", [True, False])
def test_a_trial_whose_workers_find_no_place_gets_that_of_one_that_has_ended(
    alike: bool, ray_cluster: Head, digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an autoscaler cannot start the nodes that it may start."""
    monkeypatch.setattr(parent_run, "cluster_room", lambda *_: Room(0, 100))
    recipe = small_recipe("crowded", digits, tmp_path, optim={"steps": 8})
    shapes = [
        {"num_workers": count, "cpus_per_worker": 3.0 / count, "place_timeout_minutes": 1.0}
        for count in (1, 1 if alike else 2)
    ]
    num_started: list[int] = []

    def note(*_: Any) -> None:
        num_started.append(ray.get(keeper().num_started.remote(), timeout=60))

    def works(parent: OpenParent) -> list[Work]:
        names = [f"crowded-{number}" for number in range(2)]
        recipes = [
            recipe.with_changes(name=n, workers=s) for n, s in zip(names, shapes, strict=True)
        ]
        return [Work(parent.training(one, "pretrain"), on_end=note) for one in recipes]

    outcomes = run_works(recipe.with_changes(workers=shapes[0]), works)
    assert [one.error for one in outcomes] == ["", ""]
    assert num_started == [2, 2]  # both at the start: the second was waiting
