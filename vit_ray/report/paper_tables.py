"""The paper's tables in its own form, of the runs that there are, its numbers beside ours.

A table is made where at least one of its places can be filled. Means are over seeds, written
`mean +- standard deviation` where there are several; what was not run is not known, and never 0.
Runs of one place that differ in more than their seed are rows of their own, which say in what.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vit_ray.report import paper
from vit_ray.report.figures import (
    accuracies_of,
    accuracy_name,
    decided_top1,
    epochs_of,
    is_tested,
    is_trial,
    pretrainings,
    studied,
    tunings_of,
)
from vit_ray.report.groups import (
    PRETRAINING as PRETRAINING_KEY,
)
from vit_ray.report.groups import (
    TEST_SET,
    TRAINING_SET,
    Group,
    differences,
    differing_keys,
)
from vit_ray.report.paper import PRETRAINING, TABLE_2, TEST_SETS
from vit_ray.report.runs import MEAN_TRANSFER, TRANSFER, RecordedRun, set_name
from vit_ray.report.seeds import Mean, by_group, mean_of
from vit_ray.report.tables import Column, Table, Value, number, percent

T = TypeVar("T")
R = TypeVar("R", bound=Hashable)
C = TypeVar("C", bound=Hashable)

DIFFERS: Column = Column("differs in")


@dataclass(frozen=True)
class Transfer:
    """An accuracy on a task after fine-tuning."""

    task: str
    top1: float
    group: Group
    """Of pre-training and fine-tuning."""
    seed: tuple[str, ...]
    origin: RecordedRun | None
    """The pre-training; None where it is not among the runs."""
    label: str
    """Of the model."""

    @property
    def pretrained_on(self) -> str:
        """Name of the data."""
        return task_of(self.origin) if self.origin else "not among these runs"

    @property
    def optimizer(self) -> str:
        """Of the pre-training; empty where it is not among the runs."""
        return self.origin.params.get("optim.name", "unknown") if self.origin else ""

    @property
    def model(self) -> tuple[str, str]:
        """Row name of the pre-training, and its data."""
        return self.label, self.pretrained_on


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
        table_7(largest),
        table_8(runs),
        table_9(runs),
    ]
    return [table for table in tables if table.rows]


def transfers(runs: Sequence[RecordedRun]) -> list[Transfer]:
    """Those that cells record of themselves, and every other fine-tuning that was tested."""
    found = [one for run in _finished_pretrainings(runs) for one in _of_cell(run)]
    vtabs = {run.run_id for run in runs if run.kind == "vtab"}
    for run in runs:
        top1 = decided_top1(run) if is_tested(run, "eval/top1") else None
        is_of_parent = {"vit_ray.vtab_task", "vit_ray.study_cell"} & run.tags.keys()
        is_alone = not is_of_parent and run.parent_id not in vtabs
        if run.kind == "finetune" and is_alone and run.status == "FINISHED" and top1 is not None:
            label = run.origin.label if run.origin else run.label
            one = Transfer(task_of(run), top1, run.group, run.seed, run.origin, label)
            found.append(one)
    return [*{(one.task, one.group, one.seed): one for one in found}.values()]


def of_largest_cells(found: Sequence[Transfer]) -> list[Transfer]:
    """Of each pre-trained model those of the longest pre-training on most images.

    Tables without columns for data size and length have no rows for the others.
    """

    def model(one: Transfer) -> tuple[str, str | None, str]:
        data = one.origin.group.values.get(TRAINING_SET) if one.origin else None
        return one.label, data, one.optimizer

    def size(one: Transfer) -> tuple[float, float]:
        if one.origin is None:
            return 0.0, 0.0
        return one.origin.metrics.get("study/train_images", 0.0), epochs_of(one.origin) or 0.0

    ordered = sorted(found, key=size)
    largest = {model(one): size(one) for one in ordered}
    return [one for one in found if size(one) == largest[model(one)]]


def _finished_pretrainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """One that was stopped has neither the accuracy nor the compute of its cell."""
    return [run for run in pretrainings(runs) if run.status == "FINISHED"]


def _of_cell(run: RecordedRun) -> Iterator[Transfer]:
    for key, top1 in run.metrics.items():
        if (task := TRANSFER.fullmatch(key)) and key != MEAN_TRANSFER:
            group = _group_of_cells_transfer(run, task.group(1))
            yield Transfer(task.group(1), top1, group, run.seed, run, run.label)


def _group_of_cells_transfer(run: RecordedRun, task: str) -> Group:
    """Of the cell and of the fine-tunings of the task, less what a sweep of the cell has chosen."""
    tuned = tunings_of(run, task)
    if not tuned:
        whole = {PRETRAINING_KEY + key: text for key, text in run.group.items}
        return Group.of(whole, run.group.names)
    siblings = [one for one in run.tuned if one.parent_id == tuned[0].parent_id and is_trial(one)]
    return tuned[0].group.without(*differing_keys(one.group for one in siblings))


def task_of(run: RecordedRun) -> str:
    """Name of the data that a run was trained on; of a mixture the names of all."""
    return " + ".join(map(set_name, run.training_sets)) or "unknown data"


def _spread(
    found: Sequence[Transfer], row: Callable[[Transfer], R], column: Callable[[Transfer], C]
) -> list[tuple[R, str, dict[C, Mean]]]:
    """Means over seeds by row and column; a row once for each thing in which its runs differ.

    Returns:
        Row, in what its runs differ from those of its other rows, and means by column.
    """
    places: dict[R, dict[C, dict[Group, dict[tuple[str, ...], float]]]] = {}
    for one in found:
        groups = places.setdefault(row(one), {}).setdefault(column(one), {})
        groups.setdefault(one.group, {})[one.seed] = one.top1
    rows: dict[tuple[R, str], dict[C, Mean]] = {}
    for name, columns in places.items():
        for place, groups in columns.items():
            for group, rest in differences([*groups]).items():
                if mean := mean_of([*groups[group].values()]):
                    rows.setdefault((name, rest), {})[place] = mean
    return [(name, rest, means) for (name, rest), means in rows.items()]


def _text(mean: Mean | None) -> str | None:
    return None if mean is None else str(mean)


def table_2(found: Sequence[Transfer], runs: Sequence[RecordedRun]) -> Table:
    """Comparison: a row for each data set, a column for each of our models and of the paper's."""
    models = _in_order(one.model for one in found)
    known = _of_papers_test_sets(runs)
    theirs = [*TABLE_2] if known else []
    columns = [
        Column("data set"),
        DIFFERS,
        *(Column(f"{model} ({data})") for model, data in models),
        *(Column(f"the paper's {name} ({PRETRAINING[data]})", percent) for name, data in theirs),
    ]

    def of_paper(model: tuple[str, str], task: str) -> float | None:
        printed = paper.table_2(*model, _key(task)) if task in known else None
        return None if printed is None else printed[0]

    rows: list[list[Value]] = [
        [
            task,
            rest,
            *(_text(means.get(model)) for model in models),
            *(of_paper(model, task) for model in theirs),
        ]
        for task, rest, means in _spread(found, lambda one: one.task, lambda one: one.model)
    ]
    if rows:
        days = [_core_days([one for one in found if one.model == model]) for model in models]
        days += map(number, paper.TABLE_2_CORE_DAYS[: len(theirs)])
        if any(days):
            rows.append(["core-days of pre-training", "", *days])
    caption = "Table 2: accuracy after fine-tuning, %"
    if known:
        caption += f"; the paper's columns, where ours is its test set, are {paper.SOURCE}"
    return Table(caption, columns, rows).used()


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


