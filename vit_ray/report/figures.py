"""Figures of runs, by matplotlib: a colour for each family of models, names at ends of lines."""

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from vit_ray.metric_names import STUDY_FORWARD_GMACS
from vit_ray.report.statistics import Law, student, wilson

COLORS: Final = {
    "ViT": "#0072b2", "ResNet": "#009e73", "Hybrid": "#d55e00", "Axial": "#cc79a7",
    "Other": "#555c66",
}  # fmt: skip
# Okabe and Ito's palette, for values other than families.
_PALETTE: Final = [*COLORS.values(), "#e69f00", "#56b4e9"]
MARKS: Final = {"ViT": "o", "ResNet": "s", "Hybrid": "D", "Axial": "^", "Other": "v"}
# Inches: readable at 390 pixels too.
SIZE: Final = (6.4, 4.2)
# With more lines, a legend explains the colours.
MAX_NAMES: Final = 12
# Between neighbouring names, as a fraction of the height.
MIN_GAP: Final = 0.05
TOP1: Final = "top-1 accuracy, %"
# The salt makes equal figures equal bytes; text as outlines needs no font on the reader's machine.
_STYLE: Final[Any] = {
    "svg.hashsalt": "vit_ray", "svg.fonttype": "path", "font.size": 10.0, "axes.grid": True,
    "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 5,
    "errorbar.capsize": 2, "legend.frameon": False,
}  # fmt: skip
# The end of a line: x, y, name and colour.
_End = tuple[float, float, str, str]


