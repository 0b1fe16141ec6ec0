"""The actor that records and controls all runs of a command, and how any process reaches it.

Importing MLflow and opening its store take seconds, so a sweep's trials and a study's cells share
one process. A run is named by its log, which holds all that the actor knows of it: if Ray restarts
the process, it reads the log again at the next call. Each call that records waits for the one
before it, so that a process's records are written in their order, even where Ray repeats calls.
"""

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.addresses import absolute_uri
from vit_ray.outcomes import Failure, WorkerPlace
from vit_ray.tracking.metrics_log import (
    ARRIVAL_S,
    MetricsLog,
    Record,
    Records,
    RunOpening,
    Status,
    lock_log,
)
from vit_ray.tracking.run_state import Orders, RunState, RunStatus
from vit_ray.tracking.store_requests import limit_requests, redact_uri
from vit_ray.tracking.tracker import Tracker

CONCURRENT_CALLS: Final = 64
ANSWER_S: Final = 300.0
"""Longer than the slowest call, to an MLflow server that is away, whose own limit is shorter."""
HEARTBEAT_S: Final = 30.0
FIRST_ANSWER_S: Final = 20.0
"""Longest wait for MLflow to be imported, and to give a run its id."""
MOST_REPEATED: Final = 4096
"""Records that Ray may repeat after the death of the actor's process: one of each sender."""
SAMPLE_EVERY_S: Final = 10.0
"""Between samples of a node's load, and between looks for nodes that have joined."""

# This process's last call that recorded something, by log.
_last_calls: Final[dict[Path, Any]] = {}
# Held while a call is made; a signal's handler, which records too, may interrupt its holder.
_order: Final = threading.RLock()

logger = logging.getLogger(__name__)


class NodeSampler(threading.Thread):
    """Samples this node into a run until stopped, and starts a sampler on every other node.

    CPU, memory, GPU, disk and network, by MLflow's own monitor, as `system/<node>/...`, which
    MLflow's page shows on a separate tab. The monitor would end at the first request that fails, so
    this calls its parts. A sample that MLflow does not accept is dropped: the next one comes soon.
    """

    def __init__(
        self,
        uri: str,
        run_id: Callable[[], str | None],
        node: str | None = None,
        interval_s: float = SAMPLE_EVERY_S,
    ) -> None:
        """
        Args:
            uri: tracking server; a SQLite file only on the machine that holds it, where only this
                node is sampled.
            run_id: the MLflow run, None while it is unknown.
            node: name in the keys; None for the first node, which starts the other samplers.
        """
        super().__init__(name="node-sampler", daemon=True)
        self._uri, self._run_id, self._node = absolute_uri(uri), run_id, node or "node-0"
        self._starts_others = node is None and uri.startswith(("http://", "https://"))
        self._interval_s, self._ends = interval_s, threading.Event()
        self._others: dict[str, Any] = {}

    def run(self) -> None:
        monitor: Any = None
        while not self._ends.wait(self._interval_s):
            try:
                if (run_id := self._run_id()) is None:
                    continue
                if self._starts_others:
                    self._add_nodes(run_id)
                monitor = monitor or self._monitor(run_id)
                monitor.collect_metrics()
                monitor.publish_metrics(monitor.aggregate_metrics())
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("a sample of %s is lost: %s", self._node, reason)

    def _monitor(self, run_id: str) -> Any:
        # Here, in a thread: it imports MLflow, which takes seconds.
        from vit_ray.tracking.mlflow_client import SystemMetricsMonitor

        limit_requests()  # the process is an actor, whose output Ray passes on to the driver's
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        return SystemMetricsMonitor(  # type: ignore[no-untyped-call]
            run_id,
            resume_logging=True,  # steps continue from the last one
            node_id=self._node,
            tracking_uri=self._uri,
        )

    def _add_nodes(self, run_id: str) -> None:
        here = ray.get_runtime_context().get_node_id()
        alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}  # type: ignore[no-untyped-call]
        for node in sorted(alive - {here, *self._others}):
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            actor: Any = ray.remote(NodeSampler).options(num_cpus=0, scheduling_strategy=place)
            name = f"node-{len(self._others) + 1}"
            self._others[node] = actor.remote(self._uri, lambda: run_id, name)
            self._others[node].start.remote()

    def stop(self) -> None:
        """Stop sampling; waits at most 5 s for a request to MLflow in progress."""
        self._ends.set()
        self.join(5.0)
        for other in self._others.values():
            ray.kill(other)


