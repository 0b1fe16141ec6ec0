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
    by_sets,
    mean_point,
    metric,
    title_of,
)
from vit_ray.report.groups import Group, differences
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.seeds import by_group

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
    """Figure 8: a line for each dimension that varies about the shape most models have.

    A model that differs from that shape in one dimension is on its line, one that differs in
    several is on the line of all together; the base is on each. A chart is of models that differ in
    shape alone.
    """
    held = [run for run in runs if {key, "study/exaflops"} <= run.metrics.keys()]
    held = [run for run in held if run.params.get("model.depth", "None") != "None"]
    alike: dict[Group, list[list[RecordedRun]]] = {}
    for group, members in by_group(held).items():
        alike.setdefault(group.without(*SHAPE, "model.num_heads"), []).append(members)
    names = differences([*alike])
    titles = {rest: f", {names[rest]}" if names[rest] else "" for rest in alike}
    charts = [_shapes_about_a_base(groups, key, titles[rest]) for rest, groups in alike.items()]
    return [chart for chart in charts if chart is not None]


def _shapes_about_a_base(
    groups: Sequence[Sequence[RecordedRun]], key: str, whose: str
) -> Chart | None:
    """None where nothing varies about a base."""
    shapes = [tuple(members[0].params.get(name, "") for name in SHAPE) for members in groups]
    usual = tuple(map(statistics.mode, zip(*shapes, strict=True)))
    base = next((m for m, shape in zip(groups, shapes, strict=True) if shape == usual), None)
    lines: dict[str, list[Sequence[RecordedRun]]] = {}
    for members, shape in zip(groups, shapes, strict=True):
        changed = [name for name, a, b in zip(SHAPE, shape, usual, strict=True) if a != b]
        if changed:
            name = SHAPE[changed[0]] if len(changed) == 1 else "all together"
            lines.setdefault(name, []).append(members)
    if base is None or len(lines) < 2:
        return None

    def points(line: Sequence[Sequence[RecordedRun]]) -> list[Point]:
        found = [mean_point(_compute(members) / _compute(base), members, key) for members in line]
        return sorted(found, key=lambda point: point.x)

    return Chart(
        f"{title_of(key)} by shape (as Figure 8){whose}",
        Axis("compute relative to the base (log scale)", is_log=True),
        Axis(accuracy_name(key), is_percent=True),
        [Series(name, points([base, *line])) for name, line in lines.items()],
    )


def _compute(members: Sequence[RecordedRun]) -> float:
    return statistics.fmean(run.metrics["study/exaflops"] for run in members)


def pooling(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 9: few-shot accuracy while training, by what the classifier reads and its rate."""
    key = (accuracies_of(runs) or ["eval/top1"])[0]
    held = [run for run in runs if run.params.get("model.pool", "None") != "None"]
    if len({run.params["model.pool"] for run in held}) < 2:
        return []
    curves = archive.curves(held, key)
    drawn = [run for run in held if len(curves.get(run.run_id, [])) > 1]
    rest = differences([run.group.without("model.pool", "optim.learning_rate") for run in drawn])
    series = [
        Series(name + (f", {other}" if other else ""), [Point(*at) for at in curves[run.run_id]])
        for run in drawn
        for name, other in [
            (_pool_name(run), rest[run.group.without("model.pool", "optim.learning_rate")])
        ]
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
            f"{title_of(key)} against speed (as Figure 13){whose}",
            members,
            (speed, metric("train/images_per_s")),
            (Axis(accuracy_name(key), is_percent=True), key),
        )
        for key in accuracies_of(runs)[:1]
        for whose, members in by_sets(runs, key)
    ]
