"""What a report shows of its runs: which numbers go into which chart and table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from vit_ray.config import branch_origin
from vit_ray.report.charts import COLOURS, Axis, Chart, Point, Series
from vit_ray.report.paper import TABLE_6
from vit_ray.report.runs import MEAN_TRANSFER, TRANSFER, Archive, RecordedRun
from vit_ray.report.tables import Column, Table, Value, duration, number, percent

TRAININGS: Final = ("", "pretrain", "finetune", "sweep_trial", "study_cell")
"""Kinds of runs; those of other programs have none."""
FAMILIES = ("ViT", "Hybrid", "ResNet", "Axial", "Other")
PAPER: Final = "the paper, Table 6: ImageNet top-1 after JFT-300M"
EXAFLOPS: Final = Axis("training compute (exaFLOPs, log scale)", is_log=True)
IMAGES: Final = Axis("different training images (log scale)", is_log=True)
_IMAGES_KEY: Final = "study/train_images"
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
        charts += [accuracy_against_compute(runs, key), accuracy_against_data(runs, key)]
    return [chart for chart in charts if chart is not None and not chart.is_empty]


def accuracy_against_compute(runs: Sequence[RecordedRun], key: str) -> Chart | None:
    """The paper's Figure 5: one point per run, one colour per model family, the paper's beside."""
    accuracy = Axis(accuracy_name(key), is_percent=True)
    title = f"{title_of(key)} against compute (proxy data)"
    ours = by_family(title, runs, (EXAFLOPS, "study/exaflops"), (accuracy, key))
    return None if ours.is_empty else replace(ours, series=[*ours.series, *_paper_series()])


def _points(runs: Sequence[RecordedRun], x: str, y: str) -> list[Point]:
    """One for each run that has both metrics, by x."""
    held = [run for run in runs if {x, y} <= run.metrics.keys()]
    points = [
        Point(run.metrics[x], run.metrics[y], _point_name(run), details=_details(run, y))
        for run in held
    ]
    return sorted(points, key=lambda point: point.x)


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
    """The paper's Figure 4: a line per model and length; None where all saw the same data."""
    held = [run for run in runs if {_IMAGES_KEY, key} <= run.metrics.keys()]
    if len({run.metrics[_IMAGES_KEY] for run in held}) < 2:
        return None
    lines: dict[tuple[str, str], list[RecordedRun]] = {}
    for run in held:
        lines.setdefault((run.label, _length(run)), []).append(run)
    labels = [label for label, _ in lines]
    return Chart(
        f"{title_of(key)} against data (proxy data)",
        IMAGES,
        Axis(accuracy_name(key), is_percent=True),
        [
            Series(
                label if labels.count(label) == 1 else f"{label}, {length}",
                _means_over_seeds(members, _IMAGES_KEY, key),
            )
            for (label, length), members in lines.items()
        ],
    )


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
    return round(seen / images, 2) if seen and images else None


