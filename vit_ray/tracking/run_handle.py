"""Handles of runs that are being recorded, for the driver and the workers; imports no MLflow.

A handle behaves as that of an actor of its own: `handle.method.remote(...)`, with the methods of
`run_actor.Recorder`. It says how its run is opened, so that a host that died and was started again
goes on where the run's log on disk ends.
"""

from __future__ import annotations

from typing import Any

import ray

from vit_ray.tracking.run_status import RunOpening


class RunHandle:
    """Reaches one run's record in its host; can be sent to any process."""

    def __init__(self, host: Any, key: str, opening: RunOpening) -> None:
        self._host, self._key, self._opening = host, key, opening

    def __reduce__(self) -> tuple[Any, ...]:
        return RunHandle, (self._host, self._key, self._opening)

    def __getattr__(self, method: str) -> _RemoteMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return _RemoteMethod(self, method)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Reference to the answer of the record's method."""
        return self._host.call.remote(self._key, self._opening, method, *arguments, **named)

    def release(self) -> None:
        """Have the host drop the run, which has ended."""
        # no limit: the host only drops a name; its death ends the wait
        ray.get(self._host.forget.remote(self._key))


class _RemoteMethod:
    def __init__(self, handle: RunHandle, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self._handle.call(self._method, *arguments, **named)
