"""How a run or a trial ends, and its events before: values that cross processes.

Decisions follow these values; their texts are for users. MLflow's tags, and the histories and logs
on disk, hold the values of the enums, so these must not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """Kind of an event in a run's history."""

    BRANCH = "branch"
    CALLBACK_FAILED = "callback failed"
    CELL_FAILED = "failed cell"
    CHECKPOINT_DAMAGED = "damaged checkpoint"
    CHECKPOINT_FAILED = "checkpoint failed"
    CHECKPOINT_LEFT = "old checkpoint left"
    EVALUATION_CUT = "evaluation cut"
    EVALUATION_FAILED = "evaluation failed"
    EVALUATION_NOT_RECORDED = "evaluation not recorded"
    FIRST_STEP = "first step"
    HUNG = "hung"
    NODE_LEFT_OUT = "node left out"
    NO_PLACE = "waiting for a place"
    NOT_COMPILED = "not compiled"
    NOT_FINITE = "not finite"
    SKIPPED = "step skipped"
    OUT_OF_MEMORY = "out of memory"
    PREEMPTION = "preemption"
    RECIPE_CHANGED = "recipe changed"
    RESIZING = "resizing"
    RESUMED = "resumed"
    STOPPED = "stopped"
    """On request, or early: such a run has not failed, although it lacks its last steps."""
    STORAGE_SLOW = "storage slow"
    TASK_FAILED = "failed task"
    TRIAL_DIVERGED = "trial diverged"
    WEIGHTS = "weights"
    WORKER_FAILED = "worker failed"


@dataclass(frozen=True)
class Failure:
    """Why a run ends when a restart would not help.

    Attributes:
        has_diverged: its loss or gradient is not finite: the same recipe would diverge again.
    """

    reason: str
    has_diverged: bool = False


@dataclass(frozen=True)
class WorkerPlace:
    """Place of a worker, as it introduced itself, and its step.

    Attributes:
        node: Ray's id of its node.
        detail: GPU, process and log file, for errors.
        group: id of its placement group.
    """

    host: str
    node: str
    detail: str
    step: int
    group: str = ""

    def __str__(self) -> str:
        return f"on {self.host} ({self.detail}, step {self.step})"


class TrialState(StrEnum):
    """How a trial of a sweep ended."""

    FINISHED = "finished"
    STOPPED_EARLY = "stopped early"
    """A rung of ASHA stopped it."""
    DIVERGED = "diverged"
    FAILED = "failed"
