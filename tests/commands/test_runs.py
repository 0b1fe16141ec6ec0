"""`vit-ray runs`: what it says of runs that run, ended, died or are damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.checkpoints.written import write_checkpoint
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.commands.cli import vit_ray
from vit_ray.commands.runs import list_runs
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.run_lock import lock_run
from vit_ray.lock import PATIENCE_S, RENEW_S
from vit_ray.storage import locate
from vit_ray.tracking import metrics_log
from vit_ray.tracking.metrics_log import MetricsLog, RunOpening, metrics_log_path


def log_of(folder: Path, *ends: str, measured_on: str = "eval") -> MetricsLog:
    log = MetricsLog(metrics_log_path(str(folder)))
    log.open(RunOpening(TrackingConfig(), folder.name, log.path, measured_on=measured_on))
    for end in ends:
        log.append("finish", status=end)
    return log


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (("FINISHED",), "finished"),
        (("KILLED",), "stopped"),
        (("FAILED",), "failed"),
        ((), "interrupted"),
    ],
)
def test_a_run_that_nobody_drives_is_as_its_last_driver_left_it(
    tmp_path: Path, ends: tuple[str, ...], state: str
) -> None:
    write_run(tmp_path / "a", small_model("ViT"))
    log_of(tmp_path / "a", *ends)
    (row,) = list_runs(str(tmp_path))
    assert (row.name, row.state, row.step, row.top1) == ("a", state, 7, None)
    assert row.age_s is not None
    assert 0 <= row.age_s < 60


def test_an_evaluation_has_its_accuracy_and_no_step_and_long_names_are_whole(
    tmp_path: Path,
) -> None:
    name = "a-run-with-a-name-that-is-longer-than-its-column-evaluation-20260102-030405"
    log_of(tmp_path / name)
    log = MetricsLog(metrics_log_path(str(tmp_path / name)))
    log.metrics(509, {"eval/top1": 0.25, "eval/loss": 2.0})
    log.append("finish", status="FINISHED")
    (row,) = list_runs(str(tmp_path))
    assert (row.state, row.top1, row.age_s) == ("finished", 0.25, None)
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(vit_ray, ["runs", str(tmp_path)]).stdout
    assert "25.00%" in shown
    cells = [line.split("│")[1:4] for line in shown.splitlines() if line.startswith("│")]
    assert "".join(cell[0].strip() for cell in cells) == name
    assert {cell[2].strip() for cell in cells} == {""}


@pytest.mark.parametrize(
    ("opened", "metric", "said"),
    [("eval", "eval/top1", "test"), ("dev", "eval/top1", "dev"), ("eval", "dev/top1", "dev")],
)
def test_an_accuracy_says_what_it_is_of(
    opened: str, metric: str, said: str, tmp_path: Path
) -> None:
    log_of(tmp_path / "a", measured_on=opened).metrics(9, {metric: 0.25})
    log_of(tmp_path / "b", measured_on=opened)
    assert [row.measured_on for row in list_runs(str(tmp_path))] == [said, None]
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(vit_ray, ["runs", str(tmp_path)]).stdout
    (cells,) = (line.split("│") for line in shown.splitlines() if "25.00%" in line)
    assert cells[5].strip() == said


def test_an_accuracy_is_of_the_set_of_the_last_start_and_unknown_in_an_early_log(
    tmp_path: Path,
) -> None:
    log_of(tmp_path / "a", measured_on="dev")
    log = log_of(tmp_path / "a", measured_on="eval")
    log.metrics(9, {"eval/top1": 0.25})
    (row,) = list_runs(str(tmp_path))
    assert row.measured_on == "test"
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    early = [{k: v for k, v in one.items() if k != "measured_on"} for one in lines]
    log.path.write_text("".join(f"{json.dumps(one)}\n" for one in early))
    (row,) = list_runs(str(tmp_path))
    assert (row.top1, row.measured_on) == (0.25, None)


def test_a_run_that_is_driven_says_where_and_one_whose_driver_was_killed_does_not(
    tmp_path: Path,
) -> None:
    log_of(tmp_path / "a")
    with lock_run(locate(str(tmp_path / "a"))):
        (row,) = list_runs(str(tmp_path))
        assert row.state.startswith(f"running: process {os.getpid()} on ")
        assert (row.step, row.age_s) == (0, None)
    code = (
        "import sys, time; from vit_ray.lock import *; from vit_ray.storage import locate\n"
        "with hold_lock(locate(sys.argv[1]), print): print('held', flush=True); time.sleep(99)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "a"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout
    assert driver.stdout.readline() == "held\n"
    assert list_runs(str(tmp_path))[0].state.startswith(f"running: process {driver.pid}")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert list_runs(str(tmp_path))[0].state == "interrupted"


def test_the_log_of_a_running_run_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_of(tmp_path / "a").metrics(9, {"eval/top1": 0.25})
    parsed = []
    monkeypatch.setattr(
        metrics_log,
        "_parsed",
        lambda line, parse=metrics_log._parsed: parsed.append(line) or parse(line),
    )
    with lock_run(locate(str(tmp_path / "a"))):
        list_runs(str(tmp_path))
        assert not parsed
    list_runs(str(tmp_path))
    assert len(parsed) > 1


def test_a_driver_on_another_host_is_seen_while_it_renews_its_lock(tmp_path: Path) -> None:
    log_of(tmp_path / "a")
    with lock_run(locate(str(tmp_path / "a"))):
        content = json.loads((tmp_path / "a" / "lock-00000001.json").read_bytes())
        other = tmp_path / "b" / "lock-00000001.json"
        log_of(tmp_path / "b")
        other.write_text(json.dumps({**content, "host": "elsewhere"}))
    for silent_s, is_running in ((RENEW_S, True), (PATIENCE_S + 5, False)):
        os.utime(other, (time.time() - silent_s,) * 2)
        (row,) = (one for one in list_runs(str(tmp_path)) if one.name == "b")
        assert row.state.startswith("running: process") is is_running


def test_folders_that_are_no_runs_are_left_out_and_damage_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a-features").mkdir()
    checkpoint = write_checkpoint(locate(str(tmp_path / "b")), 3)
    (Path(checkpoint.path) / "commit.json").write_bytes(b"{")
    write_run(tmp_path / "c", small_model("ViT"))
    rows = list_runs(str(tmp_path))
    assert [row.name for row in rows] == ["b", "c"]
    assert rows[0].state == "not running; none of its checkpoints is complete"
    assert rows[1].state == "not running"


def test_the_command_prints_a_table_or_json_and_refuses_what_is_no_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "a", small_model("ViT"))
    shown = CliRunner().invoke(vit_ray, ["runs", str(tmp_path)])
    assert "not running" in shown.stdout
    found = json.loads(CliRunner().invoke(vit_ray, ["runs", str(tmp_path), "--json"]).stdout)
    assert [(row["name"], row["step"]) for row in found] == [("a", 7)]
    missing = CliRunner().invoke(vit_ray, ["runs", str(tmp_path / "nope")])
    assert missing.exit_code == 2
    assert "no such folder" in missing.stderr
    log = str(metrics_log_path(str(tmp_path / "a")))
    Path(log).touch()
    file = CliRunner().invoke(vit_ray, ["runs", log])
    assert file.exit_code == 2
    assert f"OUTPUT='{log}' must be a folder, but '{log}' is a file" in file.stderr
    assert "no runs in" in CliRunner().invoke(vit_ray, ["runs", str(tmp_path / "a")]).stdout


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(vit_ray, ["--version"]).stdout == "vit_ray, version 0.1.0\n"
