"""Goodput: each second of a run, over all its attempts and drivers, in exactly one class.

What is known of a run are marks in time: its drivers, the waits for a place, what each attempt
completed, failures and ends. `account` makes of them seconds by class, which sum to the wall clock.
"""

import statistics
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeVar

from vit_ray.metric_names import (
    COST_GPU_HOURS,
    RUN_GOODPUT,
    RUN_GROUP,
    RUN_WALL_S,
)

Item = TypeVar("Item")
PAUSE_S: Final = 10.0
"""A step that takes so much longer than usual, and ten times as long, was paused."""
_FEWEST_STEPS, _MOST_STEPS = 10, 101
"""By whose median the usual time of a step is known."""


class TimeClass(StrEnum):
    """What a second of a run was spent on."""

    PLACE = "place_wait"
    """The worker group was asked for and had no place."""
    STARTING = "starting"
    """Ray, processes, imports, data sets, the engine, and the first step, which compiles."""
    RESTORING = "restoring"
    TRAINING = "training"
    DATA = "data_wait"
    CHECKPOINT = "checkpoint"
    """Training stood still for a checkpoint; writing it at the same time costs nothing."""
    EVALUATION = "evaluation"
    REPEATED = "repeated"
    """Steps that an earlier attempt had done, and the waits for their data."""
    LOST = "lost"
    """From what an attempt completed last until its failure was noticed; and what a step
    took beyond the usual, by `PAUSE_S`: of a host that could not be reached, or of own code."""
    ENDING = "ending"
    STOPPED = "stopped"
    """No driver was there; not a part of the goodput."""
    UNKNOWN = "unknown"


UNPAID: Final = (TimeClass.STOPPED, TimeClass.PLACE)
"""No workers are held."""


@dataclass(frozen=True)
class Work:
    """What an attempt has completed; its last word counts."""

    attempt: str
    """Its id."""
    begin_s: float
    until_s: float
    """Unix times; what began after `until_s` is not completed."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By class; they sum to `until_s - begin_s`."""
    world_size: int = 1
    first_step: int = 0
    """Step from which it continued."""
    last_step: int = 0
    num_steps: int = 0
    """Steps done, also those that it did more than once."""
    first_s: float = 0.0
    """Of its first step, which is a part of the start."""

    @property
    def step_s(self) -> float:
        """Seconds of all its steps, with the waits for their data."""
        parts = (self.seconds.get(what, 0.0) for what in (TimeClass.TRAINING, TimeClass.DATA))
        return self.first_s + sum(parts)


@dataclass(frozen=True)
class DriverBegan:
    """A driver has begun to work on the run."""

    time_s: float


@dataclass(frozen=True)
class WaitedForPlace:
    """A worker group has waited for its place."""

    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Failed:
    """That an attempt has failed was noticed."""

    time_s: float


@dataclass(frozen=True)
class DriverEnded:
    """A driver has ended in order."""

    time_s: float


Mark = DriverBegan | WaitedForPlace | Work | Failed | DriverEnded


@dataclass(frozen=True)
class Account:
    """Where a run's time went."""

    seconds: Mapping[TimeClass, float]
    """Of each class; they sum to the wall clock."""
    core_days: float
    """Workers times days of all their steps, those that were repeated too."""
    worker_seconds: Mapping[TimeClass, float] = field(default_factory=dict)
    """As `seconds`, times the workers of the attempt that was on or was started."""

    @property
    def wall_s(self) -> float:
        """From the start of the first driver, without the time in which there was none."""
        return sum(self.seconds.values()) - self.seconds[TimeClass.STOPPED]

    @property
    def goodput(self) -> float:
        """Share of the wall clock that trained what had not been trained before."""
        return self.seconds[TimeClass.TRAINING] / self.wall_s if self.wall_s > 0 else 0.0

    def metrics(self, *, use_gpu: bool = False) -> dict[str, float]:
        """`run/goodput`, `run/wall_s`, and `run/<class>_s` for each class.

        Args:
            use_gpu: a worker has a GPU. Adds the hours in which they were held: of all seconds but
                those without workers (stopped, waiting for a place).
        """
        parts = {f"{RUN_GROUP}{kind}_s": value for kind, value in self.seconds.items()}
        if use_gpu:
            held = [s for kind, s in self.worker_seconds.items() if kind not in UNPAID]
            parts[COST_GPU_HOURS] = sum(held) / 3600
        return {RUN_GOODPUT: self.goodput, RUN_WALL_S: self.wall_s, **parts}


def account(marks: Sequence[Mark], now_s: float | None = None) -> Account:
    """The seconds of a run by class.

    Args:
        marks: in any order; of each attempt the last `Work`.
        now_s: a time to which a driver that works still is counted; None: to the last mark.
    """
    latest = {one.attempt: one for one in marks if isinstance(one, Work)}
    others = [one for one in marks if not isinstance(one, Work)]
    ordered = sorted([*others, *latest.values()], key=_begin_s)
    seconds, worker_seconds = dict.fromkeys(TimeClass, 0.0), dict.fromkeys(TimeClass, 0.0)
    num_workers = next((one.world_size for one in ordered if isinstance(one, Work)), 1)
    core_seconds, most_steps = 0.0, 0
    at_s = _begin_s(ordered[0]) if ordered else 0.0
    has_driver = has_worked = False

    def spend(until_s: float, what: TimeClass) -> None:
        nonlocal at_s
        seconds[what] += max(0.0, until_s - at_s)
        worker_seconds[what] += max(0.0, until_s - at_s) * num_workers
        at_s = max(at_s, until_s)

    for mark in ordered:
        match mark:
            case DriverBegan():
                # One that has not ended in order has died; its last sign was the mark before.
                spend(mark.time_s, TimeClass.STOPPED)
                has_driver, has_worked = True, False
            case WaitedForPlace():
                spend(mark.begin_s, TimeClass.STARTING)
                spend(mark.end_s, TimeClass.PLACE)
            case Work():
                num_workers = mark.world_size
                spend(mark.begin_s, TimeClass.STARTING)
                for what, value in _parts(mark, most_steps).items():
                    spend(at_s + value, what)
                spend(mark.until_s, TimeClass.UNKNOWN)
                core_seconds += mark.step_s * mark.world_size
                most_steps, has_worked = max(most_steps, mark.last_step), True
            case Failed():
                spend(mark.time_s, TimeClass.LOST)
                has_worked = False
            case DriverEnded():
                spend(mark.time_s, TimeClass.ENDING if has_worked else TimeClass.STARTING)
                has_driver = False
    if now_s is not None and has_driver:
        spend(now_s, TimeClass.ENDING if has_worked else TimeClass.STARTING)
    return Account(seconds, core_seconds / 86_400, worker_seconds)


