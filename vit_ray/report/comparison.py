"""Two runs, or two studies or sweeps, compared, from MLflow alone.

Trainings of two studies are compared if they belong to the same cell: the same row, and the same
values of everything that varies within a row of either study (data size, length, rate, test set).
Runs of a cell differ only in the seed, and give mean and spread; if both sides have the same seeds,
differences are taken seed by seed.
"""

import difflib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from vit_ray.addresses import require_store
from vit_ray.config.branch_origin import TAG
from vit_ray.config.recorded_recipe import PARENT_TAG
from vit_ray.measure.goodput import TimeClass
from vit_ray.metric_names import (
    COST_CORE_DAYS,
    DEV_GROUP,
    EVAL_GROUP,
    EVAL_LOSS,
    EVAL_TOP5,
    PERF_MFU,
    RUN_GROUP,
    STUDY_EXAFLOPS,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
)
from vit_ray.outcomes import EventKind
from vit_ray.report.document import Section, write_page
from vit_ray.report.figures.chart_list import CURVES, curve_series
from vit_ray.report.figures.charts import Axis, Chart
from vit_ray.report.runs import (
    DEV,
    MEAN_TRANSFER,
    RUN_ID,
    TRANSFER,
    Archive,
    RecordedRun,
)
from vit_ray.report.statistics.accuracies import ACCURACIES, accuracy_name, studied, trainings
from vit_ray.report.statistics.groups import (
    COMMIT,
    PRETRAINING,
    TRAINING_IMAGES,
    WEIGHTS,
    Group,
    differences,
    differing_keys,
)
from vit_ray.report.statistics.intervals import Tested, of_difference
from vit_ray.report.statistics.seeds import mean_of, one_run_a_cell
from vit_ray.report.tables import Column, Table, Value, duration, first_of, percent

_EVALUATED: Final = {**ACCURACIES, EVAL_TOP5: "top-5 accuracy", EVAL_LOSS: "loss"}
_ON_DEV: Final = {
    key.replace(EVAL_GROUP, DEV_GROUP): f"{name}, {DEV}"
    for key, name in _EVALUATED.items()
    if key.startswith(EVAL_GROUP)
}
_WHOLE: Final = " with pre-training"
"""End of the key of a cost that includes the trainings whose weights a run started from."""
METRICS: Final = {
    **_EVALUATED,
    EVAL_LOSS: "loss on the test set",
    **_ON_DEV,
    TRAIN_LOSS: "training loss",
    TRAIN_IMAGES_PER_S: "images/s",
    PERF_MFU: "MFU",
    STUDY_EXAFLOPS: "exaFLOPs",
    f"{STUDY_EXAFLOPS}{_WHOLE}": f"exaFLOPs{_WHOLE}",
    COST_CORE_DAYS: "core-days",
    f"{COST_CORE_DAYS}{_WHOLE}": f"core-days{_WHOLE}",
}
_INTERRUPTIONS: Final = (
    EventKind.WORKER_FAILED, EventKind.HUNG, EventKind.OUT_OF_MEMORY, EventKind.PREEMPTION,
    EventKind.RESIZING, EventKind.STOPPED, EventKind.RETRIED,
    EventKind.RESUMED,
)  # fmt: skip
_FOLLOWS: Final = {TRAINING_IMAGES}
"""Keys that follow from other keys."""
SWEEP: Final = "sweep"
"""Kind of a run that stands for the retraining of its selected point."""
MOST_KEYS: Final = 4
"""Keys named in the headline, and cells or metrics in an error."""
ONE_SEED: Final = (
    "one seed on a side: the difference cannot be separated from the spread between seeds; train "
    "more seeds of both"
)


def _is_accuracy(metric: str) -> bool:
    """Whether it is an accuracy, of the last or the averaged weights, or on a task."""
    return "top1" in metric or metric in ACCURACIES


