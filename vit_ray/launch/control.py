"""Control of a run: why to stop, checkpoints that were requested, its failure, and its status.

The state of one run, in the process that records it (`run_host.py`). It is made from the lines of
the run's log alone, so a process that died and was started again has it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking.metrics_log import STARTUP, Record
from vit_ray.train.run_link import Orders


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
    """Last value of each; of several attempts the first one's `STARTUP`."""
    events: list[Event] = field(default_factory=list)
    stage: str = ""
    """The current one of the runs under this one; empty for a run without any."""


class ControlState:
    """Of one run; for several threads."""

    def __init__(self, name: str, parent: Callable[[], ControlState | None]) -> None:
        """
        Args:
            name: of the run, under its parent.
            parent: the state of the sweep or study that the run is part of, if there is one.
        """
        self._name, self._parent = name, parent
        self._now = RunStatus()
        self._stop: str | None = None
        self._failure: Failure | None = None
        self._saves = 0
        self._stage: Stage | None = None
        self._child_steps: dict[str, int] = {}
        self.has_finished = False
        """Its end is in the log."""

    def note(self, record: Record) -> None:
        """Take over a record of the log."""
        if record["kind"] == "metrics":
            known, values = self._now.metrics, record["values"]
            known.update({k: v for k, v in values.items() if k != STARTUP or k not in known})
            self._now.step = max(self._now.step, record["step"])
        elif record["kind"] == "event":
            event = record["event"]
            self._now.events.append(Event(**{**event, "kind": EventKind(event["kind"])}))
        elif record["kind"] == "wish" and record["what"] == "stop":
            self._stop = record["reason"]
        elif record["kind"] == "wish" and record["what"] == "fail":
            self._failure = Failure(record["reason"], bool(record.get("has_diverged")))
        elif record["kind"] == "wish":
            self._saves += 1
        elif record["kind"] == "stage":
            self._stage = Stage(record["what"], record["count"])
        elif record["kind"] == "child step":
            self.child_step(record["name"], record["step"])
        elif record["kind"] == "child ended" and self._stage is not None:
            self._stage.end_one(record["label"], record["score"])
        elif record["kind"] == "finish":
            self.has_finished = True

    def heartbeat(self, rank: int, step: int) -> Orders:
        """A worker is at `step`."""
        if rank == 0:
            self._now.step = max(self._now.step, step)
            if parent := self._parent():
                parent.child_step(self._name, step)
        return Orders(self.stop_reason(), self._saves)

    def stop_reason(self) -> str | None:
        """Why this run, or the one that it is part of, was asked to stop."""
        parent = self._parent()
        return self._stop or (parent.stop_reason() if parent else None)

    def failure(self) -> Failure | None:
        """Why the run cannot be trained any further, and a restart would not help."""
        return self._failure

    def status(self) -> RunStatus:
        """A copy, for the display, and at the end for the result."""
        now, stage = self._now, "" if self._stage is None else str(self._stage)
        return RunStatus(now.step, dict(now.metrics), list(now.events), stage)

    def child_step(self, name: str, step: int) -> None:
        """A run under this one (a trial of a sweep) is at `step`; the display shows their sum."""
        self._child_steps[name] = step
        self._now.step = sum(self._child_steps.values())
