"""The paper's tables in its own form, filled from the available runs, with its numbers next to
ours.

A table is made if at least one of its cells can be filled. Means are over seeds, written `mean +-
standard deviation` if there are several; a value that was not run is unknown, and never 0. Runs of
one cell that differ in more than their seed are separate rows, which name the difference.
"""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from vit_ray.metric_names import COST_CORE_DAYS, EVAL_TOP1, STUDY_EXAFLOPS, VTAB_GROUP
from vit_ray.report import paper
from vit_ray.report.runs import IMAGES_KEY, MEAN_TRANSFER, TRANSFER, RecordedRun
from vit_ray.report.statistics.accuracies import (
    accuracies_of,
    accuracy_name,
    decided_top1,
    epochs_of,
    studied,
    trainings,
    tunings_of,
)
from vit_ray.report.statistics.groups import (
    PRETRAINING,
    TEST_SET,
    TRAINING_SET,
    Group,
    differences,
    differing_keys,
)
from vit_ray.report.statistics.seeds import Mean, by_group, mean_of
from vit_ray.report.tables import Column, Table, Value, number, percent

R = TypeVar("R", bound=Hashable)
C = TypeVar("C", bound=Hashable)

DIFFERS: Final = Column("differs in")
CORE_DAYS: Final = "core-days of pre-training"
PUBLISHED: Final = {
    key: {(one.num_images, one.num_classes)} for key, one in paper.TEST_SETS.items()
}
"""Images and classes of the paper's test sets."""
IMAGENET: Final = PUBLISHED["imagenet"]
THEIRS: Final = "the paper's"
"""Prefix of column titles with the paper's numbers."""


@dataclass(frozen=True)
class Transfer:
    """An accuracy on a task after fine-tuning."""

    task: str
    top1: float
    group: Group
    """Group of pre-training and fine-tuning together."""
    seed: tuple[str, ...]
    origin: RecordedRun | None
    """The pre-training; None if it is not among the runs."""
    label: str
    """Label of the model."""

    @property
    def pretrained_on(self) -> str:
        return self.origin.training_name if self.origin else "not among these runs"

    @property
    def optimizer(self) -> str:
        """Optimizer of the pre-training; empty if it is not among the runs."""
        return self.origin.params.get("optim.name", "unknown") if self.origin else ""

    @property
    def model(self) -> tuple[str, str]:
        """Row name of the pre-training, and its data."""
        return self.label, self.pretrained_on

    @property
    def size(self) -> tuple[float, float]:
        """Images and epochs of the pre-training; 0 if it is not among the runs."""
        if self.origin is None:
            return 0.0, 0.0
        return self.origin.metrics.get(IMAGES_KEY, 0.0), epochs_of(self.origin) or 0.0


def paper_tables(runs: Sequence[RecordedRun]) -> list[Table]:
    """Tables 2, 5, 6, 7, 8 and 9 as far as the runs fill them.

    Args:
        runs: one of each cell. Only finished trainings count.
    """
    found = transfers(runs)
    # Tables without columns for data size and length have the longest training on most images.
    models = [
        (one.label, one.origin and one.origin.group.values.get(TRAINING_SET), one.optimizer)
        for one in found
    ]
    sizes: dict[Hashable, tuple[float, float]] = {}
    for model, one in zip(models, found, strict=True):
        sizes[model] = max(sizes.get(model, one.size), one.size)
    most = [one for model, one in zip(models, found, strict=True) if one.size == sizes[model]]
    tables = [
        table_2(most, runs),
        table_5(most),
        table_6(runs, found),
        table_7(most),
        table_8(runs),
        table_9(runs),
    ]
    return [table for table in tables if table.rows]


def comparing(tables: Sequence[Table], runs: Sequence[RecordedRun]) -> list[Table]:
    """Those with the paper's numbers or several of ours; a single value is no table.

    Table 6 needs a run that was tested on one of the paper's sets.
    """
    is_papers = any({*run.test_sets} in PUBLISHED.values() for run in runs)
    found = []
    for table in tables:
        models = {column.title for column in table.columns} - {"data set", "pre-trained on", "task"}
        is_theirs = any(title.startswith(THEIRS) for title in models)
        has_rows = sum(row[0] != CORE_DAYS for row in table.rows) > 1
        if table.caption.startswith("Table 6"):
            found += [table] if has_rows and is_papers else []
        elif is_theirs or has_rows or len(models) > 1:
            found.append(table)
    return found


