"""What a node reports of its load, in a real store, and through an outage."""

import logging
import time
from unittest.mock import Mock

import psutil

from vit_ray.tracking import recorder
from vit_ray.tracking.mlflow_client import SystemMetricsMonitor, experiment_id, open_client
from vit_ray.tracking.recorder import NodeSampler

MEMORY = "system/node-0/system_memory_usage_megabytes"


def _wait_for_count(found, count):
    for _ in range(2000):
        if len(found()) >= count:
            break
        time.sleep(0.02)


def _wait_for(points, count):
    _wait_for_count(points, count)
    return sorted(points(), key=lambda point: point.timestamp)


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
    history = _wait_for(lambda: client.get_metric_history(run_id, MEMORY), 3)
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


def test_a_node_that_joins_later_is_sampled(monkeypatch):
    alive, started = ["a" * 56], []
    node = {"get_node_id.return_value": "a" * 56}
    monkeypatch.setattr(recorder.ray, "get_runtime_context", lambda: Mock(**node))
    monkeypatch.setattr(
        recorder.ray, "nodes", lambda: [{"NodeID": one, "Alive": True} for one in alive]
    )
    actors = Mock()

    def start(uri, run_id, name):
        started.append((run_id(), name))
        return Mock()

    actors.options.return_value.remote.side_effect = start
    monkeypatch.setattr(recorder.ray, "remote", lambda _: actors)
    monkeypatch.setattr(recorder.ray, "kill", lambda _: None)
    sampler = NodeSampler("http://127.0.0.1:9", lambda: "run", interval_s=0.01)
    sampler.start()
    time.sleep(0.1)
    assert started == []
    alive += ["b" * 56, "c" * 56]
    _wait_for_count(lambda: started, 2)
    sampler.stop()
    assert started == [("run", "node-1"), ("run", "node-2")]