Cells = dict[str, list[RecordedRun]]
"""Trainings by the name of their cell."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or a parent run with its child trainings."""

    root: RecordedRun
    runs: Sequence[RecordedRun]
    """Trainings whose results count; the run itself if it is not a parent."""
    archive: Archive

    @property
    def is_group(self) -> bool:
        """Whether it is a study or another parent; a sweep stands for one training."""
        is_parent = [run.run_id for run in self.runs] != [self.root.run_id]
        return is_parent and self.root.kind != SWEEP

    @property
    def kind(self) -> str:
        """Description for messages."""
        if self.root.kind == SWEEP:
            return f"a sweep, compared by its retraining {', '.join(run.name for run in self.runs)}"
        what = self.root.kind or "parent run"
        return f"a {what} of {len(self.runs)} trainings" if self.is_group else "a single run"

    @property
    def interruptions(self) -> str:
        """What interrupted its trainings, and the time that this cost."""
        tags = {name for run in self.runs for name in run.tags}
        kinds = [k for k in _INTERRUPTIONS if f"vit_ray.events.{k.replace(' ', '_')}" in tags]
        costs = (TimeClass.REPEATED, TimeClass.LOST)
        keys = [f"{RUN_GROUP}{one}_s" for one in costs]
        lost_s = sum(run.recorded.get(key, 0.0) for run in self.runs for key in keys)
        text = ", ".join(kinds) or "none recorded"
        return f"{text} ({duration(lost_s)} of work repeated or lost)" if kinds else text


@dataclass(frozen=True)
class Difference:
    """A metric of one cell on both sides."""

    cell: str
    metric: str
    a: tuple[float, ...]
    """One value for each seed."""
    b: tuple[float, ...]
    is_paired: bool
    """Whether both have the same seeds, or cells, in this order."""
    counts: tuple[int | None, int | None] = (None, None)
    """Number of test images of either side, for an accuracy on one test set."""

    @property
    def mean(self) -> float:
        """Mean of B minus mean of A."""
        return statistics.fmean(self.b) - statistics.fmean(self.a)

    @property
    def standard_error(self) -> float | None:
        """Standard error of `mean`, from the spread over seeds; None for a single seed."""
        return self.tested.error if self.tested else None

    @property
    def tested(self) -> Tested | None:
        """Its 95 % interval, and the probability of such a difference by chance."""
        return of_difference(self.a, self.b, is_paired=self.is_paired, counts=self.counts)


