"""The charts of a report, and the table of all trainings."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from vit_ray.config import branch_origin
from vit_ray.config.resume_compatibility import LENGTH
from vit_ray.metric_names import (
    COST_CORE_DAYS,
    DATA_WAIT_FRACTION,
    EVAL_AVERAGED_TOP1,
    EVAL_GROUP,
    EVAL_LAST_TOP1,
    EVAL_LOSS,
    EVAL_MEAN_AVERAGE_PRECISION,
    EVAL_TOP1,
    EVAL_TOP5,
    FEW_SHOT_GROUP,
    PERF_MFU,
    RESULT_STEP,
    STUDY_EXAFLOPS,
    STUDY_FORWARD_GMACS,
    STUDY_IMAGES_SEEN,
    TRAIN_IMAGES_PER_S,
    TRAIN_LOSS,
    best_key,
    few_shot_top1,
)
from vit_ray.report.figures.charts import BEST, FAMILIES, MOST_LABELS, Axis, Chart, Point, Series
from vit_ray.report.paper import TABLE_6
from vit_ray.report.runs import DEV, IMAGES_KEY, MEAN_TRANSFER, Archive, RecordedRun
from vit_ray.report.statistics.accuracies import (
    accuracies_of,
    accuracy_name,
    by_sets,
    cost_of,
    transfer_keys,
)
from vit_ray.report.statistics.fits import Estimate
from vit_ray.report.statistics.groups import TRAINING_IMAGES, Group, differences
from vit_ray.report.statistics.intervals import of_share
from vit_ray.report.statistics.seeds import by_group, mean_of
from vit_ray.report.tables import Column, Table, Value, duration, number, percent

PAPER: Final = "The paper's Table 6: ImageNet top-1 after JFT-300M against compute"
EXAFLOPS: Final = Axis("training compute (exaFLOPs, log scale)", is_log=True)
IMAGES: Final = Axis("different training images (log scale)", is_log=True)
Measure = Callable[[RecordedRun], float | None]
MARKED_POINTS: Final = 30
"""A line with more points is drawn without markers."""

CURVES: Final = {
    TRAIN_LOSS: Axis("training loss"),
    EVAL_LOSS: Axis("validation loss"),
    EVAL_MEAN_AVERAGE_PRECISION: Axis("validation mean average precision", is_percent=True),
    EVAL_TOP1: Axis("validation top-1", is_percent=True),
    EVAL_AVERAGED_TOP1: Axis("validation top-1 of averaged weights", is_percent=True),
    few_shot_top1(5): Axis("5-shot accuracy", is_percent=True),
}
TESTED: Final = "test set"
# Tag of a sweep's run: what its accuracy was measured on.
SWEEP_STAGES: Final = {"sweep_trial": DEV, "finetune": TESTED}


def against_compute(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figures 5 and 4 of the paper for each accuracy that the runs have: compute, and data size.

    With the paper's own Figure 5 to compare the shape of the curves: other data, another task.
    """
    charts = []
    for key in accuracies_of(runs):
        charts += [*accuracy_against_compute(runs, key), *accuracy_against_data(runs, key)]
    theirs = []
    for family in FAMILIES:
        rows = sorted((r for r in TABLE_6 if r.family == family), key=lambda r: r.exaflops)
        points = [Point(r.exaflops, r.imagenet, f"{r.name}, {r.epochs} epochs") for r in rows]
        theirs.append(Series(family, points, family, has_line=False))
    accuracy = Axis("ImageNet top-1", is_percent=True)
    return [
        *charts,
        *([Chart(PAPER, EXAFLOPS, accuracy, theirs, is_folded=True)] if charts else []),
    ]


