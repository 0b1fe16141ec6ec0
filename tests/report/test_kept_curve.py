"""The loss curve that a long run keeps as a file, as the recorder writes it and a page reads it."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.server import (
    ARTIFACTS_DESTINATION_ENV_VAR,
    SERVE_ARTIFACTS_ENV_VAR,
    app,
    handlers,
)
from mlflow.tracking import MlflowClient

from tests.report.made_runs import served
from vit_ray import kept_curve
from vit_ray.config.recorded_recipe import tags_of
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.report import runs
from vit_ray.report.figures.histories import Histories
from vit_ray.report.runs import Archive
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, replay

KEY = "train/loss"
MOST = 44


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(kept_curve, "LONG", 50)
    monkeypatch.setattr(kept_curve, "MAX_POINTS", MOST)


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def files(tmp_path):
    """Folder of what the server sends itself."""
    return tmp_path / "files"


@pytest.fixture
def address(uri, files, monkeypatch):
    """Of an MLflow server of the store, with its default place of files."""
    store = MlflowClient(uri)._tracking_client.store
    monkeypatch.setattr(store, "artifact_root_uri", "mlflow-artifacts:/")
    monkeypatch.setattr(handlers, "_tracking_store", store)
    monkeypatch.setattr(handlers, "_artifact_repo", None)
    monkeypatch.setenv(SERVE_ARTIFACTS_ENV_VAR, "true")
    monkeypatch.setenv(ARTIFACTS_DESTINATION_ENV_VAR, str(files))
    with served(app) as address:
        yield address


@pytest.fixture
def asked(monkeypatch):
    """Runs whose histories were read."""
    found, curves = [], Histories.curves

    def noted(self, run_ids, *rest):
        found.extend(run_ids)
        return curves(self, run_ids, *rest)

    monkeypatch.setattr(Histories, "curves", noted)
    return found


def trained(uri, log_path, steps, status="FINISHED", offset=0.0, **opening):
    """Train an attempt; its MLflow run."""
    config = TrackingConfig(uri=uri, experiment="long")
    tracker = Tracker.start(RunOpening(config, log_path.parent.name, log_path, **opening))
    for step in steps:
        tracker.log.metrics(step, {KEY: offset + 1.0 / (1 + step), "train/lr": 0.1})
    if status is None:  # killed: what is sent is in MLflow, the end was never recorded
        assert tracker.close()
    else:
        assert tracker.finish(status)
    return tracker.run_id


def recorded(uri, run_id):
    """Finite points as MLflow has them."""
    history = MlflowClient(uri).get_metric_history(run_id, KEY)
    return {float(one.step): one.value for one in history if abs(one.value) < 1e300}


def kept(uri, run_id, folder):
    """The file, and the tag."""
    client = MlflowClient(uri)
    tag = tags_of(client.get_run(run_id).data.tags).get(kept_curve.TAG)
    names = [one.path for one in client.list_artifacts(run_id)]
    if kept_curve.FILE not in names:
        return None, tag
    place = client.download_artifacts(run_id, kept_curve.FILE, str(folder))
    return kept_curve.curve_in(Path(place).read_bytes()), tag


def test_a_long_run_keeps_recorded_points_of_all_its_attempts(uri, tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    run_id = trained(uri, log, range(0, 60, 2), None)
    # Killed after step 58; resumed at 40, so that 42 to 58 come again, with other rounding.
    trained(uri, log, [*range(42, 201, 2), 203], offset=0.5, resume_step=40)
    curve, tag = kept(uri, run_id, tmp_path)
    known = recorded(uri, run_id)
    assert len(known) == 102
    assert {*curve} <= {*known.items()}
    steps = [step for step, _ in curve]
    assert [len(steps), steps[0], steps[-1], tag] == [MOST, 0.0, 203.0, "203"]
    gaps = [right - left for left, right in itertools.pairwise(steps)]
    assert max(gaps) - min(gaps) <= 3
    assert log.read_bytes().count(kept_curve.FILE.encode()) == 1


def test_a_short_run_keeps_none_nor_one_whose_log_lacks_an_earlier_attempt(uri, tmp_path):
    short = trained(uri, tmp_path / "short" / "metrics.jsonl", range(50))
    assert kept(uri, short, tmp_path) == (None, None)
    first = trained(uri, tmp_path / "run" / "metrics.jsonl", range(60), "KILLED")
    elsewhere = tmp_path / "node" / "metrics.jsonl"
    trained(uri, elsewhere, range(60, 160), run_id=first, resume_step=59)
    curve, tag = kept(uri, first, tmp_path)
    assert (curve[-1][0], tag) == (59.0, "59")  # of the first attempt: no longer valid


def test_losses_that_are_not_finite_are_not_in_the_curve(uri, tmp_path):
    config = TrackingConfig(uri=uri, experiment="long")
    tracker = Tracker.start(RunOpening(config, "run", tmp_path / "run" / "metrics.jsonl"))
    for step in range(80):
        tracker.log.metrics(step, {KEY: math.nan if step in (3, 79) else float(step)})
    assert tracker.finish()
    curve, tag = kept(uri, tracker.run_id, tmp_path)
    assert (curve[-1], tag) == ((78.0, 78.0), "78")
    assert {*curve} <= {*recorded(uri, tracker.run_id).items()}


def test_a_replay_into_another_store_brings_the_file(uri, tmp_path):
    log = tmp_path / "run" / "metrics.jsonl"
    run_id = trained(uri, log, range(100))
    other = f"sqlite:///{tmp_path}/other.db"
    assert not replay(log, other).refused
    client = MlflowClient(other)
    (run,) = client.search_runs([client.get_experiment_by_name("long").experiment_id])
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir(), here.mkdir()
    assert kept(other, run.info.run_id, there) == kept(uri, run_id, here)


def test_a_page_from_a_server_reads_the_file_alone_and_draws_the_same(
    uri, address, tmp_path, asked
):
    run_id = trained(address, tmp_path / "run" / "metrics.jsonl", range(0, 650, 5))
    archive = Archive(address, "long")
    drawn = archive.curves(archive.runs, KEY)[run_id]
    assert asked == []
    here = Archive(uri, "long")
    assert drawn == here.curves(here.runs, KEY)[run_id]  # read by the index, evenly spread
    assert asked == [run_id]
    # With many runs a line has fewer points.
    few = archive._kept_curves(archive.runs, 5)[run_id]
    assert len(few) == 5
    assert {*few} <= {*drawn}
    assert [few[0], few[-1]] == [drawn[0], drawn[-1]]


def test_a_run_that_went_on_is_read_from_its_history(address, tmp_path, asked):
    log = tmp_path / "run" / "metrics.jsonl"
    run_id = trained(address, log, range(100), "KILLED")
    trained(address, log, range(90, 150), None, resume_step=89)  # live, or killed without an end
    archive = Archive(address, "long")
    assert archive.curves(archive.runs, KEY)[run_id][-1] == (149.0, 1.0 / 150)
    assert asked == [run_id]


def test_a_file_that_is_damaged_or_gone_costs_only_time(
    address, files, tmp_path, asked, monkeypatch
):
    run_ids = {trained(address, tmp_path / f"{i}" / "metrics.jsonl", range(100)) for i in range(6)}
    kept_files = [*files.rglob(kept_curve.FILE)]
    assert len(kept_files) == 6
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tried, read = [], runs.file_of_server
    monkeypatch.setattr(runs, "file_of_server", lambda *args: tried.append(args) or read(*args))
    for content in (b"[[0, 1.0], [1", b"{}", b"[[1, NaN]]", b'[["x", 1]]', None):
        for file in kept_files:
            file.unlink() if content is None else file.write_bytes(content)
        tried.clear(), asked.clear()
        archive = Archive(address, "long")
        found = archive.curves(archive.runs, KEY)
        assert {*asked} == run_ids, content
        assert all(curve[-1] == (99.0, 0.01) for curve in found.values()), content
        assert len(tried) == (6 if content else 4)  # one that is gone: the storage may be away


def test_files_that_the_server_does_not_send_are_not_asked_for(address, tmp_path):
    trained(address, tmp_path / "run" / "metrics.jsonl", range(100))
    (run,) = Archive(address, "long").runs
    assert run.keeps_curve
    for place in ("s3://bucket/run", "file:///runs", "mlflow-artifacts://another:5000/1/run"):
        info = SimpleNamespace(artifact_uri=place)
        assert not type(run)(SimpleNamespace(info=info, data=run.run.data)).keeps_curve
