"""Flows in this process: trainings and the parent's record are fakes, everything else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.experiments import parent_run, training
from vit_ray.experiments.parent_run import OpenParent
from vit_ray.experiments.runner import Room, Runner, Work
from vit_ray.experiments.training import Outcome, outcomes
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import TrialState
from vit_ray.tracking.metrics_log import RunOpening, metrics_log_path

ROOMY = Room(99.0, 999.0)


class Calls:
    """Stands for record and control of a run: every method notes its call."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.stop: str | None = None

    def stop_reason(self) -> str | None:
        """Why the run was asked to stop."""
        return self.stop

    def hint(self) -> str:
        """Where MLflow shows it."""
        return "a link"

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.made.append((method, *args))

    def kinds(self) -> list[str]:
        """Of the events, in turn."""
        return [args[0] for method, *args in self.made if method == "event"]

    def last(self, method: str) -> tuple[Any, ...]:
        """Arguments of its last call."""
        return [call[1:] for call in self.made if call[0] == method][-1]


class Parent(OpenParent):
    """An open parent run without Ray or MLflow."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        recipe = recipe or recipe_with("parent")
        opening = RunOpening(recipe.tracking, recipe.name, metrics_log_path(recipe.run_folder))
        calls = Calls()
        run: Any = SimpleNamespace(record=calls, control=calls, opening=opening, is_complete=False)
        super().__init__(recipe, run, None, "here", ClusterShape(1, 8.0, 0.0, 0.0))
        self.__dict__.update(calls=calls, first=None)

    calls: Calls
    first: str | None
    """Training for which workers were started beforehand."""

    def start_workers(self, first: Recipe | None, **_: bool) -> None:
        """Note whose."""
        self.__dict__["first"] = first and first.name


def result_of(recipe: Recipe, steps: int = 1, total_steps: int = 1, **metrics: float) -> RunResult:
    """Of a training, with metrics of its evaluation."""
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    return RunResult(recipe.name, recipe.name, steps, total_steps, measured, "folder")


def in_turns(flow: Any, room: Callable[[], Room], is_stopped: Callable[[], bool]) -> Any:
    """As Ray Tune runs it: of each training that is on its way a rung in turn."""
    runner = Runner(flow, room, is_stopped)
    live: dict[Work, tuple[Iterator[Outcome], Outcome]] = {}
    try:
        while not runner.is_over:
            while (work := runner.next()) is not None:
                lost = Outcome(TrialState.FAILED, error="no outcome")
                live[work] = outcomes(work.training), lost
            for work, (steps, last) in list(live.items()):
                outcome = next(steps, None)
                if outcome is not None and runner.goes_on(work, outcome):
                    live[work] = steps, outcome
                else:
                    del live[work]
                    runner.end(work, outcome or last)
    finally:
        runner.close()
    if runner.error is not None:
        raise runner.error
    return runner.result


def in_process(
    monkeypatch: pytest.MonkeyPatch,
    parent: Parent,
    train: Callable[..., Any] | None,
    room: Callable[[], Room] = lambda: ROOMY,
) -> None:
    """Flows under a parent run here, with `train(recipe, ...)` in the place of a training."""

    def run_flow(flow: Any, *, room: Any, is_stopped: Any, **_: Any) -> Any:
        return in_turns(flow, room, is_stopped)

    monkeypatch.setattr(parent_run, "run_flow", run_flow)
    monkeypatch.setattr(parent_run, "cluster_room", lambda *_: room())
    monkeypatch.setattr(training.OpenRun, "joined", lambda *_: parent.run)
    monkeypatch.setattr(training, "train", train)
