"""Optuna as a sweep's search: its own proposals, in one driver and over several."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.flows import Parent, in_process, result_of
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments import sweep
from vit_ray.experiments.search_space import points_of
from vit_ray.experiments.sweep import SweepPlan, Trials, trial_recipe
from vit_ray.experiments.sweep_state import RememberedSearch
from vit_ray.experiments.training import Outcome
from vit_ray.launch.run import RunResult
from vit_ray.storage import locate

RATE, STEPS = "optim.learning_rate", "optim.steps"
SPACE: dict[str, Any] = {RATE: {"log_uniform": [1e-4, 1.0]}, STEPS: [5, 10, 20]}

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="Optuna is not installed (extra `search`)"
)


def accuracy(rate: float, steps: int) -> float:
    return 1.0 - abs(rate - 0.01) - 0.001 * abs(steps - 10)


def searching(**keys: Any) -> SweepConfig:
    return SweepConfig(**{"search": "optuna", "space": SPACE, "num_trials": 14, "seed": 3, **keys})


def optunas_own(config: SweepConfig) -> list[dict[str, Any]]:
    """Points of a study of Optuna with the same values, without Ray Tune."""
    import optuna  # type: ignore[import-not-found]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=config.seed)
    )
    found = []
    for _ in range(config.num_trials or 0):
        trial = study.ask()
        rate = trial.suggest_float(RATE, 1e-4, 1.0, log=True)
        point = {RATE: float(f"{rate:.4g}"), STEPS: trial.suggest_categorical(STEPS, [5, 10, 20])}
        found.append(point)
        study.tell(trial, accuracy(*point.values()))
    return found


@needs_optuna
def test_points_are_those_that_optuna_proposes_by_what_was_reached(tmp_path: Path) -> None:
    config = searching()
    search = RememberedSearch(config, locate(str(tmp_path)))
    drawn = []
    for _ in range(14):  # ten at random, and the others by its model of them
        point = search.draw()
        search.note(point, accuracy(*point.values()))
        drawn.append(point)
    assert drawn == optunas_own(config)


class KilledError(BaseException):
    """The driver is gone."""


def tried(
    monkeypatch: pytest.MonkeyPatch, folder: Path, killed_at: int | None = None
) -> tuple[list[Outcome], list[str]]:
    """Outcomes of a sweep whose driver is killed in a training of a number, and what it trained."""
    whole = recipe_with(
        "s", output=str(folder), data={"eval": "y"}, train={"averaging": 0.0},
        sweep=searching().model_dump(mode="json"),
    )  # fmt: skip
    parent, trained = Parent(whole), list[str]()

    def train(recipe: Recipe, **_: Any) -> RunResult:
        if len(trained) == killed_at:
            raise KilledError
        trained.append(recipe.name)
        top1 = accuracy(recipe.optim.learning_rate, recipe.optim.steps or 0)
        return result_of(recipe, top1=top1)

    in_process(monkeypatch, parent, train)
    monkeypatch.setattr(sweep, "cluster_room", None, raising=False)
    monkeypatch.setattr(sweep, "resolve_run", lambda _: type("R", (), {"total_steps": 20}))
    points = points_of(whole, searching())
    resolved: Any = None
    trials = [trial_recipe(whole, point) for point in points]
    plan = SweepPlan(whole, resolved, points, trials, [20] * len(points))
    rows = parent.run_flow(Trials(plan, parent, {}).tried(), None)
    assert rows is not None
    return rows, trained


@needs_optuna
@pytest.mark.parametrize("killed_at", [0, 1, 6, 13])
def test_a_search_that_was_killed_goes_on_with_what_it_knows(
    killed_at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(KilledError):
        tried(monkeypatch, tmp_path, killed_at)
    folder = locate(str(tmp_path)).child("s")
    before = RememberedSearch(searching(), folder)
    known = [one for one in before._searcher._ot_study.trials if one.value is not None]
    rows, _ = tried(monkeypatch, tmp_path)
    points = [row.point for row in rows]
    assert len(points) == 14
    assert points[: len(before.points)] == before.points
    names = [str(point) for point in points]
    assert len(set(names)) == 14
    assert [one.params for one in known] == [
        point for point, row in zip(points, rows, strict=True) if row.point in before.points
    ][: len(known)]
    assert [one.value for one in known] == [accuracy(**_named(one.params)) for one in known]


def _named(point: dict[str, Any]) -> dict[str, Any]:
    return {"rate": point[RATE], "steps": point[STEPS]}


@needs_optuna
def test_points_of_another_space_and_trials_that_failed_teach_nothing(tmp_path: Path) -> None:
    folder = locate(str(tmp_path))
    first = RememberedSearch(searching(), folder)
    failed, good = first.draw(), first.draw()
    first.note(failed, None)
    first.note(good, 0.5)
    again = RememberedSearch(searching(), folder)
    assert again.points == [failed, good]
    assert [one.value for one in again._searcher._ot_study.trials] == [0.5]
    narrow = RememberedSearch(searching(space={RATE: {"uniform": [2.0, 3.0]}}), folder)
    assert narrow.points == []
    assert 2.0 <= narrow.draw()[RATE] <= 3.0


@needs_optuna
@pytest.mark.parametrize(
    ("space", "told"),
    [
        ({"workers.num_workers": [1, 2]}, "workers.num_workers cannot be varied by search=optuna"),
        (
            {"optim.frozen": [["head"], []]},
            r"optim.frozen=\[.head.\]: search=optuna varies numbers",
        ),
        ({STEPS: [5, 10]}, "has 2 different points and sweep.num_trials is 14"),
    ],
)
def test_a_space_that_it_cannot_search_is_refused(space: Any, told: str) -> None:
    whole = recipe_with("s", sweep=searching(space=space).model_dump(mode="json"))
    with pytest.raises(ValueError, match=f"sweep.space.*{told}"):
        points_of(whole, searching(space=space))


def test_a_searcher_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    whole = recipe_with("s", sweep=searching().model_dump(mode="json"))
    told = (
        r"sweep.search=optuna: Optuna is not installed; run pip install 'vit_ray\[search\]', or set"
    )
    with pytest.raises(ValueError, match=told):
        points_of(whole, searching())
