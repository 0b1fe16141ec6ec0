"""The lines of docs/clusters.md for a team, in turn, against the server that it is about."""

import os
import re
import subprocess

import pytest
from mlflow.tracking import MlflowClient

from tests.newcomer.follow import script_of
from tests.tracking.team_server import ADMIN, ROOT, need_programs, team_server


@pytest.mark.slow  # two trainings and a sweep, each with a Ray of its own
def test_every_line_of_the_page_does_what_it_says(tmp_path, monkeypatch):
    need_programs()
    (tmp_path / "mine").mkdir()
    # The page's section on a team, whose blocks run here alone, as a page.
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("## MLflow for a team")[2]
    lines = tmp_path / "team.md"
    lines.write_text(re.sub("<!-- newcomer skips all: .* -->\n", "", section))
    with team_server(tmp_path) as team:
        team.migrate()
        team.start()
        who = {"MLFLOW_TRACKING_USERNAME": ADMIN[0], "MLFLOW_TRACKING_PASSWORD": ADMIN[1]}
        done = subprocess.run(
            ["bash", "-c", script_of(lines)],
            cwd=tmp_path / "mine",
            env={**os.environ, **who, "SERVER": team.uri.removeprefix("http://")},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
        for name, value in who.items():
            monkeypatch.setenv(name, value)
        client = MlflowClient(team.uri)
        flowers = client.get_experiment_by_name("flowers")
        digits = client.get_experiment_by_name("digits")
        assert flowers is not None
        assert digits is not None
        (run,) = client.search_runs([flowers.experiment_id])
        assert (run.data.tags["mlflow.user"], run.data.tags["ticket"]) == ("ben", "F-12")
        (moved,) = client.search_runs([digits.experiment_id])
        assert moved.info.run_name == "digits-vit"
        assert client.get_metric_history(moved.info.run_id, "train/loss")
