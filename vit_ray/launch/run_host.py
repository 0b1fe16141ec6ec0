"""The one process that records and controls all runs of a driver, and how they are reached.

Importing MLflow and opening its store take seconds, so a sweep's trials and a study's cells share
one process. A run's opening is sent to it once. If it dies, Ray starts it again; it answers
`NoRun.UNKNOWN`, and whoever gets that answer sends the opening again. What is to be recorded names
the run's log, and is written there whether or not the run is known: nothing is lost meanwhile.
"""

from __future__ import annotations

import collections
import enum
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.launch.actor_calls import ANSWER_LIMIT_S, answer
from vit_ray.launch.control import ControlState, RunStatus
from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, Status, lock_log
from vit_ray.train.run_link import Orders

if TYPE_CHECKING:
    from vit_ray.tracking.tracker import Tracker

P = ParamSpec("P")

CONCURRENT_CALLS: Final = 64
HEARTBEAT_S: Final = 30.0
OPENING_S: Final = 60.0
"""Longest wait of a record for the opening that was sent before it."""
NAMESPACE: Final = "vit_ray"
"""Ray namespace of the hosts' names, by which they can be inspected from outside."""


class NoRun(enum.Enum):
    """Why a host has no answer of a run."""

    UNKNOWN = enum.auto()
    """It was not opened in this life of the host."""
    ENDED = enum.auto()


class RunEndedError(RuntimeError):
    """The run was asked for something after its end."""


@dataclass(frozen=True)
class _OpenRun:
    """What the host has of a run until its end."""

    tracker: Tracker
    control: ControlState
    writer_lock: IO[str]
    opened_s: float
    stop_sampling: list[Callable[[], None]]
    """System metrics, of each node."""


class RunHost:
    """Runs as an actor with concurrent methods."""

    def __init__(self) -> None:
        self._runs: dict[str, _OpenRun] = {}
        self._ended: dict[str, bool] = {}
        """Whether MLflow has everything of each run that has ended."""
        self._locks: dict[str, threading.Lock] = {}
        self._changed = threading.Condition()

    def open(self, opening: RunOpening) -> None:
        """Open a run, or do nothing where it is open or has ended; returns once MLflow has it.

        Raises:
            RuntimeError: the process of an earlier driver still writes its log.
        """
        # Here and not above: the driver and the workers, which have this module, need no MLflow.
        from vit_ray.tracking.system_metrics import sample_nodes
        from vit_ray.tracking.tracker import Tracker

        if opening.parent is not None:  # it may have been lost with the process, too
            self.open(opening.parent)
        key, parent_key = opening.key, opening.parent.key if opening.parent else ""
        with self._changed:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._runs or key in self._ended:
                return
            writer_lock = lock_log(opening.log_path, opening.run_name)
            tracker = Tracker.start(opening)
            control = ControlState(opening.run_name, lambda: self._control(parent_key))
            # Nodes are shared by what runs under a sweep or study, which samples them itself.
            stop: list[Callable[[], None]] = []
            if opening.config.system_metrics and opening.parent is None and tracker.run_id:
                stop = sample_nodes(tracker.run_id, opening.config.uri)
            run = _OpenRun(tracker, control, writer_lock, time.time(), stop)
            with self._changed:
                for record in tracker.log.opened(key):
                    control.note(record)
                tracker.log.on_record = control.note
                self._runs[key] = run
                self._changed.notify_all()
            if control.has_finished:  # before the process died
                self._close(key, run)

    def record(self, key: str, log_path: Path, method: str, *args: Any, **named: Any) -> None:
        """Call a method of the run's `MetricsLog` that writes; nothing after the run's end."""
        with self._changed:
            if key not in self._runs and not MetricsLog(log_path).opened(key):
                self._changed.wait_for(lambda: key in self._runs or key in self._ended, OPENING_S)
            run = self._runs.get(key)
            if run is None and key not in self._ended:
                getattr(MetricsLog(log_path), method)(*args, **named)
        if run is not None:
            getattr(run.tracker.log, method)(*args, **named)

    def ask(self, key: str, what: str, *args: Any) -> Any:
        """The answer of `control.method` or `tracker.method` of the run, or `NoRun`."""
        run = self._runs.get(key)
        if run is None:
            return NoRun.ENDED if key in self._ended else NoRun.UNKNOWN
        found = attrgetter(what)(run)
        return found(*args) if callable(found) else found

    def finish(self, key: str, status: Status) -> bool | NoRun:
        """Write the history and end the run; False if MLflow has not taken all of it."""
        lock = self._locks.get(key)
        if lock is None:
            return NoRun.UNKNOWN
        with lock:
            if run := self._runs.get(key):
                log = run.tracker.log
                if events := run.control.status().events:
                    # Each opening of a run keeps its own.
                    name = time.strftime("history/%Y%m%dT%H%M%S.json", time.gmtime(run.opened_s))
                    log.text(name, json.dumps([vars(event) for event in events], indent=1))
                    for kind, count in collections.Counter(one.kind for one in events).items():
                        log.tag(f"vit_ray.events.{kind.replace(' ', '_')}", str(count))
                log.finish(status)
                self._close(key, run)
            return self._ended.get(key, NoRun.UNKNOWN)

    def status_of(self, log_path: str) -> RunStatus | None:
        """Of the run that writes this log; None if there is none here."""
        runs = [run for run in list(self._runs.values()) if str(run.tracker.log.path) == log_path]
        return runs[-1].control.status() if runs else None

    def _control(self, key: str) -> ControlState | None:
        run = self._runs.get(key)
        return run.control if run else None

    def _close(self, key: str, run: _OpenRun) -> None:
        is_sent = False
        try:
            for stop in run.stop_sampling:
                stop()
            is_sent = run.tracker.close()
        finally:
            self._ended[key] = is_sent
            del self._runs[key]
            run.writer_lock.close()


