"""Figures of the paper's appendix, where the runs for them exist: 8, 9, 12 and 13."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Final

from vit_ray.report.charts import Axis, Chart, Point, Series
from vit_ray.report.figures import (
    accuracies_of,
    accuracy_name,
    by_family,
    title_of,
)
from vit_ray.report.runs import Archive, RecordedRun

SHAPE: Final = {
    "model.depth": "depth",
    "model.width": "width",
    "model.mlp_dim": "width of the MLP",
    "model.patch_size": "patch size",
}
MEASURED: Final = re.compile(r"benchmark/(\w+?)_(\d+)px_(images_per_s|largest_batch)")
"""Metric of a model benchmark: mode, input side in pixels, what."""


def ablation_charts(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """Those that have anything to show."""
    charts = [*pooling(archive, runs), *empirical_cost(archive.runs), *speeds_of_axial(runs)]
    charts += [chart for key in accuracies_of(runs)[:1] for chart in shapes(runs, key)]
    return [chart for chart in charts if not chart.is_empty]


def shapes(runs: Sequence[RecordedRun], key: str) -> list[Chart]:
    """Figure 8: a line for each dimension that varies about the shape most runs have.

    A run that differs from that shape in one dimension is on its line, one that differs in several
    is on the line of all together; the base is on each.
    """
    held = [run for run in runs if {key, "study/exaflops"} <= run.metrics.keys()]
    held = [run for run in held if run.params.get("model.depth", "None") != "None"]
    if not held:
        return []
    usual = {name: statistics.mode(run.params.get(name, "") for run in held) for name in SHAPE}
    changes = {
        run.run_id: [name for name in SHAPE if run.params.get(name, "") != usual[name]]
        for run in held
    }
    base = next((run for run in held if not changes[run.run_id]), None)
    lines: dict[str, list[RecordedRun]] = {}
    for run in held:
        if changed := changes[run.run_id]:
            name = SHAPE[changed[0]] if len(changed) == 1 else "all together"
            lines.setdefault(name, []).append(run)
    if base is None or len(lines) < 2:
        return []
    unit = base.metrics["study/exaflops"]
    series = [
        Series(
            name,
            [
                Point(run.metrics["study/exaflops"] / unit, run.metrics[key], run.label)
                for run in sorted([base, *line], key=lambda run: run.metrics["study/exaflops"])
            ],
        )
        for name, line in lines.items()
    ]
    relative = Axis("compute relative to the base (log scale)", is_log=True)
    accuracy = Axis(accuracy_name(key), is_percent=True)
    return [Chart(f"{title_of(key)} by shape (as Figure 8)", relative, accuracy, series)]


def pooling(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 9: few-shot accuracy while training, by what the classifier reads and its rate."""
    key = (accuracies_of(runs) or ["eval/top1"])[0]
    held = [run for run in runs if run.params.get("model.pool", "None") != "None"]
    if len({run.params["model.pool"] for run in held}) < 2:
        return []
    curves = archive.curves(held, key)
    series = [
        Series(_pool_name(run), [Point(*point) for point in curves[run.run_id]])
        for run in held
        if len(curves.get(run.run_id, [])) > 1
    ]
    accuracy = Axis(accuracy_name(key), is_percent=True)
    return [Chart(f"{title_of(key)} by pooling (as Figure 9)", Axis("step"), accuracy, series)]


def _pool_name(run: RecordedRun) -> str:
    rate = run.params.get("optim.learning_rate", "unknown")
    return f"{run.params['model.pool'].upper()}, learning rate {rate}, {run.label}"


def empirical_cost(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 12: images/s, and the largest batch that fits, by the side of the input."""
    values: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for run in runs:
        device = run.tags.get("vit_ray.device", "")
        for key, value in run.metrics.items():
            if found := MEASURED.fullmatch(key):
                mode, side, what = found.groups()
                line = values.setdefault((mode, what), {}).setdefault(run.label, [])
                line.append(Point(float(side), value, details={"on": device}))
    side = Axis("side of the input in pixels (log scale)", is_log=True)
    charts = []
    for (mode, what), lines in sorted(values.items()):
        name = "images/s" if what == "images_per_s" else "largest batch"
        series = [
            Series(label, sorted(line, key=lambda point: point.x)) for label, line in lines.items()
        ]
        title = f"{mode.capitalize()}: {name} by input size (as Figure 12)"
        charts.append(Chart(title, side, Axis(f"{name} (log scale)", is_log=True), series))
    return charts


def speeds_of_axial(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 13: accuracy against speed, where axial models are among the runs."""
    if not any(run.family == "Axial" for run in runs):
        return []
    speed = Axis("images/s of training (log scale)", is_log=True)
    return [
        by_family(
            f"{title_of(key)} against speed (as Figure 13)",
            runs,
            (speed, "train/images_per_s"),
            (Axis(accuracy_name(key), is_percent=True), key),
        )
        for key in accuracies_of(runs)[:1]
    ]
