"""Figure 8 of the paper's appendix, if there are runs for it."""

import statistics
from collections.abc import Sequence
from typing import Final

from vit_ray.metric_names import STUDY_EXAFLOPS
from vit_ray.report.figures.chart_list import Line, line_of_means
from vit_ray.report.figures.charts import Axis, Chart
from vit_ray.report.runs import RecordedRun
from vit_ray.report.statistics.accuracies import accuracy_name, title_of
from vit_ray.report.statistics.groups import Group, differences
from vit_ray.report.statistics.seeds import by_group

SHAPE: Final = {
    "model.depth": "depth",
    "model.width": "width",
    "model.mlp_dim": "width of the MLP",
    "model.patch_size": "patch size",
}


def shapes(runs: Sequence[RecordedRun], key: str) -> list[Chart]:
    """Figure 8: a line for each dimension that varies around the shape of most models.

    A model that differs from that shape in one dimension is on that dimension's line, one that
    differs in several is on the line for all of them; the base is on each. A chart has only models
    that differ in shape.
    """
    held = [run for run in runs if {key, STUDY_EXAFLOPS} <= run.metrics.keys()]
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
    """Lines by name, each with its runs by compute relative to the base; empty without a base."""
    shapes = [tuple(members[0].params.get(name, "") for name in SHAPE) for members in groups]
    usual = tuple(map(statistics.mode, zip(*shapes, strict=True)))
    if usual not in shapes:
        return {}
    base = groups[shapes.index(usual)]
    computes = [statistics.fmean(r.metrics[STUDY_EXAFLOPS] for r in some) for some in groups]
    unit = computes[shapes.index(usual)]
    lines: dict[str, Line] = {}
    for shape, compute, members in zip(shapes, computes, groups, strict=True):
        if changed := [name for name, a, b in zip(SHAPE, shape, usual, strict=True) if a != b]:
            name = SHAPE[changed[0]] if len(changed) == 1 else "all together"
            lines.setdefault(name, [(1.0, base)]).append((compute / unit, members))
    return lines
