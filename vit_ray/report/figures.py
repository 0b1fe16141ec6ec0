"""What a report shows of its runs: which numbers go into which chart and table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from vit_ray.report.paper import SOURCE, TABLE_6
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.svg import Axis, Series, chart, number
from vit_ray.report.tables import Column, Table, Value, duration, percent

FAMILIES = ("ViT", "Hybrid", "ResNet", "Axial", "Other")
CURVES_PER_CHART = 8  # more than that, nobody tells apart

# Metric key, what a person calls it.
ACCURACIES = {
    "few_shot/5_shot_top1": "5-shot linear accuracy",
    "few_shot/10_shot_top1": "10-shot linear accuracy",
    "few_shot/25_shot_top1": "25-shot linear accuracy",
    "few_shot/1_shot_top1": "1-shot linear accuracy",
    "eval/averaged_top1": "top-1 accuracy, averaged weights",
    "eval/top1": "top-1 accuracy",
}
CURVES = {
    "train/loss": Axis("training loss"),
    "eval/loss": Axis("validation loss"),
    "eval/top1": Axis("validation top-1", is_percent=True),
    "few_shot/5_shot_top1": Axis("5-shot accuracy", is_percent=True),
}

# Tag of a sweep's run, what its accuracy was measured on.
_SWEEP_STAGES = {"sweep_trial": "dev split", "finetune": "test set"}


@dataclass(frozen=True)
class Figure:
    """A drawing with what is said below it."""

    caption: str
    svg: Markup


def trainings(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Without the parents, which train nothing themselves."""
    return [run for run in runs if run.kind not in ("study", "sweep")]


def accuracies_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Keys to plot: the first few-shot accuracy that there is, and top-1."""
    held = {key for run in runs for key in run.metrics}
    few_shot = [key for key in ACCURACIES if key in held and key.startswith("few_shot/")][:1]
    return few_shot + [key for key in ("eval/top1",) if key in held]


def accuracy_against_compute(runs: Sequence[RecordedRun], key: str) -> Markup:
    """The paper's Figure 5: one point per run, one colour per model family."""

    def series(family: str) -> Series:
        chosen = [
            run
            for run in runs
            if run.family == family and key in run.metrics and "study/exaflops" in run.metrics
        ]
        chosen.sort(key=lambda run: run.metrics["study/exaflops"])
        points = [(run.metrics["study/exaflops"], run.metrics[key]) for run in chosen]
        return Series(family, points, [_point_name(run) for run in chosen], has_line=False)

    return chart(
        "Accuracy against compute",
        Axis("training compute (exaFLOPs, log scale)", is_log=True),
        Axis(ACCURACIES[key], is_percent=True),
        [series(family) for family in FAMILIES],
    )


def accuracy_against_data(runs: Sequence[RecordedRun], key: str) -> Markup | None:
    """The paper's Figure 4: one line per model; None where all saw the same data."""
    sizes = {
        run.metrics["study/train_images"] for run in runs if "study/train_images" in run.metrics
    }
    if len(sizes) < 2:
        return None

    def series(label: str) -> Series:
        points = sorted(
            (run.metrics["study/train_images"], run.metrics[key])
            for run in runs
            if run.label == label and {"study/train_images", key} <= set(run.metrics)
        )
        return Series(label, points)

    return chart(
        "Accuracy against data",
        Axis("different images in the training set (log scale)", is_log=True),
        Axis(ACCURACIES[key], is_percent=True),
        [series(label) for label in dict.fromkeys(run.label for run in runs)],
    )


def learning_curves(archive: Archive, runs: Sequence[RecordedRun]) -> list[Figure]:
    """Charts of every curve that there is, at most eight runs in each."""
    charts = []
    names = short_names(runs)
    for key, axis in CURVES.items():
        holders = [run for run in runs if key in run.metrics]
        groups = range(0, len(holders), CURVES_PER_CHART)
        for first in groups:
            part = holders[first : first + CURVES_PER_CHART]
            series = [
                Series(names[run.run_id], points, has_markers=len(points) <= 30)
                for run in part
                if len(points := archive.curve(run, key)) > 1
            ]
            if series:
                which = f" ({first + 1} to {first + len(part)})" if len(groups) > 1 else ""
                drawing = chart(axis.title, Axis("optimizer step"), axis, series)
                charts.append(Figure(f"{axis.title.capitalize()}{which}", drawing))
    return charts


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
        (
            Column("measured on"),
            lambda run: _SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", "")),
        ),
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
    return Table("Every training of this report", [column for column, _ in columns], rows).used()


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


def sweep_summary(runs: Sequence[RecordedRun]) -> list[str]:
    """For each sweep: mean and deviation over seeds of the runs with the chosen rate."""
    finals = [
        run
        for run in runs
        if run.tags.get("vit_ray.sweep_stage") == "finetune" and decided_top1(run) is not None
    ]
    sentences = []
    for parent_id in dict.fromkeys(run.parent_id for run in finals):
        chosen = [run for run in finals if run.parent_id == parent_id]
        values = [value for run in chosen if (value := decided_top1(run)) is not None]
        spread = f" +- {percent(statistics.stdev(values))}" if len(values) > 1 else ""
        seeds = f"{len(values)} seeds" if len(values) > 1 else "one seed"
        rates = sorted({chosen_run.params.get("optim.learning_rate", "?") for chosen_run in chosen})
        sentences.append(
            f"Test top-1 {percent(statistics.mean(values))}{spread} % over {seeds}, learning rate "
            f"{', '.join(rates)}."
        )
    return sentences


def decided_top1(run: RecordedRun) -> float | None:
    """Accuracy of the averaged weights where the run averaged any, or else of the last ones."""
    return run.metrics.get("eval/averaged_top1", run.metrics.get("eval/top1"))


def is_tested(run: RecordedRun) -> bool:
    """Whether its accuracy is of the evaluation set, not of a dev split that chose a rate."""
    return run.tags.get("vit_ray.sweep_stage") != "sweep_trial"


def paper_figure() -> Markup:
    """The paper's own points, for the shape of the curve."""

    def series(family: str) -> Series:
        rows = sorted((r for r in TABLE_6 if r.family == family), key=lambda r: r.exaflops)
        points = [(row.exaflops, row.imagenet) for row in rows]
        labels = [f"{row.name}, {row.epochs} epochs" for row in rows]
        return Series(family, points, labels, has_line=False)

    return chart(
        f"The paper's results ({SOURCE})",
        Axis("the paper's pre-training compute on JFT-300M (exaFLOPs, log scale)", is_log=True),
        Axis("the paper's ImageNet top-1", is_percent=True),
        [series(family) for family in FAMILIES],
    )


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
