"""The paper's tables in its own form, of the runs that there are, its numbers beside ours.

A table is made where at least one of its places can be filled. Means are over seeds, written
`mean +- standard deviation` where there are several; what was not run is not known, and never 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar

from vit_ray.report import paper
from vit_ray.report.figures import (
    accuracies_of,
    accuracy_name,
    decided_top1,
    epochs_of,
    is_tested,
    pretrainings,
    studied,
)
from vit_ray.report.paper_results import PRETRAINING, TABLE_2, TEST_SETS
from vit_ray.report.paper_results import table_2 as accuracy_of_paper
from vit_ray.report.runs import MEAN_TRANSFER, TRANSFER, RecordedRun
from vit_ray.report.tables import Column, Table, Value, number, percent

T = TypeVar("T")

SPLITS = {"train", "training", "train800", "train800val200"}
"""Names of folders that say which part of a data set they hold, and not which set it is."""


class Cell(NamedTuple):
    """What pre-trainings have in common that differ in the seed alone."""

    label: str
    images: float | None
    epochs: float | None

    @property
    def size(self) -> tuple[float, float]:
        """Orders the cells of a label: most images, then longest."""
        return self.images or 0.0, self.epochs or 0.0


@dataclass(frozen=True)
class Transfer:
    """An accuracy on a task after fine-tuning."""

    cell: Cell
    """Of the pre-training."""
    pretrained_on: str
    task: str
    optimizer: str
    """Of the pre-training; empty where it is not among the runs."""
    top1: float

    @property
    def model(self) -> str:
        """Row name of the pre-training."""
        return self.cell.label


def paper_tables(runs: Sequence[RecordedRun]) -> list[Table]:
    """Tables 2, 5, 6, 7, 8 and 9 as far as the runs fill them.

    Args:
        runs: one of each cell. Of trainings those that finished count.
    """
    found = transfers(runs)
    largest = of_largest_cells(found)
    tables = [
        table_2(largest, runs),
        table_5(largest),
        table_6(runs, found),
        table_7(largest, runs),
        table_8(runs),
        table_9(runs),
    ]
    return [table for table in tables if table.rows]


def transfers(runs: Sequence[RecordedRun]) -> list[Transfer]:
    """Those that cells record of themselves, and every other fine-tuning that was tested."""
    by_name = {run.name: run for run in pretrainings(runs)}
    found = [one for run in _finished_pretrainings(runs) for one in _of_cell(run)]
    vtabs = {run.run_id for run in runs if run.kind == "vtab"}
    for run in runs:
        top1 = decided_top1(run) if is_tested(run, "eval/top1") else None
        is_of_parent = {"vit_ray.vtab_task", "vit_ray.study_cell"} & run.tags.keys()
        is_alone = not is_of_parent and run.parent_id not in vtabs
        if run.kind == "finetune" and is_alone and run.status == "FINISHED" and top1 is not None:
            origin = _origin(run, by_name)
            if origin is not None:
                found.append(_transfer(origin, task_of(run), top1))
            else:
                unknown = Cell(run.label, None, None)
                found.append(Transfer(unknown, "not among these runs", task_of(run), "", top1))
    return found


def of_largest_cells(found: Sequence[Transfer]) -> list[Transfer]:
    """Of each pre-trained model those of the longest pre-training on most images.

    Tables without columns for data size and length would else take these for the spread of seeds.
    """

    def model(one: Transfer) -> tuple[str, str, str]:
        return one.model, one.pretrained_on, one.optimizer

    sizes = [(model(one), one.cell.size) for one in sorted(found, key=lambda one: one.cell.size)]
    largest = dict(sizes)
    return [one for one in found if one.cell.size == largest[model(one)]]


def _finished_pretrainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """One that was stopped has neither the accuracy nor the compute of its cell."""
    return [run for run in pretrainings(runs) if run.status == "FINISHED"]


def _of_cell(run: RecordedRun) -> Iterator[Transfer]:
    for key, top1 in run.metrics.items():
        if (found := TRANSFER.fullmatch(key)) and key != MEAN_TRANSFER:
            yield _transfer(run, found.group(1), top1)


def _transfer(origin: RecordedRun, task: str, top1: float) -> Transfer:
    optimizer = origin.params.get("optim.name", "unknown")
    return Transfer(_cell(origin), task_of(origin), task, optimizer, top1)


def _origin(run: RecordedRun, by_name: dict[str, RecordedRun]) -> RecordedRun | None:
    """The pre-training among the runs whose folder, or checkpoint, the weights were taken from."""
    place = PurePosixPath(run.params.get("init_from", ""))
    return by_name.get(place.parent.name if place.name.startswith("step-") else place.name)


def task_of(run: RecordedRun) -> str:
    """Name of the data that a run was trained on; of a mixture the names of all."""
    return " + ".join(map(_data_set, run.training_sets)) or "unknown data"


def _data_set(path: str) -> str:
    """The last folder that is none of a split."""
    parts = PurePosixPath(path).parts
    return next((part for part in reversed(parts) if part not in SPLITS), "unknown data")


def table_2(found: Sequence[Transfer], runs: Sequence[RecordedRun]) -> Table:
    """Comparison: a row for each data set, a column for each of our models and of the paper's."""
    models = _in_order((one.model, one.pretrained_on) for one in found)
    known = _of_papers_test_sets(runs)
    theirs = [*TABLE_2] if known else []
    columns = [
        Column("data set"),
        *(Column(f"{model} ({data})") for model, data in models),
        *(Column(f"the paper's {name} ({PRETRAINING[data]})", percent) for name, data in theirs),
    ]
    rows: list[list[Value]] = []
    for task in _in_order(one.task for one in found):
        ours = [
            _mean(
                one.top1 for one in found if (one.model, one.pretrained_on, one.task) == (*m, task)
            )
            for m in models
        ]
        rows.append([task, *ours, *(_of_paper(model, task, known) for model in theirs)])
    if rows:
        days = [_core_days(runs, found, *model) for model in models]
        printed = map(number, paper.TABLE_2_CORE_DAYS[: len(theirs)])
        rows.append(["core-days of pre-training", *days, *printed])
    caption = "Table 2: accuracy after fine-tuning, %"
    if known:
        caption += f"; the paper's columns, where ours is its test set, are {paper.SOURCE}"
    return Table(caption, columns, rows)


