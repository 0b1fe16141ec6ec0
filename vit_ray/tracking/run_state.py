"""The state of one run in the recorder's process, built from the log's records and heartbeats."""

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vit_ray.metric_names import EVAL_TOP1, STARTUP_FIRST_STEP_S
from vit_ray.outcomes import EventKind, Failure, WorkerPlace, beats_between
from vit_ray.tracking.metrics_log import Record

# Missed heartbeats after which a worker counts as silent.
SILENT_BEATS: Final = 5
_MAX_NAMED: Final = 4
# Of a worker that has sent heartbeats, but not where it runs.
_UNKNOWN: Final = WorkerPlace("an unknown host", node="", detail="", step=0)


class Orders(NamedTuple):
    """The answer to a heartbeat.

    Attributes:
        stop: why to checkpoint and end; None = continue.
        resizes: whether to checkpoint and end for a group of another size.
    """

    stop: str | None
    resizes: bool


class Event(NamedTuple):
    """Something that happened to the run; `kind` is the value of an `EventKind`."""

    kind: str
    text: str


@dataclass
class RunStatus:
    """The state of the run, as the display shows it.

    Attributes:
        metrics: last value of each metric, but the start-up time of the first attempt.
        evaluations: step and metrics of each evaluation, in order.
        stop: why the run, or the sweep or study that it is part of, was asked to stop.
        failure: why a restart of the run would not help.
        run_id: MLflow's run id; None while MLflow is away.
        hint: the command or link that opens MLflow's page; empty while MLflow has no run.
        heard_s: Unix time of the last heartbeat of a worker; 0 before the first.
    """

    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    stop: str | None = None
    failure: Failure | None = None
    run_id: str | None = None
    hint: str = ""
    heard_s: float = 0.0


class RunState:
    """State of one run since its last start record."""

    def __init__(self) -> None:
        self.name = ""  # of the run; empty before its start record
        self.parent: RunState | None = None  # of the sweep or study that the run is part of
        self.has_finished = False
        self._now = RunStatus()
        self._is_resizing = False
        self._child_steps: dict[str, int] = {}
        # Each worker with the time of its last heartbeat, by rank.
        self._workers: dict[int, tuple[WorkerPlace, float]] = {}
        self._hung_at: set[str] = set()  # calls in which workers of this attempt hang

    def note(self, record: Record) -> None:
        now = self._now
        match record["kind"]:
            case "start":
                self.name = record["run_name"]
            case "metrics":
                step, values = record["step"], record["values"]
                unchanging = {STARTUP_FIRST_STEP_S} & now.metrics.keys()
                now.metrics |= {key: values[key] for key in values.keys() - unchanging}
                now.step = max(now.step, step)
                if EVAL_TOP1 in values:
                    now.evaluations.append((step, values))
            case "event":
                kind = record["event"]
                now.events.append(Event(kind, record["text"]))
                if kind in (EventKind.WORKER_FAILED, EventKind.RESIZING):
                    # New workers follow, perhaps on other nodes.
                    self._workers, self._is_resizing = {}, False
            case "stop":
                now.stop = record["reason"]
            case "fail":
                now.failure = Failure(record["reason"], record["has_diverged"])
            case "resize":
                self._is_resizing = True
            case "child step":
                self._child_step(record["name"], record["step"])
            case "finish":
                self.has_finished = True

    def heartbeat(self, rank: int, step: int, place: WorkerPlace | None = None) -> Orders:
        last_place, _ = self._workers.get(rank, (_UNKNOWN, 0.0))
        worker = dataclasses.replace(place or last_place, step=step)
        self._workers[rank] = worker, time.monotonic()
        self._now.heard_s = time.time()
        if place:  # a new attempt: hangs of earlier attempts no longer count
            self._hung_at = set()
        if rank == 0:
            self._now.step = max(self._now.step, step)
            if self.parent is not None:
                self.parent._child_step(self.name, step)
        return Orders(self.stop_reason(), self._is_resizing)

    def hanging(self, rank: int, world_size: int, where: str) -> str:
        """Which workers hold up the group, in answer to a worker that hangs.

        Args:
            rank: of the worker that asks.
            world_size: number of workers in the group.
            where: the calls in which that worker hangs.

        Returns:
            A sentence; empty if another worker has reported the same hang.
        """
        if where in self._hung_at:
            return ""
        self._hung_at.add(where)
        now_s, max_silence_s = time.monotonic(), SILENT_BEATS * beats_between(world_size)
        workers = {n: self._workers[n] for n in range(world_size) if n in self._workers}
        newest = max((worker.step for worker, _ in workers.values()), default=0)
        late = [
            f"worker {n} on {worker.host} is at step {worker.step}, "
            f"heard {now_s - heard_s:.0f} s ago"
            for n, (worker, heard_s) in workers.items()
            if worker.step < newest or (n != rank and now_s - heard_s > max_silence_s)
        ]
        late += [
            f"worker {n} has never been heard from" for n in range(world_size) if n not in workers
        ]
        named = [*late[:_MAX_NAMED], *([f"{len(late)} in all"] if len(late) > _MAX_NAMED else [])]
        on_time = f"{world_size - len(late)} of {world_size} workers are at step {newest}"
        return "; ".join([*named, on_time])

    def places(self) -> dict[int, WorkerPlace]:
        """The workers that have introduced themselves since the last failure, by rank."""
        return {rank: worker for rank, (worker, _) in list(self._workers.items()) if worker.node}

    def stop_reason(self) -> str | None:
        return self._now.stop or (self.parent.stop_reason() if self.parent else None)

    def status(self) -> RunStatus:
        """A copy: Ray serializes the answer while other calls change the state."""
        now = self._now
        return dataclasses.replace(
            now,
            metrics=dict(now.metrics),
            events=list(now.events),
            evaluations=list(now.evaluations),
            stop=self.stop_reason(),
        )

    def _child_step(self, name: str, step: int) -> None:
        """A child run (a trial of a sweep) is at `step`; the display shows the children's sum."""
        self._child_steps[name] = step
        self._now.step = sum(self._child_steps.values())
