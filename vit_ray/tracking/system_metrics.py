"""CPU, memory, GPU, disk and network of a node, under `system/<node>/...` keys.

MLflow's page shows `system/` keys on a tab of their own.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
import time

import psutil

from vit_ray.tracking.mlflow_api import Metric
from vit_ray.tracking.mlflow_client import absolute_uri, open_client, redact_uri

INTERVAL_S = 10.0
GIB = 1024**3
MIB = 1024**2
_GPU_FIELDS = {
    "utilization.gpu": "gpu{}_utilization_percent",
    "memory.used": "gpu{}_memory_used_mib",
    "power.draw": "gpu{}_power_w",
    "temperature.gpu": "gpu{}_temperature_c",
}

logger = logging.getLogger(__name__)


class SystemMetrics:
    """Samples this node in a thread of its own and writes to the run; never raises, never blocks.

    One per node. A sample that MLflow cannot take is dropped: the next one comes soon.
    """

    def __init__(self, run_id: str, uri: str, node_id: str, interval_s: float = INTERVAL_S) -> None:
        """
        Args:
            run_id: MLflow run.
            uri: tracking server; a SQLite file only on the machine that holds it.
            node_id: what the keys call this node, such as `node-0`.
            interval_s: seconds between samples.
        """
        self._run_id = run_id
        self._uri = absolute_uri(uri)
        self._sampler = SystemSampler(node_id)
        self._interval_s = interval_s
        self._start_ms: int | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)

    def start(self) -> SystemMetrics:
        """Begin sampling."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Take no more samples."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _work(self) -> None:
        while not self._ends.wait(self._interval_s):
            try:
                self._write(self._sampler.sample())
            except Exception as error:
                reason = redact_uri(str(error), self._uri)
                logger.debug("a sample of run %s is lost: %s", self._run_id, reason)

    def _write(self, values: dict[str, float]) -> None:
        client = open_client(self._uri)
        if self._start_ms is None:
            self._start_ms = client.get_run(self._run_id).info.start_time
        now_ms = round(time.time() * 1000)
        # Counted from the run's start, so that the step goes on rising when a job is restarted.
        step = int((now_ms - self._start_ms) / 1000 // self._interval_s)
        points = [Metric(key, value, now_ms, step) for key, value in values.items()]
        client.log_batch(self._run_id, metrics=points)


class SystemSampler:
    """Values of this node; rates are over the time since the sample before."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._query_gpus = shutil.which("nvidia-smi")
        self._last = _Counters()
        psutil.cpu_percent()  # the first call has nothing to compare with and returns 0

    def sample(self) -> dict[str, float]:
        """Keys `system/<node>/<what>_<unit>`; GPU keys only where there are NVIDIA GPUs."""
        now = _Counters()
        memory = psutil.virtual_memory()
        values = {
            "cpu_utilization_percent": psutil.cpu_percent(),
            "memory_used_gib": (memory.total - memory.available) / GIB,
            "memory_used_percent": memory.percent,
            **_filled({"shm_used_percent": "/dev/shm", "disk_used_percent": "/"}),
            **now.rates_since(self._last),
            **self._gpus(),
        }
        self._last = now
        return {f"system/{self._node_id}/{key}": value for key, value in values.items()}

    def _gpus(self) -> dict[str, float]:
        if self._query_gpus is None:
            return {}
        query = [f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(
            [self._query_gpus, *query], capture_output=True, text=True, timeout=10.0
        )
        return parse_gpus(answer.stdout)


def parse_gpus(csv: str) -> dict[str, float]:
    """Values of every GPU from nvidia-smi's table; what a GPU does not tell is left out."""
    values = {}
    for gpu_index, line in enumerate(csv.splitlines()):
        for name, text in zip(_GPU_FIELDS.values(), line.split(","), strict=False):
            try:
                values[name.format(gpu_index)] = float(text)
            except ValueError:  # "[N/A]"
                continue
    return values


class _Counters:
    """Bytes that went through the network and the disks since the node started."""

    def __init__(self) -> None:
        self.time_s = time.monotonic()
        network, disks = psutil.net_io_counters(), psutil.disk_io_counters()
        self.bytes = {
            "network_received_mib_per_s": network.bytes_recv,
            "network_sent_mib_per_s": network.bytes_sent,
        }
        if disks is not None:  # None in some containers
            self.bytes["disk_read_mib_per_s"] = disks.read_bytes
            self.bytes["disk_written_mib_per_s"] = disks.write_bytes

    def rates_since(self, before: _Counters) -> dict[str, float]:
        elapsed_s = max(self.time_s - before.time_s, 1e-3)
        return {
            key: (count - before.bytes.get(key, count)) / MIB / elapsed_s
            for key, count in self.bytes.items()
        }


def _filled(folders: dict[str, str]) -> dict[str, float]:
    usages = {key: shutil.disk_usage(path) for key, path in folders.items() if os.path.isdir(path)}
    return {key: 100.0 * (u.total - u.free) / max(u.total, 1) for key, u in usages.items()}
