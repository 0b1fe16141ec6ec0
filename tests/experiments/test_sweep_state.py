"""ASHA's rungs and decisions against Ray's own scheduler, in one driver and over several."""

import contextlib
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

from tests.experiments.flows import ROOMY, Parent, in_process
from tests.experiments.sweeps import plan_of
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments import sweep
from vit_ray.experiments.runner import Room
from vit_ray.experiments.sweep import Trials
from vit_ray.experiments.sweep_state import (
    RememberedAsha,
    RungResult,
    grace_steps,
    rung_steps,
    trial_key,
)
from vit_ray.experiments.training import Outcome
from vit_ray.launch.pool.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState
from vit_ray.storage import locate


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
    assert rung_steps(config, max_steps, max_steps) == tuple(seen)


def test_a_shorter_trial_has_fewer_rungs_and_none_without_a_scheduler() -> None:
    config = asha(grace_steps=2)
    assert rung_steps(config, 64, 64) == (2, 8, 32)
    assert rung_steps(config, 8, 64) == (2,)
    assert rung_steps(SweepConfig(), 64, 64) == ()
    assert grace_steps(asha(), 64) == 4
    with pytest.raises(
        ValueError, match=r"sweep.grace_steps=64 must be smaller than the trial length \(64 steps"
    ):
        grace_steps(asha(grace_steps=64), 64)
    with pytest.raises(ValueError, match="grace_steps=4 with scheduler=none"):
        SweepConfig(grace_steps=4)


