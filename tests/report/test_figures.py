"""Figures: what is drawn where, and that names stay inside."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.report.made_store import EPOCHS, GMACS, Store, accuracy, exaflops_of, write_sweep
from vit_ray.report.figures import COLORS, fig_compute, fig_rates
from vit_ray.report.headline import sweeps_of
from vit_ray.report.runs import load_runs, trainings
from vit_ray.report.tables import cells_of, comparable


@pytest.fixture(scope="module")
def cells(study: tuple[Store, str]) -> pd.DataFrame:
    return comparable(cells_of(trainings(load_runs(study[0].uri, study[1]))))


def lines_of(figure: Figure) -> dict[str, list[Any]]:
    """The lines of means by the name at their ends, as points of x and y."""
    (axes,) = figure.axes
    ends = {text.xy: text.get_text() for text in axes.texts}
    found = {}
    for container in axes.containers:
        points = [tuple(map(float, point)) for point in container[0].get_xydata()]
        found[ends.get(points[-1], "")] = points
    return found


def assert_names_inside(figure: Figure) -> None:
    FigureCanvasAgg(figure).draw()
    whole = figure.bbox
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.x0 >= 0 and box.x1 <= whole.x1 + 1 for box in boxes)
        middles = sorted((box.y0 + box.y1) / 2 for box in boxes)
        height = max((box.height for box in boxes), default=0)
        assert np.diff(middles).min(initial=height) > 0.5 * height


def test_a_line_is_a_model_and_a_point_a_mean_over_seeds(cells):
    figure = fig_compute(cells)
    assert_names_inside(figure)
    lines = lines_of(figure)
    assert {*lines} == {*GMACS}
    for model, points in lines.items():
        computes = [exaflops_of(model, epochs) for epochs in EPOCHS]
        assert [x for x, _ in points] == pytest.approx(computes)
        means = [100 * np.mean([accuracy(model, c, seed) for seed in range(5)]) for c in computes]
        assert [y for _, y in points] == pytest.approx(means)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    colors = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert colors["ViT-B/16"] == COLORS["ViT"] != colors["R50x1"] == COLORS["ResNet"]
    # A training that has not finished is a cross with its state.
    assert "running" in [text.get_text() for text in axes.get_legend().get_texts()]
    crosses = [one for one in axes.collections if isinstance(one, PathCollection)]
    assert 30.0 in [point[1] for one in crosses for point in one.get_offsets().tolist()]


def test_rates_are_hollow_on_the_dev_split_and_filled_on_the_test_set(store):
    write_sweep(store)
    ((_, tried, finals),) = sweeps_of(trainings(load_runs(store.uri, "made")))
    (axes,) = fig_rates(tried, finals).axes
    drawn = {one.get_label(): one[0] for one in axes.containers}
    faces = {name: to_hex(line.get_markerfacecolor()) for name, line in drawn.items()}
    assert faces == {
        "dev split": "#ffffff", "dev split, stopped early": "#ffffff", "test": COLORS["ViT"]
    }  # fmt: skip
    points = {name: line.get_xydata().tolist() for name, line in drawn.items()}
    assert points["dev split"] == [[0.01, 88.0], [0.03, 90.0], [0.1, 89.0]]
    assert points["test"] == [[0.03, pytest.approx(90.0)]]
    assert axes.get_xscale() == "log"