@dataclass(frozen=True)
class Comparison:
    """What differs between two sides."""

    a: Side
    b: Side
    keys: Mapping[str, tuple[str, str]]
    """Keys of the recipe that differ in any compared cell, and their values on either side.

    Several values of one side are joined; a value that is not recorded is `unset`.
    """
    differences: Sequence[Difference]
    only_a: Sequence[str]
    """Cells without a counterpart."""
    only_b: Sequence[str]

    def sections(self) -> list[Section]:
        """Sentences for the page; the first three are also printed."""
        heads = ("side", "run", "kind", "branched from", "status", "experiment", "run id")
        sides = [("A", self.a), ("B", self.b)]
        rows = [
            [
                letter,
                s.root.name,
                s.kind,
                s.root.tags.get(TAG),
                s.root.status.lower(),
                s.archive.experiment,
                s.root.run_id,
            ]
            for letter, s in sides
        ]
        links = [side.archive.link(side.root) for _, side in sides]
        names = [Column(f"{letter}: {side.root.name}") for letter, side in sides]
        keys = [[key, *values] for key, values in self.keys.items()]
        notes = [ONE_SEED] if all(one.standard_error is None for one in self.differences) else []
        notes.append(
            f"interruptions: {self.a.root.name}: {self.a.interruptions}; "
            f"{self.b.root.name}: {self.b.interruptions}"
        )
        notes += [
            f"only in {side.root.name}, not compared: {'; '.join(cells)}"
            for side, cells in ((self.a, self.only_a), (self.b, self.only_b))
            if cells
        ]
        return [
            Section(
                "Sides",
                tables=[Table("What is compared", [*map(Column, heads)], rows, links).used()],
            ),
            Section(
                "Recipe",
                [] if keys else ["no recorded key of the recipe differs"],
                tables=[Table("Keys of the recipe that differ", [Column("key"), *names], keys)],
            ),
            Section("Differences", notes, tables=[self.difference_table()]),
            Section("Curves of both", charts=self.curves()),
        ]

    def curves(self) -> list[Chart]:
        """Every curve that both sides have: solid for A, dashed for B."""
        charts = []
        for key, axis in CURVES.items():
            drawn = [
                [
                    replace(one, name=f"{letter}: {one.name}", dash=dash, has_markers=False)
                    for one in curve_series(
                        side.archive, side.runs, key, {run.run_id: run.name for run in side.runs}
                    )
                ]
                for dash, (letter, side) in enumerate((("A", self.a), ("B", self.b)))
            ]
            if all(drawn):
                title = f"{axis.title.capitalize()}, compared"
                note = f"Solid: {self.a.root.name}; dashed: {self.b.root.name}."
                charts.append(
                    Chart(title, Axis("optimizer step"), axis, [*drawn[0], *drawn[1]], note)
                )
        return charts

    def pooled(self) -> list[Difference]:
        """Mean accuracies over several cells: with their spread over cells, and over seeds."""
        by_metric: dict[str, list[Difference]] = {}
        for one in self.differences:
            if _is_accuracy(one.metric):
                by_metric.setdefault(one.metric, []).append(one)
        found = []
        for metric, cells in by_metric.items():
            if len(cells) > 1:
                name = f"mean over {len(cells)} cells"
                means = [
                    tuple(map(statistics.fmean, side))
                    for side in zip(*((c.a, c.b) for c in cells), strict=True)
                ]
                found.append(Difference(f"{name}, by cell", metric, means[0], means[1], True))
                if all(c.is_paired for c in cells) and len({len(c.a) for c in cells}) == 1:
                    of_a, of_b = (
                        tuple(map(statistics.fmean, zip(*side, strict=True)))
                        for side in ([c.a for c in cells], [c.b for c in cells])
                    )
                    found.append(Difference(f"{name}, by seed", metric, of_a, of_b, True))
        return found

    def headline(self) -> list[str]:
        """How much better or worse B is in the first common accuracy, and which keys differ."""
        keys = first_of([*self.keys], MOST_KEYS)
        differ = f"they differ in {keys}" if keys else "no recorded key of the recipe differs"
        pooled = self.pooled()
        of_first = [one for one in pooled if one.metric == pooled[0].metric]  # by cell, by seed
        known = [*of_first[::-1], *(one for one in self.differences if _is_accuracy(one.metric))]
        if not known:
            return [f"No accuracy in common; {differ}."]
        one = known[0]
        word = "better" if one.mean > 0 else "worse"
        how = f"{percent(abs(one.mean))} points {word} than" if one.mean else "equal to"
        text = f"{self.b.root.name} is {how} {self.a.root.name}"
        name = METRICS.get(one.metric) or accuracy_name(one.metric)
        text += f" in {name}" + (f" ({one.cell})" if self.a.is_group else "")
        text += f", B - A: {'+' if one.mean > 0 else ''}{percent(one.mean)}"
        if tested := one.tested:
            p = "" if tested.p is None else f"; p = {tested.p:.2g}"
            text += f" (95 %: {percent(tested.estimate.low)} to {percent(tested.estimate.high)}{p})"
        if one.standard_error is None:
            text += ", one seed on a side"
        return [f"{text}; {differ}."]

    def difference_table(self) -> Table:
        """Metrics of both, and B minus A with its standard error and 95 % interval."""
        heads = ("cell", "metric", f"A: {self.a.root.name}", f"B: {self.b.root.name}", "B - A",
                 "standard error", "95 % from", "95 % to", "p", "seeds")  # fmt: skip
        rows: list[list[Value]] = []
        for one in (*self.differences, *self.pooled()):
            name = METRICS.get(one.metric) or accuracy_name(one.metric)
            is_share = "top" in one.metric or one.metric in (*ACCURACIES, PERF_MFU)
            form = percent if is_share else "{:.4g}".format
            spread, tested = one.standard_error, one.tested
            ends = (tested.estimate.low, tested.estimate.high) if tested else (None, None)
            rows.append([
                one.cell,
                f"{name} %" if is_share else name,
                *(mean.text(form) for values in (one.a, one.b) if (mean := mean_of(values))),
                f"{'+' if one.mean > 0 else ''}{form(one.mean)}",
                None if spread is None else form(spread),
                *(None if end is None else form(end) for end in ends),
                None if tested is None or tested.p is None else f"{tested.p:.2g}",
                " and ".join(dict.fromkeys([str(len(one.a)), str(len(one.b))])),
            ])  # fmt: skip
        return Table("Differences: B minus A", [*map(Column, heads)], rows).used()