def _begin_s(mark: Mark) -> float:
    return mark.begin_s if isinstance(mark, Work | WaitedForPlace) else mark.time_s


def _parts(work: Work, most_steps: int) -> dict[TimeClass, float]:
    """Seconds of an attempt, with the steps that were done before it in a class of their own."""
    parts = {kind: work.seconds.get(kind, 0.0) for kind in TimeClass}
    new = max(0, work.last_step - max(work.first_step, most_steps))
    repeated = (work.num_steps - new) / work.num_steps if work.num_steps else 0.0
    for kind in (TimeClass.TRAINING, TimeClass.DATA):
        again_s = repeated * parts[kind]
        parts[kind] -= again_s
        parts[TimeClass.REPEATED] += again_s
    return parts


class WorkClock:
    """The clock of one attempt on one worker: every moment is of one class."""

    def __init__(self, world_size: int = 1, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._class = clock, TimeClass.STARTING
        now_s = clock()
        self._first_at_s = now_s
        self._steps_s: deque[float] = deque(maxlen=_MOST_STEPS)
        self._trained_s = 0.0
        self.work = Work(uuid.uuid4().hex[:8], now_s, now_s, world_size=world_size)
        """Replaced as a whole: another thread may read it."""

    def enter(self, what: TimeClass, **changes: float) -> TimeClass:
        """Begin a class of time; returns the class that ends."""
        now_s, before, work = self._clock(), self._class, self.work
        spent = {**work.seconds, before: work.seconds.get(before, 0.0) + now_s - work.until_s}
        self.work = replace(work, until_s=now_s, seconds=spent, **changes)  # type: ignore[arg-type]
        self._class = what
        return before

    @contextmanager
    def within(self, what: TimeClass) -> Iterator[None]:
        """The block is of this class."""
        before = self.enter(what)
        try:
            yield
        finally:
            self.enter(before)

    def note_step(self, step: int) -> None:
        """A step is done; the first one was a part of the start."""
        work = self.work
        changes: dict[str, float] = {
            "last_step": max(work.last_step, step),
            "num_steps": work.num_steps + 1,
        }
        if not work.num_steps:
            changes |= {"first_step": step - 1, "first_s": self._clock() - self._first_at_s}
        self.enter(TimeClass.TRAINING, **changes)
        seconds = dict(self.work.seconds)
        trained_s = seconds.get(TimeClass.TRAINING, 0.0)
        step_s = trained_s - self._trained_s
        if len(self._steps_s) >= _FEWEST_STEPS:
            usual_s = statistics.median(self._steps_s)
            if step_s > max(10 * usual_s, usual_s + PAUSE_S):
                lost_s = seconds.get(TimeClass.LOST, 0.0) + step_s - usual_s
                seconds |= {
                    TimeClass.TRAINING: trained_s - step_s + usual_s,
                    TimeClass.LOST: lost_s,
                }
                self.work = replace(self.work, seconds=seconds)
                trained_s, step_s = seconds[TimeClass.TRAINING], usual_s
        self._steps_s.append(step_s)
        self._trained_s = trained_s

    def waits_for(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; the wait for each counts, but for that of the first step."""
        self._first_at_s = self._clock()
        source = iter(batches)
        while True:
            before = self._class
            if before is TimeClass.TRAINING:
                self.enter(TimeClass.DATA)
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                if before is TimeClass.TRAINING:
                    self.enter(before)
            yield batch


SHOWN: Final = {
    TimeClass.TRAINING: "training", TimeClass.DATA: "data wait", TimeClass.STARTING: "starting",
    TimeClass.PLACE: "waiting for a place", TimeClass.RESTORING: "restoring",
    TimeClass.CHECKPOINT: "checkpoints", TimeClass.EVALUATION: "evaluation",
    TimeClass.REPEATED: "repeated steps", TimeClass.LOST: "lost", TimeClass.ENDING: "ending",
    TimeClass.UNKNOWN: "unknown",
}  # fmt: skip


def describe_goodput(metrics: Mapping[str, float]) -> str:
    """One line of what `Account.metrics` holds; empty without it."""
    wall_s = metrics.get(RUN_WALL_S, 0.0)
    if wall_s <= 0:
        return ""
    parts = [
        (metrics.get(f"{RUN_GROUP}{kind}_s", 0.0) / wall_s, name) for kind, name in SHOWN.items()
    ]
    shown = ", ".join(f"{name} {share:.1%}" for share, name in parts if share >= 5e-4)
    whole_s = round(wall_s)
    clock = f"{whole_s // 3600}:{whole_s // 60 % 60:02d}:{whole_s % 60:02d}"
    return f"goodput {metrics[RUN_GOODPUT]:.1%} of {clock}: {shown}"
