"""The report job's choice of what to report on."""

import contextlib
import shutil
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tests.tracking.stored_runs import store_run
from vit_ray.commands import tracking_store as command
from vit_ray.commands.tracking_store import are_own_files, report, report_page
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import write_page
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
    tags = {"vit_ray.run_folder": folder} | ({"mlflow.parentRunId": parent} if parent else {})
    return store_run(client, experiment, name, {"eval/top1": 0.5}, tags=tags, status=None)


def test_the_newest_run_of_the_recipes_name_is_reported_and_keeps_the_page(recipe, capsys):
    run_id = _run(recipe, "mine")
    _run(recipe, "another")
    page = report(recipe).page
    assert "another" not in page.read_text()
    kept = {item.path for item in MlflowClient(recipe.tracking.uri).list_artifacts(run_id)}
    assert kept == {"report.html", "tables"}
    assert report_page(recipe) == 0
    assert str(page) in capsys.readouterr().out


def test_of_one_name_in_two_outputs_the_recipes_own_is_reported(recipe, tmp_path):
    mine = _run(recipe, "mine", f"{tmp_path}/runs/mine")
    other = _run(recipe, "mine", "/elsewhere/mine")
    assert mine in (page := report(recipe).page.read_text())
    assert other not in page
    moved = report(recipe.with_changes(output=f"{tmp_path}/moved")).page.read_text()
    assert other in moved
    assert mine not in moved


def test_a_page_is_made_where_the_library_of_a_bucket_refuses_to_read_or_write(
    recipe, tmp_path, monkeypatch, capsys
):
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    client = open_client(recipe.tracking.uri)
    experiment = client.create_experiment("buckets", artifact_location="s3://bucket/mlflow")
    run_id = client.create_run(experiment, run_name="mine").info.run_id
    client.log_metric(run_id, "eval/top1", 0.5)
    client.set_terminated(run_id)
    recipe = recipe.with_changes(tracking={"experiment": "buckets"})
    monkeypatch.setattr(command, "are_own_files", lambda *_: True)  # as of a server
    assert report_page(recipe) == 0
    shown = capsys.readouterr().out
    assert "not kept with the run: s3://bucket/mlflow/" in shown
    assert "Unable to locate credentials" in shown
    assert next(Path(recipe.output).rglob("report.html")).exists()


def test_a_child_run_is_reported_by_its_name_and_after_one_without_a_parent(recipe):
    sweep = _run(recipe, "sweep")
    trial = _run(recipe, "mine", parent=sweep)
    assert f"run {trial} and the runs below" in report(recipe).page.read_text()
    alone = _run(recipe, "mine")
    _run(recipe, "mine", parent=sweep)
    assert f"run {alone} and the runs below" in report(recipe).page.read_text()


def test_a_report_on_a_copied_store_changes_no_file_of_the_original(recipe, tmp_path, capsys):
    run_id = _run(recipe, "mine")
    client = MlflowClient(recipe.tracking.uri)
    event = '[{"kind": "restarted", "text": "node b was lost", "step": 3, "time_s": 1.0}]'
    client.log_text(run_id, event, "history/0.json")
    client.log_text(run_id, "older", "report.html")
    original, copy = tmp_path / "mlruns", tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "mlflow.db", copy)
    shutil.copytree(original, copy / "mlruns")
    before = {path: path.stat().st_mtime_ns for path in original.rglob("*")}
    of_copy = recipe.with_changes(tracking={"uri": f"sqlite:///{copy}/mlflow.db"})
    assert report_page(of_copy) == 0
    page = next(Path(recipe.output).rglob("report.html"))
    assert (
        f"page written to {page}; not kept with the run: MLflow has its files at {original}/"
        in (capsys.readouterr().out)
    )
    assert "node b was lost" in page.read_text()
    assert {path: path.stat().st_mtime_ns for path in original.rglob("*")} == before


def test_a_report_from_the_folder_of_the_original_does_not_write_there(
    recipe, tmp_path, monkeypatch
):
    _run(recipe, "mine")
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / "mlflow.db", copy)
    monkeypatch.chdir(tmp_path)  # MLflow's default for files is ./mlruns
    report(recipe.with_changes(tracking={"uri": f"sqlite:///{copy}/mlflow.db"}))
    assert not [*(tmp_path / "mlruns").rglob("report*")]
    report(recipe.with_changes(tracking={"uri": "sqlite:///mlflow.db"}))
    assert [*(tmp_path / "mlruns").rglob("report.html")]


