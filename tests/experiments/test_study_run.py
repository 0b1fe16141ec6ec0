"""What a study does with its cells as they end, fail, or are stopped: without Ray, on fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.experiments.flows import Parent, in_process
from tests.experiments.studies import resolved, study_recipe, study_row, study_tree, trained
from vit_ray.commands.printed_tables import print_study
from vit_ray.config.command_sections import StudyTask
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import runner, study
from vit_ray.experiments.runner import Flow, Room
from vit_ray.experiments.study import StudyRun
from vit_ray.experiments.study_cells import Cell, CellResult, study_cells, study_of
from vit_ray.experiments.study_flow import in_order
from vit_ray.launch.pool.pool_training import RunDivergedError, RunFailedError
from vit_ray.launch.run import RunResult


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    rows = [study_row("small"), study_row("broken", width=32), study_row("large", width=64)]
    return study_cells(study_recipe(tmp_path, rows))


def run_cells(
    monkeypatch: pytest.MonkeyPatch,
    cells: list[Cell],
    train: Any,
    room: Room | Callable[[], Room],
    parent: Parent,
    finished: dict[str, CellResult] | None = None,
    **keys: Any,
) -> list[CellResult]:
    """The study of the cells, with `train(recipe, ...)` in the place of a training."""
    room_now = room if callable(room) else lambda: room

    in_process(monkeypatch, parent, train, room_now)
    monkeypatch.setattr(study, "cluster_room", lambda most, _: replace(room_now(), runs=most or 99))
    config = study_of(study_recipe("/x", [study_row("any")], **keys))
    return StudyRun(
        config, cells, [resolved(recipe=cell.recipe) for cell in cells], finished or {}, parent
    ).run()


@pytest.mark.parametrize("earlier", [None, "b" * 32])
def test_a_study_records_its_number_of_cells_and_checks_all_its_trainings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, earlier: str | None
) -> None:
    tree = study_tree(tmp_path, [study_row("small"), study_row("large", width=64)])
    recipe = recipe_from_dict(tree, "test")
    fine_tuning = recipe.with_changes(name="tune")
    opened: list[tuple[Any, dict[str, Any]]] = []
    totals: list[int] = []

    @contextlib.contextmanager
    def open_parent(*words: Any, **keys: Any) -> Iterator[Any]:
        opened.append((words[-1], keys))
        totals.append(words[3])
        yield Parent()

    for name, answer in {
        "resolve_run": resolved(), "earlier_run": earlier, "finished_cells": {}, "page_of": None,
        "_check_tasks": ([fine_tuning], 7),
    }.items():  # fmt: skip
        monkeypatch.setattr(study, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(StudyRun, "run", lambda _: [])
    monkeypatch.setattr(study, "open_parent", open_parent)
    study.run_study(recipe)
    ((run_id, keys),) = opened
    cells = [cell.name for cell in study.study_cells(recipe)]
    assert [one.name for one in keys["trainings"]] == [*cells, fine_tuning.name]
    assert run_id == earlier
    assert totals == [2 * 10 + 7]
    assert keys["tags"] == {"vit_ray.num_cells": "2"}


def test_a_failing_cell_is_retried_and_then_shown_as_failed(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    tried: list[str] = []

    def train(recipe: Any, **_: Any) -> Any:
        tried.append(recipe.name)
        if recipe.name == cells[1].name:
            raise RunFailedError("the node is gone\nmore of it")
        return trained()

    parent = Parent()
    found = run_cells(monkeypatch, cells, train, Room(0, 1.7), parent, retries=2)
    assert tried == [cells[0].name, *[cells[1].name] * 3, cells[2].name]
    assert [one.error for one in found] == ["", "the node is gone", ""]
    kinds = parent.calls.kinds()
    assert kinds == ["started again", "started again", "failed cell"]
    assert study._totals(found)["study/failed_cells"] == 1.0


@pytest.mark.parametrize(("averaging", "told"), [(0.0, 0.5), (0.99, 0.7)])
def test_a_study_tells_the_accuracy_of_the_averaged_weights_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
    cells: list[Cell],
    capsys: pytest.CaptureFixture[str],
    averaging: float,
    told: float,
) -> None:
    changed = cells[0].recipe.with_changes(train={"averaging": averaging})
    metrics = {"eval/top1": 0.5} | ({"eval/averaged_top1": 0.7} if averaging else {})
    parent = Parent()
    found = run_cells(
        monkeypatch, [replace(cells[0], recipe=changed)],
        lambda recipe, **_: trained(**metrics), Room(0, 1.7), parent,
    )  # fmt: skip
    assert [made[-1] for made in parent.calls.made if made[0] == "child_ended"] == [told]
    monkeypatch.setenv("COLUMNS", "200")
    assert print_study(study.StudyResult(found, 1, "id", None, "")) == 0
    shown = capsys.readouterr().out
    assert ("top-1 averaged" in shown, "70.00%" in shown) == (bool(averaging),) * 2


def test_a_cell_that_failed_once_and_then_ended_is_no_failed_cell(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    errors = [RunFailedError("a worker died")]

    def train(recipe: Any, **_: Any) -> Any:
        if errors:
            raise errors.pop()
        return trained()

    found = run_cells(monkeypatch, cells, train, Room(0, 1.7), Parent())
    assert [one.error for one in found] == ["", "", ""]


@pytest.mark.parametrize("error", [RunDivergedError("reason"), OSError("disk full")])
def test_what_would_fail_again_is_not_tried_again_and_ends_no_other_cell(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell], error: Exception
) -> None:
    tried: list[str] = []

    def train(recipe: Any, **_: Any) -> Any:
        tried.append(recipe.name)
        if recipe.name == cells[0].name:
            raise error
        return trained()

    found = run_cells(monkeypatch, cells, train, Room(0, 1.7), Parent())
    assert tried == [cell.name for cell in cells]
    assert [bool(one.error) for one in found] == [True, False, False]


def test_side_by_side_the_largest_cell_begins(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    begun: list[str] = []

    def train(recipe: Any, **_: Any) -> Any:
        begun.append(recipe.name)
        return trained()

    parent = Parent()
    found = run_cells(monkeypatch, cells, train, Room(0, 3.4), parent)
    assert parent.first == cells[2].name
    assert cells[2].name in begun[:2]  # two begin together, each in a thread
    assert [one.cell.name for one in found] == [cell.name for cell in cells]  # as the grid has them
    begun.clear()
    run_cells(monkeypatch, cells, train, Room(0, 1.7), parent)
    assert begun == [cell.name for cell in cells]
    assert parent.first == cells[0].name


def test_a_study_uses_what_its_cluster_has_now(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.0)
    rooms = iter([Room(0, 1.7), Room(0, 1.7), ConnectionError("the head is away")])
    begun: list[str] = []

    def room() -> Room:
        found = next(rooms, Room(0, 3.4))
        if isinstance(found, Exception):
            raise found
        return found

    def train(recipe: Any, **_: Any) -> RunResult:
        begun.append(recipe.name)
        return trained()

    found = run_cells(monkeypatch, cells, train, room, Parent())
    assert [one.error for one in found] == ["", "", ""]
    assert len(begun) == 3
    assert "trainings start as before: the head is away" in caplog.text


def test_the_largest_goes_first_wherever_two_cells_fit_together() -> None:
    cells = {"wide": (8, 1.0), "broken": (1, 2.0), "large": (1, 3.0)}  # GPUs, exaFLOPs

    def need(cell: str) -> Room:
        return Room(cells[cell][0], 0.0)

    def ordered(gpus: int) -> list[str]:
        groups: list[Sequence[str]] = [[name] for name in cells]
        found = in_order(groups, Room(gpus, 0.0), need, lambda one: cells[one][1])
        return [group[0] for group in found]

    assert ordered(8) == ["large", "broken", "wide"]  # the widest beside none
    assert ordered(1) == list(cells)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"global_batch_size": 16}}, "-large-.* does not divide among 3 workers"),
        ({"sweep": {"scheduler": "asha", "grace_steps": 900}}, "-small-.*sweep.grace_steps=900"),
        ({"sweep": {"learning_rates": [0.1, 0.10000001]}}, "-small-.*have the name lr0.1"),
        (
            {"sweep": {"space": {"init_from": ["/a", "/b"]}}},
            "-small-.*sweep.space: init_from=/a: init_from comes from the cell; leave it out",
        ),
        (
            {"sweep": {"space": {"model": [{"dropout": 0.1}, {"depth": 2}]}}},
            "-small-.*sweep.space: model={.depth.: 2}: model.depth comes from the cell; leave",
        ),
        (
            {"sweep": {"space": {"optim.momentum": [0.7], "optim.frozen": [["head"]]}}},
            "-small-.*sweep.space: momentum=0.7, frozen=.*: optim.frozen has head",
        ),
    ],
)
def test_fine_tunings_of_all_cells_are_checked_before_the_first_is_trained(
    changes: Any, told: str, cells: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(ValueError, match=f"study.transfer 'tune' of cell .*{told}"):
        study._check_tasks(cells, (StudyTask(name="tune", recipe=str(path), changes=changes),))


def test_a_stop_leaves_the_cell_that_was_cut_short_and_those_behind_it(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    parent = Parent()

    def train(recipe: Any, **_: Any) -> Any:
        if recipe.name != cells[1].name:
            return trained()
        parent.calls.stop = "SIGTERM"
        return trained(is_complete=False)

    found = run_cells(monkeypatch, cells, train, Room(0, 1.7), parent)
    assert [one.cell.name for one in found] == [cells[0].name]


def test_finished_cells_are_not_trained_again(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    tried: list[str] = []

    def train(recipe: Any, **_: Any) -> Any:
        tried.append(recipe.name)
        return trained()

    before = {cells[1].name: CellResult(cells[1], {"eval/top1": 0.5}, "id", was_finished=True)}
    parent = Parent()
    found = run_cells(monkeypatch, cells, train, Room(0, 1.7), parent, before)
    assert tried == [cells[0].name, cells[2].name]
    assert parent.first == cells[0].name
    run_cells(
        monkeypatch, cells, train, Room(0, 1.7), parent, {one.cell.name: one for one in found}
    )
    assert parent.first is None
    assert [one.was_finished for one in found] == [False, True, False]


def test_a_finished_cell_still_gets_the_transfers_that_it_misses(
    monkeypatch: pytest.MonkeyPatch, cells: list[Cell]
) -> None:
    tasks: Any = (SimpleNamespace(name="pets"), SimpleNamespace(name="cars"))
    stored: list[Any] = []

    def transfer(cell: Cell, task: Any, *_: Any) -> Flow[dict[str, float]]:
        yield from ()
        if task.name == "cars":
            raise ValueError("no such data set")
        return {"transfer/pets_top1": 0.7}

    monkeypatch.setattr(study, "transfer", transfer)
    monkeypatch.setattr(study, "task_tags", lambda cell, task: {"tag": task.name})
    monkeypatch.setattr(study, "add_to_finished", lambda *args: stored.append(args[1:]))
    before = {cells[0].name: CellResult(cells[0], {"eval/top1": 0.5}, "id", True, missing=tasks)}
    (found,) = run_cells(monkeypatch, cells[:1], None, Room(0, 1.7), Parent(), before)
    assert found.metrics == {"eval/top1": 0.5, "transfer/pets_top1": 0.7}
    assert found.error == "transfer to cars: no such data set"
    assert stored == [("id", {"transfer/pets_top1": 0.7}, {"tag": "pets"})]


def test_the_total_counts_of_a_branch_what_it_computed(cells: list[Cell]) -> None:
    batch = cells[0].recipe.train.global_batch_size
    alone = {"study/exaflops": 2.0, "study/images_seen": 10.0 * batch}
    whole = CellResult(cells[0], alone, "id")
    branched = CellResult(cells[1], alone, "id", branched_from="long at step 8")
    unrecorded = CellResult(cells[2], {}, "id", branched_from="long at step 8")
    total = study._totals([whole, branched, unrecorded])["study/exaflops_total"]
    assert total == pytest.approx(2.0 + 2.0 * 2 / 10)


def test_accuracies_of_transfers_are_in_the_printed_table(
    cells: list[Cell], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    moved = CellResult(cells[0], {"eval/top1": 0.5, "transfer/pets_top1": 0.7}, "id")
    branched = CellResult(cells[1], {"eval/top1": 0.4}, "id", branched_from="long at step 8")
    both = study.StudyResult([moved, branched], 2, "id", None, "")
    assert print_study(both) == 0
    lines = capsys.readouterr().out.splitlines()
    (titles,) = [line for line in lines if "top-1" in line]
    assert titles.split("\u2503")[-2].strip() == "pets"
    (first,) = [line for line in lines if "small" in line]
    (second,) = [line for line in lines if "broken" in line]
    assert [line.split("\u2502")[-2].strip() for line in (first, second)] == ["70.00%", "-"]
    assert "1 epochs, branched" in second
    assert "branched" not in first
