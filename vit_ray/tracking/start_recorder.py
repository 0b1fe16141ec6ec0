"""Starts the recorder of a run, in the one host of the driver on a node."""

from __future__ import annotations

from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.tracking.run_handle import RunHandle
from vit_ray.tracking.run_host import RunHost
from vit_ray.tracking.run_status import RunOpening

CONCURRENT_CALLS: Final = 64
NAMESPACE: Final = "vit_ray"
"""Ray namespace of the hosts' names, by which they can be inspected from outside."""


def start_recorder(opening: RunOpening, node_id: str | None = None) -> RunHandle:
    """Start recording a run in this driver's host.

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
