"""What a sweep chooses and reports: the averaged weights' accuracy where weights are averaged."""

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.experiments.sweeps import outcome_of, swept, trained
from tests.launch.record.resolved import resolved_run
from tests.recipes import recipe_with
from vit_ray.commands.printed_tables import print_sweep
from vit_ray.config import Recipe
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import runner, sweep
from vit_ray.experiments.parent_run import _check_trainings
from vit_ray.experiments.runner import Room, cluster_room, room_of
from vit_ray.experiments.search_space import RATE, with_point
from vit_ray.experiments.sweep import (
    SweepResult,
    best_row,
    sweep_metrics,
    sweep_sentence,
    trial_recipe,
)
from vit_ray.experiments.sweep_tables import sweep_files
from vit_ray.experiments.training import Outcome
from vit_ray.experiments.training import outcome_of as outcome_at
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.pool.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.record.run_metadata import NOTE
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState
from vit_ray.report.tables import Table


def averaging_recipe(averaging: float) -> Recipe:
    return recipe_with("s", train={"averaging": averaging})


def result(**metrics: float) -> RunResult:
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    return RunResult("id", "name", 1, 1, measured, "folder")


# The last weights prefer the first rate, the averaged ones the second.
RESULTS = {0.1: result(top1=0.8, averaged_top1=0.5), 0.2: result(top1=0.6, averaged_top1=0.7)}
FAILED = Outcome(TrialState.FAILED, error="not finite", point={RATE: 0.3})


def rows_of(averaging: float) -> list[Outcome]:
    recipe = averaging_recipe(averaging)
    found = {rate: outcome_at(recipe, each, None) for rate, each in RESULTS.items()}
    return [*(replace(one, point={RATE: rate}) for rate, one in found.items()), FAILED]


@pytest.mark.parametrize(("averaging", "best"), [(0.0, 0.1), (0.9999, 0.2)])
def test_the_averaged_accuracy_decides_where_weights_are_averaged(
    averaging: float, best: float
) -> None:
    rows = rows_of(averaging)
    assert best_row(rows).point == {RATE: best}
    assert [row.top1 for row in rows] == ([0.5, 0.7, None] if averaging else [0.8, 0.6, None])
    assert [row.last_top1 for row in rows] == ([0.8, 0.6, None] if averaging else [None] * 3)


