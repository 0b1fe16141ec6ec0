"""What Ray's nodes export of a run, as a real Prometheus has it."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml

from tests.cluster.test_alerts import dashboard_queries
from tests.launch.record.hosts import recorded_here
from tests.launch.record.test_run_host import opening_of, parts
from tests.ports import free_ports
from vit_ray.launch.record import ray_metrics
from vit_ray.launch.record.run_host import start_run
from vit_ray.outcomes import EventKind
from vit_ray.tracking import metrics_log

RECORDED = {
    "train/images_per_s": 250.0, "train/loss": 2.5, "data/wait_fraction": 0.07, "perf/mfu": 0.4,
    "perf/slowest_rank": 3.0, "run/goodput": 0.9, "train/lr": 1.0,
}  # fmt: skip


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    """Values of each gauge by run."""
    values: dict[str, dict[str, float]] = {}

    class Gauge:
        def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
            assert text
            assert tag_keys == ("run",)
            self.of_run = values.setdefault(name, {})

        def set(self, value: float, tags: dict[str, str]) -> None:
            self.of_run[tags["run"]] = value

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    usage = namedtuple("usage", "total used free")(100, 75, 25)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    return values


def test_the_gauges_follow_the_run(
    gauges: dict[str, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, _ = recorded_here(opening_of(tmp_path))
    assert gauges["vit_ray_running"] == {"run": 1.0}
    assert gauges["vit_ray_loss"] == {}
    record.metrics(40, RECORDED)
    now_s = 1_000_000.0
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
        patch.setattr(metrics_log, "time", clock)
        record.metrics(40, {"checkpoint/stall_s": 0.1})
        assert gauges["vit_ray_checkpoint_time_seconds"] == {"run": now_s}
        assert gauges["vit_ray_checkpoint_interval_seconds"] == {}
        record.event(EventKind.WORKER_FAILED, "rank 1 has died", 41)
        record.event(EventKind.RESUMED, "from step 40", 41)
        now_s += 900.0
        record.metrics(50, {"checkpoint/stall_s": 0.1})
        assert gauges["vit_ray_checkpoint_time_seconds"] == {"run": now_s}
        assert gauges["vit_ray_checkpoint_interval_seconds"] == {"run": 900.0}
    found = {name: of_run.get("run") for name, of_run in gauges.items() if "checkpoint" not in name}
    assert found == {
        "vit_ray_running": 1.0,
        "vit_ray_step": 50.0,
        "vit_ray_images_per_s": 250.0,
        "vit_ray_loss": 2.5,
        "vit_ray_data_wait_fraction": 0.07,
        "vit_ray_mfu": 0.4,
        "vit_ray_slowest_rank": 3.0,
        "vit_ray_goodput": 0.9,
        "vit_ray_restarts": 1.0,
        "vit_ray_output_free_fraction": 0.25,
    }
    assert record.finish("FINISHED")
    assert gauges["vit_ray_running"] == {"run": 0.0}


def test_a_disk_that_is_away_ends_nothing(
    gauges: dict[str, dict[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def away(folder: Path) -> None:
        raise FileNotFoundError(folder)

    monkeypatch.setattr(shutil, "disk_usage", away)
    record, _ = recorded_here(opening_of(tmp_path))
    assert gauges["vit_ray_output_free_fraction"] == {}
    assert record.finish("FINISHED")


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """Address of a server that scrapes the nodes of the connected cluster."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    targets = [f"{one['NodeManagerAddress']}:{one['MetricsExportPort']}" for one in ray.nodes()]
    job = {"job_name": "ray", "scrape_interval": "1s", "scrape_timeout": "1s"}
    job["static_configs"] = [{"targets": targets}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    (port,) = free_ports(1)
    arguments = [
        f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with open(tmp_path / "prometheus.log", "w") as log:
        process = subprocess.Popen([binary, *arguments], stdout=log, stderr=log)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        process.wait(60)


def _query(address: str, expression: str) -> list[Any]:
    question = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{question}", timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


@pytest.mark.slow
def test_a_real_prometheus_answers_each_query_of_the_dashboard(
    ray_cluster: object, tmp_path: Path, prometheus: str
) -> None:
    record, _ = parts(start_run(opening_of(tmp_path, name="watched")))
    record.metrics(40, RECORDED)
    for _ in range(2):
        record.metrics(40, {"checkpoint/stall_s": 0.1}, 60)
    queries = [one.replace('run=~"$run"', 'run="watched"') for one in dashboard_queries()]
    until_s, empty = time.monotonic() + 90, queries
    while empty and time.monotonic() < until_s:
        time.sleep(1)
        try:
            empty = [one for one in queries if not _query(prometheus, one)]
        except OSError:
            continue  # it starts
    assert not empty
    (step,) = _query(prometheus, 'max by (run) (ray_vit_ray_step{run="watched"})')
    assert float(step["value"][1]) == 40
    assert record.finish("FINISHED")
    exported = _query(prometheus, 'count by (__name__) ({__name__=~"ray_vit_ray_.*"})')
    names = {re.sub("^ray_", "", one["metric"]["__name__"]) for one in exported}
    assert names >= set(ray_metrics.METRICS) - {"vit_ray_goodput"}
