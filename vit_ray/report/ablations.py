"""Figures of the paper's appendix, where the runs for them exist: 8, 9, 12 and 13."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Final

from vit_ray.report.accuracies import accuracies_of, accuracy_name, by_sets, title_of
from vit_ray.report.charts import Axis, Chart, Point, Series
from vit_ray.report.figures import Line, by_family, line_of_means
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
    return charts + [chart for key in accuracies_of(runs)[:1] for chart in shapes(runs, key)]


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
    return [
        Chart(
            f"{title_of(key)} by shape (as Figure 8){', ' * bool(names[rest])}{names[rest]}",
            Axis("compute relative to the base (log scale)", is_log=True),
            Axis(accuracy_name(key), is_percent=True),
            [line_of_means(name, line, key) for name, line in lines.items()],
        )
        for rest, groups in alike.items()
        if len(lines := _about_a_base(groups)) > 1
    ]


def _about_a_base(groups: Sequence[list[RecordedRun]]) -> dict[str, Line]:
    """Lines by name, each with its runs by compute relative to the base; none without a base."""
    shapes = [tuple(members[0].params.get(name, "") for name in SHAPE) for members in groups]
    usual = tuple(map(statistics.mode, zip(*shapes, strict=True)))
    if usual not in shapes:
        return {}
    base = groups[shapes.index(usual)]
    computes = [statistics.fmean(r.metrics["study/exaflops"] for r in some) for some in groups]
    unit = computes[shapes.index(usual)]
    lines: dict[str, Line] = {}
    for shape, compute, members in zip(shapes, computes, groups, strict=True):
        if changed := [name for name, a, b in zip(SHAPE, shape, usual, strict=True) if a != b]:
            name = SHAPE[changed[0]] if len(changed) == 1 else "all together"
            lines.setdefault(name, [(1.0, base)]).append((compute / unit, members))
    return lines


def pooling(archive: Archive, runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 9: few-shot accuracy while training, by what the classifier reads and its rate."""
    key = (accuracies_of(runs) or ["eval/top1"])[0]
    held = [run for run in runs if run.params.get("model.pool", "None") != "None"]
    if len({run.params["model.pool"] for run in held}) < 2:
        return []
    curves = archive.curves(held, key)
    drawn = [run for run in held if len(curves.get(run.run_id, [])) > 1]
    rest = {run.run_id: run.group.without("model.pool", "optim.learning_rate") for run in drawn}
    names = differences([*rest.values()])
    series = []
    for run in drawn:
        rate = f"learning rate {run.params.get('optim.learning_rate', 'unknown')}"
        parts = run.params["model.pool"].upper(), rate, run.label, names[rest[run.run_id]]
        points = [Point(*at) for at in curves[run.run_id]]
        dash = int(run.params["model.pool"] != "cls")
        series.append(Series(", ".join(filter(None, parts)), points, run.family, dash))
    accuracy = Axis(accuracy_name(key), is_percent=True)
    return [Chart(f"{title_of(key)} by pooling (as Figure 9)", Axis("step"), accuracy, series)]


def empirical_cost(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Figure 12: images/s, and the largest batch that fits, by the side of the input."""
    values: dict[tuple[str, str], dict[tuple[str, str], list[Point]]] = {}
    for run in runs:
        details = {"on": run.tags.get("vit_ray.device", "")}
        for key, value in run.metrics.items():
            if found := MEASURED.fullmatch(key):
                mode, side, what = found.groups()
                line = values.setdefault((mode, what), {}).setdefault((run.label, run.family), [])
                line.append(Point(float(side), value, details=details))
    side = Axis("side of the input in pixels (log scale)", is_log=True)
    charts = []
    for (mode, what), lines in sorted(values.items()):
        name = "images/s" if what == "images_per_s" else "largest batch"
        series = [
            Series(label, sorted(line, key=lambda point: point.x), family)
            for (label, family), line in lines.items()
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
            (speed, lambda run: run.number("train/images_per_s")),
            (Axis(accuracy_name(key), is_percent=True), key),
        )
        for key in accuracies_of(runs)[:1]
        for whose, members in by_sets(runs, key)
    ]
