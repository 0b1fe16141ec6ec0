"""Trials in this process: Ray and the trainings are fakes, everything else is real."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.launch.resolved import resolved_run
from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments import study, sweep, trials, vtab
from vit_ray.experiments.trials import OpenParent, Work
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.run import Following, RunResult
from vit_ray.tracking.recorder import Recorder

CLUSTER = ClusterShape(1, 8.0, 0.0, 0.0)


def parent_of(recipe: Recipe | None = None, **parent_is: bool) -> tuple[OpenParent, Mock]:
    """An open parent run without Ray or MLflow, and its record."""
    recipe, record = recipe or recipe_with("parent"), Mock(spec=Recorder)
    record.run_name, record.command = recipe.name, "vit-ray sweep"
    record.stop_reason.return_value = record.run_id.return_value = None
    run: Any = SimpleNamespace(record=record, is_complete=False)
    return OpenParent(recipe, run, CLUSTER, resolved_run(), **parent_is), record


def kinds(record: Mock) -> list[str]:
    """Of the recorded events."""
    return [call.args[0] for call in record.event.call_args_list]


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
