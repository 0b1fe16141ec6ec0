"""The process that records and controls all runs of a driver, and how to reach it.

Importing MLflow and opening its store take seconds, so a sweep's trials and a study's cells share
one process. A run's opening is sent to it once. If it dies, Ray restarts it; it then answers
`NoRun.UNKNOWN`, and the caller sends the opening again. Each record names the log of the run, which
has the opening, and is written there at once, so nothing is lost.
"""

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.launch.actor_calls import ANSWER_LIMIT_S, answer
from vit_ray.launch.record.control import ControlState, RunStatus
from vit_ray.launch.record.run_time import marks_of
from vit_ray.measure.goodput import Account, Work, account
from vit_ray.outcomes import Failure, WorkerPlace
from vit_ray.tracking.metrics_log import MetricsLog, Recorder, RunOpening, Status, lock_log
from vit_ray.worker.run_link import Orders

if TYPE_CHECKING:
    from vit_ray.tracking.tracker import Tracker

P = ParamSpec("P")
T = TypeVar("T")

CONCURRENT_CALLS: Final = 64
HEARTBEAT_S: Final = 30.0
ACCOUNT_EVERY_S: Final = 600.0
"""Seconds between records of a working run's goodput."""
NAMESPACE: Final = "vit_ray"
"""Ray namespace of the hosts' names, by which they can be inspected from outside."""


class NoRun(enum.Enum):
    """Why a host has no answer for a run."""

    UNKNOWN = enum.auto()
    """It was not opened since the host started."""
    ENDED = enum.auto()


class RunEndedError(RuntimeError):
    """Something was asked after the run's end."""


class _Run:
    """What the host keeps about a run from the first call that names it."""

    def __init__(self, key: str, log_path: Path) -> None:
        self.control = ControlState()
        self.log = MetricsLog(log_path, self.control.note)
        self.one_at_a_time = threading.Lock()
        """Lock for opening and ending it."""
        self.tracker: Tracker | None = None
        self.problem: str | None = None
        """Set at its end: what MLflow does not have, and why; empty if it has everything."""
        self._key, self._is_read, self._has_opening = key, False, False
        self._reading = threading.Lock()
        self._accounted_s = time.monotonic()
        self._held: list[Callable[[], None]] = []
        """Ends what the run holds until its end: the lock of the log, system metrics."""

    def has_opening(self) -> bool:
        """Whether it was opened, since the host started or before; the log is read once."""
        with self._reading:
            if not self._is_read:
                for record in self.log.opened(self._key):
                    self.control.note(record)
                    self._has_opening = True
                self._is_read = True
        return self._has_opening

    def open(self, opening: RunOpening) -> None:
        """Record it, and send the record; system metrics only for a run that has not ended.

        Raises:
            RuntimeError: the process of an earlier driver still writes its log.
        """
        # Imported here: the driver and the workers also import this module and need no MLflow.
        from vit_ray.tracking.system_metrics import NodeSamples
        from vit_ray.tracking.tracker import Tracker

        lock = lock_log(opening.log_path, opening.run_name)
        self._held = [lock.close]
        self.has_opening()
        self.tracker = Tracker.start(opening, self.log)
        self._has_opening = True
        if self.control.has_finished:  # before the process died
            self.close()
        # The children of a sweep or study share nodes; the parent samples these itself.
        elif opening.config.system_metrics and opening.parent is None:
            tracker = self.tracker
            samples = NodeSamples(opening.config.uri, lambda: tracker.run_id)
            samples.start()
            self._held = [samples.stop, lock.close]

    def account(self) -> Account:
        """How the run's time was spent so far, over all openings in the log."""
        return account(list(marks_of(self.log.timeline())), time.time())

    def keep_work(self, **work: Any) -> None:
        """Keep what an attempt has completed; from time to time record the goodput so far."""
        self.log.keep_work(**work)
        if time.monotonic() - self._accounted_s > ACCOUNT_EVERY_S:
            self._accounted_s = time.monotonic()
            self.log.metrics(self.control.status().step, self.account().metrics())

    def close(self) -> None:
        """Send what is recorded; the run has ended."""
        assert self.tracker is not None
        *sampled, lock = self._held
        self.problem = "its end was cut off"
        try:
            for stop in sampled:
                stop()
            self.tracker.close()
            self.problem = self.tracker.problem
        finally:
            self.tracker = None
            lock()


