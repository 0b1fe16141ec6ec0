"""The actor beside the driver that records a run.

Workers send metrics and events to it without waiting; it writes them to MLflow as the run's one
writer, keeps what the progress display shows, and passes the driver's wish to stop to the workers.
"""

from __future__ import annotations

import collections
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.config.training import TrackingConfig
from vit_ray.tracking.system_metrics import SystemMetrics
from vit_ray.tracking.tracker import Status, Tracker

NAMESPACE = "vit_ray"
RELEASE_S = 20.0
"""How long a driver that was killed may take to let go of its recorder."""


@dataclass
class Event:
    """Something that happened to the run, for its history."""

    kind: str
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
    events: list[Event] = field(default_factory=list)
    stage: str = ""
    """Which of the runs under this one it is at; empty for a run without any."""


class Recorder:
    """Runs as an actor with concurrent methods; see `start_recorder`."""

    def __init__(
        self,
        config: TrackingConfig,
        run_name: str,
        log_path: str,
        run_id: str | None,
        params: dict[str, str],
        tags: dict[str, str],
        resume_step: int | None,
        parent: Any = None,
    ) -> None:
        self._name, self._parent, self._log_path = run_name, parent, Path(log_path)
        self._started_s = time.time()
        self._child_steps: dict[str, int] = {}
        self._children: list[Any] = []
        self._stage: Stage | None = None
        self._tracker = Tracker.start(
            config,
            run_name,
            Path(log_path),
            run_id=run_id,
            params=params,
            tags=tags,
            resume_step=resume_step,
        )
        self._standing = RunStatus()
        self._stop: str | None = None
        self._failure: str | None = None
        self._start_step: int | None = None
        self._saves_wanted = 0
        self._system: SystemMetrics | None = None
        self._samplers: list[Any] = []
        if config.system_metrics and (run := self._tracker.run_id):
            self._system = SystemMetrics(run, config.uri, "node-0").start()
            self._samplers = sample_other_nodes(run, config.uri)
        if parent is not None:
            parent.adopt.remote(ray.get_runtime_context().current_actor)

    def run_id(self) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""
        return self._tracker.run_id

    def hint(self) -> str:
        """How to open MLflow's page."""
        return self._tracker.hint

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step; only the first attempt tells how long starting took."""
        if "startup/first_step_s" in self._standing.metrics:
            values = {k: v for k, v in values.items() if k != "startup/first_step_s"}
        self._standing.metrics.update(values)
        self._standing.step = max(self._standing.step, step)
        self._tracker.metrics(step, values)

    def event(self, kind: str, text: str, step: int) -> None:
        """Something for the run's history."""
        self._standing.events.append(Event(kind, text, step, time.time()))

    def poll(self, rank: int, step: int) -> tuple[str | None, int]:
        """A worker's heartbeat; answers why to stop, if at all, and how many saves were wanted."""
        if rank == 0:
            self._standing.step = max(self._standing.step, step)
            if self._parent is not None:
                self._parent.child_step.remote(self._name, step)
        return self._stop, self._saves_wanted

    def child_step(self, name: str, step: int) -> None:
        """A run under this one (a trial of a sweep) is at `step`; the display shows their sum."""
        self._child_steps[name] = step
        self._standing.step = sum(self._child_steps.values())

    def begin_stage(self, what: str, count: int) -> None:
        """So many runs of a kind come next."""
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

    def fail(self, reason: str) -> None:
        """The workers end, and a restart would not help."""
        self._failure = reason

    def failure(self) -> str | None:
        """The reason given to `fail`."""
        return self._failure

    def start_from(self, step: int | None) -> None:
        """The controller's choice of checkpoint for the workers that start next."""
        self._start_step = step

    def start_point(self) -> tuple[int | None, str | None]:
        """For a worker that starts: step of its checkpoint, and why it must not go on."""
        return self._start_step, self._failure

    def request_stop(self, reason: str) -> None:
        """Ask all workers, of the runs under this one too, to checkpoint and end."""
        self._stop = reason
        for child in self._children:
            child.request_stop.remote(reason)

    def request_save(self) -> None:
        """Ask the workers for a checkpoint at once."""
        self._saves_wanted += 1

    def stop_reason(self) -> str | None:
        """The reason given to `request_stop`."""
        return self._stop

    def standing(self) -> RunStatus:
        """For the display, and at the end for the result."""
        # A copy: other calls go on writing while it is being sent.
        now = self._standing
        stage = "" if self._stage is None else str(self._stage)
        return RunStatus(now.step, dict(now.metrics), list(now.events), stage)

    def tag(self, key: str, value: str) -> None:
        """A tag of the run."""
        self._tracker.tag(key, value)

    def artifact(self, path: str, folder: str = "") -> None:
        """A local file or folder to keep with the run."""
        self._tracker.artifact(path, folder)

    def content(self, name: str, content: bytes, folder: str = "profile") -> None:
        """A file to keep with the run, sent from a worker that may be on another node."""
        path = self._log_path.parent / name
        path.write_bytes(content)
        self._tracker.artifact(path, folder)

    def finish(self, status: Status) -> bool:
        """Write the history and end the run; False if MLflow has not taken all of it."""
        if self._system is not None:
            self._system.stop()
        for sampler in self._samplers:
            ray.kill(sampler)
        if self._standing.events:
            # Each attempt of a run keeps its own.
            started = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._started_s))
            name = f"history/{started}.json"
            self._tracker.artifact_text(name, _history(self._standing.events))
            counts = collections.Counter(event.kind for event in self._standing.events)
            for kind, count in counts.items():
                self._tracker.tag(f"vit_ray.events.{kind.replace(' ', '_')}", str(count))
        return self._tracker.finish(status)


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


def start_recorder(
    config: TrackingConfig,
    run_name: str,
    log_path: Path,
    *,
    run_id: str | None,
    params: dict[str, str],
    tags: dict[str, str],
    resume_step: int | None,
    parent: Any = None,
    node_id: str | None = None,
) -> Any:
    """Handle of a `Recorder`, which ends with the process that started it.

    Args:
        parent: recorder of the sweep or study that the run is part of.
        node_id: where it runs, by default on this node: the node of the SQLite file and of the log.

    Raises:
        RuntimeError: the recorder of an earlier driver still writes the run's log.
    """
    where = NodeAffinitySchedulingStrategy(
        node_id or ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(Recorder).options(
        name=str(log_path),  # the log has one writer; the run's lock has shown that ours is next
        namespace=NAMESPACE,
        num_cpus=0,
        max_concurrency=16,
        scheduling_strategy=where,
    )
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            return actor.remote(
                config, run_name, str(log_path), run_id, params, tags, resume_step, parent
            )
        except ray.exceptions.ActorAlreadyExistsError:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"run {run_name!r}: the recorder of its last driver on this cluster has not "
                    f"ended in {RELEASE_S:g} s and still writes {log_path}; end that driver's job "
                    "(ray job stop), then start again"
                ) from None
            time.sleep(0.5)


def _history(events: list[Event]) -> str:
    return json.dumps([vars(event) for event in events], indent=1)
