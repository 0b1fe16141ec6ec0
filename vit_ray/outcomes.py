"""How a run or a trial begins and ends, and its events between: values that cross processes.

Decisions follow these values; their texts are for users. MLflow's tags, and the histories and logs
on disk, hold the values of the enums and the origin of a branch, so these must not change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

BRANCH_NOTE: Final = "branched_from.txt"
"""File next to the checkpoints of a branch or fork that names the run of its first checkpoint."""
BRANCH_TAG: Final = "vit_ray.branched_from"
"""MLflow's tag of that text; later reports read it from there."""


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


def origin_of(cell_name: str, step: int) -> str:
    """The text for a branch that starts from `cell_name`'s checkpoint at `step`."""
    return f"{cell_name} at step {step}"


def step_of(origin: str) -> int | None:
    """The step in such a text; None if it has none."""
    found = re.search(r" at step (\d+)$", origin)
    return int(found[1]) if found else None


def own_share(origin: str, global_batch_size: float | None, images_seen: float | None) -> float:
    """The share of a training's compute that is its own: for a branch, the steps after its start.

    Args:
        origin: as `origin_of` made it; empty for a training that began at step 0.
        global_batch_size: of the training, in images.
        images_seen: by the training, those before the branch included.

    Returns:
        In [0, 1]. 0 for a branch whose start is unknown: its parent run has counted most of it.
    """
    if not origin:
        return 1.0
    step = step_of(origin)
    if step is None or global_batch_size is None or not images_seen:
        return 0.0
    return max(0.0, 1 - step * global_batch_size / images_seen)