def write_comparison(found: Comparison, page: Path) -> None:
    """Write the page, and its figures as SVG and PNG next to it.

    Args:
        page: the `.html` file; its folder is made.
    """
    title = f"{found.a.root.name} and {found.b.root.name}"
    lead, opening = found.headline(), found.a.archive.opening
    write_page(page, title, found.sections(), lead=lead, opening=opening)


def compare(uri: str, experiment: str, words: tuple[str, str]) -> Comparison:
    """Find both, and what differs.

    Args:
        uri: tracking server or SQLite address; it is only read.
        experiment: in which names are looked up; a run id may belong to any experiment.
        words: run ids or run names.

    Raises:
        ValueError: a run does not exist or its name is not unique, one is a run or sweep and
            the other a study, or they have no cell or no metric in common.
    """
    require_store(uri)
    client = MlflowClient(uri)
    sides = [_side(Archive(uri, _find_run(client, experiment, word))) for word in words]
    a, b = sides
    if a.is_group != b.is_group:
        raise ValueError(
            f"compare: {a.root.name!r} is {a.kind} and {b.root.name!r} {b.kind}; give two runs or "
            "sweeps (a cell of a study is a run, by its name), or two studies"
        )
    cells = _cells(a, b)
    common = [cell for cell in cells[0] if cell in cells[1]]
    if not common:
        here, there = (first_of([*one], MOST_KEYS, "; ") for one in cells)
        raise ValueError(
            f"compare: no cell of {a.root.name!r} ({here}) is a cell of {b.root.name!r} ({there})"
        )
    held = [sorted({key for run in side.runs for key in run.recorded}) for side in sides]
    tasks_a, tasks_b = ({*filter(TRANSFER.fullmatch, keys)} for keys in held)
    tasks = sorted(tasks_a & tasks_b - ({MEAN_TRANSFER} if tasks_a != tasks_b else set()))
    found = []
    for cell in common:
        for metric in (*METRICS, *tasks):
            # A seed that was trained twice counts once, with the later run.
            by_a, by_b = (
                {run.seed: value for run in one[cell] if (value := _value(run, metric)) is not None}
                for one in cells
            )
            if metric.endswith(_WHOLE) and not any(
                run.origin for one in cells for run in one[cell]
            ):
                continue
            if by_a and by_b:
                is_paired = by_a.keys() == by_b.keys() and len(by_a) == len(cells[0][cell])
                of_a, of_b = (tuple(one[seed] for seed in sorted(one)) for one in (by_a, by_b))
                runs = (cells[0][cell][0], cells[1][cell][0])
                counts = (runs[0].num_tested(metric), runs[1].num_tested(metric))
                found.append(Difference(cell, metric, of_a, of_b, is_paired, counts))
    if not found:
        here, there = (first_of(one, MOST_KEYS, "; ") or "none" for one in held)
        raise ValueError(
            f"compare: {a.root.name!r} and {b.root.name!r} have no metric in common: {here} here, "
            f"{there} there"
        )
    only_a, only_b = ([cell for cell in one if cell not in common] for one in cells)
    keys = _key_differences([(cells[0][cell], cells[1][cell]) for cell in common])
    return Comparison(a, b, keys, found, only_a, only_b)


def _value(run: RecordedRun, metric: str) -> float | None:
    key = metric.removesuffix(_WHOLE)
    return run.recorded.get(metric) if key == metric else run.in_all(key)


