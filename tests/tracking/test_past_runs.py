"""Questions about earlier runs, on real SQLite stores and on a server that is away."""

import pytest
from mlflow.tracking import MlflowClient

from tests.tracking.stored_runs import store_run
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.mlflow_client import experiment_id, open_client
from vit_ray.tracking.past_runs import newest_run


@pytest.fixture
def tracking(tmp_path):
    return TrackingConfig(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="trials")


def _run(tracking, name, *, parent=None, kind=None, status=None, start=None, folder=None):
    client = open_client(tracking.uri)
    given = {"mlflow.parentRunId": parent, "vit_ray.kind": kind, "vit_ray.run_folder": folder}
    experiment = experiment_id(client, tracking.uri, tracking.experiment)
    return store_run(client, experiment, name, tags=given, status=status, start_ms=start)


def test_the_newest_run_of_a_name_without_a_parent_is_found(tracking):
    _run(tracking, "grid", start=1000)
    newest = _run(tracking, "grid", kind="study", start=2000)
    nested = _run(tracking, "grid", parent=newest, kind="sweep", start=3000)
    _run(tracking, "other", start=4000)
    assert newest_run(tracking, "grid", "sweep", newest) == nested
    assert newest_run(tracking, "grid", "sweep", nested) is None
    assert newest_run(tracking, "grid") == newest
    assert newest_run(tracking, "grid", "study") == newest
    assert newest_run(tracking, "grid", "sweep") is None
    assert newest_run(tracking, "nothing") is None


def test_of_one_name_in_two_outputs_the_run_of_the_own_folder_is_found(tracking):
    mine = [_run(tracking, "grid", folder="/a/grid", start=at) for at in (2000, 3000)]
    _run(tracking, "grid", folder="/b/grid", start=4000)
    assert newest_run(tracking, "grid", folder="/a/grid") == mine[1]
    assert newest_run(tracking, "grid", folder="/c/grid") is None


def test_the_run_that_a_folder_notes_counts_unless_it_is_gone(tracking):
    moved = _run(tracking, "grid", folder="/a/grid", start=1000)
    here = _run(tracking, "grid", folder="/b/grid", start=2000)
    assert newest_run(tracking, "grid", folder="/b/grid", noted_id=moved) == moved
    MlflowClient(tracking.uri).delete_run(moved)
    assert newest_run(tracking, "grid", folder="/b/grid", noted_id=moved) == here
    assert newest_run(tracking, "grid", "sweep", folder="/b/grid", noted_id=here) is None


def test_no_experiment_yet_means_no_run(tracking):
    assert newest_run(tracking, "grid") is None
    assert MlflowClient(tracking.uri).get_experiment_by_name("trials") is None


def test_while_mlflow_is_away_nothing_is_known_and_a_warning_says_so(tracking, caplog):
    away = tracking.model_copy(update={"uri": "http://user:hunter2@127.0.0.1:9"})
    assert newest_run(away, "grid") is None
    assert "cannot be asked for earlier runs" in caplog.text
    assert "hunter2" not in caplog.text
