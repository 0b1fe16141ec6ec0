"""What a node reports of its load, against psutil and a table that nvidia-smi printed."""

import logging
import time

import psutil
import pytest

from vit_ray.tracking.mlflow_client import experiment_id, open_client
from vit_ray.tracking.system_metrics import SystemMetrics, SystemSampler, parse_gpus


def test_a_sample_agrees_with_psutil():
    sample = SystemSampler("node-3").sample()
    assert all(key.startswith("system/node-3/") for key in sample)
    assert 0 <= sample["system/node-3/cpu_utilization_percent"] <= 100
    total_gib = psutil.virtual_memory().total / 2**30
    used = sample["system/node-3/memory_used_gib"] / total_gib * 100
    assert used == pytest.approx(sample["system/node-3/memory_used_percent"], abs=2.0)
    assert sample["system/node-3/network_sent_mib_per_s"] >= 0


def test_gpus_are_told_apart_and_what_they_do_not_tell_is_left_out():
    table = "87, 71234, 512.25, 61\n0, 1024, [N/A], 35\n"
    assert parse_gpus(table) == {
        "gpu0_utilization_percent": 87.0,
        "gpu0_memory_used_mib": 71234.0,
        "gpu0_power_w": 512.25,
        "gpu0_temperature_c": 61.0,
        "gpu1_utilization_percent": 0.0,
        "gpu1_memory_used_mib": 1024.0,
        "gpu1_temperature_c": 35.0,
    }
    assert parse_gpus("") == {}


def test_samples_reach_the_run_until_stopped_with_steps_that_do_not_fall(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    run_id = client.create_run(experiment_id(client, uri, "trials")).info.run_id
    key = "system/node-0/cpu_utilization_percent"
    metrics = SystemMetrics(run_id, uri, "node-0", interval_s=0.02).start()
    for _ in range(1000):
        if len(client.get_metric_history(run_id, key)) >= 3:
            break
        time.sleep(0.02)
    metrics.stop()
    history = client.get_metric_history(run_id, key)
    assert len(history) >= 3
    by_time = sorted(history, key=lambda point: point.timestamp)
    assert [p.step for p in by_time] == sorted(p.step for p in history)


def test_an_outage_loses_samples_but_never_the_process(caplog):
    caplog.set_level(logging.DEBUG, logger="vit_ray.tracking.system_metrics")
    uri = "http://user:hunter2@127.0.0.1:9"  # the discard port: nothing listens
    metrics = SystemMetrics("0" * 32, uri, "node-0", interval_s=0.01).start()
    for _ in range(1000):
        if "is lost" in caplog.text:
            break
        time.sleep(0.02)
    metrics.stop()
    assert "a sample of run" in caplog.text
    assert "hunter2" not in caplog.text