def _of_paper(model: tuple[str, str], task: str, known: set[str]) -> float | None:
    printed = accuracy_of_paper(*model, _key(task)) if task in known else None
    return None if printed is None else printed[0]


def _of_papers_test_sets(runs: Sequence[RecordedRun]) -> set[str]:
    """Tasks whose fine-tunings say that they were tested on as many images as the paper's."""
    sizes: dict[str, set[tuple[int, int]]] = {}
    for run in runs:
        if run.kind == "finetune":
            task = run.tags.get("vit_ray.transfer_task") or task_of(run)
            sizes.setdefault(task, set()).update(run.test_sets)
    published = {name: {(one.num_images, one.num_classes)} for name, one in TEST_SETS.items()}
    return {task for task, found in sizes.items() if found == published.get(_key(task))}


def _key(task: str) -> str:
    """A task as the paper's tables are keyed."""
    return task.lower().replace("-", "")


def _core_days(
    runs: Sequence[RecordedRun], found: Sequence[Transfer], model: str, data: str
) -> str | None:
    """Of the longest of the pre-trainings that were fine-tuned."""
    cells = {one.cell for one in found if (one.model, one.pretrained_on) == (model, data)}
    days = [
        run.metrics["cost/core_days"]
        for run in _finished_pretrainings(runs)
        if _cell(run) in cells and task_of(run) == data and "cost/core_days" in run.metrics
    ]
    return number(max(days)) if days else None


def table_5(found: Sequence[Transfer]) -> Table:
    """Transfer: a row for each pre-training data set and task, a column for each model."""
    known = [one for one in found if one.optimizer]
    models = _in_order(one.model for one in known)
    rows: list[list[Value]] = [
        [data, task, *(_mean(
            one.top1 for one in known
            if (one.pretrained_on, one.task, one.model) == (data, task, model)
        ) for model in models)]
        for data, task in _in_order((one.pretrained_on, one.task) for one in known)
    ]  # fmt: skip
    columns = [Column("pre-trained on"), Column("task"), *map(Column, models)]
    return Table("Table 5: top-1 after fine-tuning, %", columns, rows)


def table_6(runs: Sequence[RecordedRun], found: Sequence[Transfer]) -> Table:
    """Scaling: a row for each model, data size and length, with its accuracies and exaFLOPs."""
    cells = [
        run for run in _finished_pretrainings(studied(runs)) if "study/exaflops" in run.metrics
    ]
    keys = [key for key in accuracies_of(cells) if not TRANSFER.fullmatch(key)]
    tasks = _in_order(one.task for one in found if one.optimizer)
    columns = [
        Column("model"), Column("images", number), Column("epochs", number), Column("runs", number),
        *(Column(f"{accuracy_name(key)} %") for key in keys),
        *(Column(f"{task} %") for task in tasks),
        Column("exaFLOPs", number), Column("the paper's ImageNet %", percent),
        Column("the paper's exaFLOPs", number),
    ]  # fmt: skip
    theirs = {(row.name, float(row.epochs)): row for row in paper.TABLE_6}
    rows: list[list[Value]] = []
    for cell in _in_order(_cell(run) for run in cells):
        mine = [run for run in cells if _cell(run) == cell]
        row = theirs.get((mine[0].params.get("model.name", ""), cell.epochs or 0.0))
        rows.append([
            *cell, float(len(mine)),
            *(_mean(_tested(mine, key)) for key in keys),
            *(_mean(o.top1 for o in found if (o.cell, o.task) == (cell, task)) for task in tasks),
            statistics.fmean(run.metrics["study/exaflops"] for run in mine),
            row.imagenet if row else None, row.exaflops if row else None,
        ])  # fmt: skip
    caption = f"Table 6: scaling; the paper's columns, on JFT-300M, are {paper.SOURCE}"
    return Table(caption, columns, rows).used()


