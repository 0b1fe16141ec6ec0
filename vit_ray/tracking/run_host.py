"""The one actor that records all runs of a driver.

Importing MLflow and opening its store take seconds, so a sweep's trials and a study's cells share
one process. `run_handle` has the handles through which a run is reached.
"""

from __future__ import annotations

import threading
from typing import Any

import ray

from vit_ray.tracking.run_handle import RunHandle
from vit_ray.tracking.run_status import RunOpening, RunStatus


class RunHost:
    """Runs as an actor with concurrent methods."""

    def __init__(self) -> None:
        self._runs: dict[str, Any] = {}
        self._ended: set[str] = set()
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def call(
        self, key: str, opening: RunOpening, method: str, *arguments: Any, **named: Any
    ) -> Any:
        """The answer of one run's record; the first call for a key opens it.

        A call that comes after the run has ended is answered with None: opening it again would
        set it back to running, for nobody to end.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._ended:
                return None
            if key not in self._runs:
                run = _open(opening)
                if run.was_finished:
                    self._ended.add(key)
                    return run.close()
                self._runs[key] = run
                self._show_to_parent(key, opening)
            run = self._runs[key]
        return getattr(run, method)(*arguments, **named)

    def _show_to_parent(self, key: str, opening: RunOpening) -> None:
        """At every opening: the parent may have lost its children when this process died."""
        if opening.parent is not None:
            host = ray.get_runtime_context().current_actor
            opening.parent.adopt.remote(RunHandle(host, key, opening))

    def status_of(self, log_path: str) -> RunStatus | None:
        """Of the run that writes this log; None if there is none here."""
        runs = [run for key, run in list(self._runs.items()) if key.startswith(f"{log_path} ")]
        status: RunStatus | None = runs[-1].status() if runs else None
        return status

    def forget(self, key: str) -> None:
        """Drop a run that has ended."""
        with self._lock:
            self._ended.add(key)
            self._runs.pop(key, None)
            self._locks.pop(key, None)


def _open(opening: RunOpening) -> Any:
    # Here and not above: the driver, which has this class too, needs no MLflow.
    from vit_ray.tracking.run_actor import Recorder

    return Recorder(opening)
