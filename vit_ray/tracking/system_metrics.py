"""CPU, memory, GPU, disk and network of a node, from MLflow's own monitor.

Keys are `system/<node>/...`, which MLflow's page shows on a separate tab.
"""

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.addresses import absolute_uri
from vit_ray.mlflow_internals import is_sampling
from vit_ray.tracking.mlflow_api import SystemMetricsMonitor
from vit_ray.tracking.mlflow_client import open_client, redact_uri

INTERVAL_S: Final = 10.0

logger = logging.getLogger(__name__)


class SystemMetrics:
    """Samples this node into a run until stopped; one for each node, on other nodes as an actor.

    MLflow's monitor ends at the first request that fails, so it is restarted. A sample that MLflow
    does not accept is dropped: the next one comes soon.
    """

    def __init__(self, run_id: str, uri: str, node_id: str, interval_s: float = INTERVAL_S) -> None:
        """
        Args:
            run_id: MLflow run.
            uri: tracking server; a SQLite file only on the machine that holds it.
            node_id: the node's name in the keys, such as `node-0`.
            interval_s: seconds between samples.
        """
        self._run_id, self._uri, self._node_id = run_id, absolute_uri(uri), node_id
        self._interval_s = interval_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; waits at most 5 s for a request to MLflow in progress."""
        self._ends.set()
        self._thread.join(5.0)

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                open_client(self._uri)  # limits how long a request of this process takes
                monitor: Any = SystemMetricsMonitor(  # type: ignore[no-untyped-call]
                    self._run_id,
                    sampling_interval=self._interval_s,
                    samples_before_logging=1,
                    resume_logging=True,  # steps continue from the last one
                    node_id=self._node_id,
                    tracking_uri=self._uri,
                )
                monitor.start()
                while is_sampling(monitor) and not self._ends.wait(self._interval_s):
                    pass
                monitor.finish()
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("samples of run %s are lost: %s", self._run_id, reason)
            self._ends.wait(self._interval_s)


def sample_nodes(run_id: str, uri: str) -> list[Callable[[], None]]:
    """Sample every node until the returned functions are called.

    For a run in a SQLite file only this node is sampled, because only it has the file.
    """
    own = SystemMetrics(run_id, uri, "node-0")
    if not uri.startswith(("http://", "https://")):
        return [own.stop]
    here = ray.get_runtime_context().get_node_id()
    alive = [n["NodeID"] for n in ray.nodes() if n["Alive"]]  # type: ignore[no-untyped-call]
    others: list[Any] = [
        ray.remote(SystemMetrics)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(run_id, uri, f"node-{index}")
        for index, node in enumerate(sorted(set(alive) - {here}), start=1)
    ]
    return [own.stop, *(partial(ray.kill, other) for other in others)]
