"""Start, events, end and tags of a run or trial, as values that processes exchange.

Decisions depend on these values; their texts are for users. MLflow's tags and the files on disk
contain the values of the enums and the origins of branches, so these must not change.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# File next to the checkpoints of a branch or fork, with the origin of its first checkpoint.
BRANCH_NOTE: Final = "branched_from.txt"
# Tag in MLflow with the same text, for reports.
BRANCH_TAG: Final = "vit_ray.branched_from"
# Tag with the parameters, as JSON, that have changed since the run was created.
CHANGED_PARAMS: Final = "vit_ray.changed_params"
PARENT_TAG: Final = "mlflow.parentRunId"
# What the run is, such as `sweep` or `finetune`.
KIND: Final = "vit_ray.kind"
# The folder of the run's checkpoints: two outputs may have runs of one name.
RUN_FOLDER: Final = "vit_ray.run_folder"
# The run whose weights were its initial weights.
INIT_RUN: Final = "vit_ray.init_run"
# Equal for runs that differ only in the seed.
GROUP: Final = "vit_ray.group"
# Heartbeats per second of a large group; each takes 1.4 ms of CPU in the recorder's process.
_BEATS_AT_A_TIME: Final = 128


class EventKind(StrEnum):
    """Kind of an event in a run's history."""

    BRANCH = "branch"
    CALLBACK_FAILED = "callback failed"
    CELL_FAILED = "failed cell"
    CHECKPOINT_DAMAGED = "damaged checkpoint"
    CHECKPOINT_FAILED = "checkpoint failed"
    CHECKPOINT_LEFT = "old checkpoint left"
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
    # On request, or early: such a run has not failed, although its last steps are missing.
    STOPPED = "stopped"
    STORAGE_SLOW = "storage slow"
    TASK_FAILED = "failed task"
    TRIAL_FAILED = "failed trial"
    WEIGHTS = "weights"
    WORKER_FAILED = "worker failed"


class RunStoppedError(RuntimeError):
    """An evaluation, a sweep or a study was stopped on request."""


class RunFailedError(RuntimeError):
    """The run ends: a restart would meet the same error, or there were too many; with the cause."""


class LockLostError(RunFailedError):
    """Another process has taken over the folder; this one must not write there."""


@dataclass(frozen=True)
class WorkerPlace:
    """Worker info: where a worker runs, as it reports itself, and its step.

    Attributes:
        node: Ray's id of the node.
        detail: GPU, process and log file, for errors.
        group: id of the placement group.
    """

    host: str
    node: str
    detail: str
    step: int
    group: str = ""

    def __str__(self) -> str:
        return f"on {self.host} ({self.detail}, step {self.step})"


def beats_between(world_size: int) -> int:
    """A rank above 0 sends a heartbeat every this many beats (seconds) of its watchdog.

    Some rank of a large group still learns of a request within a second; the ranks then agree.
    """
    return math.ceil(world_size / _BEATS_AT_A_TIME)


def origin_of(cell_name: str, step: int) -> str:
    """The text for a branch that starts from `cell_name`'s checkpoint at `step`."""
    return f"{cell_name} at step {step}"


def own_share(origin: str, global_batch_size: float | None, images_seen: float | None) -> float:
    """Share of a training's compute that no other run has spent: for a branch, of the steps after
    its start.

    Args:
        origin: as from `origin_of`; empty for a training that began at step 0.
        global_batch_size: of the training, in images.
        images_seen: by the training, including those before the branch.

    Returns:
        In [0, 1]. 0 for a branch whose start is unknown: the other run counts most of its compute.
    """
    if not origin:
        return 1.0
    step = re.search(r" at step (\d+)$", origin)
    if step is None or global_batch_size is None or not images_seen:
        return 0.0
    return max(0.0, 1 - int(step[1]) * global_batch_size / images_seen)
