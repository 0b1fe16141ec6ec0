"""The record of one run, in an actor beside the driver.

Workers send metrics and events to it without waiting for an answer; it writes them to MLflow as the
run's one writer, keeps what the progress display shows, and passes requests to stop or to save from
the driver to the workers.
"""

from __future__ import annotations

import collections
import fcntl
import io
import json
import logging
import time
from pathlib import Path
from typing import IO, Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.outcomes import EventKind, Failure
from vit_ray.tracking.metrics_log import MetricsLog
from vit_ray.tracking.run_status import Event, RunOpening, RunStatus, Stage
from vit_ray.tracking.system_metrics import SystemMetrics
from vit_ray.tracking.tracker import Status, Tracker

_WISH: Final = ("what", "reason", "has_diverged")
"""Of a record in the log; what others have written may lack the last."""
RELEASE_S = 20.0
"""How long the recorder of a driver that was killed may take to end."""

logger = logging.getLogger(__name__)


class Recorder:
    """The record of one run; lives in a `RunHost`, see `start_recorder`."""

    def __init__(self, opening: RunOpening) -> None:
        config = opening.config
        self._writer_lock = lock_log(opening.log_path, opening.run_name)
        self._name, self._parent = opening.run_name, opening.parent
        self._log_path = opening.log_path
        self._started_s = time.time()
        self._child_steps: dict[str, int] = {}
        self._children: list[Any] = []
        self._stage: Stage | None = None
        self._measured_on = f"{opening.measured_on}/"
        self._status = RunStatus()
        self._stop: str | None = None
        self._failure: Failure | None = None
        self._saves_wanted = 0
        self.was_finished = False
        """Its end had been noted before the host died."""
        self._restore(opening)
        self._tracker = Tracker.start(
            config,
            opening.run_name,
            opening.log_path,
            run_id=opening.run_id,
            params=opening.params,
            tags=opening.tags,
            resume_step=opening.resume_step,
            datasets=opening.datasets,
            awaited_metric=opening.awaited_metric,
            key=opening.key,
        )
        self._system: SystemMetrics | None = None
        self._samplers: list[Any] = []
        # Nodes are shared by what runs under a sweep or study, which samples them itself.
        is_alone = opening.parent is None and not self.was_finished
        if config.system_metrics and is_alone and (run := self._tracker.run_id):
            self._system = SystemMetrics(run, config.uri, "node-0").start()
            self._samplers = sample_other_nodes(run, config.uri)

    def _restore(self, opening: RunOpening) -> None:
        """What this opening had noted before its host died and was started again."""
        for record in MetricsLog(opening.log_path).opened(opening.key) or ():
            if record["kind"] == "metrics":
                values = self._renamed(record["values"], self._measured_on, "eval/")
                self._note_metrics(record["step"], values)
            elif record["kind"] == "event":
                event = record["event"]
                self._status.events.append(Event(**{**event, "kind": EventKind(event["kind"])}))
            elif record["kind"] == "wish":
                self._note_wish(**{key: record[key] for key in record if key in _WISH})
            elif record["kind"] == "finish":
                self.was_finished = True

    @staticmethod
    def _renamed(values: dict[str, float], group: str, new_group: str) -> dict[str, float]:
        return {
            new_group + key.removeprefix(group) if key.startswith(group) else key: value
            for key, value in values.items()
        }

    def _note_metrics(self, step: int, values: dict[str, float]) -> None:
        self._status.metrics.update(values)
        self._status.step = max(self._status.step, step)

    def _note_wish(self, what: str, reason: str, has_diverged: bool = False) -> None:
        if what == "stop":
            self._stop = reason
        elif what == "fail":
            self._failure = Failure(reason, has_diverged)
        else:
            self._saves_wanted += 1

    def _wish(self, what: str, reason: str = "", **more: bool) -> None:
        self._note_wish(what, reason, **more)
        self._tracker.note("wish", what=what, reason=reason, **more)

    def run_id(self) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""
        return self._tracker.run_id

    def hint(self) -> str:
        """How to open MLflow's page."""
        return self._tracker.hint

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step; only the first attempt tells how long starting took."""
        if "startup/first_step_s" in self._status.metrics:
            values = {k: v for k, v in values.items() if k != "startup/first_step_s"}
        self._note_metrics(step, values)
        self._tracker.metrics(step, self._renamed(values, "eval/", self._measured_on))

    def outcome(self, step: int, values: dict[str, float]) -> None:
        """What runs under this one have come to; in the place of an earlier start's."""
        self._note_metrics(step, values)
        values = self._renamed(values, "eval/", self._measured_on)
        self._tracker.metrics(step, values, is_again=True)

    def event(self, kind: EventKind, text: str, step: int) -> None:
        """Record an event in the run's history."""
        event = Event(kind, text, step, time.time())
        self._status.events.append(event)
        self._tracker.note("event", event=vars(event))

    def poll(self, rank: int, step: int) -> tuple[str | None, int]:
        """A worker's heartbeat; answers why to stop, if at all, and how many saves were wanted."""
        if rank == 0:
            self._status.step = max(self._status.step, step)
            if self._parent is not None:
                self._parent.child_step.remote(self._name, step)
        return self._stop, self._saves_wanted

    def child_step(self, name: str, step: int) -> None:
        """A run under this one (a trial of a sweep) is at `step`; the display shows their sum."""
        self._child_steps[name] = step
        self._status.step = sum(self._child_steps.values())

    def begin_stage(self, what: str, count: int) -> None:
        """`count` runs of a kind come next."""
        self._stage = Stage(what, count)

    def child_ended(self, label: str, score: float | None) -> None:
        """One of the stage's runs has ended, with a score if it has one."""
        if self._stage is not None:
            self._stage.end_one(label, score)

    def adopt(self, child: Any) -> None:
        """The recorder of a run under this one, which is to stop when this one is."""
        self._children.append(child)
        if self._stop:
            child.request_stop.remote(self._stop)

    def fail(self, failure: Failure) -> None:
        """The workers end, and a restart would not help."""
        self._wish("fail", failure.reason, has_diverged=failure.has_diverged)

    def failure(self) -> Failure | None:
        """What was given to `fail`."""
        return self._failure

    def request_stop(self, reason: str) -> None:
        """Ask all workers, of the runs under this one too, to checkpoint and end."""
        self._wish("stop", reason)
        for child in self._children:
            child.request_stop.remote(reason)

    def request_save(self) -> None:
        """Ask the workers for a checkpoint at once."""
        self._wish("save")

    def stop_reason(self) -> str | None:
        """The reason given to `request_stop`."""
        return self._stop

    def status(self) -> RunStatus:
        """For the display, and at the end for the result."""
        # A copy: other calls go on writing while it is being sent.
        now = self._status
        stage = "" if self._stage is None else str(self._stage)
        return RunStatus(now.step, dict(now.metrics), list(now.events), stage)

    def tag(self, key: str, value: str) -> None:
        """A tag of the run."""
        self._tracker.tag(key, value)

    def text(self, name: str, text: str) -> None:
        """A text to keep with the run as a file."""
        self._tracker.artifact_text(name, text)

    def flush(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything recorded so far; False when it does not in time."""
        return self._tracker.flush(timeout_s)

    def artifact(self, path: str, folder: str = "") -> None:
        """A local file or folder to keep with the run."""
        self._tracker.artifact(path, folder)

    def content(self, name: str, content: bytes, folder: str) -> None:
        """A file to keep with the run, sent from a worker that may be on another node."""
        path = self._log_path.parent / name
        path.write_bytes(content)
        self._tracker.artifact(path, folder)

    def model(
        self,
        files: dict[str, str],
        name: str,
        step: int,
        params: dict[str, str],
        register_as: str | None,
    ) -> None:
        """A model of MLflow by the texts of its files; else as `Tracker.model`."""
        folder = self._log_path.parent / f"mlflow-model-{step:08d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(text)
        except OSError as error:
            return logger.warning("run %s: no model is logged: %s", self._name, error)
        self._tracker.model(folder, name, step, params, register_as)

    def finish(self, status: Status) -> bool:
        """Write the history and end the run; False if MLflow has not taken all of it."""
        if self._system is not None:
            self._system.stop()
        for sampler in self._samplers:
            ray.kill(sampler)
        if self._status.events:
            # Each attempt of a run keeps its own.
            started = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._started_s))
            name = f"history/{started}.json"
            self._tracker.artifact_text(name, _history(self._status.events))
            counts = collections.Counter(event.kind for event in self._status.events)
            for kind, count in counts.items():
                self._tracker.tag(f"vit_ray.events.{kind.replace(' ', '_')}", str(count))
        self._tracker.record_end(status)
        return self.close()

    def close(self) -> bool:
        """Send what is recorded to MLflow and close the log; False if not all of it was sent."""
        try:
            return self._tracker.close()
        finally:
            self._writer_lock.close()


class NodeSampler:
    """Runs as an actor on each node: its system metrics go straight into the run."""

    def __init__(self, run_id: str, uri: str, node_id: str) -> None:
        self._metrics = SystemMetrics(run_id, uri, node_id).start()


def sample_other_nodes(run_id: str, uri: str) -> list[Any]:
    """A sampler on every other node; none for a SQLite file, which only this node has."""
    if not uri.startswith(("http://", "https://")):
        return []
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]
    return [
        ray.remote(NodeSampler)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(run_id, uri, f"node-{index}")
        for index, node in enumerate(sorted(set(alive) - {here}), start=1)
    ]


def lock_log(log_path: Path, run_name: str) -> IO[str]:
    """The run's log for this recorder alone, until the file is closed or the process ends.

    Raises:
        RuntimeError: the recorder of an earlier driver still writes it.
    """
    path = log_path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 - held until the run has ended
    except OSError:  # nothing can be written there, by nobody: the log itself will say so
        return io.StringIO()
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"run {run_name!r}: the recorder of its last driver on this machine "
                    f"has not ended in {RELEASE_S:g} s and still writes {log_path}; end "
                    "that driver's job (ray job stop), then start again"
                ) from None
            time.sleep(0.5)


def _history(events: list[Event]) -> str:
    return json.dumps([vars(event) for event in events], indent=1)