class RunHost:
    """Runs as an actor with concurrent methods."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def open(self, opening: RunOpening) -> None:
        """Open a run; does nothing if it is open or has ended; returns once MLflow has it.

        Raises:
            RuntimeError: as `_Run.open`.
        """
        run = self._run(opening.key, opening.log_path)
        if opening.parent is not None:  # it may have been lost with the process
            self.open(opening.parent)
            run.control.parent = self._runs[opening.parent.key].control
        run.control.name = opening.run_name
        with run.one_at_a_time:
            if run.tracker is None and run.problem is None:
                # A trial's process may have died without ending the run that it opened.
                for key, other in list(self._runs.items()):
                    if other is not run and other.tracker and other.log.path == opening.log_path:
                        self.finish(key, "KILLED")
                run.open(opening)

    def record(
        self, key: str, log_path: Path, opened: None, kind: str, values: dict[str, Any]
    ) -> None:
        """Write a record; nothing after the run's end.

        Args:
            opened: the result of `open`, so that Ray waits for it.

        Raises:
            RuntimeError: the run was never opened; nothing was written.
        """
        run = self._run(key, log_path)
        if not run.has_opening():
            raise RuntimeError(
                f"nothing can be recorded in {log_path}, which does not exist or was never opened"
            )
        if not run.control.has_finished:
            match kind:
                case "content":
                    run.log.content(**values)
                case "work":
                    run.keep_work(**values)
                case _:
                    run.log.append(kind, **values)

    def ask(self, key: str, what: str, *args: Any) -> Any:
        """The answer of `control.method`, `tracker.method` or a method of the run, or `NoRun`."""
        run = self._runs.get(key)
        if run is None or run.tracker is None:
            return NoRun.UNKNOWN if run is None or run.problem is None else NoRun.ENDED
        found = attrgetter(what)(run)
        return found(*args) if callable(found) else found

    def finish(self, key: str, status: Status) -> str | NoRun:
        """End the run; says what MLflow does not have, and why."""
        run = self._runs.get(key)
        if run is None:
            return NoRun.UNKNOWN
        with run.one_at_a_time:
            if run.tracker is not None:
                run.log.end(status)
                run.close()
            return NoRun.UNKNOWN if run.problem is None else run.problem

    def _run(self, key: str, log_path: Path) -> _Run:
        with self._lock:
            return self._runs.setdefault(key, _Run(key, log_path))


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
        self.opened = self.host.open.remote(self.opening)
        return self.opened

    def send(self, kind: str, wait_s: float = 0.0, **values: Any) -> None:
        """Record in the run's log, whether or not the host knows the run; if `wait_s` is above 0,
        wait until it is written.

        Raises:
            RuntimeError, RayError: the wait failed.
        """
        opening = self.opening
        call = self.host.record.remote(opening.key, opening.log_path, self.opened, kind, values)
        if wait_s:
            self.answer(call, wait_s)

    def ask(self, limit_s: float, method: str, *args: Any, opens: bool = True) -> Any:
        """Calls a method of the host.

        Args:
            opens: send the opening if the host does not know the run.

        Raises:
            RunEndedError: the run has ended, or is not known.
            RuntimeError: the host has not answered in time, or the run cannot be opened.
            RayError: the host has died and is not restarted.
        """
        until_s = time.monotonic() + limit_s
        if (opened := self.opened) is not None:  # what is sent meanwhile waits for it, too
            try:
                self.answer(opened, limit_s)
                self.opened = None
            except ray.exceptions.RayError:
                self.opened = None  # it has failed: the next call tries again
                raise
        call = getattr(self.host, method)
        for _ in range(2):
            left_s = until_s - time.monotonic()
            found = self.answer(call.remote(self.opening.key, *args), limit_s, left_s)
            if found is not NoRun.UNKNOWN or not opens:
                break
            self.answer(self.open(), limit_s, until_s - time.monotonic())
        if isinstance(found, NoRun):
            raise RunEndedError(f"run {self.opening.run_name!r} has ended")
        return found

    def answer(self, call: Any, limit_s: float, left_s: float | None = None) -> Any:
        """What a call of the host returns; raises as `answer`.

        Args:
            left_s: of `limit_s`.
        """
        return answer(call, "the run's record", limit_s, left_s)


class RunControl:
    """Control of a run, from any process."""

    def __init__(self, run: HostedRun) -> None:
        self._run = run

    def _ask(
        self,
        limit_s: float,
        opens: bool,
        method: Callable[Concatenate[ControlState, P], T],
        *args: P.args,
        **_: P.kwargs,
    ) -> T | None:
        """As `HostedRun.ask`; None if the run has ended."""
        with contextlib.suppress(RunEndedError):
            return self._run.ask(limit_s, "ask", f"control.{method.__name__}", *args, opens=opens)
        return None

    def heartbeat(self, rank: int, step: int, *introduction: str) -> Orders | None:
        """A worker is at `step`; None: no news. Only rank 0 opens an unknown run."""
        return self._ask(HEARTBEAT_S, rank == 0, ControlState.heartbeat, rank, step, *introduction)

    def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str | None:
        """As `ControlState.hanging`; None if nothing is known."""
        return self._ask(wait_s, False, ControlState.hanging, rank, world_size, where)

    def places(self) -> dict[int, WorkerPlace]:
        """As `ControlState.places`; empty if nothing is known."""
        return self._ask(HEARTBEAT_S, False, ControlState.places) or {}

    def stop_reason(self) -> str | None:
        """Why the run, or its sweep or study, was asked to stop; None after its end."""
        return self._ask(ANSWER_LIMIT_S, True, ControlState.stop_reason)

    def failure(self) -> Failure | None:
        """Why the run cannot be trained any further, if a restart would not help; None if ended."""
        return self._ask(ANSWER_LIMIT_S, True, ControlState.failure)

    def status(self, wait_s: float = ANSWER_LIMIT_S) -> RunStatus:
        return self._run.ask(wait_s, "ask", "control.status")

    def account(self) -> Account:
        """How the run's time was spent so far."""
        return self._run.ask(ANSWER_LIMIT_S, "ask", "account")

    def request_stop(self, reason: str) -> None:
        """Ask all workers, also of child runs, to checkpoint and end."""
        self._run.send("stop", reason=reason)

    def request_save(self) -> None:
        self._run.send("save")

    def fail(self, failure: Failure) -> None:
        """End the workers because a restart would not help; returns once that is noted."""
        self._run.send("fail", ANSWER_LIMIT_S, **vars(failure))

    def begin_stage(self, what: str, count: int) -> None:
        """`count` child runs of a kind come next."""
        self._run.send("stage", what=what, count=count)

    def child_step(self, name: str, step: int) -> None:
        self._run.send("child step", name=name, step=step)

    def child_ended(self, label: str, score: float | None) -> None:
        self._run.send("child ended", label=label, score=score)


