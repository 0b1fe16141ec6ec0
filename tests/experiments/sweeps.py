"""A sweep of one trial whose trainings end as a test says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.experiments.flows import Calls, Parent, in_process
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments.sweep import SweepPlan, Trials
from vit_ray.experiments.training import Outcome
from vit_ray.launch.run import RunResult


def trained(monkeypatch: pytest.MonkeyPatch, ends: list[Any]) -> tuple[Parent, Calls]:
    """The parent of a trial whose attempts end so, and the events of the sweep."""
    parent = Parent(recipe_with("s"))

    def train(*_: Any, **__: Any) -> RunResult:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end  # type: ignore[no-any-return]

    in_process(monkeypatch, parent, train)
    return parent, parent.calls


def plan_of(whole: Recipe, trials: list[Recipe], points: list[Any], steps: int = 1) -> SweepPlan:
    """Of a sweep of these trials."""
    resolved: Any = SimpleNamespace(total_steps=steps)
    return SweepPlan(whole, resolved, points, trials, [steps] * len(trials))


def outcome_of(whole: Recipe, trial: Recipe, parent: Parent) -> Outcome:
    """Of a sweep of this one trial."""
    found = parent.run_flow(Trials(plan_of(whole, [trial], [{}]), parent, {}).tried(), None)
    assert found is not None
    return found[0]


def swept(folder: Path) -> Recipe:
    """One rate, tried three times at most."""
    section = {"learning_rates": [0.1], "retries": 2, "max_concurrent": 1}
    return recipe_with("s", output=str(folder), init_from="x", data={"eval": "y"}, sweep=section)
