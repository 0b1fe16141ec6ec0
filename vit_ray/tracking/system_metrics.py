"""CPU, memory, GPU, disk and network of a node, from MLflow's own monitor.

Keys are `system/<node>/...`, which MLflow's page shows on a separate tab.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vit_ray.addresses import absolute_uri
from vit_ray.tracking.mlflow_api import SystemMetricsMonitor
from vit_ray.tracking.mlflow_client import open_client, redact_uri

INTERVAL_S: Final = 10.0
POLL_S: Final = 1.0
"""Between two looks for nodes that have joined."""

logger = logging.getLogger(__name__)


class SystemMetrics:
    """Samples this node into a run until stopped; one for each node, on other nodes as an actor.

    MLflow's monitor would end at the first request that fails, so this calls its parts. A sample
    that MLflow does not accept is dropped: the next one comes soon.
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
        monitor: Any = None
        while not self._ends.wait(self._interval_s):
            try:
                monitor = monitor or self._monitor()
                monitor.collect_metrics()
                monitor.publish_metrics(monitor.aggregate_metrics())
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("a sample of run %s is lost: %s", self._run_id, reason)

    def _monitor(self) -> Any:
        open_client(self._uri)  # limits how long a request of this process takes
        return SystemMetricsMonitor(  # type: ignore[no-untyped-call]
            self._run_id,
            resume_logging=True,  # steps continue from the last one
            node_id=self._node_id,
            tracking_uri=self._uri,
        )


class NodeSamples(threading.Thread):
    """Samples every node of the cluster into a run, also those that join later.

    For a run in a SQLite file only this node is sampled, because only it has the file.
    """

    def __init__(self, uri: str, run_id: Callable[[], str | None]) -> None:
        """`run_id`: the MLflow run, None while it is unknown."""
        super().__init__(name="node-samples", daemon=True)
        self._uri, self._run_id = uri, run_id
        self._samplers: dict[str, Any] = {}
        self._ends = threading.Event()

    def run(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        while not self._ends.wait(POLL_S):
            if (run_id := self._run_id()) is None:
                continue
            if here not in self._samplers:
                self._samplers[here] = SystemMetrics(run_id, self._uri, "node-0")
            if self._uri.startswith(("http://", "https://")):
                self._add_nodes(run_id)

    def _add_nodes(self, run_id: str) -> None:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        for node in sorted({one["NodeID"] for one in nodes if one["Alive"]} - {*self._samplers}):
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            actor: Any = ray.remote(SystemMetrics).options(num_cpus=0, scheduling_strategy=place)
            name = f"node-{len(self._samplers)}"
            self._samplers[node] = actor.remote(run_id, self._uri, name)

    def stop(self) -> None:
        """Stop sampling."""
        self._ends.set()
        self.join(POLL_S)
        for sampler in self._samplers.values():
            sampler.stop() if isinstance(sampler, SystemMetrics) else ray.kill(sampler)
