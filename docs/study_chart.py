"""Draws the README's chart from the table that the study on CIFAR-10 left in `benchmarks/results`.

python docs/study_chart.py
"""

import csv
from pathlib import Path

import vl_convert

from vit_ray.report.figures.charts import Axis, Chart, Point, Series, svg

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "benchmarks/results/study_cifar10_cpu_2026-11-25/report.csv"
FAMILY = {"ViT": "ViT", "R4+": "Hybrid", "R": "ResNet"}


def chart() -> Chart:
    """A line for each model that was trained on all images, a point for each length of one seed."""
    table = csv.DictReader(TABLE.open())
    rows = [row for row in table if (float(row["data fraction"]), float(row["seed"])) == (1.0, 0.0)]
    rows.sort(key=lambda row: float(row["exaFLOPs"]))
    lines: dict[str, list[Point]] = {}
    for row in rows:
        at = Point(float(row["exaFLOPs"]), float(row["top-1 %"]), row["model"])
        lines.setdefault(row["model"], []).append(at)
    series = [
        Series(name, points, next(f for start, f in FAMILY.items() if name.startswith(start)))
        for name, points in lines.items()
    ]
    return Chart(
        "CIFAR-10 top-1 accuracy against training compute",
        x=Axis("training compute (exaFLOPs, log scale)", is_log=True),
        y=Axis("top-1 accuracy", is_percent=True),
        series=series,
    )


if __name__ == "__main__":
    (ROOT / "docs/pictures/study.png").write_bytes(vl_convert.svg_to_png(svg(chart()), scale=2))