@pytest.mark.parametrize("seed", range(20))
def test_decisions_are_rays_own_though_the_driver_is_killed_in_between(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    names, config = [f"t{k}" for k in range(9)], asha(grace_steps=2, reduction_factor=3.0)
    rungs = [*rung_steps(config, 60, 60), 60]
    rays = rays_own(config, names, 60)
    waiting = {name: iter(rungs) for name in names}

    def remembered() -> RememberedAsha:
        return RememberedAsha(config, locate(str(tmp_path)), names, 60)

    ours = remembered()
    decisions: dict[tuple[str, int], bool] = {}
    while waiting:
        name = draw.choice(sorted(waiting))
        step = next(waiting[name])
        # Values that are equal, too, which both sides of a cut take.
        top1 = draw.choice([0.1, 0.2, 0.3, 0.3, 0.4, 0.5])
        expected = rays.on_trial_result(
            None, SimpleNamespace(trial_id=name), {"step": step, "top1": top1}
        )
        is_over = step == rungs[-1]
        if draw.random() < 0.3:
            ours = remembered()
        found = ours.goes_on(name, step, top1, is_over=is_over)
        assert found == (is_over or expected == TrialScheduler.CONTINUE)
        decisions[name, step] = found
        if is_over or not found:
            del waiting[name]
    assert False in decisions.values()
    again = remembered()
    for (name, step), decision in decisions.items():
        assert again.goes_on(name, step, 0.0, is_over=False) == decision


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


def sweep_recipe(folder: Path) -> Recipe:
    return recipe_with(
        "s", output=str(folder), data={"eval": "y"}, optim={"steps": 16},
        train={"averaging": 0.0},
        sweep={"scheduler": "asha", "grace_steps": 1, "max_concurrent": 4},
    )  # fmt: skip


RATES = (0.3, 0.1, 0.4, 0.2)


def trials_of(whole: Recipe) -> list[Recipe]:
    return [
        whole.with_changes(name=f"s-{rate}", sweep=None, optim={"learning_rate": rate})
        for rate in RATES
    ]


def tried(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    train: Any,
    tags: dict[str, str] | None = None,
    room: Room = ROOMY,
) -> tuple[list[Outcome], Parent]:
    """Outcomes of the trials of a sweep under ASHA, a rung of each in turn; and its parent."""
    whole = sweep_recipe(folder)
    parent = Parent(whole)
    in_process(monkeypatch, parent, train, lambda: room)
    points = [{"optim.learning_rate": rate} for rate in RATES]
    plan = plan_of(whole, trials_of(whole), points, steps=16)
    found = parent.run_flow(Trials(plan, parent, tags or {}).tried(), None)
    assert found is not None
    return found, parent


def kept(folder: Path) -> list[RungResult]:
    return RememberedAsha(asha(), locate(sweep_recipe(folder).run_folder), [], 64).results


@pytest.fixture(autouse=True)
def tagged(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(sweep, "tag_ended_run", lambda recipe, _, tags, *__: found.update(tags))
    return found


@pytest.mark.parametrize("killed_at", [None, 0, 2, 5, 11, 17])
def test_steps_behind_a_rung_that_stops_a_trial_are_not_trained(
    killed_at: int | None, tagged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = FakeTraining(killed_at)
    if killed_at is not None:
        with pytest.raises(KilledError):
            tried(monkeypatch, tmp_path, training)
    rows, parent = tried(monkeypatch, tmp_path, training)
    # Rungs at 1 and 4 steps: 0.3 passes all, 0.1 and 0.2 none, and 0.4 all as the best so far.
    assert [one.steps for one in rows] == [16, 1, 16, 1]
    assert [one.state is TrialState.STOPPED_EARLY for one in rows] == [False, True, False, True]
    assert training.steps_trained == 16 + 1 + 16 + 1
    assert tagged == {"vit_ray.stopped_early": "step 1 of 16"}
    if killed_at is None:
        assert parent.calls.kinds().count("trial stopped early") == 2


def test_a_trial_that_ended_by_itself_before_a_rung_is_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
        if recipe.optim.learning_rate != 0.4 or until_step == 1:
            return whole(recipe, until_step=until_step)
        return replace(whole(recipe, until_step=3), ended="no better validation loss")

    rows, _ = tried(monkeypatch, tmp_path, train)
    assert (rows[2].error, rows[2].state, rows[2].steps) == ("", TrialState.FINISHED, 3)


def test_trials_have_the_tags_of_what_they_are_part_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = FakeTraining()

    def train(recipe: Recipe, *, tags: dict[str, str], **keys: Any) -> RunResult:
        assert tags == {"vit_ray.sweep_stage": "sweep_trial", "vit_ray.study_cell": "cell"}
        return training(recipe, **keys)

    rows, _ = tried(monkeypatch, tmp_path, train, {"vit_ray.study_cell": "cell"})
    assert [one.error for one in rows] == [""] * 4


def test_where_the_leader_diverges_the_best_stopped_trial_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
        if recipe.optim.learning_rate in (0.4, 0.3) and until_step != 1:
            raise RunDivergedError("reason")
        return whole(recipe, until_step=until_step)

    # 0.3 and 0.4 pass the first rung and diverge; 0.1 and 0.2 are stopped there.
    for told in (1, 0):
        rows, parent = tried(monkeypatch, tmp_path, train)
        assert [one.steps for one in rows] == [None, 1, None, 16]
        failed, stopped = TrialState.DIVERGED, TrialState.STOPPED_EARLY
        assert [one.state for one in rows] == [failed, stopped, failed, TrialState.FINISHED]
        assert parent.calls.kinds().count("trial goes on") == told
        assert whole.steps_trained == 4 + 15


def test_another_recipe_of_the_name_of_a_stopped_trial_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried(monkeypatch, tmp_path, FakeTraining())
    names = {one.trial for one in kept(tmp_path)}
    trial = trials_of(sweep_recipe(tmp_path))[1]
    assert trial_key(trial) in names
    assert trial_key(trial.with_changes(seed=5)) not in names


def test_a_failure_at_a_rung_ends_the_trial_and_fills_no_rung(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = FakeTraining()

    def train(recipe: Recipe, **keys: Any) -> RunResult:
        if recipe.optim.learning_rate == 0.4 and keys["until_step"] != 1:
            raise RunFailedError("a worker died")
        return whole(recipe, **keys)

    rows, _ = tried(monkeypatch, tmp_path, train)
    assert [one.error for one in rows] == ["", "", "a worker died", ""]
    assert [one.step for one in kept(tmp_path) if one.trial.startswith("s-0.4")] == [1]


@pytest.mark.slow(after=10)
@pytest.mark.parametrize("seed", range(40))
def test_a_driver_that_is_killed_again_and_again_decides_and_results_as_an_undisturbed_one(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One trial at a time, in the same order; killed in steps, and before a result is told."""
    draw = random.Random(seed)
    reached = {rate: draw.random() for rate in RATES}

    class Disturbed(FakeTraining):
        def __init__(self, most_kills: int) -> None:
            super().__init__()
            self.kills_left = most_kills

        def __call__(self, recipe: Recipe, *, until_step: int | None, **_: Any) -> RunResult:
            if self.kills_left and draw.random() < 0.5:
                self.kills_left -= 1
                self.killed_at = self.steps_trained + draw.randrange(6)
            found = super().__call__(recipe, until_step=until_step)
            if self.kills_left and draw.random() < 0.2:
                self.kills_left -= 1
                raise KilledError
            top1 = reached[recipe.optim.learning_rate] * (1 - 0.9**found.steps)
            return replace(found, metrics={"eval/top1": top1})

    def until_over(training: FakeTraining, folder: Path) -> tuple[list[Any], int]:
        for drivers in range(1, 99):
            with contextlib.suppress(KilledError):
                rows, _ = tried(monkeypatch, folder, training, room=Room(9, 99, runs=1))
                return [(one.state, one.steps, one.top1, one.point) for one in rows], drivers
        raise AssertionError

    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    straight, _ = until_over(Disturbed(0), undisturbed)
    training = Disturbed(8)
    found, num_drivers = until_over(training, disturbed)
    assert num_drivers > 1
    assert found == straight
    assert kept(disturbed) == kept(undisturbed)
    # No step is trained twice, of none that is finished either.
    assert training.steps_trained == sum(steps for _, steps, *_ in found)
