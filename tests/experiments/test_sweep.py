"""Points of a sweep, and what it selects, retrains and reports: on fake trainings, without Ray."""

import importlib.util
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.schedulers import ASHAScheduler

from tests.experiments.trials_here import in_process, kinds, parent_of, result_of
from tests.launch.resolved import resolved_run
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments import sweep
from vit_ray.experiments.search_space import (
    RATE,
    Point,
    final_recipe,
    point_name,
    point_of,
    point_text,
    points_of,
    rung_steps,
    trial_config,
    trial_recipe,
    with_point,
)
from vit_ray.experiments.sweep import Row, SweepPlan, SweepResult, best_row, tune_all
from vit_ray.experiments.trials import Outcome, num_fitting
from vit_ray.launch.cluster_checks import paths_of
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import RunFailedError


def searched_recipe(**sweep: Any) -> Recipe:
    return recipe_with("s", optim={"steps": 5}, sweep=sweep)


def points(**sweep: Any) -> list[Point]:
    recipe = searched_recipe(**sweep)
    return points_of(recipe, recipe.sweep)


def test_a_grid_is_every_combination_of_any_keys():
    found = points(learning_rates=[0.003, 0.01])
    assert found == [{RATE: 0.003}, {RATE: 0.01}]
    assert [point_name(point) for point in found] == ["lr0.003", "lr0.01"]
    space = {RATE: [0.01, 0.1], "optim.steps": [500, 2000], "data.augment.kind": ["resize"]}
    found = points(space=space)
    assert len(found) == 4
    assert found[1] == {RATE: 0.01, "optim.steps": 2000, "data.augment.kind": "resize"}
    assert point_name(found[1]) == "lr0.01-steps2000-kindresize"
    assert point_text(found[1]) == "learning_rate=0.01, steps=2000, kind=resize"
    recipe = searched_recipe(space=space).with_changes(data={"augment": {"flip": False}})
    changed = with_point(recipe, found[1], name="t")
    assert (changed.name, changed.optim.steps, changed.optim.learning_rate) == ("t", 2000, 0.01)
    assert (changed.data.augment.kind, changed.data.augment.flip) == ("resize", False)
    space = {"optim": [{"steps": 9, "warmup_steps": 1}, {"steps": 90}]}
    changes = [with_point(recipe, point).optim for point in points(space=space)]
    kept = recipe.optim.warmup_steps
    assert [(one.steps, one.warmup_steps) for one in changes] == [(9, 1), (90, kept)]


def test_random_points_are_in_their_ranges_and_the_same_for_the_same_seed():
    space = {
        RATE: {"log_uniform": [1e-4, 1e-1]},
        "optim.weight_decay": {"uniform": [0.0, 0.2]},
        "optim.warmup_steps": [0, 1, 2],
    }
    found = points(space=space, search="random", num_trials=200)
    assert found[:20] == points(space=space, search="random", num_trials=20)
    assert found[:20] != points(space=space, search="random", num_trials=20, seed=1)
    rates = np.log10([point[RATE] for point in found])
    # A third of the decades each, within 4 standard deviations.
    assert np.histogram(rates, bins=[-4, -3, -2, -1])[0] == pytest.approx([67] * 3, abs=27)
    assert (rates.min() >= -4, rates.max() <= -1) == (True, True)
    decays = [point["optim.weight_decay"] for point in found]
    assert np.mean(decays) == pytest.approx(0.1, abs=0.02)
    assert {point["optim.warmup_steps"] for point in found} == {0, 1, 2}
    listed = {RATE: [0.003, 0.01, 0.03, 0.1], "optim.steps": [500, 2000]}  # all are different
    found = points(space=listed, search="random", num_trials=8)
    assert {point_name(p) for p in found} == {point_name(p) for p in points(space=listed)}
    assert found[:6] == points(space=listed, search="random", num_trials=6)


RANDOM = {"search": "random", "num_trials": 9}


