"""The trainings of one stage of a sweep: its trials, or its retrainings, side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ray.tune.schedulers import TrialScheduler

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.experiments.asha import RememberedAsha, RungRecord, rung_steps
from vit_ray.experiments.diverged_trials import DivergedTrials, trial_key
from vit_ray.experiments.parent_run import OpenParent
from vit_ray.experiments.retries import train_with_retries
from vit_ray.experiments.search_space import Point
from vit_ray.experiments.side_by_side import Room, room_of
from vit_ray.experiments.trials import Outcome, run_trials
from vit_ray.launch.cluster import capacity
from vit_ray.launch.open_record import tag_ended_run
from vit_ray.launch.pool_training import RunDivergedError
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import EventKind, TrialState
from vit_ray.storage import locate

Kind = Literal["sweep_trial", "finetune"]

_STAGES: dict[Kind, str] = {"sweep_trial": "trial", "finetune": "retraining"}


@dataclass(frozen=True)
class Trained:
    """What one training of a stage came to."""

    result: RunResult | None
    """None where it failed."""
    state: TrialState
    error: str = ""


def deciding_metric(recipe: Recipe) -> str:
    """The accuracy that chooses a rate and is the result."""
    return "eval/averaged_top1" if recipe.train.averaging else "eval/top1"


def max_concurrent(recipes: Sequence[Recipe]) -> int:
    """Trials that the cluster holds at a time, were all as large as the largest."""
    cluster = Room(*capacity())
    trials = [room_of(recipe, cluster) for recipe in recipes]
    by_gpu = [cluster.gpus // one.gpus for one in trials if one.gpus]
    return max(1, int(min([*by_gpu, *(cluster.cpus // one.cpus for one in trials)])))


class Stage:
    """Trains recipes as Ray Tune trials, each from rung to rung where a scheduler may stop it."""

    def __init__(
        self,
        sweep: Recipe,
        config: SweepConfig,
        recipes: list[Recipe],
        points: Sequence[Point],
        kind: Kind,
        parent: OpenParent,
        total_steps: list[int] | None = None,
    ) -> None:
        """
        Args:
            points: what each recipe has of its own, for Ray Tune's tables.
            total_steps: of each recipe, where a scheduler may stop them; None: nothing is stopped.
        """
        self._name, self._config = sweep.name, config
        self._recipes, self._points, self._kind = recipes, points, kind
        self._parent, self._is_nested = parent.for_children, parent.is_nested
        self._tags = parent.child_tags
        folder = locate(sweep.run_folder)
        self._diverged = DivergedTrials(folder)
        self._keys = [trial_key(recipe) for recipe in recipes]
        self._rungs: list[list[int | None]] = [[None]] * len(recipes)
        self._scheduler: RememberedAsha | None = None
        if total_steps is not None and config.scheduler == "asha":
            longest = max(total_steps)
            self._record = RungRecord(folder)
            self._scheduler = RememberedAsha(
                config, self._record, self._keys, longest, self._note_stop
            )
            self._rungs = [[*rung_steps(config, steps, longest)] for steps in total_steps]

    def run(self) -> list[Trained] | None:
        """What became of each, in the order of the recipes.

        None if the sweep was told to stop: its trials have written checkpoints, and resume from
        them.
        """
        run, first = self._parent.run, self._recipes[0]
        run.control.begin_stage(_STAGES[self._kind], len(self._recipes))
        outcomes = (
            self._run_in_turn()
            if self._is_nested
            else run_trials(
                {self._label(index): point for index, point in enumerate(self._points)},
                self.train,
                max_concurrent=self._config.max_concurrent or max_concurrent(self._recipes),
                name=f"{first.name}-tune",
                storage_path=f"{first.output.rstrip('/')}/tune",
                scheduler=self._scheduler,
            )
        )
        while (index := self._best_stopped(outcomes)) is not None:
            if run.control.stop_reason():
                return None
            text = f"{self._label(index)}: every trial that was not stopped early has failed"
            run.record.event(EventKind.TRIAL_CONTINUED, text, 0)
            outcomes[index] = self.train(index, len(self._rungs[index]) - 1)
        if run.control.stop_reason():
            return None
        return [self._trained(index, outcome) for index, outcome in enumerate(outcomes)]

    def _best_stopped(self, outcomes: list[Outcome | None]) -> int | None:
        """The trial that got furthest, where rungs stopped some and no other came to its end."""
        ended = [(index, one) for index, one in enumerate(outcomes) if one is not None]
        stopped = [pair for pair in ended if pair[1]["state"] == TrialState.STOPPED_EARLY]
        if not stopped or any(one["state"] == TrialState.FINISHED for _, one in ended):
            return None
        return max(stopped, key=lambda pair: (pair[1]["step"], pair[1]["top1"]))[0]

    def _run_in_turn(self) -> list[Outcome | None]:
        """In the place of one training of a study, which has no room for several."""
        return [self._run_one(index) for index in range(len(self._recipes))]

    def _run_one(self, index: int) -> Outcome:
        for rung in itertools.count():
            outcome = self.train(index, rung)
            decision = self._scheduler and self._scheduler.on_trial_result(None, None, outcome)
            if outcome["is_over"] or decision == TrialScheduler.STOP:
                return outcome
        raise AssertionError

    def train(self, index: int, rung: int) -> Outcome:
        """Train one up to a rung, of which the last is its end."""
        recipe, control = self._recipes[index], self._parent.run.control
        if reason := control.stop_reason():
            return _failed(reason)  # it was scheduled after the sweep was asked to stop
        if reason := self._diverged.reason(recipe):
            control.child_ended(self._label(index), None)
            return _failed(reason, TrialState.DIVERGED)
        until, is_last = self._rungs[index][rung], rung == len(self._rungs[index]) - 1
        if not is_last and until is not None and (known := self._passed(index, until)):
            return known
        try:
            result = self._train(index, None if is_last else until)
        except Exception as error:  # one trial that fails must not end the sweep
            return self._note_failure(index, error)
        is_cut = result.steps < (until or 0) and not result.ended
        if not is_last and (is_cut or result.evaluation_due):
            return _failed("stopped on request")
        # One that an earlier driver let go on behind its rung is at its end already.
        is_last = is_last or result.steps >= result.total_steps
        top1 = result.metrics.get(deciding_metric(recipe))
        is_over = is_last or bool(result.ended)
        if is_over:
            control.child_ended(self._label(index), top1)
        return {
            "index": index,
            "result": vars(result),
            "step": result.steps,
            "top1": top1,
            "state": TrialState.FINISHED if is_over else TrialState.STOPPED_EARLY,
            "is_over": is_over,
        }

    def _label(self, index: int) -> str:
        return self._recipes[index].name.removeprefix(f"{self._name}-")

    def _passed(self, index: int, step: int) -> Outcome | None:
        """The outcome at a rung that an earlier driver has seen the trial pass."""
        known = self._record.find(self._keys[index], step)
        if known is None or not known.goes_on:
            return None
        outcome = {"index": index, "step": step, "top1": known.top1}
        return {**outcome, "state": TrialState.STOPPED_EARLY, "is_over": False}

    def _train(self, index: int, until_step: int | None) -> RunResult:
        recipe = self._recipes[index]
        is_scratch = self._kind == "finetune" and recipe.init_from is None
        return train_with_retries(
            recipe,
            "pretrain" if is_scratch else self._kind,
            self._parent,
            self._config.retries,
            {"vit_ray.sweep_stage": self._kind, **self._tags},
            EventKind.TRIAL_RETRIED,
            until_step,
        )

    def _note_failure(self, index: int, error: Exception) -> Outcome:
        label, run = self._label(index), self._parent.run
        text = str(error) or repr(error)
        run.control.child_ended(label, None)
        if not isinstance(error, RunDivergedError):
            return _failed(text)
        if self._kind == "sweep_trial":
            run.record.event(EventKind.TRIAL_DIVERGED, f"{label}: {text}", 0)
            self._diverged.note(self._recipes[index], text)
        return _failed(text, TrialState.DIVERGED)

    def _trained(self, index: int, outcome: Outcome | None) -> Trained:
        if outcome is None:
            return Trained(None, TrialState.FAILED, "the trial did not come to its end")
        state = TrialState(outcome["state"])
        if state in (TrialState.DIVERGED, TrialState.FAILED):
            return Trained(None, state, outcome["error"])
        result = RunResult(**outcome["result"])
        if state is TrialState.STOPPED_EARLY:
            tags = {"vit_ray.stopped_early": f"step {result.steps} of {result.total_steps}"}
            tag_ended_run(
                self._recipes[index],
                result.run_id,
                tags,
                self._parent.run.opening,
                self._parent.node_id,
            )
        return Trained(result, state)

    def _note_stop(self, index: int, step: int, is_new: bool) -> None:
        self._parent.run.control.child_ended(self._label(index), None)
        if is_new:
            text = f"{self._label(index)}: after {step} steps, by its accuracy on the dev split"
            self._parent.run.record.event(EventKind.TRIAL_STOPPED, text, 0)


def _failed(text: str, state: TrialState = TrialState.FAILED) -> Outcome:
    return {"state": state, "error": text, "is_over": True}