def transfers(runs: Sequence[RecordedRun]) -> list[Transfer]:
    """Accuracies that cells record themselves, and every other fine-tuning that was tested."""
    found = []
    for run in _finished_pretrainings(runs):
        for key, top1 in run.metrics.items():
            if (task := TRANSFER.fullmatch(key)) and key != MEAN_TRANSFER:
                # The group of the cell and of the task's fine-tunings, without a sweep's trials.
                if tunings := tunings_of(run, task.group(1)):
                    parent = tunings[0].parent_id
                    trials = [t.group for t in run.tuned if t.parent_id == parent and t.is_trial]
                    group = tunings[0].group.without(*differing_keys(trials))
                else:
                    whole = {PRETRAINING + key: text for key, text in run.group.items}
                    group = Group.of(whole, run.group.names)
                found.append(Transfer(task.group(1), top1, group, run.seed, run, run.label))
    vtabs = {run.run_id for run in runs if run.kind == "vtab"}
    for run in runs:
        tuned = decided_top1(run) if run.is_tested(EVAL_TOP1) else None
        is_of_parent = {"vit_ray.vtab_task", "vit_ray.study_cell"} & run.tags.keys()
        is_alone = not is_of_parent and run.parent_id not in vtabs
        if run.kind == "finetune" and is_alone and run.status == "FINISHED" and tuned is not None:
            label, name = (run.origin or run).label, run.training_name
            found.append(Transfer(name, tuned, run.group, run.seed, run.origin, label))
    return [*{(one.task, one.group, one.seed): one for one in found}.values()]


def _finished_pretrainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Trainings from random weights; stopped ones have no accuracy or compute of the cell."""
    return [
        run
        for run in trainings(runs)
        if run.kind != "finetune" and "vit_ray.sweep_stage" not in run.tags
        if run.status == "FINISHED"
    ]


def _spread(
    found: Iterable[Transfer], row: Callable[[Transfer], R], column: Callable[[Transfer], C]
) -> list[tuple[R, str, dict[C, Mean]]]:
    """Means over seeds by row and column; one row for each combination in which its runs differ.

    Returns:
        Row, how its runs differ from those of the other rows, and means by column.
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


def _texts(means: dict[C, Mean], columns: Iterable[C]) -> list[str | None]:
    return [str(means[column]) if column in means else None for column in columns]


def table_2(found: Sequence[Transfer], runs: Sequence[RecordedRun]) -> Table:
    """Comparison: a row for each data set, a column for each of our models and of the paper's.

    The paper's values are shown for tasks whose fine-tunings recorded as many test images and
    classes as the paper's test set has.
    """
    sizes: dict[str, set[tuple[int, int]]] = {}
    for run in runs:
        if run.kind == "finetune":
            task = run.tags.get("vit_ray.transfer_task") or run.training_name
            sizes.setdefault(task, set()).update(run.test_sets)
    keys = {task: task.lower().replace("-", "") for task in sizes}
    known = {task for task in sizes if sizes[task] == PUBLISHED.get(keys[task])}
    theirs = [*paper.TABLE_2] if known else []
    models = list(dict.fromkeys(one.model for one in found))
    rows: list[list[Value]] = []
    for task, rest, means in _spread(found, lambda one: one.task, lambda one: one.model):
        printed = [paper.table_2(*m, keys[task]) if task in known else None for m in theirs]
        rows.append([task, rest, *_texts(means, models), *(p and p[0] for p in printed)])
    days: list[str | None] = []
    for model in models:  # of the most costly group of its pre-trainings, mean over seeds
        origins = [one.origin for one in found if one.model == model and one.origin is not None]
        costs = [
            statistics.fmean(its)
            for members in by_group(origins).values()
            if (its := [cost for run in members if (cost := run.metrics.get(COST_CORE_DAYS))])
        ]
        days.append(number(max(costs)) if costs else None)
    days += map(number, paper.TABLE_2_CORE_DAYS[: len(theirs)])
    if rows and any(days):
        rows.append([CORE_DAYS, "", *days])
    columns = [
        Column("data set"), DIFFERS, *(Column(f"{model} ({data})") for model, data in models),
        *(
            Column(f"the paper's {name} ({paper.PRETRAINING[data]})", percent)
            for name, data in theirs
        ),
    ]  # fmt: skip
    source = f"; the paper's columns, where our test set is the paper's, are {paper.SOURCE}"
    caption = f"Table 2: accuracy after fine-tuning, %{source if known else ''}"
    return Table(caption, columns, rows).used()


