"""What a report shows of its runs: which numbers go into which chart and table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from vit_ray.config import branch_origin
from vit_ray.config.resume_compatibility import LENGTH
from vit_ray.report.charts import COLOURS, Axis, Chart, Point, Series
from vit_ray.report.groups import (
    FEW_SHOT_SETS,
    TEST_SET,
    TRAINING_IMAGES,
    TRAINING_SET,
    Group,
    differences,
)
from vit_ray.report.paper import TABLE_6
from vit_ray.report.runs import MEAN_TRANSFER, TRAININGS, TRANSFER, Archive, RecordedRun
from vit_ray.report.seeds import Mean, by_group, mean_of
from vit_ray.report.tables import Column, Table, Value, duration, number, percent

FAMILIES = ("ViT", "Hybrid", "ResNet", "Axial", "Other")
PAPER: Final = "the paper, Table 6: ImageNet top-1 after JFT-300M"
EXAFLOPS: Final = Axis("training compute (exaFLOPs, log scale)", is_log=True)
IMAGES: Final = Axis("different training images (log scale)", is_log=True)
_IMAGES_KEY: Final = "study/train_images"
Measure = Callable[[RecordedRun], float | None]
MARKED_POINTS: Final = 30
"""A line of more points is drawn without markers."""


def averaged(key: str) -> str:
    """The key of what is measured of the averaged weights in the place of the last ones."""
    return key.replace("/", "/averaged_", 1)


_LAST = {
    "few_shot/5_shot_top1": "5-shot linear accuracy",
    "few_shot/10_shot_top1": "10-shot linear accuracy",
    "few_shot/25_shot_top1": "25-shot linear accuracy",
    "few_shot/1_shot_top1": "1-shot linear accuracy",
    "eval/top1": "top-1 accuracy",
}
# Metric key, what a person calls it.
ACCURACIES = _LAST | {averaged(key): f"{name} of averaged weights" for key, name in _LAST.items()}
CURVES = {
    "train/loss": Axis("training loss"),
    "eval/loss": Axis("validation loss"),
    "eval/top1": Axis("validation top-1", is_percent=True),
    "eval/averaged_top1": Axis("validation top-1 of averaged weights", is_percent=True),
    "few_shot/5_shot_top1": Axis("5-shot accuracy", is_percent=True),
}

DEV: Final = "dev split"
"""Images held out of the training set."""
# Tag of a sweep's run, what its accuracy was measured on.
_SWEEP_STAGES: Final = {"sweep_trial": DEV, "finetune": "test set"}


def trainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Without parents, benchmarks, evaluations and the like, which train nothing themselves."""
    return [run for run in runs if run.kind in TRAININGS]


