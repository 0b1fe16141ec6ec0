"""Scaling studies: the grid as arithmetic, the resumed study on real digits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from mlflow.tracking import MlflowClient

from tests.experiments.studies import study_recipe, study_row, study_tree
from vit_ray.commands.experiments import print_study
from vit_ray.commands.tracking_store import report
from vit_ray.config.keys import tags_of
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments.study import run_study
from vit_ray.experiments.study_cells import study_cells

ROOT = Path(__file__).parents[2]


def test_a_recipe_without_a_study_says_what_to_give():
    tree = study_tree("/x", [study_row("a")]) | {"study": None}
    with pytest.raises(ValueError, match=r"study is not set; give study\.models"):
        study_cells(recipe_from_dict(tree, "test"))


def _logged_metrics(folder, cell):
    log_path = folder / "runs" / cell / "metrics.jsonl"
    lines = log_path.read_text().splitlines() if log_path.exists() else []
    return [line for line in lines if '"kind": "metrics"' in line]


def _kill_in_second_cell(folder, tree, address):
    """Run the job as a process of its own, and kill it while its second cell trains."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    job = [sys.executable, "jobs/scaling_study.py", str(recipe)]
    with open(folder / "job.log", "w") as log:
        process = subprocess.Popen(
            job,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        for _ in range(1200):
            if len(_logged_metrics(folder, "grid-two-data1-epochs4")) >= 25:
                break
            assert process.poll() is None, (folder / "job.log").read_text()[-3000:]
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def finished(ray_cluster, digits, tmp_path_factory):
    """A study of two cells."""
    models = [study_row("one"), study_row("two", width=32)]
    folder = tmp_path_factory.mktemp("study")
    recipe = study_recipe(folder, models, digits.train, digits.test, max_concurrent=2)
    return recipe, run_study(recipe)


@pytest.mark.slow
def test_a_killed_study_skips_what_is_finished_and_continues_the_rest(
    ray_cluster, digits, tmp_path
):
    models = [study_row("one"), study_row("two", width=32)]
    # Long enough that the kill lands well before the end of the second cell.
    tree = study_tree(tmp_path, models, digits.train, digits.test, epochs=[4.0], max_concurrent=1)
    _kill_in_second_cell(tmp_path, tree, ray_cluster.address)
    recipe = recipe_from_dict(tree, "test")
    result = run_study(recipe)
    assert result.is_complete
    assert [cell.was_finished for cell in result.cells] == [True, False]
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name("vit_ray").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert len(client.search_runs([experiment])) == 3  # the study and its two cells, once each
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    for cell in result.cells:
        run = runs[cell.cell.name]
        assert run.data.tags["mlflow.parentRunId"] == result.parent_run_id
        assert run.data.tags["vit_ray.study_label"] == cell.cell.label
        assert run.data.tags["vit_ray.kind"] == "study_cell"
        steps = [p.step for p in client.get_metric_history(run.info.run_id, "train/loss")]
        assert sorted(steps) == list(range(1, 95))  # round(4 x 1497 / 64) steps, none twice
        assert 0.0 < run.data.metrics["few_shot/5_shot_top1"] <= 1.0
        assert run.data.metrics["study/images_seen"] == 94 * 64


def test_a_finished_study_trains_nothing_when_it_is_run_again(finished, capsys):
    recipe, first = finished
    again = run_study(recipe)
    assert [cell.was_finished for cell in again.cells] == [True, True]
    assert again.parent_run_id == first.parent_run_id
    assert print_study(again) == 0
    assert "2 of 2 cells had finished before" in capsys.readouterr().out


def test_the_page_of_a_study_is_written_and_kept_with_its_run(finished):
    recipe, result = finished
    text = result.page.read_text()
    assert "Accuracy against compute" in text
    assert all(cell.cell.name in text for cell in result.cells)
    client = MlflowClient(recipe.tracking.uri)
    kept = {item.path for item in client.list_artifacts(result.parent_run_id)}
    assert "report.html" in kept
    parent = client.get_run(result.parent_run_id).data
    assert next(iter(parent.metrics)) == "eval/top1"
    assert "2 of 2 cells have finished" in parent.tags["mlflow.note.content"]
    result.page.unlink()
    assert report(recipe).page == result.page
    assert result.page.exists()


def test_a_finished_cell_is_not_taken_for_one_of_another_recipe(finished):
    recipe, _ = finished
    result = run_study(recipe.with_changes(optim={"weight_decay": 0.3}))
    for cell in result.cells:
        assert "these keys have changed: optim.weight_decay was 0.0 and is 0.3" in cell.error


@pytest.fixture(scope="module")
def failed_and_transferred(ray_cluster, digits, tmp_path_factory):
    """A cell that diverges beside one that is transferred, at one rate and over a sweep."""
    folder = tmp_path_factory.mktemp("transfer")
    models = [study_row("bad", rate=1e38), study_row("good")]
    tree = study_tree(folder, models, digits.train, digits.test, data_fractions=[0.1])
    own = ("data", "train", "evaluate", "checkpoint")
    tune = {key: tree[key] for key in own} | {"name": "tune", "model": study_row("any")["model"]}
    tune["optim"] = {"name": "sgd", "learning_rate": 0.03, "steps": 3}
    (folder / "tune.yaml").write_text(yaml.safe_dump(tune))
    task = {"name": "fixed", "recipe": str(folder / "tune.yaml")}
    sweep = {"learning_rates": [1e-3, 0.03], "dev_fraction": 0.1, "seeds": 1}
    tree["study"]["transfer"] = [task, {**task, "name": "swept", "changes": {"sweep": sweep}}]
    return recipe_from_dict(tree, "test"), run_study(recipe_from_dict(tree, "test"))


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_the_others_still_run(
    failed_and_transferred, tmp_path, capsys
):
    _, result = failed_and_transferred
    assert [bool(cell.error) for cell in result.cells] == [True, False]
    assert not result.is_complete
    assert print_study(result) == 1
    assert "failed: grid-bad-data0.1-epochs1: " in capsys.readouterr().out
    client = MlflowClient(result.cells[0].cell.recipe.tracking.uri)
    assert client.get_run(result.parent_run_id).info.status != "FINISHED"
    history = client.download_artifacts(result.parent_run_id, "history", str(tmp_path))
    (attempt,) = Path(history).glob("*.json")
    events = json.loads(attempt.read_text())
    assert [event["kind"] for event in events] == ["failed cell"]


@pytest.mark.slow
def test_a_cell_is_transferred_at_one_rate_and_over_a_sweep(failed_and_transferred):
    recipe, result = failed_and_transferred
    client = MlflowClient(recipe.tracking.uri)
    (_, good) = result.cells
    run = client.get_run(good.run_id)
    kept = {key: run.data.metrics[f"transfer/{key}_top1"] for key in ("fixed", "swept")}
    assert kept == {key: good.metrics[f"transfer/{key}_top1"] for key in kept}
    runs = client.search_runs([run.info.experiment_id])
    # Without the digest of what is trained.
    under = {re.sub("-[0-9a-f]{8}$", "", run.info.run_name): run for run in runs}
    fixed = under[f"{good.cell.name}-fixed"]
    assert fixed.data.metrics["eval/top1"] == kept["fixed"]
    assert tags_of(fixed.data.tags)["vit_ray.study_cell"] == good.cell.name
    swept = under[f"{good.cell.name}-swept"]
    assert swept.data.tags["vit_ray.transfer_task"] == "swept"
    assert swept.data.tags["mlflow.parentRunId"] == result.parent_run_id
    trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == swept.info.run_id]
    assert len(trials) == 3  # two rates, and one run with the better one
    assert {run.info.status for run in (*trials, swept, fixed)} == {"FINISHED"}
    assert not [name for name in under if name.startswith("grid-bad") and "-fixed" in name]