@pytest.mark.parametrize(("space", "more", "key"), [
    ({RATE: [0.1, 0.1]}, {}, "learning_rate"),
    ({RATE: [0.1, -0.1]}, {}, "learning_rate=-0.1"),
    ({RATE: [0.1, 0.10000001]}, {}, "have the name lr0.1"),
    ({RATE: []}, {}, "learning_rate"), ({RATE: 0.1}, {}, "learning_rate"),
    ({RATE: {"normal": [0, 1]}}, {}, "learning_rate"),
    ({RATE: {"uniform": [False, True]}}, {}, "learning_rate"),
    ({RATE: {"log_uniform": [0.1, 1.0]}}, {}, "sweep.search=random"),
    ({RATE: {"log_uniform": [0, 1]}}, {}, "for log_uniform above zero"),
    ({RATE: {"uniform": [1, 1]}}, {}, "from a smaller to a larger"),
    ({"optim.lr": [0.1]}, {}, "unknown key optim.lr"),
    ({}, {}, "sweep.space"), ({"seed": [1, 2]}, {}, "seed cannot"),
    ({"data.held_out_fraction": [0.1]}, {}, "data.held_out_fraction cannot"),
    ({"data": [{"eval": "a"}]}, {}, "data cannot"),
    ({"tracking.uri": ["a"]}, {}, "tracking.uri cannot"),
    ({RATE: [0.1, 0.2]}, {"search": "random"}, "num_trials"),
    ({RATE: [0.1, 0.2]}, RANDOM, "num_trials is 9"),
    ({"optim.steps": {"uniform": [1, 9]}}, RANDOM, "optim.steps="),
])  # fmt: skip
def test_a_space_that_cannot_work_is_refused(space, more, key):
    with pytest.raises(ValueError) as refused:
        points(space=space, **more)
    assert key in str(refused.value)


def plan_of(folder: Path, rates: tuple[float, ...] = (0.1, 0.2), **changes: Any) -> SweepPlan:
    """Of a sweep that opens no data."""
    recipe = recipe_with(
        "s", output=str(folder), init_from="x", data={"eval": "y"},
        sweep={"learning_rates": rates, "seeds": 2}, **changes,
    )  # fmt: skip
    points = points_of(recipe, recipe.sweep)
    return SweepPlan(recipe, resolved_run(), points, ("train", "dev"), [16] * len(points))


def test_the_nodes_are_checked_for_what_the_retraining_reads(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "open_parent", lambda *arguments, **_: arguments[-1])
    plan = plan_of(tmp_path)
    trainings: Any = sweep.open_sweep(plan)
    *trials, retraining = trainings
    assert trials == plan.trials
    assert Path(dict(paths_of(retraining))["data.eval"]).name == "y"


@pytest.fixture(autouse=True)
def no_data_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the paper's accuracy."""
    monkeypatch.setattr(sweep, "training_table", lambda *_: [])


def swept(plan: SweepPlan, **parent_is: bool) -> tuple[SweepResult, Any]:
    """By trials of Ray Tune; with what was recorded."""
    parent, calls = parent_of(plan.recipe, **parent_is)
    return sweep.sweep(plan, parent, partial(tune_all, plan, parent)), calls


@pytest.mark.parametrize(("averaging", "best"), [(0.0, 0.1), (0.9999, 0.2)])
def test_the_averaged_accuracy_decides_where_weights_are_averaged(
    averaging, best, tmp_path, monkeypatch
):
    def train(recipe: Recipe, **_: Any) -> RunResult:
        """The last weights prefer the first rate of 0.1 and 0.2, the averaged ones the second."""
        rate = recipe.optim.learning_rate
        averaged = {"averaged_top1": rate} if recipe.train.averaging else {}
        return result_of(recipe, top1=1 - rate, **averaged)

    in_process(monkeypatch, train)
    found, calls = swept(plan_of(tmp_path, train={"averaging": averaging}))
    assert found.best == {RATE: best}
    assert [row.outcome.top1 for row in found.rows] == ([0.1, 0.2] if averaging else [0.9, 0.8])
    assert found.test_top1 == [best if averaging else 1 - best] * 2
    accuracy = "eval/averaged_top1" if averaging else "eval/top1"
    _, results = calls.results.call_args.args
    assert results[accuracy] == found.mean
    assert next(iter(results)) == "eval/top1"  # what MLflow's pages show first
    key, text = calls.tag.call_args.args  # whether MLflow answers or not
    assert key == "mlflow.note.content"
    assert text.startswith(f"Of 2 trials, learning_rate={best} won (dev ")


def test_a_failed_a_diverged_and_a_trial_without_a_number_are_rows_and_never_best(
    tmp_path, monkeypatch
):
    def train(recipe: Recipe, **keys: Any) -> RunResult:
        match recipe.optim.learning_rate:
            case 0.1:
                raise RunFailedError("no memory")
            case 0.2:
                raise ValueError("not finite")
            case 0.3:
                return result_of(recipe, top1=math.nan)
            case 0.4:
                return result_of(recipe)
        return result_of(recipe, top1=0.25)

    in_process(monkeypatch, train)
    found, calls = swept(plan_of(tmp_path, (0.1, 0.2, 0.3, 0.4, 0.5)))
    assert found.best == {RATE: 0.5}
    assert [row.outcome.error for row in found.rows] == ["no memory", "not finite", "", "", ""]
    assert kinds(calls) == ["failed trial"] * 2
    with pytest.raises(RunFailedError, match="every trial failed; the first: its accuracy is not"):
        swept(plan_of(tmp_path, (0.3,)))
    stopped = Row({RATE: 0.5}, Outcome(0.9, 10, is_stopped_early=True))
    equal = [Row({RATE: rate}, Outcome(0.5)) for rate in (0.1, 0.2)]
    assert best_row([stopped, *equal]) is equal[0]


