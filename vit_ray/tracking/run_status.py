"""What is known of a run while it is recorded: plain data, for the driver and its display."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import EventKind

RUN_FOLDER = "vit_ray.run_folder"
"""Tag of the folder that has the run's checkpoints: two outputs may have runs of one name."""


@dataclass
class Event:
    """Something that happened to the run, for its history."""

    kind: EventKind
    text: str
    step: int
    time_s: float


@dataclass
class Stage:
    """Runs of one kind under this one, such as trials of a sweep, as the display counts them."""

    what: str
    count: int
    ended: int = 0
    best: tuple[float, str] | None = None
    """The best score of those that ended, and whose it is."""

    def end_one(self, label: str, score: float | None) -> None:
        """One of them has ended; without a score if it failed."""
        self.ended += 1
        if score is not None and (self.best is None or score > self.best[0]):
            self.best = (score, label)

    def __str__(self) -> str:
        text = f"{self.what} {min(self.ended + 1, self.count)} of {self.count}"
        return text if self.best is None else f"{text}, best {self.best[0]:.2%} ({self.best[1]})"


@dataclass
class RunStatus:
    """Where the run is, as the display shows it."""

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    stage: str = ""
    """Which of the runs under this one it is at; empty for a run without any."""


@dataclass(frozen=True)
class RunOpening:
    """How a run's record is opened, in its host."""

    config: TrackingConfig
    run_name: str
    log_path: Path
    run_id: str | None
    """MLflow run to continue."""
    params: dict[str, str]
    tags: dict[str, str]
    resume_step: int | None = None
    """Step of the checkpoint that training goes on from."""
    parent: Any = None
    """Handle of the sweep or study that the run is part of."""
    datasets: list[dict[str, Any]] = field(default_factory=list)
    """Inputs: name, digest, source, context and profile of each."""
    measured_on: str = "eval"
    """Group of what workers call `eval/...`: `dev` where it is a split to choose on."""
    awaited_metric: str | None = None
    """Listed first among the run's metrics: MLflow's compare view draws the first one."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies this opening of the log, also after the host has died and was restarted."""
