"""ASHA's rungs and decisions against Ray's own scheduler, in one driver and over several."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle, tune
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler, TrialScheduler

from tests.experiments.studies import Calls
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments import retries, stage
from vit_ray.experiments.asha import RememberedAsha, RungRecord, grace_steps, rung_steps
from vit_ray.experiments.diverged_trials import trial_key
from vit_ray.launch.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState
from vit_ray.storage import Location, locate


def asha(**keys: Any) -> SweepConfig:
    return SweepConfig(scheduler="asha", **keys)


def rays_own(config: SweepConfig, names: list[str], max_steps: int) -> AsyncHyperBandScheduler:
    scheduler = AsyncHyperBandScheduler(
        time_attr="step", metric="top1", mode="max", max_t=max_steps,
        grace_period=config.grace_steps or 1, reduction_factor=config.reduction_factor,
    )  # fmt: skip
    for name in names:
        scheduler.on_trial_add(None, SimpleNamespace(trial_id=name))
    return scheduler


@pytest.mark.parametrize(
    ("grace", "factor", "max_steps"), [(1, 4, 100), (5, 2, 80), (3, 1.5, 50), (10, 4, 11)]
)
def test_rungs_are_where_rays_scheduler_sees_them(
    grace: int, factor: float, max_steps: int
) -> None:
    config = asha(grace_steps=grace, reduction_factor=factor)
    rays = rays_own(config, ["a"], max_steps)
    seen = []
    for step in range(1, max_steps):
        counts = [len(recorded) for _, recorded in rays._brackets[0]._rungs]
        rays.on_trial_result(None, SimpleNamespace(trial_id="a"), {"step": step, "top1": 0.0})
        if counts != [len(recorded) for _, recorded in rays._brackets[0]._rungs]:
            seen.append(step)
    assert rung_steps(config, max_steps, max_steps) == [*seen, max_steps]


def test_a_shorter_trial_has_fewer_rungs_and_none_without_a_scheduler() -> None:
    config = asha(grace_steps=2)
    assert rung_steps(config, 64, 64) == [2, 8, 32, 64]
    assert rung_steps(config, 8, 64) == [2, 8]
    assert rung_steps(SweepConfig(), 64, 64) == [64]
    assert grace_steps(asha(), 64) == 4
    with pytest.raises(ValueError, match=r"sweep.grace_steps=64 is no rung of trials of 64 steps"):
        grace_steps(asha(grace_steps=64), 64)
    with pytest.raises(ValueError, match="grace_steps=4 is of scheduler=asha"):
        SweepConfig(grace_steps=4)


@pytest.mark.parametrize("seed", range(20))
def test_decisions_are_rays_own_though_the_driver_is_killed_in_between(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    names, config = [f"t{k}" for k in range(9)], asha(grace_steps=2, reduction_factor=3.0)
    rungs = rung_steps(config, 60, 60)
    rays = rays_own(config, names, 60)
    waiting = {name: iter(rungs) for name in names}
    ours = RememberedAsha(config, RungRecord(locate(str(tmp_path))), names, 60)
    decisions: dict[tuple[str, int], str] = {}
    while waiting:
        name = draw.choice(sorted(waiting))
        step = next(waiting[name])
        # Values that are equal, too, which both sides of a cut take.
        top1 = draw.choice([0.1, 0.2, 0.3, 0.3, 0.4, 0.5])
        expected = rays.on_trial_result(
            None, SimpleNamespace(trial_id=name), {"step": step, "top1": top1}
        )
        is_over = step == rungs[-1]
        told = {"index": names.index(name), "step": step, "top1": top1, "is_over": is_over}
        if draw.random() < 0.3:
            ours = RememberedAsha(config, RungRecord(locate(str(tmp_path))), names, 60)
        found = ours.on_trial_result(None, None, told)
        assert found == (TrialScheduler.CONTINUE if is_over else expected)
        decisions[name, step] = found
        if is_over or found == TrialScheduler.STOP:
            del waiting[name]
    assert TrialScheduler.STOP in decisions.values()
    again = RememberedAsha(config, RungRecord(locate(str(tmp_path))), names, 60)
    for (name, step), decision in decisions.items():
        told = {"index": names.index(name), "step": step, "top1": 0.0, "is_over": False}
        assert again.on_trial_result(None, None, told) == decision


def test_ray_tune_can_write_its_configuration(tmp_path: Path) -> None:
    ours = RememberedAsha(asha(grace_steps=2), RungRecord(locate(str(tmp_path))), ["a"], 60)
    config = tune.TuneConfig(scheduler=ours)
    again = cloudpickle.loads(cloudpickle.dumps(config))
    assert type(again.scheduler) is FIFOScheduler
    assert config.scheduler is ours


class KilledError(BaseException):
    """The driver is gone."""


class FakeTraining:
    """Trains recipes by name, each to an accuracy that grows with its rate, from where it was."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.reached: dict[str, int] = {}
        self.steps_trained = 0
        self.killed_at = killed_at

    def __call__(self, recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
        total = recipe.optim.steps or 0
        goal = until_step or total
        while self.reached.get(recipe.name, 0) < goal:
            if self.steps_trained == self.killed_at:
                self.killed_at = None
                raise KilledError
            self.reached[recipe.name] = self.reached.get(recipe.name, 0) + 1
            self.steps_trained += 1
        step = self.reached[recipe.name]
        metrics = {"eval/top1": recipe.optim.learning_rate * (1 - 0.5**step)}
        return RunResult(recipe.name, recipe.name, step, total, metrics, "folder")


def in_turns(configurations: Any, train: Any, *, scheduler: RememberedAsha, **_: Any) -> list[Any]:
    """As Ray Tune with all trials at a time: a rung of each in turn."""
    last: list[Any] = [None] * len(configurations)
    rungs = itertools.count()
    going = list(range(len(configurations)))
    while going:
        rung = next(rungs)
        for index in list(going):
            last[index] = train(index, rung)
            decision = scheduler.on_trial_result(None, None, last[index])
            if last[index]["is_over"] or decision == TrialScheduler.STOP:
                going.remove(index)
    return last


def sweep_recipe(folder: Path) -> Recipe:
    return recipe_with(
        "s", output=str(folder), data={"eval": "y"}, optim={"steps": 16},
        train={"averaging": 0.0},
        sweep={"scheduler": "asha", "grace_steps": 1, "max_concurrent": 4},
    )  # fmt: skip


RATES = (0.3, 0.1, 0.4, 0.2)


def a_stage(folder: Path, events: Calls, *, is_nested: bool = False) -> stage.Stage:
    whole = sweep_recipe(folder)
    assert whole.sweep is not None
    trials = [
        whole.with_changes(name=f"s-{rate}", sweep=None, optim={"learning_rate": rate})
        for rate in RATES
    ]
    run = SimpleNamespace(record=events, control=events, opening=None)
    children = SimpleNamespace(run=run, node_id="here")
    tags = {"vit_ray.study_cell": "cell"} if is_nested else {}
    parent: Any = SimpleNamespace(for_children=children, is_nested=is_nested, child_tags=tags)
    points = [{"optim.learning_rate": rate} for rate in RATES]
    return stage.Stage(whole, whole.sweep, trials, points, "sweep_trial", parent, [16] * 4)


@pytest.fixture
def tagged(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(stage, "run_trials", in_turns)
    monkeypatch.setattr(stage, "tag_ended_run", lambda recipe, _, tags, *__: found.update(tags))
    return found


@pytest.mark.parametrize("killed_at", [None, 0, 2, 5, 11, 17])
def test_steps_behind_a_rung_that_stops_a_trial_are_not_trained(
    killed_at: int | None, tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training, events = FakeTraining(killed_at), Calls()
    monkeypatch.setattr(retries, "train", training)
    if killed_at is not None:
        with pytest.raises(KilledError):
            a_stage(tmp_path, events).run()
    trained = a_stage(tmp_path, events).run()
    assert trained is not None
    # Rungs at 1 and 4 steps: 0.3 passes all, 0.1 and 0.2 none, and 0.4 all as the best so far.
    assert [one.result and one.result.steps for one in trained] == [16, 1, 16, 1]
    assert [one.state is TrialState.STOPPED_EARLY for one in trained] == [False, True, False, True]
    assert training.steps_trained == 16 + 1 + 16 + 1
    assert tagged == {"vit_ray.stopped_early": "step 1 of 16"}
    assert events.kinds().count("trial stopped early") == 2


def test_a_trial_that_ended_by_itself_before_a_rung_is_finished(
    tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
        if recipe.optim.learning_rate != 0.4 or until_step == 1:
            return whole(recipe, until_step=until_step)
        return replace(whole(recipe, until_step=3), ended="no better validation loss")

    monkeypatch.setattr(retries, "train", train)
    trained = a_stage(tmp_path, Calls()).run()
    assert trained is not None
    assert [(one.error, one.state) for one in trained][2] == ("", TrialState.FINISHED)
    assert trained[2].result
    assert trained[2].result.steps == 3


def test_in_the_place_of_one_training_trials_run_in_turn(
    tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = FakeTraining()

    def train(recipe: Recipe, *, tags: dict[str, str], **keys: Any) -> RunResult:
        assert tags == {"vit_ray.sweep_stage": "sweep_trial", "vit_ray.study_cell": "cell"}
        return training(recipe, **keys)

    monkeypatch.setattr(retries, "train", train)
    monkeypatch.setattr(stage, "run_trials", None)
    trained = a_stage(tmp_path, Calls(), is_nested=True).run()
    assert trained is not None
    # 0.3 is alone at both rungs; 0.1 is worse, 0.4 the best so far, 0.2 below the best quarter.
    assert [one.result and one.result.steps for one in trained] == [16, 1, 16, 1]
    assert training.steps_trained == 34


def test_where_the_leader_diverges_the_best_stopped_trial_goes_on(
    tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
        if recipe.optim.learning_rate in (0.4, 0.3) and until_step != 1:
            raise RunDivergedError("reason")
        return whole(recipe, until_step=until_step)

    monkeypatch.setattr(retries, "train", train)
    # 0.3 and 0.4 pass the first rung and diverge; 0.1 and 0.2 are stopped there.
    for events, told in ((Calls(), 1), (Calls(), 0)):
        trained = a_stage(tmp_path, events).run()
        assert trained is not None
        assert [one.result and one.result.steps for one in trained] == [None, 1, None, 16]
        failed, stopped = TrialState.DIVERGED, TrialState.STOPPED_EARLY
        assert [one.state for one in trained] == [failed, stopped, failed, TrialState.FINISHED]
        assert events.kinds().count("trial goes on") == told
        assert whole.steps_trained == 4 + 15


def test_another_recipe_of_the_name_of_a_stopped_trial_is_measured_anew(
    tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(retries, "train", FakeTraining())
    first = a_stage(tmp_path, Calls())
    first.run()
    record = RungRecord(locate(sweep_recipe(tmp_path).run_folder))
    names = {one.trial for one in record.results()}
    changed = first._recipes[1].with_changes(seed=5)
    assert trial_key(first._recipes[1]) in names
    assert trial_key(changed) not in names


def test_a_failure_at_a_rung_ends_the_trial_and_fills_no_rung(
    tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, **keys: Any) -> RunResult:
        if recipe.optim.learning_rate == 0.4 and keys["until_step"] != 1:
            raise RunFailedError("a worker died")
        return whole(recipe, **keys)

    monkeypatch.setattr(retries, "train", train)
    trained = a_stage(tmp_path, Calls()).run()
    assert trained is not None
    assert [one.error for one in trained] == ["", "", "a worker died", ""]
    folder: Location = locate(sweep_recipe(tmp_path).run_folder)
    steps = [one.step for one in RungRecord(folder).results() if one.trial.startswith("s-0.4")]
    assert steps == [1]