def _cell(run: RecordedRun) -> Cell:
    return Cell(run.label, run.metrics.get("study/train_images"), epochs_of(run))


def table_7(found: Sequence[Transfer], runs: Sequence[RecordedRun]) -> Table:
    """Adam and SGD: a row for each task and a column for each ResNet and optimizer."""
    names = {run.label: run.params.get("model.name", run.label) for run in runs}
    known = [(names.get(one.model, one.model), one) for one in found if one.optimizer]
    optimizers = {
        name: {one.optimizer for other, one in known if other == name} for name, _ in known
    }
    models = [name for name, used in optimizers.items() if {"adamw", "sgd"} <= used]
    pairs = [(model, optimizer) for model in models for optimizer in ("adamw", "sgd")]
    rows: list[list[Value]] = [
        [task, *(_mean(
            one.top1 for name, one in known
            if (name, one.optimizer, one.task) == (*pair, task)
        ) for pair in pairs)]
        for task in _in_order(one.task for name, one in known if name in models)
    ]  # fmt: skip
    columns = [Column("task"), *(Column(f"{model}, {name}") for model, name in pairs)]
    theirs = "; ".join(f"{name} {adam} and {sgd}" for name, adam, sgd in paper.TABLE_7)
    caption = f"Table 7: Adam and SGD, %; {paper.SOURCE} has means of {theirs}"
    return Table(caption, columns, rows)


def table_8(runs: Sequence[RecordedRun]) -> Table:
    """Positions: a row for each kind, a column for each place, the paper's beside."""
    held = [
        run for run in _finished_pretrainings(studied(runs)) if run.params.get("model.positions")
    ]
    keys = accuracies_of(held)
    kinds = _in_order(run.params["model.positions"] for run in held)
    kinds = [kind for kind in kinds if kind != "None"]
    if not keys or len(kinds) < 2:
        return Table("", [], [])
    columns = [
        Column("positions"),
        *(Column(place.replace("_", " ")) for place in paper.POSITION_PLACES),
        *(Column(f"the paper's {p.replace('_', ' ')}", percent) for p in paper.POSITION_PLACES),
    ]
    rows: list[list[Value]] = [
        [kind, *(_mean(_tested((
            run for run in held
            if run.params["model.positions"] == kind and _place(run) == place
        ), keys[0])) for place in paper.POSITION_PLACES), *paper.TABLE_8.get(kind, (None,) * 3)]
        for kind in kinds
    ]  # fmt: skip
    caption = f"Table 8: {accuracy_name(keys[0])} by positions, %; the paper's are {paper.SOURCE}"
    return Table(caption, columns, rows)


def _place(run: RecordedRun) -> str:
    place = run.params.get("model.positions_at", "None")
    return "stem" if place == "None" else place


def table_9(runs: Sequence[RecordedRun]) -> Table:
    """VTAB: a row for each of our models and the paper's, a column for each task."""
    ours = {
        run.name: [run.metrics.get(f"vtab/{task}_top1") for task in (*paper.VTAB_TASKS, "mean")]
        for run in runs
        if run.kind == "vtab"
    }
    if not any(value is not None for row in ours.values() for value in row):
        return Table("", [], [])
    theirs = {
        f"the paper's {name}": [value / 100 for value in (*values, statistics.fmean(values))]
        for name, values in paper.TABLE_9.items()
    }
    columns = [Column("model"), *(Column(task, percent) for task in (*paper.VTAB_TASKS, "mean"))]
    rows: list[list[Value]] = [[name, *values] for name, values in ours.items()]
    rows += [[name, *values] for name, values in theirs.items()]
    return Table(f"Table 9: VTAB-1k, top-1 %; {paper.SOURCE}", columns, rows)


def _tested(runs: Iterable[RecordedRun], key: str) -> list[float]:
    return [run.metrics[key] for run in runs if key in run.metrics and is_tested(run, key)]


def _in_order(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def _mean(values: Iterable[float]) -> str | None:
    """In percent, with the deviation over seeds where there are several."""
    known = list(values)
    if not known:
        return None
    spread = f" +- {percent(statistics.stdev(known))}" if len(known) > 1 else ""
    return f"{percent(statistics.fmean(known))}{spread}"