def accuracy_against_compute(runs: Sequence[RecordedRun], key: str) -> list[Chart]:
    """The paper's Figure 5: a point for each group of seeds, one colour per model family.

    A chart for each pair of a training and a test set, and for each amount of data.
    """
    x, accuracy = (
        (EXAFLOPS, lambda run: cost_of(run, key)),
        Axis(accuracy_name(key), is_percent=True),
    )
    title, charts = f"How does {accuracy_name(key)} grow with compute?", []
    for whose, members in by_sets(runs, key):
        amounts: dict[float | None, list[RecordedRun]] = {}
        for run in members:
            amounts.setdefault(run.metrics.get(IMAGES_KEY), []).append(run)
        for images, some in sorted(amounts.items(), key=lambda one: -(one[0] or 0.0)):
            of = f", {number(images)} images" if images and len(amounts) > 1 else ""
            charts.append(by_family(f"{title}{whose}{of}", some, x, (accuracy, key)))
    return [one for one in charts if one.rows]


def by_family(
    title: str, runs: Sequence[RecordedRun], x: tuple[Axis, Measure], y: tuple[Axis, str]
) -> Chart:
    """A point for each group of seeds that has both values, by x, in the colour of its family.

    Runs that have not finished are separate points.

    Args:
        y: axis and key of a metric.
    """
    points: dict[str, list[Point]] = {family: [] for family in FAMILIES}
    held = [run for run in runs if y[1] in run.metrics and x[1](run) is not None]
    gmacs = [one for run in held if (one := run.metrics.get(STUDY_FORWARD_GMACS, 0.0)) > 0]
    width = math.log(max(gmacs) / min(gmacs)) if gmacs else 0.0
    for members in by_group(held).values():
        finished = [run for run in members if run.status == "FINISHED"]
        for alike in ([finished] if finished else []) + [[r] for r in members if r not in finished]:
            at = statistics.fmean(value for run in alike if (value := x[1](run)) is not None)
            own = alike[0].metrics.get(STUDY_FORWARD_GMACS, 0.0)
            size = math.log(max(own, min(gmacs)) / min(gmacs)) / width if width else None
            point = replace(mean_point(at, alike, y[1]), size=size)
            points[alike[0].family].append(point)
    series = [
        Series(family, sorted(found, key=lambda point: point.x), family, has_line=False)
        for family, found in points.items()
    ]
    drawn = [point for found in points.values() for point in found]
    notes = ["Each point is one run"]
    if any(point.seeds for point in drawn):
        notes[0] += (
            " or a mean over seeds; small marks are single seeds, bars one standard deviation"
        )
    if width:
        notes.append("larger marks are larger models")
    if any(point.low is not None and not point.seeds for point in drawn):
        notes.append("bars of single trainings are 95 % intervals for the test set")
    return Chart(title, x[0], y[0], series, f"{'; '.join(notes)}.")


def state_of(run: RecordedRun, key: str) -> str:
    """The set of a point that is not a result on a test set; empty for a result."""
    if run.status != "FINISHED":
        return run.status.lower()
    is_accuracy = key.startswith((EVAL_GROUP, FEW_SHOT_GROUP))
    return DEV if is_accuracy and not run.is_tested(key) else ""


def interval_of(run: RecordedRun, key: str) -> Estimate | None:
    """95 % interval of an accuracy of one seed, by the number of its test images."""
    count = run.num_tested(key)
    return of_share(run.metrics[key], count) if count and 0 <= run.metrics[key] <= 1 else None


def _point(run: RecordedRun, at: float, key: str) -> Point:
    status = "" if run.status == "FINISHED" else run.status.lower()
    details = {"run": run.name, "status": status, "seed": run.params.get("seed", "")}
    if key.startswith((EVAL_GROUP, FEW_SHOT_GROUP)):
        details["measured on"] = TESTED if run.is_tested(key) else DEV
    interval = interval_of(run, key)
    if interval is not None:
        details["drawn"] = f"95 % interval of {run.num_tested(key)} images"
    low, high = (interval.low, interval.high) if interval else (None, None)
    shown = {name: value for name, value in details.items() if value}
    value, state = run.metrics[key], state_of(run, key)
    return Point(at, value, point_name(run), low, high, shown, state)


