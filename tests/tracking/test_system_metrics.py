"""What a node reports of its load, in a real store, and through an outage."""

import logging
import time

import psutil

from vit_ray.tracking.mlflow_client import SystemMetricsMonitor, experiment_id, open_client
from vit_ray.tracking.recorder import NodeSampler

MEMORY = "system/node-0/system_memory_usage_megabytes"


def test_samples_reach_the_run_through_an_outage_with_steps_that_rise(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    run_id = client.create_run(experiment_id(client, uri, "trials")).info.run_id
    publish, failures = SystemMetricsMonitor.publish_metrics, []

    def failing(self, metrics):
        if len(failures) < 2:
            failures.append(1)
            raise OSError("away")
        publish(self, metrics)

    monkeypatch.setattr(SystemMetricsMonitor, "publish_metrics", failing)
    monkeypatch.setattr(logging.getLogger("mlflow"), "level", logging.INFO)
    metrics = NodeSampler(uri, lambda: run_id, interval_s=0.02)
    metrics.start()
    deadline_s = time.monotonic() + 40
    while len(client.get_metric_history(run_id, MEMORY)) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    history = sorted(client.get_metric_history(run_id, MEMORY), key=lambda one: one.timestamp)
    metrics.stop()
    assert logging.getLogger("mlflow").level == logging.ERROR  # its output is the driver's, too
    assert len(failures) == 2
    assert len(history) >= 3
    assert [p.step for p in history] == sorted({p.step for p in history})
    used = psutil.virtual_memory().used / 1e6
    assert 0.3 * used < history[-1].value < 3 * used  # others use this machine, too


def test_nobody_waits_for_a_server_that_is_away():
    sampler = NodeSampler("http://127.0.0.1:9", lambda: "0" * 32, "node-0", interval_s=0.01)
    sampler.start()
    time.sleep(0.1)
    sampler.stop()
    assert not sampler.is_alive()
