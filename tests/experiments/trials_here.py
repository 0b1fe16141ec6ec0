"""Trials in this process: Ray and the trainings are fakes, everything else is real."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.resolved import resolved_run
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments import study, sweep, trials, vtab
from vit_ray.experiments.trials import OpenParent, Work
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run import Following, RunResult

CLUSTER = ClusterShape(1, 8.0, 0.0, 0.0)


class Calls:
    """Stands for record and control of a run: every method notes its call."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.stop: str | None = None
        self.run_name, self.command = "", "vit-ray sweep"

    def stop_reason(self) -> str | None:
        return self.stop

    def hint(self) -> str:
        return "a link"

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.made.append((method, *args))

    def kinds(self) -> list[str]:
        return [args[0] for method, *args in self.made if method == "event"]

    def last(self, method: str) -> tuple[Any, ...]:
        return [call[1:] for call in self.made if call[0] == method][-1]


def parent_of(recipe: Recipe | None = None, **parent_is: bool) -> tuple[OpenParent, Calls]:
    """An open parent run without Ray or MLflow, and what is recorded there."""
    recipe, calls = recipe or recipe_with("parent"), Calls()
    calls.run_name = recipe.name
    run: Any = SimpleNamespace(record=calls, is_complete=False)
    return OpenParent(recipe, run, CLUSTER, resolved_run(), **parent_is), calls


def following_of(parent: OpenParent) -> Following:
    return Following(parent.run, threading.Event())


def result_of(recipe: Recipe, steps: int = 1, total_steps: int = 1, **metrics: float) -> RunResult:
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    is_complete = steps >= total_steps
    name = recipe.name
    return RunResult(name, name, steps, total_steps, measured, "folder", is_complete)


def in_process(monkeypatch: pytest.MonkeyPatch, train: Callable[..., RunResult]) -> None:
    """Trials run here one after another, with `train(recipe, ...)` in the place of a training."""

    def run_trials(
        work: Work, parent: Any, _: str, __: Any, configs: list[Any], **___: Any
    ) -> list[dict[str, Any]]:
        return [{**work(config, following_of(parent)), "config": config} for config in configs]

    for module in (sweep, study, vtab):
        monkeypatch.setattr(module, "run_trials", run_trials)
    monkeypatch.setattr(trials, "train", train)