def studied(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Those that may stand in one figure: where there is a study, its cells.

    Their fine-tunings have other test sets, and compute of their own.
    """
    return [run for run in runs if run.kind == "study_cell"] or list(runs)


def pretrainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Of the trainings those that no weights were given to."""
    return [
        run
        for run in trainings(runs)
        if run.kind != "finetune" and "vit_ray.sweep_stage" not in run.tags
    ]


def accuracies_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Keys to plot: the first few-shot accuracy that there is, top-1, and those of transfers.

    The first two of averaged weights where all that have been measured have them.
    """
    held = {key for run in runs for key in run.metrics}
    few_shot = [key for key in _LAST if key in held and key.startswith("few_shot/")][:1]
    top1 = [key for key in ("eval/top1",) if key in held]
    transfers = [key for key in (MEAN_TRANSFER, *_transfers(runs)) if key in held]
    return [decided_key(runs, key) for key in few_shot + top1] + transfers


def decided_key(runs: Sequence[RecordedRun], key: str) -> str:
    """The accuracy that decides: of averaged weights where all that have the key have it of them.

    And of the same images: a test set, or a dev split.
    """
    measured, other = [run for run in runs if key in run.metrics], averaged(key)
    has_all = measured and all(other in run.metrics for run in measured)
    is_alike = all(run.is_on_dev(key) == run.is_on_dev(other) for run in measured)
    return other if has_all and is_alike else key


def _transfers(runs: Sequence[RecordedRun]) -> list[str]:
    held = {key for run in runs for key in run.metrics}
    return sorted(key for key in held if TRANSFER.fullmatch(key) and key != MEAN_TRANSFER)


def accuracy_name(key: str) -> str:
    """What a person calls a metric."""
    if key == MEAN_TRANSFER:
        return "mean top-1 over the tasks after fine-tuning"
    task = TRANSFER.fullmatch(key)
    return f"{task.group(1)} top-1 after fine-tuning" if task else ACCURACIES[key]


def against_compute(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figures 5 and 4 of the paper for each accuracy that the runs have: compute, and data size."""
    charts = []
    for key in accuracies_of(runs):
        charts += [*accuracy_against_compute(runs, key), accuracy_against_data(runs, key)]
    return [chart for chart in charts if chart is not None and not chart.is_empty]


def accuracy_against_compute(runs: Sequence[RecordedRun], key: str) -> list[Chart]:
    """The paper's Figure 5: one point per run, one colour per model family, the paper's beside.

    A chart for each pair of a training and a test set.
    """
    accuracy = Axis(accuracy_name(key), is_percent=True)
    charts = [
        by_family(f"{title_of(key)} against compute (proxy data){whose}", members,
                  (EXAFLOPS, partial(cost_of, key=key)), (accuracy, key))
        for whose, members in by_sets(runs, key)
    ]  # fmt: skip
    paper = _paper_series()
    return [replace(one, series=[*one.series, *paper]) for one in charts if not one.is_empty]


def by_sets(runs: Sequence[RecordedRun], key: str) -> list[tuple[str, list[RecordedRun]]]:
    """Runs that have the accuracy, those of one training and test set together.

    Each with `, training set NAME, test set NAME`, as far as these differ among the runs.
    """
    parts: dict[Group, list[RecordedRun]] = {}
    for run in runs:
        if key in run.metrics:
            parts.setdefault(_sets_of(run, key), []).append(run)
    names = differences([*parts])
    return [(f", {names[sets]}" if names[sets] else "", one) for sets, one in parts.items()]


def _sets_of(run: RecordedRun, key: str) -> Group:
    """Training and test set of an accuracy; a transfer's are those of its fine-tunings, too."""
    tests = FEW_SHOT_SETS if key.startswith("few_shot/") else (TEST_SET,)
    if task := TRANSFER.fullmatch(key):
        tuned = tunings_of(run, task.group(1))
        theirs = tuned[0].group.values.get(TEST_SET, "None") if tuned else "None"
        sets = run.group.only(lambda name: name == TRAINING_SET)
        names = {**sets.names, **(tuned[0].group.names if tuned else {})}
        return Group.of({**sets.values, TEST_SET: theirs}, names)
    return run.group.only(lambda name: name in (TRAINING_SET, *tests))


def tunings_of(run: RecordedRun, task: str) -> list[RecordedRun]:
    """Trainings by which a cell's accuracy on a task of its study came to be."""
    return [
        one
        for one in run.tuned
        if one.tags.get("vit_ray.transfer_task") == task and not is_trial(one)
    ]


def cost_of(run: RecordedRun, key: str, cost: str = "study/exaflops") -> float | None:
    """Cost at which an accuracy stands: of pre-training and fine-tuning together.

    The accuracy on a task after fine-tuning, of a run's own metrics, has the mean cost of the
    fine-tunings of the task, and a mean over tasks the mean over these; where theirs is not
    recorded, it stands at that of the pre-training.
    """
    if (own := run.in_all(cost)) is None or not (task := TRANSFER.fullmatch(key)):
        return own
    tasks = [task.group(1)] if key != MEAN_TRANSFER else [
        found.group(1) for one in run.tasks if (found := TRANSFER.fullmatch(one))
    ]  # fmt: skip
    tuned = [one.recorded.get(cost) for name in tasks for one in tunings_of(run, name)]
    known = [one for one in tuned if one is not None]
    return own + (statistics.fmean(known) if known else 0.0)


def state_of(run: RecordedRun, key: str) -> str:
    """Of a point that is no result on a test set: what it is of; empty for a result."""
    if run.status != "FINISHED":
        return run.status.lower()
    is_accuracy = key.startswith(("eval/", "few_shot/"))
    return DEV if is_accuracy and not is_tested(run, key) else ""


def _point(run: RecordedRun, at: float, key: str) -> Point:
    details = _details(run, key)
    return Point(at, run.metrics[key], _point_name(run), details=details, state=state_of(run, key))


def _details(run: RecordedRun, key: str) -> dict[str, str]:
    told = {"run": run.name, "status": run.status.lower(), "seed": run.params.get("seed", "")}
    told["measured on"] = "" if is_tested(run, key) else DEV
    return {name: value for name, value in told.items() if value and value != "finished"}


def _paper_series() -> list[Series]:
    def points(family: str) -> list[Point]:
        rows = sorted((r for r in TABLE_6 if r.family == family), key=lambda r: r.exaflops)
        return [Point(r.exaflops, r.imagenet, f"{r.name}, {r.epochs} epochs") for r in rows]

    return [Series(f, points(f), has_line=False, source=PAPER) for f in FAMILIES]


def accuracy_against_data(runs: Sequence[RecordedRun], key: str) -> Chart | None:
    """The paper's Figure 4: a line for what differs in the amount of data alone.

    None where no line has two amounts.
    """
    held = [run for run in runs if {_IMAGES_KEY, key} <= run.metrics.keys()]
    lines: dict[Group, list[list[RecordedRun]]] = {}
    for group, members in by_group(held).items():
        lines.setdefault(group.without("data.fraction", TRAINING_IMAGES), []).append(members)
    if not any(len({one[0].metrics[_IMAGES_KEY] for one in line}) > 1 for line in lines.values()):
        return None
    names = _line_names({line: groups[0][0] for line, groups in lines.items()})
    return Chart(
        f"{title_of(key)} against data (proxy data)",
        IMAGES,
        Axis(accuracy_name(key), is_percent=True),
        [
            Series(
                names[line],
                sorted(
                    (mean_point(one[0].metrics[_IMAGES_KEY], one, key) for one in groups),
                    key=lambda point: point.x,
                ),
            )
            for line, groups in lines.items()
        ],
    )


def _line_names(lines: Mapping[Group, RecordedRun]) -> dict[Group, str]:
    """By a run of each: its label, its length where others of the label differ, and what else."""
    names = {}
    for label in dict.fromkeys(run.label for run in lines.values()):
        mine = {group: run for group, run in lines.items() if run.label == label}
        rest = differences([group.without(*LENGTH) for group in mine])
        lengths = {_length(run) for run in mine.values()}
        for group, run in mine.items():
            other = rest[group.without(*LENGTH)]
            parts = [
                label,
                _length(run) if len(lengths) > 1 else "",
                other and f"differs in {other}",
            ]
            names[group] = ", ".join(part for part in parts if part)
    return names


def _length(run: RecordedRun) -> str:
    """As the recipe gives it, so that it is the same for all amounts of data."""
    for unit in ("epochs", "steps", "images"):
        length = _param(f"optim.{unit}")(run)
        if isinstance(length, float):
            return f"{length:.12g} {unit}"
    return "length not known"


def epochs_of(run: RecordedRun) -> float | None:
    """Length of a training; one in steps or images counts in epochs, too."""
    epochs = _param("optim.epochs")(run)
    if isinstance(epochs, float):
        return epochs
    images, seen = run.metrics.get(_IMAGES_KEY), run.metrics.get("study/images_seen")
    return seen / images if seen and images else None


def mean_point(at: float, runs: Sequence[RecordedRun], key: str) -> Point:
    """Of the finished ones of a group, where there are any, with one deviation on either side."""
    runs = [run for run in runs if run.status == "FINISHED"] or runs
    mean = mean_of([run.metrics[key] for run in runs])
    assert mean is not None
    if mean.deviation is None:
        return _point(runs[0], at, key)
    told = {"mean of": f"{mean.count} seeds", "drawn": "+- one standard deviation"}
    low, high = mean.value - mean.deviation, mean.value + mean.deviation
    return Point(at, mean.value, _point_name(runs[0]), low, high, told, state_of(runs[0], key))


def best_of(runs: Sequence[RecordedRun], key: str) -> tuple[RecordedRun, Mean] | None:
    """A run of the group with the best mean over seeds, of those that finished and were tested."""
    tested = [run for run in runs if key in run.metrics and is_tested(run, key)]
    groups = [
        (members[0], mean_of([run.metrics[key] for run in members]))
        for members in by_group(run for run in tested if run.status == "FINISHED").values()
    ]
    known = [(run, mean) for run, mean in groups if mean is not None]
    return max(known, key=lambda pair: pair[1].value, default=None)


def title_of(key: str) -> str:
    """As `accuracy_name`, to begin a caption with."""
    name = accuracy_name(key)
    return name[0].upper() + name[1:]


def cost_and_speed(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Accuracy against core-days, and speed and MFU against the size of the model."""
    gmacs = Axis("forward multiply-adds (GMAC, log scale)", is_log=True)
    days = Axis("core-days of training (log scale)", is_log=True)
    charts = [
        by_family(f"{title_of(key)} against cost{whose}", members,
                  (days, partial(cost_of, key=key, cost="cost/core_days")),
                  (Axis(accuracy_name(key), is_percent=True), key))
        for key in accuracies_of(runs)
        for whose, members in by_sets(runs, key)
    ]  # fmt: skip
    for title, axis, key in (
        ("Training speed", Axis("images/s, log scale", is_log=True), "train/images_per_s"),
        ("Model FLOPs utilization", Axis("MFU", is_percent=True), "perf/mfu"),
    ):
        x = (gmacs, metric("study/forward_gmacs"))
        charts.append(by_family(title, runs, x, (axis, key)))
    return [chart for chart in charts if not chart.is_empty]


def by_family(
    title: str, runs: Sequence[RecordedRun], x: tuple[Axis, Measure], y: tuple[Axis, str]
) -> Chart:
    """A point for each run that has both, by x, in the colour of its family.

    Args:
        y: axis and key of a metric.
    """

    def points(family: str) -> list[Point]:
        found = [
            _point(run, at, y[1])
            for run in runs
            if run.family == family and y[1] in run.metrics and (at := x[1](run)) is not None
        ]
        return sorted(found, key=lambda point: point.x)

    series = [Series(family, points(family), has_line=False) for family in FAMILIES]
    return Chart(title, x[0], y[0], series, order=FAMILIES)


def learning_curves(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """A chart of every curve that there is, all runs in each."""
    names = {run.run_id: _point_name(run) for run in runs}
    if len(set(names.values())) < len(runs):  # model and data do not tell the runs apart
        names = {run.run_id: run.name for run in runs}
    drawn = {key: curve_series(archive, runs, key, names) for key in CURVES}
    return [
        Chart(CURVES[key].title.capitalize(), Axis("optimizer step"), CURVES[key], series)
        for key, series in drawn.items()
        if series
    ]


def curve_series(
    archive: Archive, runs: Sequence[RecordedRun], key: str, names: Mapping[str, str]
) -> list[Series]:
    """The curve of each run that has one; its end is marked where the run has not finished."""
    curves = archive.curves([run for run in runs if key in run.metrics], key)
    holders = [run for run in runs if len(curves.get(run.run_id, [])) > 1]
    groups = _colour_groups(holders)
    series = []
    for run in holders:
        points = [Point(step, value) for step, value in curves[run.run_id]]
        if run.status != "FINISHED":
            points[-1] = replace(points[-1], state=run.status.lower())
        has_markers = len(points) <= MARKED_POINTS
        series.append(
            Series(names[run.run_id], points, groups[run.run_id], has_markers=has_markers)
        )
    return series


def _colour_groups(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Run id to what it shares a colour with: itself, its model or its family, so few there are."""
    if len(runs) <= len(COLOURS):
        return {run.run_id: "" for run in runs}
    by_label = {run.run_id: run.label for run in runs}
    if len(set(by_label.values())) <= len(COLOURS):
        return by_label
    return {run.run_id: run.family for run in runs}


def cells(runs: Sequence[RecordedRun], archive: Archive | None = None) -> Table:
    """One row per training, every number that was recorded at its end, and where MLflow has it."""
    columns: list[tuple[Column, Callable[[RecordedRun], Value]]] = [
        (Column("run"), lambda run: run.name),
        (Column("model"), lambda run: run.label),
        (Column("data fraction", number), _param("data.fraction")),
        (Column("epochs", number), _param("optim.epochs")),
        (Column("exaFLOPs", number), metric("study/exaflops")),
        *(
            (Column(f"{n}-shot %", percent), metric(f"few_shot/{n}_shot_top1"))
            for n in (1, 5, 10, 25)
        ),
        (Column("top-1 %", percent), metric("eval/top1")),
        (Column("measured on"), _measured_on),
        (Column("last top-1 %", percent), metric("eval/last_top1")),
        (Column("best at step", number), metric("result/step")),
        (Column("transfer to"), lambda run: run.tags.get("vit_ray.transfer_task")),
        *(
            (Column(f"{accuracy_name(key)} %", percent), metric(key))
            for key in (MEAN_TRANSFER, *_transfers(runs))
        ),
        (Column("branched from"), lambda run: run.tags.get("vit_ray.branched_from")),
        (Column("top-1 % averaged", percent), metric("eval/averaged_top1")),
        (Column("top-5 %", percent), metric("eval/top5")),
        (Column("eval loss", number), metric("eval/loss")),
        (Column("training images", number), metric("study/train_images")),
        (Column("images seen", number), metric("study/images_seen")),
        (Column("learning rate", number), _param("optim.learning_rate")),
        (Column("seed", number), _param("seed")),
        (Column("images/s", number), metric("train/images_per_s")),
        (Column("MFU %", percent), metric("perf/mfu")),
        (Column("data wait %", percent), metric("data/wait_fraction")),
        (Column("core-days", number), metric("cost/core_days")),
        (Column("wall time", duration), lambda run: run.elapsed_s),
        (Column("status"), lambda run: run.status.lower()),
        (Column("group"), lambda run: run.group.digest),
        (Column("git commit"), lambda run: run.tags.get("vit_ray.git_commit")),
        (Column("data fingerprint"), lambda run: run.tags.get("vit_ray.data_fingerprint", "")[:12]),
        (Column("run id"), lambda run: run.run_id),
    ]
    rows = [[value(run) for _, value in columns] for run in runs]
    links = [archive.link(run) for run in runs] if archive and archive.is_server else []
    heads = [column for column, _ in columns]
    return Table("Every training of this report", heads, rows, links).used()


def _measured_on(run: RecordedRun) -> str | None:
    if not is_tested(run, "eval/top1"):
        return DEV
    if (count := run.best_of_tests) is not None:
        return f"best of {count} evaluations on the test set"
    return _SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", ""))


def sweep_table(runs: Sequence[RecordedRun]) -> Table:
    """Learning rate by seed, as trials of a sweep recorded them; best first."""
    rows = [
        [
            _param("optim.learning_rate")(run),
            _param("seed")(run),
            _SWEEP_STAGES[stage],
            run.metrics.get("eval/averaged_top1"),
            run.metrics.get("eval/top1"),
            run.metrics.get("eval/loss"),
            run.status.lower(),
            run.name,
        ]
        for run in runs
        if (stage := run.tags.get("vit_ray.sweep_stage", "")) in _SWEEP_STAGES
    ]
    rows.sort(key=lambda row: (str(row[2]), -_as_number(row[3] or row[4]), str(row[-1])))
    columns = [
        Column("learning rate", number),
        Column("seed", number),
        Column("measured on"),
        Column("averaged top-1 %", percent),
        Column("top-1 %", percent),
        Column("eval loss", number),
        Column("status"),
        Column("run"),
    ]
    return Table("Trials of the learning-rate sweep", columns, rows).used()


def sweep_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Rate against accuracy: a line for what differs in the rate alone."""
    rate = Axis("learning rate (log scale)", is_log=True)
    lines: dict[str, dict[Group, list[Point]]] = {}
    measured = [run for run in runs if _stage(run) and decided_top1(run) is not None]
    for group, (first, *others) in by_group(measured).items():
        x, key = _param("optim.learning_rate")(first), decided_key([first, *others], "eval/top1")
        if isinstance(x, float):
            alike = lines.setdefault(f"{_sweep_name(first)}, {_stage(first)}", {})
            line = alike.setdefault(group.without("optim.learning_rate"), [])
            line.append(mean_point(x, [first, *others], key))
    series = [
        Series(
            name + (f", differs in {rest}" if rest else ""), sorted(alike[group], key=lambda p: p.x)
        )
        for name, alike in lines.items()
        for group, rest in differences([*alike]).items()
    ]
    accuracy = Axis("top-1 accuracy", is_percent=True)
    return [Chart("Learning rate against accuracy", rate, accuracy, series)] if series else []


def _stage(run: RecordedRun) -> str:
    """What a run of a sweep was measured on; empty for others."""
    return _SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", ""), "")


def _sweep_name(run: RecordedRun) -> str:
    """The trial's own name without what differs between trials."""
    return re.sub(r"-(lr|seed)[\w.-]*$", "", run.name)


def sweep_summary(runs: Sequence[RecordedRun]) -> list[str]:
    """Mean and deviation over seeds of the finished runs with a sweep's chosen rate."""
    sweeps = by_group(
        run
        for run in runs
        if run.tags.get("vit_ray.sweep_stage") == "finetune"
        if run.status == "FINISHED" and decided_top1(run) is not None
    )
    sentences = []
    for group, chosen in sweeps.items():
        mean = mean_of([value for run in chosen if (value := decided_top1(run)) is not None])
        name, rate = _sweep_name(chosen[0]), "optim.learning_rate"
        alike = [one.without(rate) for one, (run, *_) in sweeps.items() if _sweep_name(run) == name]
        rest = differences(alike)[group.without(rate)]
        seeds = f"{len(chosen)} seeds" if len(chosen) > 1 else "one seed"
        whose = f"{name}: test" if len(sweeps) > 1 else "Test"
        told = (
            f"{whose} top-1 {mean} % over {seeds}, learning rate {chosen[0].params.get(rate, '?')}"
        )
        sentences.append(told + (f", differs in {rest}." if rest else "."))
    return sentences


def decided_top1(run: RecordedRun) -> float | None:
    """Accuracy of the averaged weights where the run averaged any, or else of the last ones."""
    return run.metrics.get(decided_key([run], "eval/top1"))


def is_trial(run: RecordedRun) -> bool:
    """Whether it was trained to choose a learning rate, and measured on a dev split."""
    return run.tags.get("vit_ray.sweep_stage") == "sweep_trial"


def is_tested(run: RecordedRun, key: str) -> bool:
    """Whether what it has of this accuracy is not of images held out of its training set."""
    return not is_trial(run) and not run.is_on_dev(key)


def own_share(run: RecordedRun) -> float:
    """Of a training that branched off another one: the part of its compute that is its own."""
    batch, seen = _param("train.global_batch_size")(run), run.metrics.get("study/images_seen")
    origin = run.tags.get("vit_ray.branched_from", "")
    return branch_origin.own_share(origin, batch if isinstance(batch, float) else None, seen)


def _point_name(run: RecordedRun) -> str:
    fraction = _param("data.fraction")(run)
    part = f" {100 * fraction:g}%" if isinstance(fraction, float) and fraction < 1 else ""
    return f"{run.label}{part}"


def _param(key: str) -> Callable[[RecordedRun], Value]:
    def value(run: RecordedRun) -> Value:
        text = run.params.get(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None

    return value


def metric(key: str) -> Measure:
    """Its last value, of a run."""
    return lambda run: run.metrics.get(key)


def _as_number(value: Value) -> float:
    return value if isinstance(value, float) else float("-inf")