def mean_point(at: float, runs: Sequence[RecordedRun], key: str) -> Point:
    """Mean over the finished runs of a group, if any, with one deviation on either side."""
    runs = [run for run in runs if run.status == "FINISHED"] or runs
    mean = mean_of([run.metrics[key] for run in runs])
    assert mean is not None
    if mean.deviation is None:
        return _point(runs[0], at, key)
    details = {"mean of": f"{mean.count} seeds", "drawn": "+- one standard deviation"}
    low, high = mean.value - mean.deviation, mean.value + mean.deviation
    seeds = {" of ".join(run.seed): run.metrics[key] for run in runs}
    state = state_of(runs[0], key)
    return Point(at, mean.value, point_name(runs[0]), low, high, details, state, seeds=seeds)


Line = list[tuple[float, list[RecordedRun]]]
"""Groups of seeds, each with its position on the x axis."""


def line_of_means(name: str, line: Line, key: str) -> Series:
    """Means over the seeds of each group, by x."""
    points = [mean_point(at, members, key) for at, members in line]
    return Series(name, sorted(points, key=lambda point: point.x), line[0][1][0].family)


def accuracy_against_data(runs: Sequence[RecordedRun], key: str) -> list[Chart]:
    """The paper's Figure 4: a line for trainings that differ only in the amount of data.

    No chart if no line has two amounts.
    """
    held = [run for run in runs if {IMAGES_KEY, key} <= run.metrics.keys()]
    lines: dict[Group, Line] = {}
    for group, members in by_group(held).items():
        line = lines.setdefault(group.without("data.fraction", TRAINING_IMAGES), [])
        line.append((members[0].metrics[IMAGES_KEY], members))
    if not any(len({at for at, _ in line}) > 1 for line in lines.values()):
        return []
    firsts = {group: line[0][1][0] for group, line in lines.items()}
    accuracy = Axis(accuracy_name(key), is_percent=True)
    title = f"How does {accuracy_name(key)} grow with the amount of data?"
    note = "A line joins trainings that differ only in the amount of data"
    note += "; bars: one deviation; small marks: single seeds."
    by_length: dict[str, list[Group]] = {"": [*lines]}
    if len(lines) > MOST_LABELS:  # small multiples, so that each line has room for its label
        by_length = {}
        for group, line in lines.items():
            if len({at for at, _ in line}) > 1:
                length = f" Trainings of {length_of(firsts[group])}"
                by_length.setdefault(length, []).append(group)
    charts = []
    for length, groups in by_length.items():
        names = _line_names({group: firsts[group] for group in groups})
        series = [line_of_means(names[group], lines[group], key) for group in groups]
        charts.append(Chart(f"{title}{length}", IMAGES, accuracy, series, note))
    return charts


def _line_names(lines: Mapping[Group, RecordedRun]) -> dict[Group, str]:
    """For a run of each: its label, its length if needed, and other differences."""
    names = {}
    for label in dict.fromkeys(run.label for run in lines.values()):
        mine = {group: run for group, run in lines.items() if run.label == label}
        rest = differences([group.without(*LENGTH) for group in mine])
        lengths = {group: length_of(run) for group, run in mine.items()}
        for group, length in lengths.items():
            other = rest[group.without(*LENGTH)]
            several = len({*lengths.values()}) > 1
            parts = label, length if several else "", other and f"differs in {other}"
            names[group] = ", ".join(filter(None, parts))
    return names


def length_of(run: RecordedRun) -> str:
    """As in the recipe, so that it is the same for all amounts of data."""
    for unit in ("epochs", "steps", "images"):
        if (length := run.number(f"optim.{unit}")) is not None:
            return f"{length:.12g} {unit}"
    return "unknown length"