@dataclass
class HostedRun:
    """Where a run is recorded and controlled; can be sent to any process."""

    host: Any
    """Handle of the `RunHost`."""
    opening: RunOpening
    opened: ray.ObjectRef[None] | None = None
    """The call that opens the run, in the process that made it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return HostedRun, (self.host, self.opening)

    def open(self) -> ray.ObjectRef[None]:
        """Send the opening."""
        self.opened = self.host.open.remote(self.opening)
        return self.opened

    def send(
        self,
        wait_s: float,
        method: Callable[Concatenate[MetricsLog, P], None],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call a method of the run's log, known or not; above 0 `wait_s` waits until that is done.

        Raises:
            RuntimeError, RayError: it was waited for in vain.
        """
        key, path = self.opening.key, self.opening.log_path
        call = self.host.record.remote(key, path, method.__name__, *args, **named)
        if wait_s:
            self.answer(call, wait_s)

    def ask(self, limit_s: float, method: str, *args: Any, opens: bool = True) -> Any:
        """The answer of a method of the host.

        Args:
            opens: send the opening where the host does not know the run.

        Raises:
            RunEndedError: the run has ended, or is not known.
            RuntimeError: the host has not answered in time, or the run cannot be opened.
            RayError: the host has died for good.
        """
        if (opened := self.opened) is not None:
            try:
                self.answer(opened, limit_s)
            except ray.exceptions.RayTaskError:
                self.opened = None  # it failed: the next call tries again
                raise
            self.opened = None
        call = getattr(self.host, method)
        for _ in range(2):
            found = self.answer(call.remote(self.opening.key, *args), limit_s)
            if found is not NoRun.UNKNOWN or not opens:
                break
            self.answer(self.open(), limit_s)
        if isinstance(found, NoRun):
            raise RunEndedError(f"run {self.opening.run_name!r} has ended")
        return found

    def answer(self, call: Any, limit_s: float) -> Any:
        """What a call of the host returns; raises as `answer`."""
        return answer(call, "the run's record", limit_s)


class RunControl:
    """Control of a run, from any process."""

    def __init__(self, run: HostedRun) -> None:
        self._run = run

    def heartbeat(self, rank: int, step: int) -> Orders | None:
        """A worker is at `step`; None: no news. Of the ranks, 0 alone opens an unknown run."""
        try:
            orders: Orders = self._run.ask(
                HEARTBEAT_S, "ask", "control.heartbeat", rank, step, opens=rank == 0
            )
        except RunEndedError:
            return None
        return orders

    def stop_reason(self) -> str | None:
        """Why the run, or the one that it is part of, was asked to stop."""
        reason: str | None = self._run.ask(ANSWER_LIMIT_S, "ask", "control.stop_reason")
        return reason

    def request_stop(self, reason: str) -> None:
        """Ask all workers, of the runs under this one too, to checkpoint and end."""
        self._run.send(0.0, MetricsLog.note, "wish", {"what": "stop", "reason": reason})

    def request_save(self) -> None:
        """Ask the workers for a checkpoint at once."""
        self._run.send(0.0, MetricsLog.note, "wish", {"what": "save", "reason": ""})

    def fail(self, failure: Failure) -> None:
        """The workers end, and a restart would not help; returns once that is noted."""
        self._run.send(ANSWER_LIMIT_S, MetricsLog.note, "wish", {"what": "fail", **vars(failure)})

    def failure(self) -> Failure | None:
        """Why the run cannot be trained any further, if a restart would not help."""
        failure: Failure | None = self._run.ask(ANSWER_LIMIT_S, "ask", "control.failure")
        return failure

    def status(self, wait_s: float = ANSWER_LIMIT_S) -> RunStatus:
        """Where the run is."""
        status: RunStatus = self._run.ask(wait_s, "ask", "control.status")
        return status

    def begin_stage(self, what: str, count: int) -> None:
        """`count` runs of a kind come next under this one."""
        self._run.send(0.0, MetricsLog.note, "stage", {"what": what, "count": count})

    def child_step(self, name: str, step: int) -> None:
        """A run under this one is at `step`."""
        self._run.send(0.0, MetricsLog.note, "child step", {"name": name, "step": step})

    def child_ended(self, label: str, score: float | None) -> None:
        """One of the stage's runs has ended, with a score if it has one."""
        self._run.send(0.0, MetricsLog.note, "child ended", {"label": label, "score": score})


