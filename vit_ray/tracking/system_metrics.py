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
from vit_ray.tracking.store_requests import limit_requests, redact_uri

INTERVAL_S: Final = 10.0

logger = logging.getLogger(__name__)


class NodeSampler(threading.Thread):
    """Samples this node into a run until stopped, and starts a sampler on every other node.

    MLflow's monitor would end at the first request that fails, so this calls its parts. A sample
    that MLflow does not accept is dropped: the next one comes soon.
    """

    def __init__(
        self,
        uri: str,
        run_id: Callable[[], str | None],
        node: str | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """
        Args:
            uri: tracking server; a SQLite file only on the machine that holds it, where only this
                node is sampled.
            run_id: the MLflow run, None while it is unknown.
            node: name in the keys; None for the first node, which starts the other samplers.
            interval_s: seconds between samples, and between looks for nodes that have joined.
        """
        super().__init__(name="node-sampler", daemon=True)
        self._uri, self._run_id, self._node = absolute_uri(uri), run_id, node or "node-0"
        self._starts_others = node is None and uri.startswith(("http://", "https://"))
        self._interval_s, self._ends = interval_s, threading.Event()
        self._others: dict[str, Any] = {}

    def run(self) -> None:
        monitor: Any = None
        while not self._ends.wait(self._interval_s):
            try:
                if (run_id := self._run_id()) is None:
                    continue
                if self._starts_others:
                    self._add_nodes(run_id)
                monitor = monitor or self._monitor(run_id)
                monitor.collect_metrics()
                monitor.publish_metrics(monitor.aggregate_metrics())
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("a sample of %s is lost: %s", self._node, reason)

    def _monitor(self, run_id: str) -> Any:
        # Here, in a thread: it imports MLflow, which takes seconds.
        from vit_ray.tracking.mlflow_client import SystemMetricsMonitor

        limit_requests()  # the process is an actor, whose output Ray passes on to the driver's
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        return SystemMetricsMonitor(  # type: ignore[no-untyped-call]
            run_id,
            resume_logging=True,  # steps continue from the last one
            node_id=self._node,
            tracking_uri=self._uri,
        )

    def _add_nodes(self, run_id: str) -> None:
        here = ray.get_runtime_context().get_node_id()
        alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}  # type: ignore[no-untyped-call]
        for node in sorted(alive - {here, *self._others}):
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            actor: Any = ray.remote(NodeSampler).options(num_cpus=0, scheduling_strategy=place)
            name = f"node-{len(self._others) + 1}"
            self._others[node] = actor.remote(self._uri, lambda: run_id, name)
            self._others[node].start.remote()

    def stop(self) -> None:
        """Stop sampling; waits at most 5 s for a request to MLflow in progress."""
        self._ends.set()
        self.join(5.0)
        for other in self._others.values():
            ray.kill(other)
