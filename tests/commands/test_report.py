"""The report job's choice of what to report on."""

from types import SimpleNamespace

import pytest
import ray
from mlflow.tracking import MlflowClient

from vit_ray.commands.report import report, report_page
from vit_ray.config.schema import recipe_from_dict
from vit_ray.experiments.page import page_of
from vit_ray.tracking.mlflow_client import experiment_id, open_client


@pytest.fixture
def recipe(tmp_path):
    tree = {"name": "mine", "output": f"{tmp_path}/runs"}
    tree["tracking"] = {"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "trials"}
    return recipe_from_dict(tree, "test")


def _run(recipe, name):
    client = open_client(recipe.tracking.uri)
    experiment = experiment_id(client, recipe.tracking.uri, "trials")
    run_id = client.create_run(experiment, run_name=name).info.run_id
    client.log_metric(run_id, "eval/top1", 0.5)
    return run_id


def test_the_newest_run_of_the_recipes_name_is_reported_and_keeps_the_page(recipe, capsys):
    run_id = _run(recipe, "mine")
    _run(recipe, "another")
    page = report(recipe)
    assert "another" not in page.read_text()
    kept = {item.path for item in MlflowClient(recipe.tracking.uri).list_artifacts(run_id)}
    assert kept == {"report.html", "report.csv"}
    assert report_page(recipe) == 0
    assert str(page) in capsys.readouterr().out


def test_without_such_a_run_the_whole_experiment_is_reported(recipe):
    _run(recipe, "another")
    assert "another" in report(recipe).read_text()


def test_a_mistyped_store_is_refused_and_not_created(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"tracking.uri=.*no such file"):
        report(recipe)
    assert not (tmp_path / "mlflow.db").exists()


def test_a_long_job_does_not_fail_because_its_page_cannot_be_made(recipe, caplog, monkeypatch):
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    recorder = SimpleNamespace(flush=SimpleNamespace(remote=lambda wait_s: True))
    away = recipe.with_changes(tracking={"uri": "http://user:hunter2@127.0.0.1:9"})
    open_client(away.tracking.uri)  # as the job has done: calls fail fast
    assert page_of(away, "0" * 32, recorder) is None
    assert "jobs/report.py makes it" in caplog.text
    assert "hunter2" not in caplog.text
    assert page_of(away, None, recorder) is None
