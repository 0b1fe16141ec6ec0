"""A team's MLflow as `cluster/mlflow.yaml` has it (`make team-mlflow`): PostgreSQL, S3, log-in."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tests.newcomer.follow import script_of
from tests.tracking.team_server import ADMIN, ROOT, TeamServer, need_programs, team_server
from tests.tracking.tracked import history
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.tracker import Tracker, replay

RUNS, POINTS_PER_S, SECONDS = 16, 1000, 10
KEYS = ("train/loss", "train/lr")
PASSWORD = "long-enough-for-mlflow"

# MLflow makes its schema in a new database, and a server with four processes starts.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    """Up, with the people `amy` and `bob`."""
    need_programs()
    from mlflow.server.auth.client import AuthServiceClient

    with team_server(tmp_path_factory.mktemp("team")) as team:
        team.migrate()
        team.start()
        with pytest.MonkeyPatch.context() as patch:
            _log_in(patch, *ADMIN)
            for user in ("amy", "bob"):
                AuthServiceClient(team.uri).create_user(user, PASSWORD)
        yield team


def _log_in(patch: pytest.MonkeyPatch, user: str, password: str = PASSWORD) -> None:
    patch.setenv("MLFLOW_TRACKING_USERNAME", user)
    patch.setenv("MLFLOW_TRACKING_PASSWORD", password)


def test_people_who_log_in_read_all_and_write_what_is_theirs(team, monkeypatch):
    search = "/api/2.0/mlflow/experiments/search?max_results=1"
    assert team.get("/health") == 200
    for path in (search, "/", "/api/2.0/mlflow-artifacts/artifacts", "/graphql"):
        assert team.get(path) == 401, path
    # A page that an attacker's name server points at the server's address (DNS rebinding).
    for name, status in {"mlflow": 401, f"mlflow:{team.port}": 401, "evil.example": 403}.items():
        assert team.get(search, Host=name) == status
    from mlflow.server.auth.client import AuthServiceClient

    client = MlflowClient(team.uri)
    _log_in(monkeypatch, "amy", "a-password-of-others")
    with pytest.raises(MlflowException, match="401"):
        client.search_experiments()
    _log_in(monkeypatch, "amy")
    experiment, users = client.create_experiment("amy"), AuthServiceClient(team.uri)
    run_id = client.create_run(experiment).info.run_id
    _log_in(monkeypatch, "bob")
    assert client.get_run(run_id).info.status == "RUNNING"
    for refused in (
        lambda: client.log_metric(run_id, "train/loss", 1.0),
        lambda: client.delete_experiment(experiment),
        lambda: users.create_user("eve", PASSWORD),
        lambda: users.delete_user("amy"),
    ):
        with pytest.raises(MlflowException, match="403"):
            refused()
    _log_in(monkeypatch, "amy")
    users.grant_user_permission("bob", "experiment", experiment, "EDIT")
    _log_in(monkeypatch, "bob")
    client.log_metric(run_id, "train/loss", 1.0)
    with pytest.raises(MlflowException, match="403"):
        client.delete_experiment(experiment)


def test_files_go_through_the_server_and_no_client_has_a_key(team, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    _log_in(monkeypatch, "amy")
    client = MlflowClient(team.uri)
    run_id = client.create_run(client.create_experiment("files")).info.run_id
    content = os.urandom(3 << 20)
    (tmp_path / "weights.bin").write_bytes(content)
    client.log_artifact(run_id, str(tmp_path / "weights.bin"), "model")
    (stored,) = team.stored("weights.bin")
    assert stored.read_bytes() == content
    there = client.download_artifacts(run_id, "model/weights.bin", str(tmp_path))
    assert Path(there).read_bytes() == content
    client.delete_run(run_id)
    team.run("mlflow-gc")
    assert team.stored("weights.bin") == [stored]
    team.run("mlflow-gc", **{"30d": "0s"})
    with pytest.raises(MlflowException, match="Permission denied"):  # of what is nowhere
        client.get_run(run_id)
    assert team.stored("weights.bin") == []


def test_sixteen_runs_write_at_once_and_a_database_and_a_server_that_are_away_cost_no_point(
    team, monkeypatch, tmp_path, caplog, capfd
):
    """A thousand points a second, read back exactly."""
    _log_in(monkeypatch, "amy")
    config = TrackingConfig(
        uri=team.uri.replace("://", f"://amy:{PASSWORD}@"), experiment="at once"
    )
    trackers = []
    for number in range(RUNS):
        opening = RunOpening(config, f"run {number}", tmp_path / f"{number}" / "metrics.jsonl")
        trackers.append(Tracker.begin(opening, wait_s=120))
    steps = SECONDS * POINTS_PER_S // (RUNS * len(KEYS))
    pause = threading.Event()
    for step in range(steps):
        for number, tracker in enumerate(trackers):
            tracker.log.metrics(step, {key: _value(number, step, key) for key in KEYS})
        if step == steps // 4:
            team.database.stop()
        if step == steps * 5 // 8:
            team.database.start()
        if step == steps * 3 // 4:
            team.stop()
            trackers[0].log.text("note.txt", "kept through the outage")
            team.start()
        pause.wait(SECONDS / steps)
    assert all(tracker.finish(timeout_s=300) for tracker in trackers)
    for number, tracker in enumerate(trackers):
        result = replay(tracker.log.path, config.uri)
        assert (result.num_points, result.refused) == (0, [])
        for key in KEYS:
            expected = [(step, _value(number, step, key)) for step in range(steps)]
            assert history(team.uri, tracker.run_id, key) == expected
    files = MlflowClient(team.uri).list_artifacts(trackers[0].run_id)
    assert [file.path for file in files] == ["note.txt"]
    # MLflow prints the address at the end of a run, unless it is kept from it.
    assert PASSWORD not in capfd.readouterr().out + caplog.text


def _value(number: int, step: int, key: str) -> float:
    return (number + 1) / (step + 3) + KEYS.index(key)


def test_a_backup_brings_back_what_was_lost(team, monkeypatch, tmp_path):
    _log_in(monkeypatch, "amy")
    client = MlflowClient(team.uri)
    run_id = client.create_run(client.create_experiment("to lose")).info.run_id
    for step in range(5):
        client.log_metric(run_id, "eval/top1", step / 7, step=step)
    backup = team.back_up(tmp_path)
    team.postgresql("psql", "--dbname=mlflow", "--command=DROP TABLE metrics, experiments CASCADE")
    team.stop()
    team.restore(backup)
    team.migrate()
    team.start()
    assert history(team.uri, run_id, "eval/top1") == [(step, step / 7) for step in range(5)]


def test_every_line_of_the_page_does_what_it_says(team, monkeypatch, tmp_path):
    """Of docs/clusters.md, whose section on a team runs here alone, as a page."""
    (tmp_path / "mine").mkdir()
    section = (ROOT / "docs" / "clusters.md").read_text().partition("## MLflow for a team")[2]
    lines = tmp_path / "team.md"
    lines.write_text(re.sub("<!-- newcomer skips all: .* -->\n", "", section))
    _log_in(monkeypatch, *ADMIN)
    done = subprocess.run(
        ["bash", "-c", script_of(lines)],
        cwd=tmp_path / "mine",
        env={**os.environ, "SERVER": team.uri.removeprefix("http://")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    client = MlflowClient(team.uri)
    runs = {
        name: client.search_runs([client.get_experiment_by_name(name).experiment_id])
        for name in ("flowers", "digits")
    }
    (run,) = runs["flowers"]
    assert (run.data.tags["mlflow.user"], run.data.tags["ticket"]) == ("ben", "F-12")
    (moved,) = runs["digits"]
    assert moved.info.run_name == "digits-vit"
    assert client.get_metric_history(moved.info.run_id, "train/loss")