class RunRecord(Recorder):
    """The record of a run, from any process; what is sent is on disk before it is acknowledged."""

    def __init__(self, run: HostedRun) -> None:
        self._run = run

    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> None:
        self._run.send(kind, wait_s, **values)

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        """Keep a file with the run, from a worker that may be on another node."""
        self.append("content", wait_s, name=name, content=content, folder=folder)

    def work(self, work: Work, wait_s: float = 0.0) -> None:
        """What an attempt has completed so far; replaces what it had before."""
        self.append("work", wait_s, **vars(work))

    def place_wait(self, begin_s: float, end_s: float) -> None:
        """The worker group has waited for its place; Unix times."""
        self.append("place wait", begin_s=begin_s, end_s=end_s)

    def run_id(self, wait_s: float = ANSWER_LIMIT_S) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""
        return self._run.ask(wait_s, "ask", "tracker.run_id")

    def hint(self) -> str:
        return self._run.ask(ANSWER_LIMIT_S, "ask", "tracker.hint")

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False if it does not in time."""
        return self._run.ask(ANSWER_LIMIT_S, "ask", "tracker.flush", timeout_s)

    def finish(self, status: Status) -> str:
        """End the run; says what MLflow does not have, and why."""
        return self._run.ask(ANSWER_LIMIT_S, "finish", status)


def start_run(opening: RunOpening, node_id: str | None = None) -> HostedRun:
    """Open a run in this driver's host without waiting for it; it may take seconds.

    Args:
        node_id: the node of the SQLite file and of the log; by default this node.
    """
    run = HostedRun(host_on(node_id or ray.get_runtime_context().get_node_id()), opening)
    run.open()
    return run


_HOSTS: Final[dict[str, Any]] = {}
"""This driver's host for each connection to Ray and each node."""


def host_on(node_id: str) -> Any:
    """Handle of this driver's host on a node; starts one if there is none."""
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