def _core_days(found: Sequence[Transfer]) -> str | None:
    """Of the dearest group of the pre-trainings that were fine-tuned, mean over seeds."""
    origins = by_group(one.origin for one in found if one.origin is not None)
    days = [
        statistics.fmean(known)
        for members in origins.values()
        if (known := [value for run in members if (value := run.metrics.get("cost/core_days"))])
    ]
    return number(max(days)) if days else None


def table_5(found: Sequence[Transfer]) -> Table:
    """Transfer: a row for each pre-training data set and task, a column for each model."""
    known = [one for one in found if one.origin is not None]
    models = _in_order(one.label for one in known)
    spread = _spread(known, lambda one: (one.pretrained_on, one.task), lambda one: one.label)
    rows: list[list[Value]] = [
        [data, task, rest, *(_text(means.get(model)) for model in models)]
        for (data, task), rest, means in spread
    ]
    columns = [Column("pre-trained on"), Column("task"), DIFFERS, *map(Column, models)]
    return Table("Table 5: top-1 after fine-tuning, %", columns, rows).used()


def table_6(runs: Sequence[RecordedRun], found: Sequence[Transfer]) -> Table:
    """Scaling: a row for each model, data size and length, with its accuracies and exaFLOPs."""
    cells = [
        run for run in _finished_pretrainings(studied(runs)) if "study/exaflops" in run.metrics
    ]
    keys = [key for key in accuracies_of(cells) if not TRANSFER.fullmatch(key)]
    tasks = _in_order(one.task for one in found if one.origin is not None)
    columns = [
        Column("model"), Column("images", number), Column("epochs", number), DIFFERS,
        Column("runs", number),
        *(Column(f"{accuracy_name(key)} %") for key in keys),
        *(Column(f"{task} %") for task in tasks),
        Column("exaFLOPs", number), Column("the paper's ImageNet %", percent),
        Column("the paper's exaFLOPs", number),
    ]  # fmt: skip
    theirs = {(row.name, float(row.epochs)): row for row in paper.TABLE_6}
    groups = by_group(cells)
    tuned: dict[tuple[Group, str], list[Transfer]] = {}
    for one in found:
        if one.origin is not None:
            tuned.setdefault((one.origin.group, one.task), []).append(one)
    rest = _differences_in_table(groups)
    rows: list[list[Value]] = []
    for group, mine in groups.items():
        epochs = epochs_of(mine[0])
        row = theirs.get((mine[0].params.get("model.name", ""), epochs or 0.0))
        rows.append([
            mine[0].label, mine[0].metrics.get("study/train_images"), epochs, rest[group],
            float(len(mine)),
            *(_text(mean_of(_tested(mine, key))) for key in keys),
            *(_of_task(tuned.get((group, task), [])) for task in tasks),
            statistics.fmean(run.metrics["study/exaflops"] for run in mine),
            row.imagenet if row else None, row.exaflops if row else None,
        ])  # fmt: skip
    caption = f"Table 6: scaling; the paper's columns, on JFT-300M, are {paper.SOURCE}"
    return Table(caption, columns, rows).used()