@pytest.mark.parametrize(("max_steps", "grace"), [(16, None), (100, None), (300, 8), (5, 4)])
def test_trials_are_evaluated_at_the_rungs_of_tunes_scheduler(max_steps, grace):
    config = SweepConfig(scheduler="asha", grace_steps=grace)
    scheduler = sweep._scheduler(config, max_steps)
    assert isinstance(scheduler, ASHAScheduler)
    (bracket,) = scheduler._brackets
    rungs = sorted(step for step, _ in bracket._rungs if step < max_steps)
    assert list(rung_steps(config, max_steps)) == rungs
    assert rung_steps(SweepConfig(), max_steps) == ()
    with pytest.raises(ValueError, match=r"sweep.grace_steps=900 must be smaller"):
        rung_steps(SweepConfig(scheduler="asha", grace_steps=900), max_steps)


def test_a_configuration_of_tune_has_its_point_again_whatever_its_values_are(monkeypatch):
    space: dict[str, Any] = {
        RATE: {"log_uniform": [1e-4, 1e-1]},
        "optim.frozen": [["head", "norm"], []],
        "data.augment": [{"kind": "resize"}, {"flip": False}],
    }
    config = SweepConfig(search="random", num_trials=8, space=space)
    drawn = points_of(recipe_with("s", sweep=config.model_dump(mode="json")), config)
    configs = [trial_config(point) for point in drawn]
    assert {type(value) for one in configs for value in one.values()} == {float, str}
    assert [point_of({**one, "seed": 3}, config) for one in configs] == drawn
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"Optuna is not installed; run pip install 'vit_ray\["):
        points(search="optuna", num_trials=2, space={RATE: [0.1, 0.2]})


def test_trials_hold_out_the_dev_split_and_the_final_run_does_not():
    recipe = recipe_with(
        "s", data={"train": "/a", "eval": "/b"}, init_from="x", sweep={"learning_rates": [0.1]}
    )
    trial, final = trial_recipe(recipe, {RATE: 0.1}), final_recipe(recipe, {RATE: 0.1}, seed=7)
    assert (trial.data.held_out_fraction, trial.data.eval, trial.seed) == (0.02, None, 0)
    assert (final.data.held_out_fraction, final.data.eval, final.seed) == (0.0, "/b", 7)


@pytest.mark.parametrize(("use_gpu", "cluster", "count"), [
    ("auto", {"GPU": 4.0, "CPU": 64.0}, 2),
    (True, {"GPU": 4.0, "CPU": 64.0}, 2),
    (False, {"GPU": 4.0, "CPU": 20.0}, 8),  # CPUs alone bound what uses no GPU
    ("auto", {"CPU": 8.0}, 3),
    ("auto", {"CPU": 1.0}, 1),
    (True, {"CPU": 8.0}, 1),  # no node with a GPU is up yet
])  # fmt: skip
def test_as_many_run_in_parallel_as_fit_whichever_they_are(use_gpu, cluster, count):
    shape = ClusterShape(1, cluster["CPU"], cluster.get("GPU", 0.0), 0.0)
    workers = {"num_workers": 2, "cpus_per_worker": 1.0, "use_gpu": use_gpu}
    one = recipe_with("s", workers=workers, data={"cpus_per_task": 0.5})
    small = one.with_changes(workers={"num_workers": 1})
    assert num_fitting([small, *[one] * 9, small], shape) == count


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_sweep_under_asha_that_was_restarted_says_so(has_begun, tmp_path, monkeypatch):
    plan = plan_of(tmp_path)
    plan = replace(plan, recipe=plan.recipe.with_changes(sweep={"scheduler": "asha"}))
    in_process(monkeypatch, lambda recipe, **_: result_of(recipe, top1=0.5))
    _, calls = swept(plan, has_begun=has_begun)
    assert (sweep.RESTARTED in calls.tag.call_args.args[1]) is has_begun


def test_names_of_trials_are_names_of_folders_and_their_paths_whole(tmp_path, monkeypatch):
    """A trial runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    values = [f"weights/{'x' * 200}/{k}" for k in range(2)]
    recipe = recipe_with("s" * 60, data={"eval": "y"}, sweep={"space": {"init_from": values}})
    points = [{"init_from": value} for value in values]
    found = [trial_recipe(recipe, point) for point in points]
    found += [final_recipe(recipe, point, seed=7) for point in points]
    names = {one.name for one in found}
    assert len(names) == 4
    assert all(len(name.encode()) < 255 - len("-evaluation-20261128-200000") for name in names)
    for name in names:
        Path(name).mkdir()
    assert [one.init_from for one in found] == [f"{tmp_path}/{value}" for value in values] * 2
