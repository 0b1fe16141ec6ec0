"""How any process reaches the record of a run: a handle of the command's actor.

The path of its log identifies a run. Each call that records waits for the sender's previous call,
so records are written in order, even when Ray repeats calls.
"""

import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import ray

from vit_ray.outcomes import RunFailedError, WorkerPlace
from vit_ray.tracking.metrics_log import ARRIVAL_S, Records, RunOpening, Status

# Longer than the slowest call, to an MLflow server that is away: its requests have shorter limits.
ANSWER_S: Final = 300.0
HEARTBEAT_S: Final = 30.0
# Longest wait for MLflow to be imported, and to give a run its id.
FIRST_ANSWER_S: Final = 20.0

# This process's last call that recorded something, by log.
_last_calls: Final[dict[Path, Any]] = {}
# Locked while a call is made; reentrant, because the handler of a signal records too.
_call_lock: Final = threading.RLock()


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
    failure: RunFailedError | None = None
    run_id: str | None = None
    hint: str = ""
    heard_s: float = 0.0


@dataclass(frozen=True)
class Recorder(Records):
    """The record and control of a run, from any process.

    Calls that wait raise RuntimeError if the actor does not answer in time, or has died. `RunState`
    and `RunStatus` describe the results.

    Attributes:
        actor: handle of the command's `RunRecords`.
        command: the command line as typed; child runs record it, too.
    """

    actor: Any
    log_path: Path
    run_name: str
    command: str = ""

    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> None:
        with _call_lock:
            before, record_id = _last_calls.get(self.log_path, ""), uuid.uuid4().hex[:12]
            call = self.actor.write.remote(self.log_path, kind, values, record_id, before)
            _last_calls[self.log_path] = call
        if wait_s and (problem := _answer(call, wait_s)):
            raise RuntimeError(problem)

    def _ask(self, limit_s: float, method: str, *args: Any) -> Any:
        return _answer(self.actor.ask.remote(self.log_path, method, *args), limit_s)

    def open(self, opening: RunOpening) -> str:
        """Open the run; returns when its start record is on disk.

        Returns:
            The placement group of its workers if a process of this command opened it and died, as
            that of a trial; else empty.

        Raises:
            RuntimeError: the process of an earlier driver still writes the log.
        """
        _last_calls.pop(self.log_path, None)
        return _answer(self.actor.open.remote(opening), ANSWER_S)

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        """Store a worker's file, perhaps from another node, in the run's folder and in MLflow."""
        self._ask(wait_s, "content", name, content, folder)

    def request_stop(self, reason: str) -> None:
        """Ask all workers, also of child runs, to checkpoint and end."""
        self.append("stop", reason=reason)

    def request_resize(self) -> None:
        """Ask the present workers to checkpoint and end: a larger group follows."""
        self.append("resize")

    def fail(self, error: RunFailedError) -> None:
        """End the run because a restart would not help; returns once the record is on disk."""
        self.append("fail", ARRIVAL_S, reason=str(error))

    def child_step(self, name: str, step: int) -> None:
        self.append("child step", name=name, step=step)

    def heartbeat(self, rank: int, step: int, place: WorkerPlace | None = None) -> Orders:
        """A worker is at `step`; at the start of an attempt, it also says where it runs."""
        return self._ask(HEARTBEAT_S, "state.heartbeat", rank, step, place)

    def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str:
        return self._ask(wait_s, "state.hanging", rank, world_size, where)

    def status(self, limit_s: float = ANSWER_S, mlflow_s: float = 0.0) -> RunStatus:
        """The run's state; waits up to `mlflow_s` for MLflow's first answer."""
        return self._ask(limit_s, "status", mlflow_s)

    def places(self) -> dict[int, WorkerPlace]:
        return self._ask(HEARTBEAT_S, "state.places")

    def stop_reason(self) -> str | None:
        return self.status().stop

    def failure(self) -> RunFailedError | None:
        return self.status().failure

    def run_id(self, limit_s: float = ANSWER_S) -> str | None:
        return self.status(limit_s, min(limit_s / 2, FIRST_ANSWER_S)).run_id

    def hint(self) -> str:
        return self.status(mlflow_s=FIRST_ANSWER_S).hint

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False if it does not in time."""
        return self._ask(ANSWER_S, "tracker.flush", timeout_s)

    def finish(self, status: Status) -> str:
        """End the run; returns what MLflow does not have, and why."""
        self.append("finish", ARRIVAL_S, status=status)
        return self._ask(ANSWER_S, "close")


def _answer(call: Any, limit_s: float) -> Any:
    """Wait for the result of a call of the actor.

    Raises:
        RuntimeError: the actor has not answered in time, or has died.
        RayError: the call has failed.
    """
    try:
        return ray.get(call, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(
            f"the run's record has not answered in {limit_s:g} s: its process, on the driver's "
            "node, hangs or gets no CPU time; check that machine, then run the same command again"
        ) from None
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        raise RuntimeError(f"the process of the run's record has died: {error}") from error