def test_files_of_another_store_are_not_a_stores_own(tmp_path):
    folder = tmp_path.resolve()
    for name in ("own/mlruns/e/r", "big/e/r", "linked", "copy", "moved", "above/below/mlruns/e/r"):
        (folder / name).mkdir(parents=True)
    (folder / "linked" / "mlruns").symlink_to(folder / "big")
    (folder / "copy" / "mlruns").symlink_to(folder / "own" / "mlruns")
    (folder / "way").symlink_to(folder / "own")
    for name in ("own", "copy"):
        (folder / name / "mlflow.db").touch()
    (folder / "moved" / "mlflow.db").symlink_to(folder / "own" / "mlflow.db")

    def is_own(store, files):
        uri = f"sqlite:///{folder}/{store}/mlflow.db"
        return are_own_files(uri, files if "://" in files else f"file://{folder}/{files}/e/r")

    pairs = (("own", "own"), ("way", "own"), ("own", "way"), ("linked", "linked"))
    pairs += (("moved", "own"), ("moved", "moved"))
    assert all(is_own(store, f"{files}/mlruns") for store, files in pairs)
    assert not is_own("copy", "own/mlruns")
    assert not is_own("above", "above/below/mlruns")
    assert not is_own("own", "s3://bucket/mlruns/e/r")
    assert are_own_files("http://127.0.0.1:5000", "s3://bucket/mlruns/e/r")


def test_a_store_whose_files_are_on_s3_may_be_a_copy_and_is_reported_without_them(
    recipe, tmp_path, monkeypatch, capsys
):
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(key, raising=False)
    for key in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(key, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = open_client(recipe.tracking.uri)
    client.create_experiment("trials", artifact_location="s3://bucket/runs")
    experiment = experiment_id(client, recipe.tracking.uri, "trials")
    run_id = store_run(client, experiment, "mine", {"eval/top1": 0.5})
    place = f"s3://bucket/runs/{run_id}/artifacts"
    client.set_tag(run_id, "vit_ray.kind", "pretrain")
    assert report_page(recipe) == 0
    told = capsys.readouterr().out
    assert f"not kept with the run: MLflow has its files at {place}, which" in told


def test_without_such_a_run_the_whole_experiment_is_reported_and_that_is_said(recipe, capsys):
    _run(recipe, "another")
    assert "another" in report(recipe).page.read_text()
    assert report_page(recipe) == 0
    assert "no run 'mine'; this page is of the whole experiment" in capsys.readouterr().out


def test_a_mistyped_store_is_refused_and_not_created(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"tracking.uri=.*no such file"):
        report(recipe)
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(ValueError, match=r"tracking.uri=.*it is a folder"):
        report(recipe)


def test_the_database_of_another_program_gets_no_table(recipe, tmp_path):
    file = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE trials (number INTEGER)")
    before = file.read_bytes()
    message = (
        r"tracking.uri=.*belongs to another program \(its tables are trials\); give the MLflow"
    )
    for use in (report_page, lambda recipe: open_client(recipe.tracking.uri)):
        with pytest.raises(ValueError, match=message):
            use(recipe)
    assert file.read_bytes() == before


def test_a_long_job_does_not_fail_because_its_page_cannot_be_made(recipe, caplog, monkeypatch):
    record = SimpleNamespace(flush=lambda timeout_s: True)
    away = recipe.with_changes(tracking={"uri": "http://user:hunter2@127.0.0.1:9"})
    parent = SimpleNamespace(recipe=away, run=SimpleNamespace(record=record), run_id="0" * 32)
    assert page_of(parent) is None
    assert "`vit-ray report` can write it" in caplog.text
    assert "hunter2" not in caplog.text
    parent.run_id = None
    assert page_of(parent) is None
    parent.run_id = "0" * 32
    monkeypatch.setitem(sys.modules, write_page.__name__, None)  # a library of it is broken
    assert page_of(parent) is None
    assert "import of vit_ray.experiments.write_page halted" in caplog.text


def test_an_experiment_without_runs_is_a_page_that_says_so_and_an_exit_code(recipe, capsys):
    client = open_client(recipe.tracking.uri)
    experiment_id(client, recipe.tracking.uri, "trials")
    assert report_page(recipe) == 1
    told = capsys.readouterr().out
    assert "missing: 'trials' holds no runs yet" in told
    assert "holds no runs yet" in report(recipe).page.read_text()


def test_an_mlflow_that_is_away_for_a_moment_makes_no_page_of_other_runs(recipe, monkeypatch):
    """The page of a run must not become that of the whole experiment."""
    _run(recipe, "mine")
    page = report(recipe).page
    before = page.read_text()

    def search(*_, **__):
        raise MlflowException("the database is locked")

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", search)
    with pytest.raises(RuntimeError, match="cannot be used: the database is locked"):
        report(recipe)
    assert page.read_text() == before


class _AsksForLogIn(BaseHTTPRequestHandler):
    status = 401

    def do_POST(self):
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b"You are not authenticated.")

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_asks_for_a_log_in_is_told_with_what_to_set(recipe, monkeypatch, status):
    monkeypatch.setattr(_AsksForLogIn, "status", status)
    server = HTTPServer(("127.0.0.1", 0), _AsksForLogIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        uri = f"http://127.0.0.1:{server.server_port}"
        asking = recipe.with_changes(tracking={"uri": uri})
        with pytest.raises(RuntimeError, match=r"requires a log-in.*MLFLOW_TRACKING_USERNAME"):
            report_page(asking)
    finally:
        server.shutdown()
        server.server_close()
