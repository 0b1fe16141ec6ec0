"""The actor that records and controls all runs of a command.

Importing MLflow and opening its store take seconds, so a sweep's trials and a study's cells share
one process. The log has all that the actor knows of a run: if Ray restarts the process, the next
call reads the log again.
"""

import dataclasses
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.addresses import absolute_uri
from vit_ray.metric_names import EVAL_TOP1, STARTUP_FIRST_STEP_S
from vit_ray.outcomes import (
    EventKind,
    RunFailedError,
    WorkerPlace,
    beats_between,
)
from vit_ray.tracking.metrics_log import MetricsLog, Record, RunOpening, lock_log
from vit_ray.tracking.recorder import Event, Orders, Recorder, RunStatus
from vit_ray.tracking.store_requests import limit_requests, redact_uri
from vit_ray.tracking.tracker import Tracker

CONCURRENT_CALLS: Final = 64
# Records that Ray may repeat after the actor's process has died: one per sender.
MAX_REPEATED: Final = 4096
# Between samples of a node's load, and between checks for nodes that have joined.
SAMPLE_EVERY_S: Final = 10.0
# Missed heartbeats after which a worker counts as silent.
SILENT_BEATS: Final = 5
_MAX_NAMED: Final = 4
# Of a worker that has sent heartbeats, but not where it runs.
_UNKNOWN: Final = WorkerPlace("an unknown host", node="", detail="", step=0)

logger = logging.getLogger(__name__)


class RunState:
    """State of one run since its last start record, from the log's records and heartbeats."""

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
                now.failure = RunFailedError(record["reason"])
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


class NodeSampler(threading.Thread):
    """Samples this node into a run until stopped, and starts a sampler on every other node.

    MLflow's monitor measures CPU, memory, GPU, disk and network as `system/<node>/...`, which
    MLflow's page shows on a separate tab. The monitor's own thread ends at the first request that
    fails, so this thread calls the monitor's parts. A sample that MLflow refuses is dropped.
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
            uri: tracking server, or a SQLite file on this machine: then only this node is sampled.
            run_id: returns the MLflow run's id, None while it is unknown.
            node: name in the metrics' keys; None for the first node, which starts the samplers of
                the other nodes.
        """
        super().__init__(name="node-sampler", daemon=True)
        self._uri, self._run_id, self._node = absolute_uri(uri), run_id, node or "node-0"
        self._samples_all_nodes = node is None and uri.startswith(("http://", "https://"))
        self._interval_s, self._stopped = interval_s, threading.Event()
        self._samplers: dict[str, Any] = {}

    def run(self) -> None:
        monitor: Any = None
        while not self._stopped.wait(self._interval_s):
            try:
                if (run_id := self._run_id()) is None:
                    continue
                if self._samples_all_nodes:
                    self._add_nodes(run_id)
                # Here, in a thread: it imports MLflow, which takes seconds.
                from vit_ray.tracking.mlflow_client import SystemMetricsMonitor

                limit_requests()  # an actor, whose output Ray passes on to the driver's
                logging.getLogger("mlflow").setLevel(logging.ERROR)
                monitor = monitor or SystemMetricsMonitor(  # type: ignore[no-untyped-call]
                    run_id,
                    resume_logging=True,  # steps continue from the last one
                    node_id=self._node,
                    tracking_uri=self._uri,
                )
                monitor.collect_metrics()
                monitor.publish_metrics(monitor.aggregate_metrics())
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("a sample of %s is lost: %s", self._node, reason)

    def _add_nodes(self, run_id: str) -> None:
        here = ray.get_runtime_context().get_node_id()
        alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}  # type: ignore[no-untyped-call]
        for node in sorted(alive - {here, *self._samplers}):
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            actor: Any = ray.remote(NodeSampler).options(num_cpus=0, scheduling_strategy=on_node)
            name = f"node-{len(self._samplers) + 1}"
            self._samplers[node] = actor.remote(self._uri, lambda: run_id, name)
            self._samplers[node].start.remote()

    def stop(self) -> None:
        """Stop sampling; waits at most 5 s for a request to MLflow in progress."""
        self._stopped.set()
        self.join(5.0)
        for sampler in self._samplers.values():
            ray.kill(sampler)


class _Run:
    def __init__(self, path: Path, uri: str, opening: RunOpening | None) -> None:
        """Open the run; without an opening, in a restarted process, continue what the log holds.

        Raises:
            RuntimeError: the process of an earlier driver still writes the log; or there is
                neither an opening nor such a log.
        """
        self.state, self._lock = RunState(), threading.Lock()
        self._record_ids = deque[str](maxlen=MAX_REPEATED)
        self.problem: str | None = None  # set by `close`: what MLflow does not have, and why
        self.log = MetricsLog(path, self._note)
        self._exit = lock_log(path)  # releases the lock and stops the samplers at the end
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
        # Child runs share the nodes that their sweep or study samples.
        if start["system_metrics"] and not self.parent_log and not self.state.has_finished:
            sampler = NodeSampler(uri, lambda: self.tracker.run_id)
            sampler.start()
            self._exit.callback(sampler.stop)

    def _note(self, record: Record) -> None:
        if record["kind"] == "start":  # the state begins again at each start record
            self.state = RunState()
        if "id" in record:
            self._record_ids.append(record["id"])
        self.state.note(record)

    def record(self, kind: str, values: Record, record_id: str) -> None:
        """Write a record, unless Ray repeats the call or the run has finished."""
        with self._lock:
            if self.state.has_finished or record_id in self._record_ids:
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
                self.problem = self.tracker.close()
        return self.problem


class RunRecords:
    """An actor with concurrent methods; no call waits for another run."""

    def __init__(self, uri: str) -> None:
        limit_requests()
        self._uri = uri  # an argument, so that no log contains MLflow's password
        self._runs: dict[Path, _Run] = {}
        self._locks: dict[Path, threading.RLock] = {}  # locked while a run is opened

    def open(self, opening: RunOpening) -> str:
        """Open a run; returns the workers' placement group of a process that opened it and died."""
        with self._lock_of(opening.log_path):
            earlier = self._runs.get(opening.log_path)
            if earlier is not None and earlier.key == opening.key:
                return ""
            if earlier is not None:  # either finished, or the process that opened it died
                earlier.record("finish", {"status": "KILLED"}, uuid.uuid4().hex)
                earlier.close()
            self._open(opening.log_path, opening)
            workers = earlier.state.places().values() if earlier else ()
            return max((worker.group for worker in workers), default="")

    def write(self, path: Path, kind: str, values: Record, record_id: str, before: str) -> str:
        """Write a record; returns why it could not be written, or an empty text.

        Args:
            before: the sender's previous call, for which Ray waits. Its error would fail all later
                calls, so this method returns errors instead of raising them.
        """
        try:
            self._run(path).record(kind, values, record_id)
        except Exception as error:
            return str(error) or repr(error)
        return ""

    def ask(self, path: Path, method: str, *args: Any) -> Any:
        """Call a method of a `_Run`, of its `state` or its `tracker`.

        Raises:
            RuntimeError: the run was never opened.
        """
        return attrgetter(method)(self._run(path))(*args)

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
            parent.log.append("child", path=str(path))
        return run


def start_recorder(uri: str, log_path: Path, run_name: str, command: str) -> Recorder:
    """Start the actor on this node, where the logs are; returns the recorder of the first run."""
    here = ray.get_runtime_context().get_node_id()
    actor = (
        ray.remote(RunRecords)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(absolute_uri(uri))
    )
    return Recorder(actor, log_path, run_name, command)