class _Run:
    def __init__(self, path: Path, uri: str, opening: RunOpening | None) -> None:
        """Open the run, or continue with what its log holds, in a process that was restarted.

        Raises:
            RuntimeError: the process of an earlier driver still writes its log; or there is
                neither an opening nor such a log.
        """
        self.state, self._lock = RunState(), threading.Lock()
        self._known_ids = deque[str](maxlen=MOST_REPEATED)
        self.problem: str | None = None  # set at its end: what MLflow does not have, and why
        self.log = MetricsLog(path, self._note)
        self._exit = lock_log(path)  # the log's lock and the samplers, until the end
        for record in self.log.records():
            self._note(record)
        if opening:
            self.log.open(opening)
        elif not self.state.name:
            raise RuntimeError(
                f"nothing can be recorded in {path}, which does not exist or was never opened"
            )
        *_, start = self.log.records("start")
        self.key: str = start["opening"]
        self.parent_log: str | None = start["parent_log"]
        self.tracker = Tracker(self.log, uri)
        # The children of a sweep or study share nodes; the parent samples these itself.
        if start["system_metrics"] and not self.parent_log and not self.state.has_finished:
            sampler = NodeSampler(uri, lambda: self.tracker.run_id)
            sampler.start()
            self._exit.callback(sampler.stop)

    def _note(self, record: Record) -> None:
        if record["kind"] == "start":  # the state is that since the last one
            self.state = RunState()
        if "id" in record:
            self._known_ids.append(record["id"])
        self.state.note(record)

    def record(self, kind: str, values: Record, record_id: str) -> None:
        """Write a record, unless it is known; nothing after the run's end."""
        with self._lock:
            if self.state.has_finished or record_id in self._known_ids:
                return
            self.log.append(kind, id=record_id, **values)

    def content(self, name: str, content: bytes, folder: str) -> None:
        path = self.log.path.parent / name
        path.write_bytes(content)
        if not self.state.has_finished:
            self.log.artifact(path, folder)

    def status(self, wait_s: float) -> RunStatus:
        status = self.state.status()
        if wait_s:
            self.tracker.wait_for_try(wait_s)
            status.run_id, status.hint = self.tracker.run_id, self.tracker.hint
        return status

    def close(self) -> str:
        if self.problem is None:
            with self._exit:
                self.tracker.close()
                self.problem = self.tracker.problem
        return self.problem


class RunRecords:
    """Runs as an actor with concurrent methods, none of which waits for another run."""

    def __init__(self, uri: str) -> None:
        """`uri`: of MLflow; an argument, so that no log holds its password."""
        limit_requests()
        self._uri = uri
        self._runs: dict[Path, _Run] = {}
        self._locks: dict[Path, threading.RLock] = {}  # held while a run is opened

    def open(self, opening: RunOpening) -> None:
        """Open a run; returns when the start record is on disk.

        Raises:
            RuntimeError: as `_Run`.
        """
        with self._lock_of(opening.log_path):
            earlier = self._runs.get(opening.log_path)
            if earlier is not None and earlier.key == opening.key:
                return
            if earlier is not None:  # its opener died, unless it has ended
                earlier.record("finish", {"status": "KILLED"}, uuid.uuid4().hex)
                earlier.close()
            self._open(opening.log_path, opening)

    def write(self, path: Path, kind: str, values: Record, record_id: str, before: str) -> str:
        """Write a record; says why it could not be written.

        Args:
            before: result of the sender's last call, for which Ray waits; an error would pass on to
                all calls after it.
        """
        try:
            self._run(path).record(kind, values, record_id)
        except Exception as error:
            return str(error) or repr(error)
        return ""

    def ask(self, path: Path, method: str, *given: Any) -> Any:
        """Call a method of a `_Run`, of its state or its tracker.

        Raises:
            RuntimeError: the run was never opened.
        """
        return attrgetter(method)(self._run(path))(*given)

    def _lock_of(self, path: Path) -> threading.RLock:
        return self._locks.setdefault(path, threading.RLock())

    def _run(self, path: Path) -> _Run:
        with self._lock_of(path):
            return self._runs.get(path) or self._open(path)

    def _open(self, path: Path, opening: RunOpening | None = None) -> _Run:
        run = self._runs[path] = _Run(path, self._uri, opening)
        if run.parent_log:
            parent = self._run(Path(run.parent_log))
            run.state.parent = parent.state
            if path not in parent.state.children:
                parent.log.append("child", path=str(path))
        return run