def new_figure(columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side that share the y axis, without pyplot's global state."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        return figure, list(figure.subplots(1, columns, sharey=True, squeeze=False)[0])


def svg(figure: Figure) -> str:
    """Base64 of the figure as SVG, for a `data:` address."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return base64.b64encode(buffer.getvalue()).decode()


def means_of(runs: pd.DataFrame, accuracy: str, images: str = "num_test") -> pd.DataFrame:
    """A row for each group with the mean over its seeds and the 95 % interval.

    The interval covers those of the test set (Wilson) and over seeds (Student).

    Args:
        runs: finished trainings, each seed once.
        images: the column with the number of images behind an accuracy.
    """
    rows = []
    for _, seeds in runs.dropna(subset=[accuracy]).groupby("group", sort=False):
        values, first = seeds[accuracy].astype(float), seeds.iloc[0].to_dict()
        mean, exaflops = float(values.mean()), seeds["exaflops"].mean()
        intervals = [student(values.tolist())]
        intervals += [wilson(mean, first[images])] if (first[images] or 0) > 0 else []
        low = min([mean, *(interval.low for interval in intervals if interval)])
        high = max([mean, *(interval.high for interval in intervals if interval)])
        rows.append(first | {"mean": mean, "low": low, "high": high, "exaflops": exaflops})
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*runs, "mean", "low", "high"])))


def fig_compute(
    runs: pd.DataFrame,
    accuracy: str = "test",
    color: str = "family",
    laws: Mapping[str, Law] | None = None,
    axis: str = TOP1,
) -> Figure:
    """Accuracy against compute (Figure 5; by another key Figures 8, 9 and 13): a line for each
    model, a point for each mean over seeds with its interval.

    Args:
        runs: trainings; unfinished ones are crosses.
        color: a column or key of the recipe; each value has a colour.
        laws: a dotted line for each family.
    """
    figure, (axes,) = new_figure()
    points = runs.dropna(subset=[accuracy, "exaflops"])
    points = points.assign(**{color: points[color].astype(object).fillna("unset")})
    is_finished = points["status"] == "finished"
    values = [*dict.fromkeys(points[color])]
    by_value = dict(zip(values, itertools.cycle(_PALETTE), strict=False))
    colors: dict[Any, str] = COLORS if color == "family" else by_value
    means, ends = means_of(points[is_finished], accuracy), []
    for (value, label, _), line in means.groupby([color, "label", "images"], dropna=False):
        name = label if color in ("family", "label") else f"{label}, {value}"
        ends.append(_draw(axes, line.sort_values("exaflops"), "exaflops", colors[value], name))
    for status, some in points[~is_finished].groupby("status"):
        shades = some[color].map(colors)
        axes.scatter(some["exaflops"], 100 * some[accuracy], c=shades, marker="x", label=status)
        axes.legend()
    seeds = points[is_finished & points.duplicated("group", keep=False)]
    shades = seeds[color].map(colors)
    axes.scatter(seeds["exaflops"], 100 * seeds[accuracy], s=6, c=shades, alpha=0.5)
    for family, law in (laws or {}).items():
        exaflops = means.loc[means["family"] == family, "exaflops"]
        x = np.geomspace(exaflops.min(), exaflops.max(), 50)
        axes.plot(x, 100 * (1 - law.error_at(x)), ":", color=COLORS[family], linewidth=1)
    _log_axis(axes, "training compute, exaFLOPs", axis)
    _name(axes, ends, {value: colors[value] for value in values})
    return figure


def fig_data(runs: pd.DataFrame, accuracy: str = "test", axis: str = TOP1) -> Figure:
    """Accuracy against the number of training images (Figure 4), for the three greatest lengths."""
    means = means_of(runs.dropna(subset=[accuracy, "images"]), accuracy)
    length = "epochs" if means["steps"].isna().all() else "steps"
    varied = means.groupby(length)["images"].nunique() > 1
    lengths = [*varied.index[varied]][-3:]
    figure, all_axes = new_figure(len(lengths))
    all_ends = []
    for axes, value in zip(all_axes, lengths, strict=True):
        points = means[means[length] == value].sort_values("images")
        lines = [*points.groupby(["family", "label"], sort=False)]
        all_ends.append([
            _draw(axes, line, "images", COLORS[family], label) for (family, label), line in lines
        ])  # fmt: skip
        axes.set_title(f"{value:,g} {length}", fontsize=10)
        _log_axis(axes, "training images", axis if axes is all_axes[0] else "")
    # After all lines, which set the limits of the shared y axis.
    for axes, ends in zip(all_axes, all_ends, strict=True):
        _name(axes, ends, COLORS)
    return figure


def fig_rates(trials: pd.DataFrame, finals: pd.DataFrame) -> Figure:
    """Accuracy against the learning rate: hollow on the dev split, filled on the test set."""
    figure, (axes,) = new_figure()
    dev_points = [(some, "dev", str(status)) for status, some in trials.groupby("status")]
    for some, key, status in [*dev_points, (finals, "test", "finished")]:
        means = means_of(some.dropna(subset=["rate"]), key, f"num_{key}")
        if not len(means):
            continue
        is_line = key == "dev" and status == "finished" and means["rate"].is_unique
        color = COLORS[str(means["family"].iloc[0])]
        _draw(
            axes, means.sort_values("rate"), "rate", color, "",
            marker={"finished": "o", "stopped early": "v"}.get(status, "x"),
            linestyle="-" if is_line else "none", markersize=6,
            markerfacecolor="white" if key == "dev" else None,
            label=key + " split" * (key == "dev") + f", {status}" * (status != "finished"),
        )  # fmt: skip
    _log_axis(axes, "learning rate", TOP1)
    axes.legend()
    return figure


def fig_curves(
    curves: Mapping[str, "pd.Series[float]"],
    families: Mapping[str, str],
    axis: str,
    bold: Sequence[str] = (),
) -> Figure:
    """A metric of each run by step; if some runs are bold, the others are faint."""
    figure, (axes,) = new_figure()
    ends = []
    for name, curve in curves.items():
        is_faint, color = bool(bold) and name not in bold, COLORS[families[name]]
        width, alpha = (1.0, 0.35) if is_faint else (1.8, 0.9)
        mark = "" if len(curve) > 20 else "o"
        axes.plot(curve.index, curve, mark + "-", color=color, linewidth=width, alpha=alpha)
        ends.append((float(curve.index[-1]), float(curve.iloc[-1]), name, color))
    axes.set(xlabel="step", ylabel=axis)
    _name(axes, ends, {family: COLORS[family] for family in dict.fromkeys(families.values())})
    return figure


def fig_speed(runs: pd.DataFrame) -> Figure:
    """Images per second of each model against its compute of a forward pass."""
    figure, (axes,) = new_figure()
    ends = []
    for (family, label), some in runs.groupby(["family", "label"], sort=False):
        x, y = some[STUDY_FORWARD_GMACS].mean(), some["images_per_s"].median()
        axes.plot(x, y, MARKS[family], color=COLORS[family], markersize=8)
        ends.append((x, y, label, COLORS[family]))
    _log_axis(axes, "forward pass, GMAC an image", "images/s in training")
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _name(axes, ends, COLORS)
    return figure


def _draw(axes: Axes, line: pd.DataFrame, x: str, color: str, name: str, **style: Any) -> _End:
    # A line of means with their intervals; returns its end.
    end, marker = line.iloc[-1], MARKS.get(line["family"].iloc[0], "o")
    bars = 100 * np.array([line["mean"] - line["low"], line["high"] - line["mean"]])
    axes.errorbar(line[x], 100 * line["mean"], bars, color=color, **{"marker": marker, **style})
    return float(end[x]), 100 * float(end["mean"]), name, color


def _log_axis(axes: Axes, x: str, y: str) -> None:
    # Ticks at powers of ten; on an axis of less than two decades, also between them.
    axes.set(xscale="log", xlabel=x, ylabel=y)
    low, high = axes.get_xlim()
    if high / low < 100:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _name(axes: Axes, ends: Sequence[_End], colors: Mapping[Any, str]) -> None:
    """A name for each line at the right, without overlaps; for many lines a legend of colours."""
    if len(ends) > MAX_NAMES:
        for value, color in colors.items():
            axes.plot([], [], color=color, label=str(value))
        axes.legend()
        return
    axes.autoscale_view()  # sets the limits now instead of in drawing
    to_fraction = axes.transAxes.inverted()
    heights = [to_fraction.transform(axes.transData.transform((x, y)))[1] for x, y, *_ in ends]
    apart, order = np.array(heights, float), np.argsort(heights)
    for below, above in [*itertools.pairwise(order)] * len(order):
        lack = max(0.0, MIN_GAP - (apart[above] - apart[below]))
        apart[[below, above]] += (-lack / 2, lack / 2)
    for (x, y, name, color), height in zip(ends, map(float, apart), strict=True):
        axes.annotate(
            name, (x, y), (1.02, height), textcoords="axes fraction", color=color, fontsize=9,
            va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.4, "linewidth": 0.6},
        )  # fmt: skip
