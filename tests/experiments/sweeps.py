"""A sweep of one trial whose trainings end as a test says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.experiments.studies import Calls
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments import retries, stage, sweep
from vit_ray.experiments.stage import Trained
from vit_ray.launch.run import RunResult


def trained(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any]) -> tuple[Any, Calls]:
    """What a trial comes to whose attempts end so, and the events of the sweep."""
    calls = Calls()

    def train(*_: Any, **__: Any) -> RunResult:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    monkeypatch.setattr(retries, "train", train)

    def run_here(configurations: Any, train: Any, **_: Any) -> list[Any]:
        return [train(index, 0) for index in range(len(configurations))]

    monkeypatch.setattr(stage, "run_trials", run_here)
    children = SimpleNamespace(run=SimpleNamespace(record=calls, control=calls))
    parent: Any = SimpleNamespace(for_children=children, is_nested=False, child_tags={})
    return parent, calls


def outcome_of(whole: Recipe, trial: Recipe, parent: Any) -> Trained:
    """Of a sweep of this one trial."""
    found = stage.Stage(whole, sweep.sweep_of(whole), [trial], [{}], "sweep_trial", parent).run()
    assert found is not None
    return found[0]


def swept(folder: Path) -> Recipe:
    """One rate, tried three times at most."""
    section = {"learning_rates": [0.1], "retries": 2, "max_concurrent": 1}
    return recipe_with("s", output=str(folder), init_from="x", data={"eval": "y"}, sweep=section)
