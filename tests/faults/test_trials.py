"""Trials of Ray Tune as thin drivers: they are shown, stopped, and die."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.util.state import list_actors

from tests.conftest import Digits, Head
from tests.end_to_end.runs import checkpoint_steps, runs_of, same_weights, weights_of
from tests.faults.runs import STEPS, long_recipe
from tests.recipes import small_recipe
from vit_ray.config import Recipe
from vit_ray.experiments.parent_run import OpenParent, open_parent
from vit_ray.experiments.runner import Flow, Work
from vit_ray.experiments.training import Outcome
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.pool.pool_keeper import keeper
from vit_ray.outcomes import TrialState


def trial_pids(head: Head) -> list[int]:
    filters = [("class_name", "=", "ImplicitFunc"), ("state", "=", "ALIVE")]
    return [one.pid for one in list_actors(head.dashboard, filters=filters, detail=True)]


def run_works(recipe: Recipe, works: Callable[[OpenParent], list[Work]]) -> list[Outcome]:
    """Outcomes of work under a parent run of the recipe's name."""
    with open_parent(recipe, "sweep", resolve_run(recipe), 1) as parent:

        def flow() -> Flow[list[Outcome]]:
            return (yield works(parent))

        found = parent.run_flow(flow(), None)
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


def test_a_trial_killed_in_its_training_resumes_and_leaves_no_workers_behind(
    ray_cluster: Head, digits: Digits, folder: Path, undisturbed: Recipe
) -> None:
    recipe = long_recipe("killed-trial", digits, folder)
    num_started: list[int] = []

    def kill() -> None:
        while len(checkpoint_steps(recipe)) < 2:
            ended.wait(0.05)
        os.kill(int(pid.read_text()), signal.SIGKILL)

    def works(parent: OpenParent) -> list[Work]:
        def note(*_: Any) -> None:
            num_started.append(ray.get(keeper().num_started.remote(), timeout=60))

        training = parent.training(recipe, "pretrain", begin=partial(note_pid, pid))
        return [Work(training, on_end=note)]

    ended, pid = threading.Event(), folder / "pid-of-killed-trial"
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    (outcome,) = run_works(recipe.with_changes(name="parent-of-killed"), works)
    killer.join(60)
    assert (outcome.error, outcome.state, outcome.steps) == ("", TrialState.FINISHED, STEPS)
    assert num_started == [2]  # the first has lost its places with its trial
    assert same_weights(weights_of(recipe), weights_of(undisturbed))
    (run,) = [one for one in runs_of(recipe) if one.info.run_name == recipe.name]
    assert run.info.status == "FINISHED"
    assert run.data.tags["vit_ray.events.resumed"] == "1"


def test_a_rung_stops_a_trial_and_its_process_trains_the_next(
    ray_cluster: Head, digits: Digits, tmp_path: Path
) -> None:
    recipe = small_recipe("rungs", digits, tmp_path, optim={"steps": 8})
    pids: set[int] = set()

    def goes_on(training: Any, outcome: Outcome) -> bool:
        pids.update(trial_pids(ray_cluster))
        return outcome.is_over or training.label == "b"

    def works(parent: OpenParent) -> list[Work]:
        trainings = [
            parent.training(recipe.with_changes(name=f"rungs-{name}"), "pretrain", rungs=(4,))
            for name in "ab"
        ]
        return [Work(training, goes_on=goes_on) for training in trainings]

    stopped, whole = run_works(recipe.with_changes(workers={"num_workers": 2}), works)
    assert (stopped.state, stopped.steps) == (TrialState.STOPPED_EARLY, 4)
    assert (whole.state, whole.steps) == (TrialState.FINISHED, 8)
    assert stopped.top1 is not None