def _differences_in_table(groups: dict[Group, list[RecordedRun]]) -> dict[Group, str]:
    """In what rows of one label, data size and length differ, and sets in which any rows do."""
    rows: dict[tuple[str, str, str], list[Group]] = {}
    for group, (run, *_) in groups.items():
        shown = (run.metrics.get("study/train_images"), epochs_of(run))
        images, epochs = ("" if one is None else number(one) for one in shown)
        rows.setdefault((run.label, images, epochs), []).append(group)
    varied = {TRAINING_SET, TEST_SET} & {*differing_keys(groups)}
    sets = differences([group.only(lambda key: key in varied) for group in groups])
    found = {}
    for alike in rows.values():
        rest = differences([group.without(*varied) for group in alike])
        for group in alike:
            parts = sets[group.only(lambda key: key in varied)], rest[group.without(*varied)]
            found[group] = ", ".join(part for part in parts if part)
    return found


def _of_task(found: Sequence[Transfer]) -> str | None:
    """Mean over seeds of a cell's transfers to a task; several means where fine-tunings differ."""
    means = [
        f"{mean} ({rest})" if rest else str(mean)
        for _, rest, means in _spread(found, lambda one: one.task, lambda one: one.task)
        for mean in means.values()
    ]
    return "; ".join(means) or None


