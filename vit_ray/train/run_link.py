"""A worker's link to the run's actor beside the driver: the only code here that calls it.

Metrics and events are sent without waiting for an answer. The actor lives with the driver: if it
is gone, Ray ends this worker too, so calls that may fail then are not errors of the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import ray

from vit_ray.outcomes import EventKind, Failure

P = ParamSpec("P")
R = TypeVar("R")

POLL_TIMEOUT_S: Final = 30.0
HANG_REPORT_TIMEOUT_S: Final = 10.0
RUN_ID_TIMEOUT_S: Final = 20.0
CALL_TIMEOUT_S: Final = 120.0
"""For calls whose answer counts: a worker that gets none ends, and its group starts again."""


class RunActor(Protocol):
    """Every method of the run's actor that a worker calls."""

    def poll(self, rank: int, step: int) -> tuple[str | None, int]:
        """A heartbeat; answers why to stop, if at all, and how many saves were requested."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Metrics of a step."""

    def event(self, kind: EventKind, text: str, step: int) -> None:
        """An entry of the run's history."""

    def content(self, name: str, content: bytes, folder: str) -> None:
        """A file to keep with the run."""

    def fail(self, failure: Failure) -> None:
        """The run ends, and a restart would not help."""

    def run_id(self) -> str | None:
        """MLflow's id of the run; None while MLflow is away."""


class RunLink:
    """One worker's side of the link."""

    def __init__(self, actor: Any, rank: int) -> None:
        """`actor`: handle of a Ray actor that has the methods of `RunActor`."""
        self._actor, self.rank = actor, rank
        self.stop_reason: str | None = None
        """Why the workers were asked to stop, by the last answer to a heartbeat."""
        self._saves_requested = 0
        # Until the first answer it is not known how many were requested of earlier attempts.
        self._saves_seen: int | None = None

    def fail(self, failure: Failure) -> None:
        """End the run; returns once the actor knows."""
        self._call(RunActor.fail, failure)

    def beat(self, step: int) -> None:
        """Send a heartbeat and store the requests that the answer holds."""
        with contextlib.suppress(ray.exceptions.RayError):
            answer = ray.get(self._send(RunActor.poll, self.rank, step), timeout=POLL_TIMEOUT_S)
            stop, saves = answer or (None, self._saves_requested)  # None: the run has ended
            self.stop_reason = stop or self.stop_reason
            self._saves_requested = saves
            self._saves_seen = saves if self._saves_seen is None else self._saves_seen

    def current_stop_reason(self, step: int) -> str | None:
        """Asked of the actor now: another worker's heartbeat may have had the answer first."""
        answer = self._call(RunActor.poll, self.rank, step)
        return answer[0] if answer else None

    def take_save_request(self) -> bool:
        """Whether the driver has requested a checkpoint; true once for each request, on rank 0."""
        if self.rank > 0 or self._saves_seen in (None, self._saves_requested):
            return False
        self._saves_seen = self._saves_requested
        return True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send metrics, which are the same on all ranks, from rank 0."""
        if self.rank == 0 and metrics:
            self._send(RunActor.metrics, step, metrics)

    def note(self, kind: EventKind, text: str, step: int) -> None:
        """Send an event that all ranks know of, from rank 0."""
        if self.rank == 0:
            self.note_own(kind, text, step)

    def note_own(self, kind: EventKind, text: str, step: int) -> None:
        """Send an event of this rank alone."""
        self._send(RunActor.event, kind, text, step)

    def note_last(self, kind: EventKind, text: str, step: int) -> None:
        """As `note`, and wait until it has arrived: this process ends right after."""
        if self.rank == 0:
            self._call(RunActor.event, kind, text, step)

    def note_hang(self, text: str, step: int) -> None:
        """Report that this rank hangs; waits for some seconds at most."""
        with contextlib.suppress(ray.exceptions.RayError):
            sent = self._send(RunActor.event, EventKind.HUNG, f"worker {self.rank}: {text}", step)
            ray.get(sent, timeout=HANG_REPORT_TIMEOUT_S)

    def keep_file(self, name: str, content: bytes, folder: str = "profile") -> None:
        """Keep a file with the run, in a folder of its artifacts; returns once it has arrived."""
        self._call(RunActor.content, name, content, folder)

    def tracking_run_id(self) -> str | None:
        """MLflow's id of the run on rank 0; None where it is not known in time."""
        if self.rank > 0:
            return None  # only rank 0's position is kept
        try:
            return ray.get(self._send(RunActor.run_id), timeout=RUN_ID_TIMEOUT_S)
        except ray.exceptions.RayError:
            return None  # training goes on without its tracking

    def _call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs) -> R:
        return ray.get(self._send(method, *args, **_), timeout=CALL_TIMEOUT_S)

    def _send(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> ray.ObjectRef[R]:
        return getattr(self._actor, method.__name__).remote(*args, **kwargs)