def _means_over_seeds(runs: Sequence[RecordedRun], x: str, y: str) -> list[Point]:
    """A point for each x, with the deviation on either side where there are several seeds."""
    groups: dict[float, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(run.metrics[x], []).append(run)
    return [_mean_point(at, groups[at], y) for at in sorted(groups)]


def _mean_point(at: float, runs: Sequence[RecordedRun], key: str) -> Point:
    """Of the finished and tested ones, where there are any."""
    runs = [run for run in runs if run.status == "FINISHED"] or runs
    runs = [run for run in runs if is_tested(run, key)] or runs
    if len(runs) == 1:
        return Point(at, runs[0].metrics[key], _point_name(runs[0]), details=_details(runs[0], key))
    values = [run.metrics[key] for run in runs]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    seeds = {"mean of": f"{len(values)} runs", "drawn": "+- one standard deviation"}
    return Point(at, mean, _point_name(runs[0]), mean - deviation, mean + deviation, details=seeds)


def title_of(key: str) -> str:
    """As `accuracy_name`, to begin a caption with."""
    name = accuracy_name(key)
    return name[0].upper() + name[1:]


def cost_and_speed(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Accuracy against core-days, and speed and MFU against the size of the model."""
    gmacs = Axis("forward multiply-adds (GMAC, log scale)", is_log=True)
    days = Axis("core-days of training (log scale)", is_log=True)
    charts = [
        by_family(f"{title_of(key)} against cost", runs, (days, "cost/core_days"), (axis, key))
        for key in accuracies_of(runs)
        for axis in [Axis(accuracy_name(key), is_percent=True)]
    ]
    for title, axis, key in (
        ("Training speed", Axis("images/s, log scale", is_log=True), "train/images_per_s"),
        ("Model FLOPs utilization", Axis("MFU", is_percent=True), "perf/mfu"),
    ):
        charts.append(by_family(title, runs, (gmacs, "study/forward_gmacs"), (axis, key)))
    return [chart for chart in charts if not chart.is_empty]


def by_family(
    title: str, runs: Sequence[RecordedRun], x: tuple[Axis, str], y: tuple[Axis, str]
) -> Chart:
    """A point for each run that has both metrics, in the colour of its family."""

    def of(family: str) -> list[RecordedRun]:
        return [run for run in runs if run.family == family]

    series = [
        Series(family, _points(of(family), x[1], y[1]), has_line=False) for family in FAMILIES
    ]
    return Chart(title, x[0], y[0], series, order=FAMILIES)


def learning_curves(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """A chart of every curve that there is, all runs in each."""
    names = short_names(runs)
    charts = []
    for key, axis in CURVES.items():
        curves = archive.curves([run for run in runs if key in run.metrics], key)
        holders = [run for run in runs if len(curves.get(run.run_id, [])) > 1]
        groups = _colour_groups(holders)
        series = [
            Series(
                names[run.run_id],
                [Point(step, value) for step, value in curves[run.run_id]],
                groups[run.run_id],
                has_markers=len(curves[run.run_id]) <= MARKED_POINTS,
            )
            for run in holders
        ]
        if series:
            charts.append(Chart(axis.title.capitalize(), Axis("optimizer step"), axis, series))
    return charts


def _colour_groups(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Run id to what it shares a colour with: itself, its model or its family, so few there are."""
    if len(runs) <= len(COLOURS):
        return {run.run_id: "" for run in runs}
    by_label = {run.run_id: run.label for run in runs}
    if len(set(by_label.values())) <= len(COLOURS):
        return by_label
    return {run.run_id: run.family for run in runs}


def cells(runs: Sequence[RecordedRun]) -> Table:
    """One row per training, every number that was recorded at its end."""
    columns: list[tuple[Column, Callable[[RecordedRun], Value]]] = [
        (Column("run"), lambda run: run.name),
        (Column("model"), lambda run: run.label),
        (Column("data fraction", number), _param("data.fraction")),
        (Column("epochs", number), _param("optim.epochs")),
        (Column("exaFLOPs", number), _metric("study/exaflops")),
        *(
            (Column(f"{n}-shot %", percent), _metric(f"few_shot/{n}_shot_top1"))
            for n in (1, 5, 10, 25)
        ),
        (Column("top-1 %", percent), _metric("eval/top1")),
        (Column("measured on"), _measured_on),
        (Column("transfer to"), lambda run: run.tags.get("vit_ray.transfer_task")),
        *(
            (Column(f"{accuracy_name(key)} %", percent), _metric(key))
            for key in (MEAN_TRANSFER, *_transfers(runs))
        ),
        (Column("branched from"), lambda run: run.tags.get("vit_ray.branched_from")),
        (Column("top-1 % averaged", percent), _metric("eval/averaged_top1")),
        (Column("top-5 %", percent), _metric("eval/top5")),
        (Column("eval loss", number), _metric("eval/loss")),
        (Column("training images", number), _metric("study/train_images")),
        (Column("images seen", number), _metric("study/images_seen")),
        (Column("learning rate", number), _param("optim.learning_rate")),
        (Column("seed", number), _param("seed")),
        (Column("images/s", number), _metric("train/images_per_s")),
        (Column("MFU %", percent), _metric("perf/mfu")),
        (Column("data wait %", percent), _metric("data/wait_fraction")),
        (Column("core-days", number), _metric("cost/core_days")),
        (Column("wall time", duration), lambda run: run.elapsed_s),
        (Column("status"), lambda run: run.status.lower()),
    ]
    rows = [[value(run) for _, value in columns] for run in runs]
    links = [f"#run-{run.run_id}" for run in runs]
    heads = [column for column, _ in columns]
    return Table("Every training of this report", heads, rows, links).used()


def _measured_on(run: RecordedRun) -> str | None:
    if not is_tested(run, "eval/top1"):
        return DEV
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
    """Rate against accuracy, all trials: one line for each sweep, dev split and test set apart."""
    rate = Axis("learning rate (log scale)", is_log=True)
    groups: dict[tuple[str, str], list[Point]] = {}
    for run in runs:
        stage = _SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", ""))
        x, y = _param("optim.learning_rate")(run), decided_top1(run)
        if stage and isinstance(x, float) and y is not None:
            sweep = _sweep_name(run)
            groups.setdefault((sweep, stage), []).append(
                Point(x, y, run.name, details=_details(run, "eval/top1"))
            )
    series = [
        Series(f"{sweep}, {stage}" if sweep else stage, sorted(points, key=lambda p: p.x))
        for (sweep, stage), points in groups.items()
    ]
    accuracy = Axis("top-1 accuracy", is_percent=True)
    return [Chart("Learning rate against accuracy", rate, accuracy, series)] if series else []


def _sweep_name(run: RecordedRun) -> str:
    """The trial's own name without what differs between trials."""
    return re.sub(r"-(lr|seed)[\w.-]*$", "", run.name)


def sweep_summary(runs: Sequence[RecordedRun]) -> list[str]:
    """For each sweep: mean and deviation over seeds of the runs with the chosen rate."""
    finals = [
        run
        for run in runs
        if run.tags.get("vit_ray.sweep_stage") == "finetune" and decided_top1(run) is not None
    ]
    sweeps: dict[tuple[str | None, str], list[RecordedRun]] = {}
    for run in finals:
        # All tasks of a VTAB have one parent.
        sweeps.setdefault((run.parent_id, run.params.get("data.train", "")), []).append(run)
    sentences = []
    for chosen in sweeps.values():
        values = [value for run in chosen if (value := decided_top1(run)) is not None]
        spread = f" +- {percent(statistics.stdev(values))}" if len(values) > 1 else ""
        seeds = f"{len(values)} seeds" if len(values) > 1 else "one seed"
        rates = sorted({chosen_run.params.get("optim.learning_rate", "?") for chosen_run in chosen})
        whose = f"{_sweep_name(chosen[0])}: test" if len(sweeps) > 1 else "Test"
        sentences.append(
            f"{whose} top-1 {percent(statistics.mean(values))}{spread} % over {seeds}, "
            f"learning rate {', '.join(rates)}."
        )
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


def short_names(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Run id to the shortest name that tells the runs apart: model and data, or the run's name."""
    names = {run.run_id: _point_name(run) for run in runs}
    if len(set(names.values())) == len(runs):
        return names
    return {run.run_id: run.name for run in runs}


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


def _metric(key: str) -> Callable[[RecordedRun], Value]:
    return lambda run: run.metrics.get(key)


def _as_number(value: Value) -> float:
    return value if isinstance(value, float) else float("-inf")