def table_5(found: Sequence[Transfer]) -> Table:
    """Transfer: a row for each pre-training data set and task, a column for each model."""
    known = [one for one in found if one.origin is not None]
    models = list(dict.fromkeys(one.label for one in known))
    spread = _spread(known, lambda one: (one.pretrained_on, one.task), lambda one: one.label)
    rows = [[data, task, rest, *_texts(means, models)] for (data, task), rest, means in spread]
    columns = [Column("pre-trained on"), Column("task"), DIFFERS, *map(Column, models)]
    return Table("Table 5: top-1 after fine-tuning, %", columns, rows).used()


def table_6(runs: Sequence[RecordedRun], found: Sequence[Transfer]) -> Table:
    """Scaling: a row for each model, data size and length, with its accuracies and exaFLOPs.

    The paper's accuracy is shown for models that were tested on as many images and classes.
    """
    cells = [run for run in _finished_pretrainings(studied(runs)) if STUDY_EXAFLOPS in run.metrics]
    keys = [key for key in accuracies_of(cells) if not TRANSFER.fullmatch(key)]
    tuned: dict[Group, dict[str, list[Transfer]]] = {}
    for one in found:
        if one.origin is not None:
            tuned.setdefault(one.origin.group, {}).setdefault(one.task, []).append(one)
    tasks = list(dict.fromkeys(one.task for one in found if one.origin is not None))

    def means(of: Sequence[Transfer]) -> str | None:
        """Over the seeds of a cell's transfers to a task; several if fine-tunings differ."""
        return "; ".join(
            f"{mean} ({rest})" if rest else str(mean)
            for _, rest, columns in _spread(of, lambda one: one.task, lambda one: one.task)
            for mean in columns.values()
        ) or None  # fmt: skip

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
    rest = _differences_in_table(groups)
    rows: list[list[Value]] = []
    for group, mine in groups.items():
        epochs = epochs_of(mine[0])
        row = theirs.get((mine[0].params.get("model.name", ""), epochs or 0.0))
        tested = [_tested(mine, key) for key in keys]
        rows.append([
            mine[0].label, mine[0].metrics.get(IMAGES_KEY), epochs, rest[group],
            float(len(mine)),
            *(None if mean is None else str(mean) for mean in tested),
            *(means(tuned.get(group, {}).get(task, [])) for task in tasks),
            statistics.fmean(run.metrics[STUDY_EXAFLOPS] for run in mine),
            row.imagenet if row and {*mine[0].test_sets} == IMAGENET else None,
            row.exaflops if row else None,
        ])  # fmt: skip
    has_theirs = any(row[-1] is not None for row in rows)
    source = f"; the paper's columns, on JFT-300M, are {paper.SOURCE}" if has_theirs else ""
    return Table(f"Table 6: scaling{source}", columns, rows).used()


def _differences_in_table(groups: dict[Group, list[RecordedRun]]) -> dict[Group, str]:
    """How rows of one label, data size and length differ, and the sets that differ between rows."""
    rows: dict[tuple[str, ...], list[Group]] = {}
    for group, (run, *_) in groups.items():
        shown = (run.metrics.get(IMAGES_KEY), epochs_of(run))
        texts = ("" if one is None else number(one) for one in shown)
        rows.setdefault((run.label, *texts), []).append(group)
    varied = {TRAINING_SET, TEST_SET} & {*differing_keys(groups)}
    sets = differences([group.only(varied.__contains__) for group in groups])
    found = {}
    for alike in rows.values():
        rest = differences([group.without(*varied) for group in alike])
        for group in alike:
            parts = sets[group.only(varied.__contains__)], rest[group.without(*varied)]
            found[group] = ", ".join(filter(None, parts))
    return found