def cost_and_speed(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Accuracy against core-days, and speed and MFU against the size of the model.

    With axial models among the runs, also accuracy against speed: the paper's Figure 13.
    """
    days = Axis("core-days of training (log scale)", is_log=True)
    charts = [
        by_family(f"What does {accuracy_name(key)} cost?{whose}", members,
                  (days, partial(cost_of, key=key, cost=COST_CORE_DAYS)),
                  (Axis(accuracy_name(key), is_percent=True), key))
        for key in accuracies_of(runs)[:3]
        for whose, members in by_sets(runs, key)
    ]  # fmt: skip
    if any(run.family == "Axial" for run in runs):
        speed = Axis("images/s of training (log scale)", is_log=True)
        x = speed, partial(RecordedRun.number, key=TRAIN_IMAGES_PER_S)
        charts += [
            by_family(f"How fast is {accuracy_name(key)} reached? (as Figure 13){whose}", members,
                      x, (Axis(accuracy_name(key), is_percent=True), key))
            for key in accuracies_of(runs)[:1]
            for whose, members in by_sets(runs, key)
        ]  # fmt: skip
    size = Axis("forward multiply-adds (GMAC, log scale)", is_log=True)
    speeds = {TRAIN_IMAGES_PER_S: Axis("images/s, log scale", is_log=True),
              PERF_MFU: Axis("MFU", is_percent=True)}  # fmt: skip
    titles = ("How fast does each model train?", "How well are the devices used?")
    for title, (key, axis) in zip(titles, speeds.items(), strict=True):
        x = size, partial(RecordedRun.number, key=STUDY_FORWARD_GMACS)
        charts.append(by_family(title, runs, x, (axis, key)))
    return charts


def learning_curves(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """A chart for every curve, with all runs in each.

    Trials of a sweep are faint if it has retrained its selected point. The dash shows the
    classifier's input if that varies (the paper's Figure 9), and the rate is in the name.
    """
    names = {run.run_id: point_name(run) for run in runs}
    pools = {run.params.get("model.pool", "None") for run in runs} - {"None"}
    if len(pools) > 1:
        rest = differences([run.group for run in runs])
        names = {run.run_id: ", ".join(filter(None, (run.label, rest[run.group]))) for run in runs}
    if len(set(names.values())) < len(runs):  # model and data are the same for several runs
        names = {run.run_id: run.name for run in runs}
    has_choice = any(run.tags.get("vit_ray.sweep_stage") == "finetune" for run in runs)
    charts = []
    for key, axis in CURVES.items():
        series = curve_series(archive, runs, key, names, faint_trials=has_choice)
        note = (
            "Each line is one training, with recorded points; an unfinished training has a mark at "
            "its end."
        )
        if len(pools) > 1:
            note += " Dashed: global average pooling."
        charts.append(Chart(axis.title.capitalize(), Axis("optimizer step"), axis, series, note))
    return charts


def curve_series(
    archive: Archive,
    runs: Sequence[RecordedRun],
    key: str,
    names: Mapping[str, str],
    *,
    faint_trials: bool = False,
) -> list[Series]:
    """The curve of each run that has one; its end is marked if the run has not finished."""
    curves = archive.curves([run for run in runs if key in run.metrics], key)
    series = []
    for run in runs:
        points = [Point(step, value) for step, value in curves.get(run.run_id, [])]
        if len(points) > 1:
            if run.status != "FINISHED":
                points[-1] = replace(points[-1], state=run.status.lower())
            if key != TRAIN_LOSS:
                best, value = run.recorded.get(RESULT_STEP), run.recorded.get(best_key(key))
                if best is not None and value is not None:  # in a long curve it may not be a point
                    others = [p for p in points if p.x != best]
                    points = sorted([*others, Point(best, value, state=BEST)], key=lambda p: p.x)
            series.append(
                Series(
                    names[run.run_id],
                    points,
                    run.family,
                    dash=int(run.params.get("model.pool") == "gap"),
                    is_faint=faint_trials and run.is_trial,
                    has_markers=len(points) <= MARKED_POINTS,
                )
            )
    return series


def cells(runs: Sequence[RecordedRun], archive: Archive | None = None) -> Table:
    """One row per training with every number recorded at its end, and its place in MLflow."""

    def measured_on(run: RecordedRun) -> str | None:
        measured = [key for key in run.metrics if key.startswith(EVAL_GROUP)]
        if not measured:
            return None
        if not run.is_tested(EVAL_TOP1) or all(map(run.is_on_dev, measured)):
            return DEV
        if (count := run.best_of_tests) is not None:
            return f"best of {count} evaluations on the test set"
        return TESTED

    def numbers(title: str, key: str, form: Callable[[float], str] = number) -> Any:
        return Column(title, form), lambda run: run.number(key)

    def tag(title: str, key: str) -> Any:
        return Column(title), lambda run: run.tags.get(f"vit_ray.{key}")

    columns: list[tuple[Column, Callable[[RecordedRun], Value]]] = [
        (Column("run"), lambda run: run.name),
        (Column("model"), lambda run: run.label),
        (Column("status"), lambda run: run.status.lower()),
        numbers("top-1 %", EVAL_TOP1, percent),
        numbers("top-1 % averaged", EVAL_AVERAGED_TOP1, percent),
        (Column("measured on"), measured_on),
        numbers("last top-1 %", EVAL_LAST_TOP1, percent),
        numbers("best at step", RESULT_STEP),
        numbers("top-5 %", EVAL_TOP5, percent),
        numbers("mean average precision %", EVAL_MEAN_AVERAGE_PRECISION, percent),
        numbers("eval loss", EVAL_LOSS),
        *(numbers(f"{n}-shot %", few_shot_top1(n), percent) for n in (1, 5, 10, 25)),
        *(
            numbers(f"{accuracy_name(key)} %", key, percent)
            for key in (MEAN_TRANSFER, *transfer_keys(runs))
        ),
        numbers("learning rate", "optim.learning_rate"),
        numbers("epochs", "optim.epochs"),
        numbers("steps", "optim.steps"),
        numbers("data fraction", "data.fraction"),
        numbers("training images", IMAGES_KEY),
        numbers("images seen", STUDY_IMAGES_SEEN),
        numbers("seed", "seed"),
        tag("transfer to", "transfer_task"),
        tag("branched from", "branched_from"),
        numbers("exaFLOPs", STUDY_EXAFLOPS),
        numbers("core-days", COST_CORE_DAYS),
        (Column("wall time", duration), lambda run: run.elapsed_s),
        numbers("images/s", TRAIN_IMAGES_PER_S),
        numbers("MFU %", PERF_MFU, percent),
        numbers("data wait %", DATA_WAIT_FRACTION, percent),
        (Column("group"), lambda run: run.group.digest),
        tag("git commit", "git_commit"),
        (Column("data fingerprint"), lambda run: run.tags.get("vit_ray.data_fingerprint", "")[:12]),
        (Column("run id"), lambda run: run.run_id),
    ]
    rows = [[value(run) for _, value in columns] for run in runs]
    links = [archive.link(run) for run in runs] if archive and archive.is_server else []
    heads = [column for column, _ in columns]
    table = Table("Every training of this report", heads, rows, links).used()
    return replace(table, has_places=True)


def own_share(run: RecordedRun) -> float:
    """For a training that branched off another one: the share of its compute that is its own."""
    batch, seen = run.number("train.global_batch_size"), run.metrics.get(STUDY_IMAGES_SEEN)
    return branch_origin.own_share(run.tags.get(branch_origin.TAG, ""), batch, seen)


def point_name(run: RecordedRun) -> str:
    """The model, and its share of the data if that is not all of it."""
    fraction = run.number("data.fraction")
    return run.label + (f" {100 * fraction:g}%" if fraction is not None and fraction < 1 else "")