def table_7(found: Sequence[Transfer]) -> Table:
    """Adam and SGD: a row for each task and a column for each ResNet and optimizer."""

    def pair(one: Transfer) -> tuple[str, str]:
        name = one.origin.params.get("model.name", one.label) if one.origin else one.label
        return name, one.optimizer

    pairs = {pair(one) for one in found}
    models = [
        name
        for name in _in_order(pair(one)[0] for one in found)
        if {(name, "adamw"), (name, "sgd")} <= pairs
    ]
    columns = [(model, optimizer) for model in models for optimizer in ("adamw", "sgd")]
    known = [one for one in found if pair(one) in columns]
    rows: list[list[Value]] = [
        [task, rest, *(_text(means.get(column)) for column in columns)]
        for task, rest, means in _spread(known, lambda one: one.task, pair)
    ]
    heads = [Column("task"), DIFFERS, *(Column(f"{model}, {name}") for model, name in columns)]
    theirs = "; ".join(f"{name} {adam} and {sgd}" for name, adam, sgd in paper.TABLE_7)
    caption = f"Table 7: Adam and SGD, %; {paper.SOURCE} has means of {theirs}"
    return Table(caption, heads, rows).used()


def table_8(runs: Sequence[RecordedRun]) -> Table:
    """Positions: a row for each kind, a column for each place, the paper's beside.

    Runs that differ in more than their positions are in rows of their own.
    """
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
        DIFFERS,
        *(Column(place.replace("_", " ")) for place in paper.POSITION_PLACES),
        *(Column(f"the paper's {p.replace('_', ' ')}", percent) for p in paper.POSITION_PLACES),
    ]
    means: dict[tuple[str, Group], dict[str, Mean]] = {}
    for group, (first, *others) in by_group(held).items():
        kind, rest = first.params["model.positions"], group.without(*_POSITIONS)
        mean = mean_of(_tested([first, *others], keys[0]))
        if kind in kinds and mean is not None:
            means.setdefault((kind, rest), {})[_place(first)] = mean
    names = differences([rest for _, rest in means])
    rows: list[list[Value]] = [
        [
            kind, names[rest], *(_text(mine.get(place)) for place in paper.POSITION_PLACES),
            *paper.TABLE_8.get(kind, (None,) * 3),
        ]
        for (kind, rest), mine in means.items()
    ]  # fmt: skip
    caption = f"Table 8: {accuracy_name(keys[0])} by positions, %; the paper's are {paper.SOURCE}"
    return Table(caption, columns, rows).used()


_POSITIONS = ("model.positions", "model.positions_at")


def _place(run: RecordedRun) -> str:
    place = run.params.get("model.positions_at", "None")
    return "stem" if place == "None" else place


def table_9(runs: Sequence[RecordedRun]) -> Table:
    """VTAB: a row for each of our models and the paper's, a column for each task."""
    ours = [
        (run.name, [run.metrics.get(f"vtab/{t}_top1") for t in (*paper.VTAB_TASKS, "mean")])
        for run in runs
        if run.kind == "vtab"
    ]
    if not any(value is not None for _, row in ours for value in row):
        return Table("", [], [])
    theirs = {
        f"the paper's {name}": [value / 100 for value in (*values, statistics.fmean(values))]
        for name, values in paper.TABLE_9.items()
    }
    columns = [Column("model"), *(Column(task, percent) for task in (*paper.VTAB_TASKS, "mean"))]
    rows: list[list[Value]] = [[name, *values] for name, values in ours]
    rows += [[name, *values] for name, values in theirs.items()]
    return Table(f"Table 9: VTAB-1k, top-1 %; {paper.SOURCE}", columns, rows)


def _tested(runs: Iterable[RecordedRun], key: str) -> list[float]:
    return [run.metrics[key] for run in runs if key in run.metrics and is_tested(run, key)]


def _in_order(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
