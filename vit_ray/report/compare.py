"""Two runs, or two studies or sweeps, against each other, from MLflow alone.

Trainings of two studies are compared where they stand in one cell: the same row, and the same of
everything that varies within a row of either study (data size, length, rate, test set). So those of
a cell differ in the seed alone, and give mean and spread; with the same seeds on both sides,
differences are taken seed by seed.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from vit_ray.report.charts import Axis, Chart, Point, Series
from vit_ray.report.figures import (
    ACCURACIES,
    CURVES,
    DEV,
    accuracy_name,
    is_trial,
    studied,
    trainings,
)
from vit_ray.report.groups import TRAINING_IMAGES, Group, differences, differing_keys
from vit_ray.report.missing import one_run_a_cell
from vit_ray.report.runs import (
    MEAN_TRANSFER,
    PARENT_TAG,
    RUN_ID,
    TRANSFER,
    Archive,
    RecordedRun,
    require_store,
)
from vit_ray.report.tables import Column, Table, Value, percent

_EVALUATED: Final = {**ACCURACIES, "eval/top5": "top-5 accuracy", "eval/loss": "validation loss"}
METRICS: Final = {
    **_EVALUATED,
    # Of images held out of the training set, which are no test set.
    **{
        key.replace("eval/", "dev/"): f"{name}, {DEV}"
        for key, name in _EVALUATED.items()
        if key.startswith("eval/")
    },
    "train/loss": "training loss",
    "train/images_per_s": "images/s",
    "perf/mfu": "MFU",
    "study/exaflops": "exaFLOPs",
    "cost/core_days": "core-days",
}
_SHARES: Final = {key for key in METRICS if "_top" in key or "/top" in key} | {"perf/mfu"}
_PARENTS: Final = ("study", "sweep", "vtab")
_FOLLOWS: Final = {TRAINING_IMAGES}
"""Follows from other keys."""


@dataclass(frozen=True)
class Side:
    """One of the two: a run, or a parent run with the trainings under it."""

    root: RecordedRun
    runs: Sequence[RecordedRun]
    """Trainings whose results count; the run itself where it is no parent."""
    archive: Archive

    @property
    def is_group(self) -> bool:
        """Whether it is a study, a sweep or the like."""
        return [run.run_id for run in self.runs] != [self.root.run_id]

    @property
    def kind(self) -> str:
        """For messages."""
        what = self.root.kind or "parent run"
        return f"a {what} of {len(self.runs)} trainings" if self.is_group else "a single run"


@dataclass(frozen=True)
class KeyDifference:
    """A key of the recipe that differs, in all compared cells alike or not."""

    key: str
    values: tuple[str, str]
    """Of either side; several of one side are joined, what is not recorded is `unset`."""


@dataclass(frozen=True)
class Difference:
    """A metric of one cell on both sides."""

    cell: str
    metric: str
    a: tuple[float, ...]
    """One value for each seed."""
    b: tuple[float, ...]
    is_paired: bool
    """Whether both have the same seeds, in this order."""

    @property
    def mean(self) -> float:
        """Mean of B less mean of A."""
        return statistics.fmean(self.b) - statistics.fmean(self.a)

    @property
    def standard_error(self) -> float | None:
        """Of `mean`, from the spread over seeds; None where either side has a single one."""
        if min(len(self.a), len(self.b)) < 2:
            return None
        if self.is_paired:
            each = [b - a for a, b in zip(self.a, self.b, strict=True)]
            return statistics.stdev(each) / math.sqrt(len(each))
        return math.sqrt(sum(statistics.variance(v) / len(v) for v in (self.a, self.b)))


@dataclass(frozen=True)
class Comparison:
    """What differs between two sides."""

    a: Side
    b: Side
    keys: Sequence[KeyDifference]
    differences: Sequence[Difference]
    only_a: Sequence[str]
    """Cells without a counterpart."""
    only_b: Sequence[str]

    def described(self) -> Iterator[tuple[str, Side, str]]:
        """Letter of each side, the side, and where it is."""
        for letter, side in (("A", self.a), ("B", self.b)):
            root = side.root
            where = f"{root.status.lower()}, experiment {side.archive.experiment}, {root.run_id}"
            yield letter, side, f"{side.kind}, {where}"

    def key_table(self) -> Table:
        """Recipe keys that differ."""
        heads = [Column("key"), Column(self.a.root.name), Column(self.b.root.name)]
        return Table(
            "Keys of the recipe that differ", heads, [[k.key, *k.values] for k in self.keys]
        )

    def curves(self) -> list[Chart]:
        """Every curve that both sides have, over each other: a colour for each side."""
        charts = []
        for key, axis in CURVES.items():
            series = [*_curves("A", self.a, key), *_curves("B", self.b, key)]
            if len({one.group for one in series}) == 2:
                title = f"{axis.title.capitalize()}, compared"
                charts.append(Chart(title, Axis("optimizer step"), axis, series))
        return charts

    def difference_table(self) -> Table:
        """Metrics of both, and B less A with its standard error."""
        heads = [
            Column("cell"), Column("metric"), Column(f"A: {self.a.root.name}"),
            Column(f"B: {self.b.root.name}"), Column("B - A"), Column("standard error"),
            Column("seeds"),
        ]  # fmt: skip
        return Table("Differences", heads, [_table_row(one) for one in self.differences]).used()


def compare(uri: str, experiment: str, words: tuple[str, str]) -> Comparison:
    """Find both, and what differs.

    Args:
        uri: tracking server or SQLite address; it is only read.
        experiment: in which names are looked up; a run id may be of any.
        words: run ids or run names.

    Raises:
        ValueError: a run is not there or its name is of several, one is a single run and the other
            is not, or they have no cell or no metric in common.
    """
    require_store(uri)
    client = MlflowClient(uri)
    a, b = (_side(uri, find_run(client, experiment, word)) for word in words)
    if a.is_group != b.is_group:
        raise ValueError(
            f"compare: {a.root.name!r} is {a.kind} and {b.root.name!r} {b.kind}; give two runs (a "
            "cell of a study is one, by its name) or two of the others"
        )
    return _compared(a, b)


def find_run(client: MlflowClient, experiment: str, word: str) -> str:
    """Id of the run with this id or name.

    Raises:
        ValueError: there is none, or several.
    """
    if RUN_ID.fullmatch(word):
        return word
    names = {str(one.experiment_id): one.name for one in client.search_experiments()}
    inside = [key for key, name in names.items() if name == experiment]
    if not inside:
        raise ValueError(
            f"tracking.experiment={experiment}: MLflow has no such experiment; it has "
            f"{', '.join(sorted(names.values()))}"
        )
    found = _named(client, inside, word)
    if len(found) > 1:
        told = "; ".join(_described(run) for run in found)
        raise ValueError(f"compare: {len(found)} runs are named {word!r}: {told}; give an id")
    if found:
        return str(found[0].info.run_id)
    raise ValueError(
        f"compare: experiment {experiment!r} has no run {word!r}"
        + _elsewhere(client, names, inside[0], word)
    )


def _named(client: MlflowClient, experiments: list[str], name: str) -> list[Run]:
    """Newest first."""
    quote = '"' if "'" in name else "'"
    if quote in name:
        return []  # both kinds of quotes: no name that MLflow could be asked for
    wanted = f"attributes.run_name = {quote}{name}{quote}"
    return list(client.search_runs(experiments, wanted, order_by=["attributes.start_time DESC"]))


def _elsewhere(
    client: MlflowClient, names: Mapping[str, str], experiment_id: str, word: str
) -> str:
    """Where it is instead, or what was meant."""
    others = [key for key in names if key != experiment_id]
    if others and (found := _named(client, others, word)):
        other = names[str(found[0].info.experiment_id)]
        return f", and experiment {other!r} has one; give tracking.experiment={other} or its id"
    known = {str(run.info.run_name) for run in client.search_runs([experiment_id])}
    near = difflib.get_close_matches(word, sorted(known), 3, 0.5)
    return f"; near: {', '.join(near)}" if near else "; give its name or its id"


def _described(run: Run) -> str:
    under = " under a parent" if PARENT_TAG in run.data.tags else ""
    return f"{run.info.run_id} ({run.info.status.lower()}{under})"


def _side(uri: str, run_id: str) -> Side:
    archive = Archive(uri, run_id)
    root = archive.parent
    assert root is not None
    below, _ = one_run_a_cell(run for run in archive.runs if run.run_id != run_id)
    counted = [
        run for run in studied(trainings(below)) if not is_trial(run) and run.status == "FINISHED"
    ]
    if root.kind in _PARENTS and not counted:
        raise ValueError(
            f"compare: {root.kind} {root.name!r} has no finished trainings to compare yet"
        )
    return Side(root, counted or [root], archive)


def _compared(a: Side, b: Side) -> Comparison:
    cells_a, cells_b = _cells(a, b)
    common = [cell for cell in cells_a if cell in cells_b]
    if not common:
        raise ValueError(
            f"compare: no cell of {a.root.name!r} ({_some(cells_a)}) is one of {b.root.name!r} "
            f"({_some(cells_b)})"
        )
    differences = [
        difference
        for cell in common
        for metric in (*METRICS, *_transfers(a, b))
        if (difference := _difference(cell, metric, cells_a[cell], cells_b[cell])) is not None
    ]
    if not differences:
        held = [sorted({key for run in side.runs for key in run.recorded}) for side in (a, b)]
        raise ValueError(
            f"compare: {a.root.name!r} and {b.root.name!r} have no metric in common: "
            f"{_some(held[0]) or 'none'} here, {_some(held[1]) or 'none'} there"
        )
    pairs = [(cells_a[cell], cells_b[cell]) for cell in common]
    only_a, only_b = ([c for c in one if c not in common] for one in (cells_a, cells_b))
    return Comparison(a, b, _key_differences(pairs), differences, only_a, only_b)


def _transfers(a: Side, b: Side) -> list[str]:
    """Accuracies on tasks of both, and their mean where both have the same tasks."""
    held = [
        {key for run in side.runs for key in run.recorded if TRANSFER.fullmatch(key)}
        for side in (a, b)
    ]
    is_same = held[0] == held[1]
    return sorted(key for key in held[0] & held[1] if is_same or key != MEAN_TRANSFER)


def _cells(a: Side, b: Side) -> tuple[dict[str, list[RecordedRun]], dict[str, list[RecordedRun]]]:
    """Trainings of each side by the name of their cell."""
    if not a.is_group:
        name = a.root.label if a.root.label == b.root.label else "both"
        return {name: [a.root]}, {name: [b.root]}
    axes = (_varying(a.runs) | _varying(b.runs)) - _FOLLOWS
    places = {run.run_id: run.group.only(axes.__contains__) for run in (*a.runs, *b.runs)}
    names = differences([*places.values()])
    found: tuple[dict[str, list[RecordedRun]], dict[str, list[RecordedRun]]] = {}, {}
    for side, cells in zip((a, b), found, strict=True):
        for run in side.runs:
            name = ", ".join(filter(None, (_row(run), names[places[run.run_id]])))
            cells.setdefault(name, []).append(run)
    return found


def _row(run: RecordedRun) -> str:
    return run.tags.get("vit_ray.vtab_task") or run.label


def _varying(runs: Sequence[RecordedRun]) -> set[str]:
    """Keys in which trainings of one row differ."""
    rows: dict[str, list[Group]] = {}
    for run in runs:
        rows.setdefault(_row(run), []).append(run.group)
    return {key for groups in rows.values() for key in differing_keys(groups)}


def _difference(
    cell: str, metric: str, a: Sequence[RecordedRun], b: Sequence[RecordedRun]
) -> Difference | None:
    values_a, values_b = _by_seed(a, metric), _by_seed(b, metric)
    if not values_a or not values_b:
        return None
    is_paired = len(a) == len(values_a) and values_a.keys() == values_b.keys()
    return Difference(
        cell,
        metric,
        tuple(value for _, value in sorted(values_a.items())),
        tuple(value for _, value in sorted(values_b.items())),
        is_paired,
    )


def _by_seed(runs: Sequence[RecordedRun], metric: str) -> dict[tuple[str, ...], float]:
    """A seed that was trained twice counts once, by the later run."""
    return {run.seed: run.recorded[metric] for run in runs if metric in run.recorded}


def _key_differences(
    pairs: Sequence[tuple[Sequence[RecordedRun], Sequence[RecordedRun]]],
) -> list[KeyDifference]:
    """Keys that differ in any pair of cells, with the values that they have there."""
    values: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for a, b in pairs:
        known = [[_known(run) for run in side] for side in (a, b)]
        for key in sorted({key for side in known for one in side for key in one}):
            held = [sorted({one.get(key, "unset") for one in side}) for side in known]
            if held[0] != held[1]:
                seen = values.setdefault(key, ({}, {}))
                for side, these in zip(seen, held, strict=True):
                    side.update(dict.fromkeys(these))
    return [
        KeyDifference(key, (", ".join(a), ", ".join(b))) for key, (a, b) in sorted(values.items())
    ]


def _known(run: RecordedRun) -> dict[str, str]:
    """The recipe as recorded, and the fingerprints, weights and commit that decide beside it."""
    told = {key: text for key, text in run.group.items if " " in key and key != TRAINING_IMAGES}
    return {**run.params, **told}


def _curves(letter: str, side: Side, key: str) -> Iterator[Series]:
    found = side.archive.curves(side.runs, key)
    for run in side.runs:
        points = [Point(step, value) for step, value in found.get(run.run_id, [])]
        if len(points) > 1:
            group = f"{letter}: {side.root.name}"
            yield Series(f"{letter}: {run.name}", points, group, has_markers=False)


def _table_row(one: Difference) -> list[Value]:
    is_transfer = bool(TRANSFER.fullmatch(one.metric))
    is_share = is_transfer or one.metric in _SHARES
    form = percent if is_share else "{:.4g}".format
    name = accuracy_name(one.metric) if is_transfer else METRICS[one.metric]
    spread = one.standard_error
    sizes = {len(one.a), len(one.b)}
    return [
        one.cell,
        f"{name} %" if is_share else name,
        _with_spread(one.a, form),
        _with_spread(one.b, form),
        f"{'+' if one.mean > 0 else ''}{form(one.mean)}",
        None if spread is None else form(spread),
        f"{len(one.a)}" if len(sizes) == 1 else f"{len(one.a)} and {len(one.b)}",
    ]


def _with_spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    mean = form(statistics.fmean(values))
    return f"{mean} +- {form(statistics.stdev(values))}" if len(values) > 1 else mean


def _some(names: Sequence[str] | Mapping[str, object], most: int = 4) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return "; ".join(listed[:most]) + more
