"""What a study does with its cells as they end or fail: on fakes here, then on real digits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient

from tests.experiments.studies import study_recipe, study_row, study_tree, trained, with_steps
from tests.experiments.trials_here import in_process, kinds, parent_of
from vit_ray.commands.tracking_store import report
from vit_ray.commands.trainings import print_study
from vit_ray.config import Recipe
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import study
from vit_ray.experiments.study import CellResult, run_study
from vit_ray.experiments.study_cells import Cell, branch_step, study_cells
from vit_ray.experiments.sweep import SweepResult
from vit_ray.experiments.trials import Outcome
from vit_ray.launch.run import Following
from vit_ray.outcomes import RunFailedError


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    rows = [study_row("small"), study_row("broken", width=32), study_row("large", width=64)]
    return study_cells(study_recipe(tmp_path, rows))


def test_transfers_are_metrics_of_their_cell_and_a_failed_one_ends_no_other(monkeypatch, cells):
    stored: list[Any] = []
    tops: dict[str, float] = {"cars": 0.7}

    def fine_tune(recipe: Recipe, following: Following, tags: dict[str, str]) -> SweepResult:
        name = tags["vit_ray.transfer_task"]
        if name not in tops:
            raise RunFailedError("no such data set")
        return SweepResult([], {}, [Outcome(tops[name])])

    def transferred() -> Outcome:
        tasks: Any = [{"name": name, "recipe": "finetune/pets"} for name in ("pets", "cars")]
        in_process(monkeypatch, lambda recipe, **_: trained(**{"eval/top1": 0.5}))
        parent, _ = parent_of(study_recipe("/x", [study_row("any")], transfer=tasks))
        (found,) = study._run_cells(cells[:1], parent)
        return found.outcome

    monkeypatch.setattr(study, "task_recipe", lambda *_: None)
    monkeypatch.setattr(study, "fine_tune", fine_tune)
    monkeypatch.setattr(study, "add_to_ended", lambda *args: stored.append(args[1:3]))
    found = transferred()
    assert found.metrics == {"eval/top1": 0.5, "transfer/cars_top1": 0.7}
    assert found.error == "transfer to pets: no such data set"
    assert stored == [(None, {"transfer/cars_top1": 0.7})]
    tops["pets"] = 0.9
    assert transferred().metrics["transfer/mean_top1"] == pytest.approx(0.8)


def test_branches_follow_the_longest_cell_of_their_row_in_its_trial(monkeypatch, tmp_path):
    lengths: Any = {"epochs": None, "steps": [100, 400, 200], "branch": True}
    tree = study_tree(tmp_path, [study_row("a"), study_row("b", rate=3e-4)], **lengths)
    tree["optim"]["schedule"] = "cooldown"
    recipe = recipe_from_dict(tree, "test")
    cells, order = with_steps(study_cells(recipe)), list[tuple[str, tuple[int, ...]]]()

    def train(recipe: Any, **_: Any) -> Any:
        order.append((recipe.name, recipe.checkpoint.keep_steps))
        return trained()

    in_process(monkeypatch, train)
    monkeypatch.setattr(
        study, "begin_branch", lambda cell, trunk: f"{trunk.name} {branch_step(cell)}"
    )
    parent, calls = parent_of(recipe)
    found = study._run_cells(cells, parent)
    kept = [(80, 160), (), ()] * 2
    assert order == [(cells[k].name, kept.pop(0)) for k in (1, 2, 0, 4, 5, 3)]
    assert [one.cell for one in found] == cells
    trunk = cells[1].name
    assert [one.branched_from for one in found[:3]] == [f"{trunk} 80", "", f"{trunk} 160"]
    assert kinds(calls) == ["branch"] * 4


@pytest.mark.parametrize(("changes", "key"), [
    ({"train": {"global_batch_size": 16}}, "-large-.*global_batch_size"),
    ({"sweep": {"learning_rates": [0.1, 0.10000001]}}, "-small-.*lr0.1"),
    ({"sweep": {"space": {"init_from": ["/a", "/b"]}}}, "-small-.*init_from"),
    ({"sweep": {"space": {"model": [{"dropout": 0.1}, {"depth": 2}]}}}, "-small-.*model.depth"),
    ({"sweep": {"space": {"optim.momentum": [0.7], "optim.frozen": [["head"]]}}}, "optim.frozen"),
])  # fmt: skip
def test_fine_tunings_of_all_cells_are_checked_before_the_first_is_trained(
    changes, key, cells, tmp_path, monkeypatch
):
    path = tmp_path / "tune.yaml"
    tree = {"name": "tune", "data": {"train": "/t", "eval": "/e"}, "optim": {"steps": 5}}
    path.write_text(yaml.safe_dump({**tree, "train": {"global_batch_size": 12}}))
    monkeypatch.setattr(study, "resolve_run", lambda recipe: SimpleNamespace(num_images=640))
    wide = cells[2].recipe.with_changes(workers={"num_workers": 3})
    cells = [*cells[:2], replace(cells[2], recipe=wide)]
    tune = StudyTask(name="tune", recipe=str(path))
    sweep = {"learning_rates": [0.1, 0.2], "seeds": 3}
    swept = tune.model_copy(update={"name": "swept", "changes": {"sweep": sweep}})
    # The progress of a study is of these steps, too: 5 of each trial and of each retraining.
    assert study._check_tasks(cells, (tune,))[1] == len(cells) * 5
    assert study._check_tasks(cells, (tune, swept))[1] == len(cells) * (5 + 2 * 5 + 3 * 5)
    with pytest.raises(ValueError, match=f"study.transfer 'tune' of cell .*{key}"):
        study._check_tasks(cells, (StudyTask(name="tune", recipe=str(path), changes=changes),))


def test_the_record_of_a_study_begins_with_the_best_test_accuracy_of_its_cells(cells):
    tops = [{"eval/top1": 0.4}, {"eval/top1": 0.6}, {}]
    found = study._totals(
        [CellResult(c, Outcome(metrics=m)) for c, m in zip(cells, tops, strict=True)]
    )
    assert next(iter(found.items())) == ("eval/top1", 0.6)
    # A cell without a test set is evaluated on images of its training set.
    held_out = cells[0].recipe.with_changes(data={"eval": None, "held_out_fraction": 0.1})
    cell = replace(cells[0], recipe=held_out)
    assert "eval/top1" not in study._totals([CellResult(cell, Outcome(metrics={"eval/top1": 0.9}))])


def test_a_finished_study_trains_nothing_again_and_its_page_is_kept_with_its_run(
    ray_cluster, digits, tmp_path, capsys
):
    models = [study_row("one"), study_row("two", width=32)]
    recipe = study_recipe(tmp_path, models, digits.train, digits.test, max_concurrent=2)
    first, again = run_study(recipe), run_study(recipe)
    assert [cell.outcome.was_finished for cell in again.cells] == [True, True]
    assert again.published.run_id == first.published.run_id
    assert print_study(again) == 0
    assert "2 of 2 cells had finished before" in capsys.readouterr().out
    text = again.published.page.read_text()
    assert "Accuracy against compute" in text
    assert all(cell.cell.name in text for cell in again.cells)
    client = MlflowClient(recipe.tracking.uri)
    assert "report.html" in {one.path for one in client.list_artifacts(again.published.run_id)}
    parent = client.get_run(again.published.run_id).data
    assert next(iter(parent.metrics)) == "eval/top1"
    assert "2 of 2 cells have finished" in parent.tags["mlflow.note.content"]
    again.published.page.unlink()
    assert report(recipe).page == again.published.page
    assert again.published.page.exists()
    # A finished cell is not taken for one of another recipe.
    for cell in run_study(recipe.with_changes(optim={"weight_decay": 0.3})).cells:
        assert (
            "these keys have changed: optim.weight_decay was 0.0 and is 0.3" in cell.outcome.error
        )


@pytest.mark.slow
def test_a_cell_that_fails_is_named_and_the_others_are_trained_and_transferred(
    ray_cluster, digits, tmp_path, capsys
):
    """One diverges; the other is fine-tuned at one rate, and over a sweep."""
    models = [study_row("bad", rate=1e38), study_row("good")]
    tree = study_tree(tmp_path, models, digits.train, digits.test, data_fractions=[0.1])
    own = ("data", "train", "evaluate", "checkpoint")
    tune = {key: tree[key] for key in own} | {"name": "tune", "model": study_row("any")["model"]}
    tune["optim"] = {"name": "sgd", "learning_rate": 0.03, "steps": 3}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(tune))
    task = {"name": "fixed", "recipe": str(tmp_path / "tune.yaml")}
    sweep = {"learning_rates": [1e-3, 0.03], "dev_fraction": 0.1, "seeds": 1}
    tree["study"]["transfer"] = [task, {**task, "name": "swept", "changes": {"sweep": sweep}}]
    recipe = recipe_from_dict(tree, "test")
    result = run_study(recipe)
    assert [bool(cell.outcome.error) for cell in result.cells] == [True, False]
    assert not result.published.is_complete
    assert print_study(result) == 1
    assert "failed: grid-bad-data0.1-epochs1: " in capsys.readouterr().out
    client = MlflowClient(recipe.tracking.uri)
    assert client.get_run(result.published.run_id).info.status != "FINISHED"
    history = client.download_artifacts(result.published.run_id, "history", str(tmp_path))
    (attempt,) = Path(history).glob("*.json")
    assert [event["kind"] for event in json.loads(attempt.read_text())] == ["failed cell"]

    (_, good) = result.cells
    run = client.get_run(good.outcome.run_id)
    kept = {key: run.data.metrics[f"transfer/{key}_top1"] for key in ("fixed", "swept")}
    assert kept == {key: good.outcome.metrics[f"transfer/{key}_top1"] for key in kept}
    runs = client.search_runs([run.info.experiment_id])
    # Without the digest of what is trained.
    under = {re.sub("-[0-9a-f]{8}$", "", run.info.run_name): run for run in runs}
    fixed = under[f"{good.cell.name}-fixed"]
    assert fixed.data.metrics["eval/top1"] == kept["fixed"]
    assert fixed.data.tags["vit_ray.study_cell"] == good.cell.name
    swept = under[f"{good.cell.name}-swept"]
    assert swept.data.tags["vit_ray.transfer_task"] == "swept"
    assert swept.data.tags["mlflow.parentRunId"] == result.published.run_id
    trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == swept.info.run_id]
    assert len(trials) == 3  # two rates, and one run with the better one
    assert {run.info.status for run in (*trials, swept, fixed)} == {"FINISHED"}
    assert not [name for name in under if name.startswith("grid-bad") and "-fixed" in name]
