"""`cluster/alerts.yaml` and `cluster/grafana.json`, by Prometheus' own tools."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from vit_ray.launch.record.ray_metrics import METRICS

CLUSTER = Path(__file__).parents[2] / "cluster"
ALERTS = CLUSTER / "alerts.yaml"
HEALTHY = {
    "running": "1x240",
    "step": "0+60x240",
    "checkpoint_time_seconds": " ".join(str(900 * (minute // 15)) for minute in range(240)),
    "checkpoint_interval_seconds": "900x240",
    "data_wait_fraction": "0.1x240",
    "restarts": "2x240",
    "output_free_fraction": "0.5x240",
}
"""Values of the metrics of a run, one a minute for four hours."""
FIRING = {
    "NoStep": {"step": "0+60x100 6000x140"},
    "NoCheckpoint": {"checkpoint_time_seconds": "5400x240"},
    "DataWait": {"data_wait_fraction": "0.3x240"},
    "ManyRestarts": {"restarts": "2x170 3 4 5 6x70"},
    "DiskNearlyFull": {"output_free_fraction": "0.04x240"},
}
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus"
)


def _fired(tmp_path: Path, run: dict[str, str], minute: int = 200) -> dict[str, bool]:
    """For each alert, whether it fires for a run with these values."""
    series = [
        {"series": f'ray_vit_ray_{name}{{run="a", WorkerId="w"}}', "values": values}
        for name, values in run.items()
    ]
    fired = {}
    for name in FIRING:
        check = {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
        group = {"interval": "1m", "input_series": series, "alert_rule_test": [check]}
        tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [group]}
        (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
        done = subprocess.run(
            ["promtool", "test", "rules", str(tmp_path / "test.yaml")],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        fired[name] = done.returncode != 0
        assert fired[name] == (f"alertname: {name}" in done.stderr + done.stdout), done.stderr
    return fired


@promtool
def test_a_healthy_run_and_one_that_has_ended_alert_about_nothing(tmp_path: Path) -> None:
    assert not any(_fired(tmp_path, HEALTHY).values())
    ended = HEALTHY | {name: FIRING[alert][name] for alert in FIRING for name in FIRING[alert]}
    ended |= {"running": "1x30 0x210", "output_free_fraction": "0.5x240"}
    assert not any(_fired(tmp_path, ended).values())


@promtool
@pytest.mark.parametrize("alert", FIRING)
def test_each_alert_fires_for_what_it_is_for_alone(tmp_path: Path, alert: str) -> None:
    fired = _fired(tmp_path, HEALTHY | FIRING[alert])
    assert [name for name, fires in fired.items() if fires] == [alert]


def test_alerts_and_dashboard_name_metrics_that_there_are() -> None:
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    assert [rule["alert"] for rule in rules] == list(FIRING)
    queries = [rule["expr"] for rule in rules] + dashboard_queries()
    named = set(re.findall(r"\bray_(vit_ray_\w+)", " ".join(queries)))
    assert named == set(METRICS)


def dashboard_queries() -> list[str]:
    panels = json.loads((CLUSTER / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