@pytest.mark.parametrize("is_new", [True, False])
def test_the_workers_of_the_first_trial_start_with_the_sweep(
    is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def start(first: Recipe | None) -> None:
        raise StartedError(first and first.name)

    @contextmanager
    def opened(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(start_workers=start)

    tree = {
        "name": "s", "init_from": "weights.npz", "sweep": {"learning_rates": [0.1, 0.2]},
        "data": {"eval": "test"},
    }  # fmt: skip
    monkeypatch.setattr(
        sweep, "resolve_run", lambda recipe: SimpleNamespace(total_steps=1, recipe=recipe)
    )
    monkeypatch.setattr(sweep, "_dev_split", lambda *_, **__: None)
    monkeypatch.setattr(sweep, "check_weights", lambda _: None)
    monkeypatch.setattr(sweep, "newest_checkpoint", lambda folder: None if is_new else "step-9")
    monkeypatch.setattr(sweep, "open_parent", opened)
    with pytest.raises(StartedError, match="^s-lr0.1$" if is_new else "^None$"):
        sweep.run_sweep(recipe_from_dict(tree, "test"))


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_sweep_that_has_begun_goes_on_under_its_own_run(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OpenedError(Exception):
        pass

    def opened(*words: Any, varied: list[str], **_: Any) -> None:
        assert varied == [RATE]  # or its run would show a rate that no trial had
        raise OpenedError(words[4])

    whole = swept(tmp_path)
    resolved: Any = SimpleNamespace(total_steps=1)
    plan = sweep.SweepPlan(whole, resolved, [{RATE: 0.1}], [trial_recipe(whole, {RATE: 0.1})], [1])
    if has_begun:
        (tmp_path / "s-lr0.1" / "step-00000001").mkdir(parents=True)
    monkeypatch.setattr(sweep, "plan_sweep", lambda _: plan)
    monkeypatch.setattr(sweep, "earlier_run", lambda one, kind: f"{one.run_folder} {kind}")
    monkeypatch.setattr(sweep, "open_parent", opened)
    with pytest.raises(OpenedError, match=f"^{tmp_path}/s sweep$" if has_begun else "^None$"):
        sweep.run_sweep(whole)


def test_a_point_that_the_cluster_cannot_hold_is_named() -> None:
    base = averaging_recipe(0.0).with_changes(workers={"num_workers": 2, "use_gpu": False})
    cluster = ClusterShape(1, 8.0, 0.0, 0.0, is_private=True)
    trials = [with_point(base, {"workers.num_workers": n}, name=f"s-{n}") for n in (4, 40)]
    _check_trainings(base, trials[:1], cluster)
    with pytest.raises(ValueError, match=r"^s-40: 40 workers with"):
        _check_trainings(base, trials, cluster)
    with pytest.raises(ValueError, match=r"^2 workers with"):
        _check_trainings(base, [base], replace(cluster, num_cpus=1.0))


def test_both_accuracies_are_recorded_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(0.9999)
    pairs = ((0.75, 0.65), (0.77, 0.67))
    finals = [Outcome(TrialState.FINISHED, top1=top1, last_top1=last) for top1, last in pairs]
    outcome = SweepResult(rows, {RATE: 0.2}, finals, "id", "hint")
    metrics = sweep_metrics(outcome)
    assert metrics["eval/averaged_top1"] == pytest.approx(0.76)
    assert metrics["eval/top1"] == pytest.approx(0.66)
    assert print_sweep(outcome) == 0
    text = capsys.readouterr().out
    for shown in ("70.00%", "60.00%", "76.00% +-", "last weights: 66.00%", "failed: not finite"):
        assert shown in text


def test_the_sweeps_description_says_what_was_tried_what_won_and_its_accuracies() -> None:
    finals = [Outcome(TrialState.FINISHED, top1=top1) for top1 in (0.75, 0.77)]
    outcome = SweepResult(rows_of(0.0), {RATE: 0.1}, finals)
    sentence = "Sweep of 3 values of optim.learning_rate; 0.1 won (dev 80.00%); test "
    assert sweep_sentence(outcome) == f"{sentence}76.00% (mean of 2 seeds)"
    assert sweep_sentence(replace(outcome, finals=finals[:1])) == f"{sentence}75.00%"
    two = {RATE: 0.1, "model.dropout": 0.0}
    rows = [Outcome(TrialState.FINISHED, top1=0.8, point=two)]
    assert sweep_sentence(SweepResult(rows, two, finals[:1])) == (
        "Sweep of 1 point of optim.learning_rate, model.dropout; learning_rate=0.1, dropout=0 won "
        "(dev 80.00%); test 75.00%"
    )


def test_a_sweep_ends_with_its_description_below_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = swept(tmp_path).with_changes(tracking={"description": "Of May"})
    trial = trial_recipe(whole, {RATE: 0.1})
    parent, calls = trained(monkeypatch, [result(top1=0.8)] * 9)
    monkeypatch.setattr(sweep, "sweep_table", lambda *_: Table("", [], []))
    resolved: Any = resolved_run()
    plan = sweep.SweepPlan(whole, resolved, [{RATE: 0.1}], [trial], [1])
    assert parent.run_flow(sweep.recorded_sweep(plan, parent), None) is not None
    notes = [text for method, key, text in calls.made if (method, key) == ("tag", NOTE)]
    first, second, third, *_ = notes[-1].split("\n\n")
    assert (first, third[:8]) == ("Of May", "ViT-B/16")
    assert second.startswith("Sweep of 1 value of optim.learning_rate; 0.1 won (dev 80.00%)")


def test_without_averaging_one_accuracy_is_recorded_and_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of(0.0)
    outcome = SweepResult(rows, {RATE: 0.1}, [Outcome(TrialState.FINISHED, top1=0.85)])
    assert sweep_metrics(outcome) == {
        "sweep/learning_rate": 0.1,
        "eval/top1": 0.85,
        "eval/top1_std": 0.0,
    }
    print_sweep(outcome)
    assert "averaged" not in capsys.readouterr().out


def test_what_is_kept_with_the_sweeps_own_run_has_every_trial() -> None:
    rows = rows_of(0.0)[:2]
    rows.append(Outcome(TrialState.DIVERGED, error="it is not finite", point={RATE: 10.0}))
    at_rung = replace(result(top1=0.9), total_steps=2)
    rows.append(replace(outcome_at(averaging_recipe(0.0), at_rung, 1), point={RATE: 0.5}))
    states = ["finished", "finished", "diverged", "stopped early"]
    assert [row.state for row in rows] == states
    files = sweep_files(rows, best_row(rows))
    table = list(csv.DictReader(io.StringIO(files["trials.csv"])))
    assert [row["state"] for row in table] == states
    assert [row["chosen"] for row in table] == ["yes", "", "", ""]
    assert [row["steps"] for row in table] == ["1", "1", "", "1"]
    assert table[0]["checkpoint"] == "folder"
    assert table[1]["dev_top1"] == "0.6"
    drawing = ElementTree.fromstring(files["dev_accuracy.svg"])
    assert "learning rate" in "".join(drawing.itertext())
    assert "stopped early" in "".join(drawing.itertext())


def test_a_trial_that_fails_is_tried_again_as_often_as_the_recipe_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcomes: list[Any] = [RunFailedError("a worker died")] * 2 + [result(top1=0.5)]
    parent, events = trained(monkeypatch, outcomes)
    whole = swept(tmp_path)
    trial = trial_recipe(whole, {RATE: 0.1})
    assert outcome_of(whole, trial, parent).error == ""
    assert events.kinds() == ["started again"] * 2
    parent, events = trained(monkeypatch, [RunFailedError("a worker died")] * 3)
    assert outcome_of(whole, trial, parent) == Outcome(TrialState.FAILED, error="a worker died")


def test_a_trial_that_diverged_is_not_tried_again_by_this_sweep_nor_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parent, events = trained(monkeypatch, [RunDivergedError("reason")])
    whole = swept(tmp_path)
    trial = trial_recipe(whole, {RATE: 0.1})
    assert outcome_of(whole, trial, parent) == Outcome(TrialState.DIVERGED, error="reason")
    assert events.kinds() == ["trial diverged"]
    parent, events = trained(monkeypatch, [])
    assert outcome_of(whole, trial, parent) == Outcome(TrialState.DIVERGED, error="reason")
    # Another recipe of the same name is tried.
    parent, _ = trained(monkeypatch, [result(top1=0.5)])
    assert outcome_of(whole, trial.with_changes(seed=1), parent).error == ""


@pytest.mark.parametrize(
    ("use_gpu", "cluster", "count"),
    [
        ("auto", {"GPU": 4.0, "CPU": 64.0}, 2),
        (True, {"GPU": 4.0, "CPU": 64.0}, 2),
        (False, {"GPU": 4.0, "CPU": 20.0}, 8),  # CPUs alone bound what uses no GPU
        ("auto", {"CPU": 8.0}, 3),
        ("auto", {"CPU": 1.0}, 1),
    ],
)
def test_trials_run_side_by_side_as_the_cluster_holds_them(
    use_gpu: Any, cluster: dict[str, float], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = ClusterShape(1, cluster["CPU"], cluster.get("GPU", 0.0), 0.0)
    monkeypatch.setattr(runner, "shape", lambda _: now)
    workers = {"num_workers": 2, "cpus_per_worker": 1.0, "use_gpu": use_gpu}
    chosen = averaging_recipe(0.0).with_changes(workers=workers, data={"cpus_per_task": 0.5})
    whole, taken = cluster_room(), list[Room]()
    while whole.holds(room_of(chosen, whole), taken):
        taken.append(room_of(chosen, whole))
    assert len(taken) == count
    assert cluster_room(max_runs=1).holds(taken[0], [])
    assert not cluster_room(max_runs=1).holds(taken[0], taken[:1])


def test_a_sweep_of_failed_trials_says_why() -> None:
    stopped = Outcome(TrialState.STOPPED_EARLY, result(top1=0.9), top1=0.9)
    for rows in ([stopped, FAILED], [FAILED]):
        with pytest.raises(RunFailedError, match="every trial failed; the first: not finite"):
            best_row(rows)


def test_paths_of_a_point_are_whole_since_a_trial_runs_in_a_folder_of_its_own() -> None:
    recipe = recipe_with("s", data={"eval": "y"}, sweep={"learning_rates": [0.1]})
    for found in (
        trial_recipe(recipe, {"init_from": "runs/a"}),
        sweep.final_recipe(recipe, {"init_from": "runs/a"}, 0),
    ):
        assert found.init_from == str(Path("runs/a").absolute())