class RunRecord:
    """The record of a run, from any process; what is sent is on disk before it is acknowledged."""

    def __init__(self, run: HostedRun) -> None:
        self._run = run

    def metrics(self, step: int, values: Mapping[str, float], wait_s: float = 0.0) -> None:
        """Metrics of a step; sent without waiting, or waiting for so long until they arrived."""
        if values:
            self._run.send(wait_s, MetricsLog.metrics, step, values)

    def results(self, step: int, values: Mapping[str, float]) -> None:
        """What the runs under this one resulted in; replaces what an earlier start recorded."""
        self._run.send(ANSWER_LIMIT_S, MetricsLog.metrics, step, values, is_again=True)

    def event(self, kind: EventKind, text: str, step: int, wait_s: float = 0.0) -> None:
        """An event of the run's history."""
        self._run.send(wait_s, MetricsLog.event, kind, text, step)

    def tag(self, key: str, value: str) -> None:
        """A tag of the run."""
        self._run.send(ANSWER_LIMIT_S, MetricsLog.tag, key, value)

    def text(self, name: str, text: str, wait_s: float = ANSWER_LIMIT_S) -> None:
        """A text to keep with the run as a file."""
        self._run.send(wait_s, MetricsLog.text, name, text)

    def artifact(self, path: Path, folder: str = "") -> None:
        """A file or folder of the run's folder to keep with the run."""
        self._run.send(ANSWER_LIMIT_S, MetricsLog.artifact, path, folder)

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        """A file to keep with the run, from a worker that may be on another node."""
        self._run.send(wait_s, MetricsLog.content, name, content, folder)

    def model(
        self,
        files: Mapping[str, str],
        name: str,
        step: int,
        params: Mapping[str, str],
        register_as: str | None,
    ) -> None:
        """As `MetricsLog.model`."""
        self._run.send(ANSWER_LIMIT_S, MetricsLog.model, files, name, step, params, register_as)

    def run_id(self, wait_s: float = ANSWER_LIMIT_S) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""
        found: str | None = self._run.ask(wait_s, "ask", "tracker.run_id")
        return found

    def hint(self) -> str:
        """How to open MLflow's page."""
        return str(self._run.ask(ANSWER_LIMIT_S, "ask", "tracker.hint"))

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False when it does not in time."""
        return bool(self._run.ask(ANSWER_LIMIT_S, "ask", "tracker.flush", timeout_s))

    def finish(self, status: Status) -> bool:
        """End the run; False if MLflow has not taken all of its record."""
        return bool(self._run.ask(ANSWER_LIMIT_S, "finish", status))


def start_run(opening: RunOpening, node_id: str | None = None) -> HostedRun:
    """Open a run in this driver's host, which may take seconds, without waiting for it.

    Args:
        node_id: where, by default on this node: the node of the SQLite file and of the log.
    """
    run = HostedRun(host_on(node_id or ray.get_runtime_context().get_node_id()), opening)
    run.open()
    return run


_HOSTS: Final[dict[str, Any]] = {}
"""This driver's host for each connection to Ray and each node."""


def host_on(node_id: str) -> Any:
    """Handle of this driver's host on a node, which is started where there is none."""
    context = ray.get_runtime_context()
    name = f"recorders of job {context.get_job_id()} on {node_id}"
    key = f"{context.gcs_address} {name}"
    if key not in _HOSTS:
        _HOSTS[key] = (
            ray.remote(RunHost)
            .options(
                name=name,
                namespace=NAMESPACE,
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=CONCURRENT_CALLS,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote()
        )
    return _HOSTS[key]
