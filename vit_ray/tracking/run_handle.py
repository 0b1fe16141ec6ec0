"""Handles of runs that are being recorded, for the driver and the workers: no MLflow in here.

A handle behaves as that of an actor of its own: `handle.method.remote(...)`, with the methods of
`run_actor.Recorder`. It says how its run is opened, so that a host that died and was started again
goes on where the run's log on disk ends.
"""

from __future__ import annotations

from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.tracking.run_host import RunHost
from vit_ray.tracking.run_status import RunOpening

CONCURRENT_CALLS: Final = 64
NAMESPACE: Final = "vit_ray"
"""Of Ray, in which hosts have names, so that they can be looked at from outside."""


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
        ray.get(self._host.forget.remote(self._key))


class _RemoteMethod:
    def __init__(self, handle: RunHandle, method: str) -> None:
        self._handle, self._method = handle, method

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self._handle.call(self._method, *arguments, **named)


def start_recorder(opening: RunOpening, node_id: str | None = None) -> RunHandle:
    """Begin to record a run in this driver's host.

    Args:
        node_id: where, by default on this node: the node of the SQLite file and of the log.
    """
    host = host_on(node_id or ray.get_runtime_context().get_node_id())
    handle = RunHandle(host, f"{opening.log_path} {opening.key}", opening)
    handle.run_id.remote()  # opens it while the caller goes on
    return handle


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
