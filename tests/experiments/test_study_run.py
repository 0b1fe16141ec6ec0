"""What a study does with its cells as they end or fail: trials in this process, on fakes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.experiments.studies import resolved, study_recipe, study_row, study_tree, trained
from tests.experiments.trials_here import Calls, context_of, in_process, parent_of
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import study
from vit_ray.experiments.study_cells import Cell, CellResult, study_cells
from vit_ray.experiments.trials import Context
from vit_ray.launch.terminal import RunStoppedError
from vit_ray.launch.workers import RunDivergedError, RunFailedError


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    rows = [study_row("small"), study_row("broken", width=32), study_row("large", width=64)]
    return study_cells(study_recipe(tmp_path, rows))


def run_cells(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell], train: Any, **keys: Any
) -> tuple[list[CellResult], Calls]:
    """The study of the cells, with `train(recipe, ...)` in the place of a training."""
    in_process(monkeypatch, train)
    parent, calls = parent_of(study_recipe("/x", [study_row("any")], **keys))
    return study._run_cells([(cell, 10) for cell in cells], parent), calls


@pytest.mark.parametrize(
    "error", [RunFailedError("no node\nmore of it"), RunDivergedError("reason"), OSError("full")]
)
def test_a_failed_cell_is_a_row_and_ends_no_other_cell(monkeypatch, cells, error):
    tried: list[str] = []

    def train(recipe: Any, **_: Any) -> Any:
        tried.append(recipe.name)
        if recipe.name == cells[1].name:
            raise error
        return trained()

    found, calls = run_cells(monkeypatch, cells, train)
    assert tried == [cell.name for cell in cells]
    assert [one.error for one in found] == ["", str(error).partition("\n")[0], ""]
    assert calls.kinds() == ["failed cell"]
    assert study._totals(found)["study/failed_cells"] == 1.0


def test_transfers_are_metrics_of_their_cell_and_a_failed_one_ends_no_other(monkeypatch, cells):
    tasks: Any = [{"name": name, "recipe": "finetune/pets"} for name in ("pets", "cars")]
    stored: list[Any] = []

    def transfer(cell: Cell, task: Any, context: Context) -> dict[str, float]:
        if task.name == "pets":
            raise ValueError("no such data set")
        return {"transfer/cars_top1": 0.7}

    monkeypatch.setattr(study, "_transfer", transfer)
    monkeypatch.setattr(study, "add_to_ended", lambda *args: stored.append(args[1:3]))
    metrics = {"eval/top1": 0.5}
    found, _ = run_cells(
        monkeypatch, cells[:1], lambda recipe, **_: trained(**metrics), transfer=tasks
    )
    assert found[0].metrics == {**metrics, "transfer/cars_top1": 0.7}
    assert found[0].error == "transfer to pets: no such data set"
    assert stored == [(None, {"transfer/cars_top1": 0.7})]
    tops = {"pets": 0.9, "cars": 0.7}
    both = lambda cell, task, _: {f"transfer/{task.name}_top1": tops[task.name]}  # noqa: E731
    monkeypatch.setattr(study, "_transfer", both)
    found, _ = run_cells(
        monkeypatch, cells[:1], lambda recipe, **_: trained(**metrics), transfer=tasks
    )
    mean = {"transfer/mean_top1": pytest.approx(0.8)}
    assert stored[-1] == (None, {"transfer/cars_top1": 0.7, **mean})
    assert found[0].metrics["transfer/mean_top1"] == mean["transfer/mean_top1"]


def test_branches_follow_the_longest_cell_of_their_row_in_its_trial(monkeypatch, tmp_path):
    lengths: Any = {"epochs": None, "steps": [100, 400, 200], "branch": True}
    tree = study_tree(tmp_path, [study_row("a"), study_row("b", rate=3e-4)], **lengths)
    tree["optim"]["schedule"] = "cooldown"
    recipe = recipe_from_dict(tree, "test")
    cells, order = study_cells(recipe), list[tuple[str, tuple[int, ...]]]()

    def train(recipe: Any, **_: Any) -> Any:
        order.append((recipe.name, recipe.checkpoint.keep_steps))
        return trained()

    in_process(monkeypatch, train)
    monkeypatch.setattr(study, "begin_branch", lambda cell, trunk, step: f"{trunk.name} {step}")
    parent, calls = parent_of(recipe)
    steps = [100, 400, 200] * 2
    found = study._run_cells(list(zip(cells, steps, strict=True)), parent)
    assert [name for name, _ in order] == [cells[k].name for k in (1, 2, 0, 4, 5, 3)]
    assert [kept for _, kept in order] == [(80, 160), (), ()] * 2
    assert [one.cell for one in found] == cells
    assert [one.branched_from for one in found[:3]] == [
        f"{cells[1].name} 80", "", f"{cells[1].name} 160"
    ]  # fmt: skip
    assert calls.kinds() == ["branch"] * 4


def test_a_stop_ends_a_trial_between_its_trainings(monkeypatch, cells):
    in_process(monkeypatch, lambda recipe, **_: trained(is_complete=False))
    parent, calls = parent_of()
    with pytest.raises(RunStoppedError):
        context_of(parent).train(cells[0].recipe, "study_cell")
    calls.stop = "SIGTERM"
    in_process(monkeypatch, lambda recipe, **_: pytest.fail("it was started"))
    with pytest.raises(RunStoppedError):
        context_of(parent).train(cells[0].recipe, "study_cell")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"train": {"global_batch_size": 16}}, "-large-.*global_batch_size"),
        ({"sweep": {"learning_rates": [0.1, 0.10000001]}}, "-small-.*lr0.1"),
        ({"sweep": {"space": {"init_from": ["/a", "/b"]}}}, "-small-.*init_from"),
        (
            {"sweep": {"space": {"model": [{"dropout": 0.1}, {"depth": 2}]}}},
            "-small-.*model.depth",
        ),
        (
            {"sweep": {"space": {"optim.momentum": [0.7], "optim.frozen": [["head"]]}}},
            "-small-.*optim.frozen",
        ),
    ],
)
def test_fine_tunings_of_all_cells_are_checked_before_the_first_is_trained(
    changes, key, cells, tmp_path, monkeypatch
):
    path = tmp_path / "tune.yaml"
    tree = {"name": "tune", "data": {"train": "/t", "eval": "/e"}, "optim": {"steps": 5}}
    path.write_text(yaml.safe_dump({**tree, "train": {"global_batch_size": 12}}))
    monkeypatch.setattr(study, "resolve_run", lambda recipe: resolved())
    wide = cells[2].recipe.with_changes(workers={"num_workers": 3})
    cells = [*cells[:2], replace(cells[2], recipe=wide)]
    tune = StudyTask(name="tune", recipe=str(path))
    swept = StudyTask(
        name="swept", recipe=str(path),
        changes={"sweep": {"learning_rates": [0.1, 0.2], "seeds": 3}, "data.train": "/other"},
    )  # fmt: skip
    # The progress of a study is of these steps, too: 5 of each trial and of each retraining.
    assert study._check_tasks(cells, (tune,))[1] == len(cells) * 5
    fine_tunings, steps = study._check_tasks(cells, (tune, swept))
    assert steps == len(cells) * (5 + 2 * 5 + 3 * 5)
    assert [one.data.train for one in fine_tunings] == ["/t"] * 3 + ["/other"] * 3
    with pytest.raises(ValueError, match=f"study.transfer 'tune' of cell .*{key}"):
        study._check_tasks(cells, (StudyTask(name="tune", recipe=str(path), changes=changes),))


def test_the_record_of_a_study_begins_with_the_best_accuracy_of_its_cells(cells):
    tops = [{"eval/top1": 0.4}, {"eval/top1": 0.6}, {}]
    found = study._totals([CellResult(c, m, "id") for c, m in zip(cells, tops, strict=True)])
    assert next(iter(found.items())) == ("eval/top1", 0.6)


def test_an_accuracy_on_held_out_images_is_no_test_accuracy_of_a_study(cells):
    """A cell without a test set is evaluated on images of its training set."""
    held_out = cells[0].recipe.with_changes(data={"eval": None, "held_out_fraction": 0.1})
    cell = replace(cells[0], recipe=held_out)
    assert "eval/top1" not in study._totals([CellResult(cell, {"eval/top1": 0.9}, "id")])