def _find_run(client: MlflowClient, experiment: str, word: str) -> str:
    """Id of the run with this id or name.

    Raises:
        ValueError: there is none, or more than one.
    """
    if RUN_ID.fullmatch(word):
        return word
    names = {str(one.experiment_id): one.name for one in client.search_experiments()}
    here = [key for key, name in names.items() if name == experiment]
    if not here:
        raise ValueError(
            f"tracking.experiment={experiment}: MLflow has no such experiment; it has "
            f"{', '.join(sorted(names.values()))}"
        )
    quote = '"' if "'" in word else "'"

    def named(experiments: list[str]) -> list[Run]:
        if quote in word or not experiments:
            return []  # both kinds of quotes: MLflow cannot search for such a name
        wanted = f"attributes.run_name = {quote}{word}{quote}"
        newest_first = ["attributes.start_time DESC"]
        return list(client.search_runs(experiments, wanted, order_by=newest_first))

    found = named(here)
    if len(found) > 1:
        listed = "; ".join(
            f"{run.info.run_id} ({run.info.status.lower()}"
            f"{' under a parent' if PARENT_TAG in run.data.tags else ''})"
            for run in found
        )
        raise ValueError(f"compare: {len(found)} runs are named {word!r}: {listed}; give an id")
    if found:
        return str(found[0].info.run_id)
    hint = "; give its name or its id"
    if elsewhere := named([key for key in names if key not in here]):
        other = names[str(elsewhere[0].info.experiment_id)]
        hint = f"; experiment {other!r} has one: give tracking.experiment={other} or its id"
    else:
        known = {str(run.info.run_name) for run in client.search_runs(here)}
        if near := difflib.get_close_matches(word, sorted(known), 3, 0.5):
            hint = f"; similar: {', '.join(near)}"
    raise ValueError(f"compare: experiment {experiment!r} has no run {word!r}{hint}")


def _side(archive: Archive) -> Side:
    assert archive.parent is not None
    # As it is among the runs, which know the trainings that they started from.
    root = next(run for run in archive.runs if run.run_id == archive.parent.run_id)
    below, _ = one_run_a_cell(run for run in archive.runs if run.run_id != root.run_id)
    counted = [
        run for run in studied(trainings(below)) if not run.is_trial and run.status == "FINISHED"
    ]
    if root.kind in ("study", SWEEP, "vtab") and not counted:
        raise ValueError(
            f"compare: {root.kind} {root.name!r} has no finished trainings to compare yet"
        )
    if root.kind == SWEEP:  # continued with more rates, it may have retrained another point too
        points = [run.group.without(COMMIT) for run in counted]
        counted = [run for run, point in zip(counted, points, strict=True) if point == points[-1]]
    return Side(root, counted or [root], archive)


def _cells(a: Side, b: Side) -> tuple[Cells, Cells]:
    """Trainings of each side by the name of their cell."""
    if not a.is_group:
        labels = {run.label for run in (*a.runs, *b.runs)}
        name = labels.pop() if len(labels) == 1 else "both"
        return {name: [*a.runs]}, {name: [*b.runs]}
    axes: set[str] = set()
    for side in (a, b):
        rows: dict[str, list[Group]] = {}
        for run in side.runs:
            rows.setdefault(_row(run), []).append(run.group)
        axes |= {key for groups in rows.values() for key in differing_keys(groups)} - _FOLLOWS
    places = {run.run_id: run.group.only(axes.__contains__) for run in (*a.runs, *b.runs)}
    names = differences([*places.values()])
    found: tuple[Cells, Cells] = {}, {}
    for side, cells in zip((a, b), found, strict=True):
        for run in side.runs:
            name = ", ".join(filter(None, (_row(run), names[places[run.run_id]])))
            cells.setdefault(name, []).append(run)
    return found


def _row(run: RecordedRun) -> str:
    return run.tags.get("vit_ray.vtab_task") or run.label


def _key_differences(
    pairs: Sequence[tuple[Sequence[RecordedRun], Sequence[RecordedRun]]],
) -> dict[str, tuple[str, str]]:
    """As `Comparison.keys`, for pairs of cells.

    Fingerprints, weights and commit, which also decide the result, are among the keys.
    """
    values: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for pair in pairs:
        known = [
            [{**run.params, **{k: v for k, v in run.group.items if " " in k}} for run in side]
            for side in pair
        ]
        keys = {key for side in known for one in side for key in one} - _FOLLOWS
        if all(one.get(WEIGHTS) in (None, one.get("init_from")) for side in known for one in side):
            keys.discard(WEIGHTS)  # the same row twice
        if not all(any(run.origin for run in side) for side in pair):
            keys = {key for key in keys if not key.startswith(PRETRAINING)}  # init_from says it
        for key in keys:
            held = [sorted({one.get(key, "unset") for one in side}) for side in known]
            if held[0] != held[1]:
                for side, texts in zip(values.setdefault(key, ({}, {})), held, strict=True):
                    side.update(dict.fromkeys(texts))
    return {key: (", ".join(a), ", ".join(b)) for key, (a, b) in sorted(values.items())}