def table_7(found: Sequence[Transfer]) -> Table:
    """Adam and SGD: a row for each task and a column for each ResNet and optimizer."""

    def pair(one: Transfer) -> tuple[str, str]:
        name = one.origin.params.get("model.name", one.label) if one.origin else one.label
        return name, one.optimizer

    pairs = dict.fromkeys(map(pair, found))
    models = dict.fromkeys(m for m, _ in pairs if {(m, "adamw"), (m, "sgd")} <= pairs.keys())
    columns = [(model, optimizer) for model in models for optimizer in ("adamw", "sgd")]
    known = [one for one in found if pair(one) in columns]
    rows = [
        [task, rest, *_texts(means, columns)]
        for task, rest, means in _spread(known, lambda one: one.task, pair)
    ]
    heads = [Column("task"), DIFFERS, *(Column(f"{model}, {name}") for model, name in columns)]
    theirs = "; ".join(f"{name} {adam} and {sgd}" for name, adam, sgd in paper.TABLE_7)
    caption = f"Table 7: Adam and SGD, %; {paper.SOURCE} has means of {theirs}"
    return Table(caption, heads, rows).used()


def table_8(runs: Sequence[RecordedRun]) -> Table:
    """Positions: a row for each kind, a column for each place, and the paper's.

    Runs that differ in more than their positions are in separate rows.
    """
    held = _finished_pretrainings(studied(runs))
    held = [run for run in held if run.params.get("model.positions", "None") != "None"]
    keys = accuracies_of(held)
    if not keys or len({run.params["model.positions"] for run in held}) < 2:
        return Table("", [], [])
    means: dict[tuple[str, Group], dict[str, Mean]] = {}
    for group, members in by_group(held).items():
        params, rest = members[0].params, group.without("model.positions", "model.positions_at")
        if mean := _tested(members, keys[0]):
            place = params.get("model.positions_at", "None").replace("None", "stem")
            means.setdefault((params["model.positions"], rest), {})[place] = mean
    names = differences([rest for _, rest in means])
    rows = [
        [
            kind, names[rest], *_texts(mine, paper.POSITION_PLACES),
            *paper.TABLE_8.get(kind, (None,) * 3),
        ]
        for (kind, rest), mine in means.items()
    ]  # fmt: skip
    places = [place.replace("_", " ") for place in paper.POSITION_PLACES]
    theirs = [Column(f"the paper's {place}", percent) for place in places]
    columns = [Column("positions"), DIFFERS, *map(Column, places), *theirs]
    caption = f"Table 8: {accuracy_name(keys[0])} by positions, %; the paper's are {paper.SOURCE}"
    return Table(caption, columns, rows).used()


def table_9(runs: Sequence[RecordedRun]) -> Table:
    """VTAB: a row for each of our models and the paper's, a column for each task."""
    tasks = (*paper.VTAB_TASKS, "mean")
    rows: list[list[Value]] = [
        [run.name, *(run.metrics.get(f"{VTAB_GROUP}{task}_top1") for task in tasks)]
        for run in runs
        if run.kind == "vtab"
    ]
    if not any(value is not None for _, *values in rows for value in values):
        return Table("", [], [])
    for name, values in paper.TABLE_9.items():
        mean = statistics.fmean(values)
        rows.append([f"the paper's {name}", *(value / 100 for value in (*values, mean))])
    columns = [Column("model"), *(Column(task, percent) for task in tasks)]
    return Table(f"Table 9: VTAB-1k, top-1 %; {paper.SOURCE}", columns, rows)


def _tested(runs: Iterable[RecordedRun], key: str) -> Mean | None:
    """Of the runs that were not tested on a dev split."""
    return mean_of([run.metrics[key] for run in runs if key in run.metrics and run.is_tested(key)])