@dataclass(frozen=True)
class Recorder(Records):
    """The record and control of a run, from any process.

    Calls that wait raise RuntimeError if the actor has not answered in time, or has died. What they
    return is described in `RunState` and `RunStatus`.

    Attributes:
        actor: handle of the command's `RunRecords`.
        command: the line that was typed; its child runs record it, too.
    """

    actor: Any
    log_path: Path
    run_name: str
    command: str = ""

    def append(self, kind: str, wait_s: float = 0.0, **values: Any) -> None:
        with _order:
            before, record_id = _last_calls.get(self.log_path, ""), uuid.uuid4().hex[:12]
            call = self.actor.write.remote(self.log_path, kind, values, record_id, before)
            _last_calls[self.log_path] = call
        if wait_s and (problem := _answer(call, wait_s)):
            raise RuntimeError(problem)

    def _asked(self, limit_s: float, method: str, *given: Any) -> Any:
        return _answer(self.actor.ask.remote(self.log_path, method, *given), limit_s)

    def open(self, opening: RunOpening) -> None:
        """Open the run; returns when its start record is on disk."""
        _last_calls.pop(self.log_path, None)
        _answer(self.actor.open.remote(opening), ANSWER_S)

    def content(self, name: str, content: bytes, folder: str, wait_s: float) -> None:
        """Keep a file with the run, from a worker that may be on another node."""
        self._asked(wait_s, "content", name, content, folder)

    def request_stop(self, reason: str) -> None:
        """Ask all workers, also of child runs, to checkpoint and end."""
        self.append("stop", reason=reason)

    def request_resize(self) -> None:
        """Ask the workers that train now to checkpoint and end: a larger group follows."""
        self.append("resize")

    def fail(self, failure: Failure) -> None:
        """End the workers because a restart would not help; returns once that is noted."""
        self.append("fail", ARRIVAL_S, **vars(failure))

    def child_step(self, name: str, step: int) -> None:
        self.append("child step", name=name, step=step)

    def heartbeat(self, rank: int, step: int, *introduction: str) -> Orders:
        """A worker is at `step`.

        Args:
            introduction: host, node, detail and group, as in `WorkerPlace`, when an attempt
                begins.
        """
        return self._asked(HEARTBEAT_S, "state.heartbeat", rank, step, *introduction)

    def hanging(self, rank: int, world_size: int, where: str, wait_s: float) -> str:
        """Which workers the others wait for; empty if that was reported before."""
        return self._asked(wait_s, "state.hanging", rank, world_size, where)

    def status(self, limit_s: float = ANSWER_S, mlflow_s: float = 0.0) -> RunStatus:
        """The run's state; waits up to `mlflow_s` for MLflow's first answer."""
        return self._asked(limit_s, "status", mlflow_s)

    def places(self) -> dict[int, WorkerPlace]:
        return self._asked(HEARTBEAT_S, "state.places")

    def stop_reason(self) -> str | None:
        return self.status().stop

    def failure(self) -> Failure | None:
        return self.status().failure

    def run_id(self, limit_s: float = ANSWER_S) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""
        return self.status(limit_s, min(limit_s / 2, FIRST_ANSWER_S)).run_id

    def hint(self) -> str:
        return self.status(mlflow_s=FIRST_ANSWER_S).hint

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False if it does not in time."""
        return self._asked(ANSWER_S, "tracker.flush", timeout_s)

    def finish(self, status: Status) -> str:
        """End the run; says what MLflow does not have, and why."""
        self.append("finish", ARRIVAL_S, status=status)
        return self._asked(ANSWER_S, "close")


def start_recorder(uri: str, log_path: Path, run_name: str, command: str) -> Recorder:
    """A recorder of a command's first run, in a process on this node, where its log is."""
    node = ray.get_runtime_context().get_node_id()
    actor = (
        ray.remote(RunRecords)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(absolute_uri(uri))
    )
    return Recorder(actor, log_path, run_name, command)


def _answer(call: Any, limit_s: float) -> Any:
    """What a call of the actor returns.

    Raises:
        RuntimeError: it has not answered in time, or its process has died.
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
