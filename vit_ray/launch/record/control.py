"""Control of a run: why to stop, requested checkpoints, its failure, and its status.

The state of one run, in the process that records it (`run_host.py`). It is built only from the
lines of the run's log, so a process that died and was restarted has the same state.
"""

import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vit_ray.metric_names import EVAL_TOP1, STARTUP_FIRST_STEP_S
from vit_ray.outcomes import EventKind, Failure, WorkerPlace
from vit_ray.tracking.metrics_log import Record
from vit_ray.worker.run_link import Orders, beats_between

SILENT_BEATS: Final = 5
"""Missed heartbeats after which a worker is called silent."""
ONE_HANG_S: Final = 120.0
"""Reports within this time belong to the same hang."""
_MOST_NAMED: Final = 4


@dataclass
class Event:
    """Something that happened to the run, for its history."""

    kind: EventKind
    text: str
    step: int
    time_s: float


@dataclass
class Stage:
    """Child runs of one kind, such as trials of a sweep, as the display counts them."""

    what: str
    count: int
    ended: int = 0
    best: tuple[float, str] | None = None
    """The best score of those that ended, and the run that has it."""

    def end_one(self, label: str, score: float | None) -> None:
        """A child run has ended; without a score if it failed."""
        self.ended += 1
        if score is not None and (self.best is None or score > self.best[0]):
            self.best = (score, label)

    def __str__(self) -> str:
        text = f"{self.what} {min(self.ended + 1, self.count)} of {self.count}"
        return text if self.best is None else f"{text}, best {self.best[0]:.2%} ({self.best[1]})"


@dataclass
class RunStatus:
    """The state of the run, as the display shows it."""

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Last value of each metric; for several attempts the first attempt's start-up time."""
    events: list[Event] = field(default_factory=list)
    stage: str = ""
    """The current child run; empty for a run without any."""
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and metrics of each evaluation on a data set, in order."""


class _Heard(NamedTuple):
    """The last heartbeat of a worker."""

    step: int
    time_s: float
    introduction: tuple[str, ...]
    """Host, node, detail and group, as in `WorkerPlace`; empty if unknown."""


class ControlState:
    """State of one run; safe for several threads."""

    def __init__(self) -> None:
        self.name = ""
        """Of the run, under its parent."""
        self.parent: ControlState | None = None
        """Of the sweep or study that the run is part of."""
        self._now = RunStatus()
        self._stop: str | None = None
        self._failure: Failure | None = None
        self._saves = 0
        self._stage: Stage | None = None
        self._child_steps: dict[str, int] = {}
        self.has_finished = False
        """Its end is in the log."""
        self._heard: dict[int, _Heard] = {}
        self._hang_s = 0.0
        self._hung_at: set[str] = set()

    def note(self, record: Record) -> None:
        match record["kind"]:
            case "metrics":
                known, values = self._now.metrics, record["values"]
                known.update(
                    {k: v for k, v in values.items() if k != STARTUP_FIRST_STEP_S or k not in known}
                )
                self._now.step = max(self._now.step, record["step"])
                if EVAL_TOP1 in values:
                    self._now.evaluations.append((record["step"], values))
            case "event":
                kind, time_s = EventKind(record["event"]), record["time_ms"] / 1000
                self._now.events.append(Event(kind, record["text"], record["step"], time_s))
                if kind in (EventKind.WORKER_FAILED, EventKind.RESIZING):
                    self._heard = {}  # other workers follow, perhaps on other nodes
            case "stop":
                self._stop = record["reason"]
            case "fail":
                self._failure = Failure(record["reason"], bool(record["has_diverged"]))
            case "save":
                self._saves += 1
            case "stage":
                self._stage = Stage(record["what"], record["count"])
            case "child step":
                self.child_step(record["name"], record["step"])
            case "child ended" if self._stage is not None:
                self._stage.end_one(record["label"], record["score"])
            case "finish":
                self.has_finished = True

    def heartbeat(self, rank: int, step: int, *introduction: str) -> Orders:
        """A worker is at `step`; it introduces itself once."""
        earlier = self._heard.get(rank)
        known = earlier.introduction if earlier else ()
        self._heard[rank] = _Heard(step, time.monotonic(), introduction or known)
        if introduction:  # in a new attempt, so that its hang would be a new one
            self._hung_at = set()
        if rank == 0:
            self._now.step = max(self._now.step, step)
            if self.parent is not None:
                self.parent.child_step(self.name, step)
        return Orders(self.stop_reason(), self._saves)

    def hanging(self, rank: int, world_size: int, where: str) -> str:
        """Which workers the others wait for, in answer to a worker that hangs.

        Args:
            rank: of the worker that asks.
            world_size: workers of its group.
            where: the calls that it is in.

        Returns:
            A sentence; empty if another worker has reported the same hang.
        """
        now_s = time.monotonic()
        if now_s - self._hang_s > ONE_HANG_S:
            self._hang_s, self._hung_at = now_s, set()
        if where in self._hung_at:
            return ""
        self._hung_at.add(where)
        heard = [(one, self._heard.get(one)) for one in range(world_size)]
        newest = max((of.step for _, of in heard if of), default=0)
        named: list[str] = []
        for one, of in heard:
            name = f"worker {one}" + (f" on {of.introduction[0]}" if of and of.introduction else "")
            if of is None:
                named.append(f"{name} has never been heard from")
            elif one != rank and now_s - of.time_s > SILENT_BEATS * beats_between(world_size):
                named.append(
                    f"{name} has been silent for {now_s - of.time_s:.0f} s, at step {of.step}"
                )
            elif of.step < newest:
                named.append(f"{name} is behind, at step {of.step}")
        others = f"{world_size - len(named)} of {world_size} workers are at step {newest}"
        more = [f"{len(named) - _MOST_NAMED} more of them"] if len(named) > _MOST_NAMED else []
        return "; ".join([*named[:_MOST_NAMED], *more, others])

    def places(self) -> dict[int, WorkerPlace]:
        """Places of the workers that have introduced themselves since the last failure, by rank."""
        return {
            rank: WorkerPlace(host, node, detail, of.step, group)
            for rank, of in self._heard.items()
            for host, node, detail, group in ([of.introduction] if of.introduction else [])
        }

    def stop_reason(self) -> str | None:
        """Why this run, or its sweep or study, was asked to stop."""
        return self._stop or (self.parent.stop_reason() if self.parent else None)

    def failure(self) -> Failure | None:
        """Why the run cannot be trained any further, so that a restart would not help."""
        return self._failure

    def status(self) -> RunStatus:
        """A copy, for the display, and at the end for the result."""
        now, stage = self._now, "" if self._stage is None else str(self._stage)
        copied = dict(now.metrics), list(now.events), stage, list(now.evaluations)
        return RunStatus(now.step, *copied)

    def child_step(self, name: str, step: int) -> None:
        """A child run (a trial of a sweep) is at `step`; the display shows the children's sum."""
        self._child_steps[name] = step
        self._now.step = sum(self._child_steps.values())
