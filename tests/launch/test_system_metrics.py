"""What a node tells of itself, against psutil and a table that nvidia-smi printed."""

import threading

import psutil
import pytest

from vit_ray.launch.system_metrics import SystemMetrics, SystemSampler, parse_gpus


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


def test_samples_are_sent_until_stopped_with_steps_that_do_not_fall():
    sent, enough = [], threading.Event()

    def send(step, values):
        sent.append((step, values))
        if len(sent) >= 3:
            enough.set()

    metrics = SystemMetrics(send, "node-0", interval_s=0.02).start()
    assert enough.wait(30)
    metrics.stop()
    steps = [step for step, _ in sent]
    assert steps == sorted(steps)


def test_a_lost_receiver_ends_the_samples_with_a_warning_only(caplog):
    called = threading.Event()

    def send(step, values):
        called.set()
        raise ConnectionError("the actor is gone")

    metrics = SystemMetrics(send, "node-0", interval_s=0.01).start()
    assert called.wait(30)
    metrics.stop()
    assert "the actor is gone" in caplog.text
