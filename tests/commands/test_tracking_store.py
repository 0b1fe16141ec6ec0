"""`vit-ray report` and `ui`: which runs of which store, and that no other store is written to."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vit_ray.commands import tracking_store
from vit_ray.commands.tracking_store import are_own_files, report, report_page
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.trials import page_of
from vit_ray.tracking.mlflow_client import experiment_id, open_client


@pytest.fixture
def recipe(tmp_path):
    tree = {"name": "mine", "output": f"{tmp_path}/runs"}
    tree["tracking"] = {"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "trials"}
    return recipe_from_dict(tree, "test")


def _run(recipe, name, folder=None, parent=None):
    client = open_client(recipe.tracking.uri)
    experiment = experiment_id(client, recipe.tracking.uri, "trials")
    tags = {"vit_ray.run_folder": folder, "mlflow.parentRunId": parent}
    tags = {key: text for key, text in tags.items() if text}
    run_id = client.create_run(experiment, None, tags, name).info.run_id
    client.log_metric(run_id, "eval/top1", 0.5, step=100)
    return run_id


def test_the_newest_run_of_the_recipes_name_is_reported_and_keeps_the_page(recipe, capsys):
    client = open_client(recipe.tracking.uri)
    experiment_id(client, recipe.tracking.uri, "trials")
    assert report_page(recipe) == 1
    assert "missing: 'trials' holds no runs yet" in capsys.readouterr().out
    _run(recipe, "another")
    assert "another" in report(recipe).page.read_text()
    assert report_page(recipe) == 0
    assert "no run 'mine'; this page is of the whole experiment" in capsys.readouterr().out
    run_id = _run(recipe, "mine")
    page = report(recipe).page
    assert "another" not in page.read_text()
    assert {item.path for item in client.list_artifacts(run_id)} == {"report.html", "tables"}
    assert report_page(recipe) == 0
    assert str(page) in capsys.readouterr().out


def test_of_runs_of_one_name_that_of_the_recipes_output_and_then_one_without_a_parent_is_reported(
    recipe, tmp_path
):
    def text(output: str = "runs") -> str:
        return report(recipe.with_changes(output=f"{tmp_path}/{output}")).page.read_text()

    sweep = _run(recipe, "sweep")
    trial = _run(recipe, "mine", parent=sweep)
    assert f"run {trial} and the runs below" in text()
    alone = _run(recipe, "mine")
    _run(recipe, "mine", parent=sweep)
    assert f"run {alone} and the runs below" in text()
    mine = _run(recipe, "mine", f"{tmp_path}/runs/mine")
    other = _run(recipe, "mine", "/elsewhere/mine")
    assert f"run {mine} and the runs below" in text()
    assert f"run {other} and the runs below" in text("moved")


def test_files_in_a_bucket_may_be_of_another_store_or_out_of_reach_and_a_page_is_made(
    recipe, tmp_path, monkeypatch, capsys
):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    for key in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(key, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = open_client(recipe.tracking.uri)
    client.create_experiment("trials", artifact_location="s3://bucket/runs")
    run_id = _run(recipe, "mine")
    with monkeypatch.context() as patch:
        patch.setattr(tracking_store, "are_own_files", lambda *_: True)  # as of a server
        assert report_page(recipe) == 0
    assert "Unable to locate credentials" in capsys.readouterr().out
    assert next(Path(recipe.output).rglob("report.html")).exists()
    client.set_tag(run_id, "vit_ray.kind", "pretrain")
    assert report_page(recipe) == 0
    place = f"s3://bucket/runs/{run_id}/artifacts"
    output = capsys.readouterr().out
    assert f"not kept with the run: MLflow has its files at {place}: not below" in output


def test_a_report_on_a_copied_store_changes_no_file_of_the_original(
    recipe, tmp_path, monkeypatch, capsys
):
    run_id = _run(recipe, "mine")
    event = '[{"kind": "restarted", "text": "node b was lost", "step": 3, "time_s": 1.0}]'
    open_client(recipe.tracking.uri).log_text(run_id, event, "history/0.json")
    original, copy = tmp_path / "mlruns", tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "mlflow.db", copy)
    shutil.copytree(original, copy / "mlruns")
    before = {path: path.stat().st_mtime_ns for path in original.rglob("*")}
    monkeypatch.chdir(tmp_path)  # MLflow's default for files is ./mlruns
    assert report_page(recipe.with_changes(tracking={"uri": f"sqlite:///{copy}/mlflow.db"})) == 0
    assert f"not kept with the run: MLflow has its files at {original}/" in capsys.readouterr().out
    assert "node b was lost" in next(Path(recipe.output).rglob("report.html")).read_text()
    assert {path: path.stat().st_mtime_ns for path in original.rglob("*")} == before
    report(recipe.with_changes(tracking={"uri": "sqlite:///mlflow.db"}))
    assert [*original.rglob("report.html")]


def test_files_of_another_store_are_not_a_stores_own(tmp_path):
    for name in ("own", "copy", "moved"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "mlflow.db").touch()
    (tmp_path / "moved" / "mlflow.db").symlink_to(tmp_path / "own" / "mlflow.db")
    (tmp_path / "copy" / "mlruns").symlink_to(tmp_path / "own" / "mlruns")
    files = f"file://{tmp_path.resolve()}/own/mlruns/e/r"
    for store, is_own in (("own", True), ("moved", True), ("copy", False)):
        assert are_own_files(f"sqlite:///{tmp_path}/{store}/mlflow.db", files) is is_own, store
    beside_link = files.replace("/own/", "/moved/")
    assert are_own_files(f"sqlite:///{tmp_path}/moved/mlflow.db", beside_link)
    assert are_own_files("http://127.0.0.1:5000", "s3://bucket/mlruns/e/r")


def test_the_database_of_another_program_gets_no_table(recipe, tmp_path):
    file = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE trials (number INTEGER)")
    before = file.read_bytes()
    for use in (report_page, lambda recipe: open_client(recipe.tracking.uri)):
        with pytest.raises(ValueError, match=r"belongs to another program \(trials\)"):
            use(recipe)
    assert file.read_bytes() == before


def test_a_long_job_does_not_fail_because_its_page_cannot_be_made(recipe, caplog, monkeypatch):
    record = SimpleNamespace(flush=lambda timeout_s: True)
    away = recipe.with_changes(tracking={"uri": "http://user:hunter2@127.0.0.1:9"})
    parent = SimpleNamespace(recipe=away, run=SimpleNamespace(record=record))
    assert page_of(parent, "0" * 32) is None
    assert "`vit-ray report` can write it" in caplog.text
    assert "hunter2" not in caplog.text
    monkeypatch.setitem(sys.modules, "vit_ray.report.page", None)  # a library of it is broken
    assert page_of(parent, "0" * 32) is None


def test_an_mlflow_that_is_away_for_a_moment_makes_no_page_of_other_runs(recipe, monkeypatch):
    """The page of a run must not become that of the whole experiment."""
    _run(recipe, "mine")
    page = report(recipe).page
    before = page.read_text()
    away = Mock(side_effect=MlflowException("the database is locked"))
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", away)
    with pytest.raises(RuntimeError, match="cannot be used: the database is locked"):
        report(recipe)
    assert page.read_text() == before


def test_a_server_that_asks_for_a_log_in_is_told_with_what_to_set(recipe):
    class AsksForLogIn(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"You are not authenticated.")

        do_GET = do_POST  # noqa: N815

    server = HTTPServer(("127.0.0.1", 0), AsksForLogIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        uri = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(RuntimeError, match=r"requires a log-in.*MLFLOW_TRACKING_USERNAME"):
            report_page(recipe.with_changes(tracking={"uri": uri}))
    finally:
        server.shutdown()
        server.server_close()


def test_the_link_to_the_newest_run_without_a_parent_is_printed_and_served(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = open_client(uri)
    old, new = (experiment_id(client, uri, name) for name in ("old", "new"))
    client.create_run(old, 1, {"vit_ray.kind": "pretrain"}, "first")
    sweep = client.create_run(new, 2, {"vit_ray.kind": "sweep"}, "sweep").info.run_id
    tags = {"vit_ray.kind": "sweep_trial", "mlflow.parentRunId": sweep}
    client.create_run(new, 3, tags, "trial")
    with socket.socket() as taken:  # another server on the port: the next free one is used
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["-m", "vit_ray", "ui", uri, "--port", str(taken.getsockname()[1])]
        server = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            link = server.stdout.readline()
            found = re.match(
                rf"(http://127\.0\.0\.1:\d+)/#/experiments/{new}/runs\?.*=sweep&", link
            )
            assert found, link
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError):
                    with urllib.request.urlopen(f"{found[1]}/health") as answer:
                        assert answer.read() == b"OK"
                    break
                assert time.monotonic() < deadline
                time.sleep(0.2)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def test_no_store_is_served_that_is_empty_or_has_no_address(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    open_client(uri)
    with pytest.raises(ValueError, match="has no run yet"):
        tracking_store.open_pages(uri, 5000)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ValueError, match=r"uri: a path .*MLFLOW_TRACKING_URI.*mlruns$"):
        tracking_store.open_pages(None, 5000)
