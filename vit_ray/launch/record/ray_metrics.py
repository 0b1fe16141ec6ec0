"""The state of each run as metrics of Ray, for monitoring a cluster with Prometheus.

Ray's nodes export them with the prefix `ray_`, on ports from `--metrics-export-port`, with or
without a dashboard. Alerts and a Grafana dashboard for them are in `cluster/`.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Final

from ray.util.metrics import Gauge

from vit_ray.launch.record.control import RunStatus
from vit_ray.metric_names import (
    DATA_WAIT_FRACTION,
    PERF_MFU,
    PERF_SLOWEST_RANK,
    RUN_GOODPUT,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
)
from vit_ray.outcomes import EventKind

_TAGS: Final = ("run",)
_COPIED: Final = {
    "vit_ray_images_per_s": (TRAIN_IMAGES_PER_S, "Images trained in a second"),
    "vit_ray_loss": (TRAIN_LOSS, "Training loss"),
    "vit_ray_data_wait_fraction": (DATA_WAIT_FRACTION, "Share of time waiting for data"),
    "vit_ray_mfu": (PERF_MFU, "Share of the devices' peak that model FLOPs reach"),
    "vit_ray_slowest_rank": (PERF_SLOWEST_RANK, "Worker with the longest step"),
    "vit_ray_goodput": (RUN_GOODPUT, "Share of the wall clock that trained something new"),
}
"""Names of gauges to names of recorded metrics, and their help."""
_OWN: Final = {
    "vit_ray_running": "1 while the run works, 0 from its end on",
    "vit_ray_step": "Optimizer steps done",
    "vit_ray_restarts": "Worker failures; each restarts one worker or all",
    "vit_ray_checkpoint_time_seconds": "Unix time at which the newest checkpoint was begun",
    "vit_ray_checkpoint_interval_seconds": "Time between the two newest checkpoints",
    "vit_ray_output_free_fraction": "Free share of the disk that holds the run's log",
}
METRICS: Final = (*_COPIED, *_OWN)


class RunMetrics:
    """Gauges of the runs that one process records."""

    def __init__(self) -> None:
        texts = {name: text for name, (_, text) in _COPIED.items()} | _OWN
        self._gauges = {name: Gauge(name, text, _TAGS) for name, text in texts.items()}

    def show(self, run: str, status: RunStatus, log_path: Path, *, is_running: bool) -> None:
        """The state of a run; unknown values are left out."""
        values = {
            "vit_ray_running": float(is_running),
            "vit_ray_step": float(status.step),
            "vit_ray_restarts": float(
                sum(one.kind is EventKind.WORKER_FAILED for one in status.events)
            ),
        }
        for name, (metric, _) in _COPIED.items():
            if metric in status.metrics:
                values[name] = status.metrics[metric]
        if status.checkpoints_s:
            first_s, last_s = status.checkpoints_s[0], status.checkpoints_s[-1]
            values["vit_ray_checkpoint_time_seconds"] = last_s
            if last_s > first_s:
                values["vit_ray_checkpoint_interval_seconds"] = last_s - first_s
        with contextlib.suppress(OSError):  # it may be away
            usage = shutil.disk_usage(log_path.parent)
            values["vit_ray_output_free_fraction"] = usage.free / usage.total
        for name, value in values.items():
            self._gauges[name].set(value, {"run": run})
